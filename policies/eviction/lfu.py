"""The block found least often goes, of equals the one released longest ago (least frequently used).

Counts end with a block's life in the cache and never fade: what was popular once stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.eviction._leaves import LeafHeap
from policies.types import Block, RequestState


class LeastFrequentlyUsed:
    def __init__(self) -> None:
        self._heap = LeafHeap()

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        self._heap.add(block, block.note or 0)

    def discard(self, block: Block) -> None:
        self._heap.discard(block)

    def touch(self, block: Block) -> None:
        block.note = (block.note or 0) + 1

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        return self._heap.take()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._heap)

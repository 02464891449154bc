"""The leaf released longest ago goes, of equals the deepest (SGLang's radix cache).

Nearly `lru`, whose tables come tail first; but of chains released at one instant the longest is shortened first.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.eviction._leaves import LeafHeap
from policies.types import Block, RequestState


class LeastRecentlyUsedLeaf:
    def __init__(self) -> None:
        self._heap = LeafHeap()

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        self._heap.add(block, (now, -block.depth))

    def discard(self, block: Block) -> None:
        self._heap.discard(block)

    def touch(self, block: Block) -> None:
        pass  # it takes its place when it is released

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        return self._heap.take()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._heap)

"""The block that came first goes, however often it was found (first in, first out)."""

from __future__ import annotations

from collections.abc import Iterator

from policies.eviction._leaves import LeafHeap
from policies.types import Block, RequestState


class FirstInFirstOut:
    def __init__(self) -> None:
        self._heap = LeafHeap()
        self._num_come = 0

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        if block.note is None:
            self._num_come += 1
            block.note = self._num_come
        self._heap.add(block, block.note)

    def discard(self, block: Block) -> None:
        self._heap.discard(block)

    def touch(self, block: Block) -> None:
        pass

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        return self._heap.take()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._heap)

"""Segments of least recently used blocks; each hit moves a block one segment up (SLRU, Karedla et al. 1994).

What goes is the oldest of the lowest segment. A segment that overflows hands its oldest down, as the newest there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from policies.eviction._leaves import LeafHeap
from policies.types import Block, RequestState


class SegmentedLru:
    """`segments`: how many, each an equal share of the pool; 2 are the paper's probation and protection."""

    def __init__(self, segments: int = 4) -> None:
        if segments < 2:
            raise ValueError(f"segments ({segments}) must be at least 2: one alone is lru")
        self._segments = [OrderedDict[Block, None]() for _ in range(segments)]
        self._heap = LeafHeap()
        self._size = 0  # of a segment, in blocks

    def fit(self, num_blocks: int, block_size: int) -> None:
        self._size = num_blocks // len(self._segments)

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        if block.note is None:
            block.note = self._lowest_with_room()
        self._segments[block.note][block] = None
        self._heap.add(block, block.note)
        for segment in range(block.note, 0, -1):
            self._hand_down(segment)

    def discard(self, block: Block) -> None:
        del self._segments[self._heap.rank(block)][block]
        self._heap.discard(block)

    def touch(self, block: Block) -> None:
        if block.note is not None:
            block.note = min(block.note + 1, len(self._segments) - 1)  # where it will go when it is released

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        block = self._heap.take()
        del self._segments[block.note][block]
        return block

    def _lowest_with_room(self) -> int:
        rooms = (index for index, segment in enumerate(self._segments) if len(segment) < self._size)
        return next(rooms, 0)

    def _hand_down(self, segment: int) -> None:
        while len(self._segments[segment]) > self._size:
            block, _ = self._segments[segment].popitem(last=False)
            block.note = segment - 1
            self._segments[segment - 1][block] = None
            self._heap.rerank(block, segment - 1)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._heap)

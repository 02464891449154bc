"""The block least likely to be found while it could stay goes: kinds of requests differ (Wang et al., ATC 2025).

A kind is a class of requests, and whether their prompt was found in part: a first turn or a later one. Of each are
learnt the share of its blocks that are found again and the mean time until then, taken to be exponential (that of all
kinds, while none of its own was found); what counts is the time for which a block lately stayed. Within a kind the
oldest goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from policies.eviction._leaves import LeafHeap, Tree
from policies.types import Block, RequestState


@dataclass(eq=False, slots=True)
class _Kind:
    heap: LeafHeap
    share_found: float = 0.5  # of its blocks, before they went
    gap: float | None = None  # mean seconds from a release to the next use


@dataclass(slots=True)
class _Release:
    kind: _Kind
    time: float


class WorkloadAware:
    """`memory`: the weight of each block found or gone in what is learnt; small ones forget slowly."""

    time_dependent = True

    def __init__(self, memory: float = 0.02) -> None:
        if not 0 < memory <= 1:
            raise ValueError(f"memory ({memory}) must be above 0 (nothing is learnt), up to 1 (the last one is all)")
        self._memory = memory
        self._tree = Tree()
        self._kinds: dict[tuple[str, bool], _Kind] = {}
        self._gap: float | None = None  # of all kinds
        self._stay: float | None = None  # mean seconds a block stayed before it went
        self._num_released = 0

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        if block.note is not None:
            self._found(block.note, now if holder.first_scheduled_time is None else holder.first_scheduled_time)
        name = holder.request.class_name, holder.num_cached_tokens > 0
        kind = self._kinds.setdefault(name, _Kind(LeafHeap(self._tree)))
        self._num_released += 1
        block.note = _Release(kind, now)
        kind.heap.add(block, (now, self._num_released))

    def _found(self, before: _Release, at: float) -> None:
        kind, gap = before.kind, max(0.0, at - before.time)
        kind.gap, self._gap = self._learnt(kind.gap, gap), self._learnt(self._gap, gap)
        kind.share_found = self._learnt(kind.share_found, 1.0)

    def discard(self, block: Block) -> None:
        block.note.kind.heap.discard(block)

    def touch(self, block: Block) -> None:
        pass  # counted when it is released, with the time

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        oldest = [(kind, rank) for kind in self._kinds.values() if (rank := kind.heap.peek()) is not None]
        kind, rank = min(oldest, key=lambda each: (self.chance(each[0], now - each[1][0]), each[1]))
        kind.share_found = self._learnt(kind.share_found, 0.0)
        self._stay = self._learnt(self._stay, now - rank[0])
        return kind.heap.take()

    def _learnt(self, so_far: float | None, value: float) -> float:
        return value if so_far is None else so_far + self._memory * (value - so_far)

    def chance(self, kind: _Kind, age: float) -> float:
        """That a block so old, not found until now, is found within a stay."""
        gap = self._gap if kind.gap is None else kind.gap
        if gap is None or self._stay is None:
            return kind.share_found
        if not gap:
            return 0.0
        later = kind.share_found * math.exp(-age / gap)  # it will be found, but has not been yet
        return later * -math.expm1(-self._stay / gap) / (later + 1.0 - kind.share_found or 1.0)

    def __len__(self) -> int:
        return sum(len(kind.heap) for kind in self._kinds.values())

    def __iter__(self) -> Iterator[Block]:
        """Kind by kind."""
        for kind in self._kinds.values():
            yield from kind.heap

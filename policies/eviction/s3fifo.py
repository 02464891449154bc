"""A small queue tries new blocks out, a main one keeps those found again; who returns soon skips the trial (S3-FIFO).

What leaves the small queue unfound is remembered by its key for a while (Yang et al., SOSP 2023; as in libCacheSim, the
small queue takes no more than its share until the pool is full for the first time).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from policies.eviction._leaves import LeafHeap
from policies.types import Block, RequestState

_MOST_HITS = 3  # a counter of two bits


@dataclass(slots=True)
class _Place:
    in_main: bool
    order: int  # of coming to its queue
    num_hits: int = 0


class S3Fifo:
    """`small`, `ghost`: shares of the pool, for the small queue and for keys remembered; `threshold`: hits that take a
    block to the main queue."""

    def __init__(self, small: float = 0.1, ghost: float = 0.9, threshold: int = 2) -> None:
        if not 0 < small < 1:
            raise ValueError(f"small ({small}) must be a share of the pool between 0 and 1")
        if not 0 <= ghost <= 10:
            raise ValueError(f"ghost ({ghost}) must be 0 (nothing is remembered) to 10 times the pool")
        if threshold < 1:
            raise ValueError(f"threshold ({threshold}) must be at least 1 hit")
        self._shares = (small, ghost)
        self._threshold = threshold
        self._small = LeafHeap()
        self._main = LeafHeap(self._small.tree)
        self._ghosts = OrderedDict[int | None, None]()
        self._returning = OrderedDict[int | None, None]()  # were remembered when they were asked for
        self._asked: RequestState | None = None
        self._num_come = 0
        self._has_evicted = False

    def fit(self, num_blocks: int, block_size: int) -> None:
        small, ghost = self._shares
        self._small_size = int(num_blocks * small)
        self._main_size = num_blocks - self._small_size
        self._ghost_size = int(num_blocks * ghost)

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        if block.note is None:
            self._num_come += 1
            block.note = _Place(self._goes_to_main(block), self._num_come)
        (self._main if block.note.in_main else self._small).add(block, block.note.order)

    def _goes_to_main(self, block: Block) -> bool:
        key, absent = block.key, object()
        if self._returning.pop(key, absent) is None or self._ghosts.pop(key, absent) is None:
            return True
        return not self._has_evicted and len(self._small) >= self._small_size

    def discard(self, block: Block) -> None:
        (self._main if block in self._main else self._small).discard(block)

    def touch(self, block: Block) -> None:
        if block.note is not None:
            block.note.num_hits += 1

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        self._has_evicted = True
        if beneficiary is not None and beneficiary is not self._asked:
            self._recognise(beneficiary)
        while True:
            from_main = len(self._main) > self._main_size or not self._small
            block = (self._from_main() if from_main else self._from_small()) or self._from_main() or self._from_small()
            if block is not None:
                return block

    def _recognise(self, beneficiary: RequestState) -> None:
        """Of the keys it asks for, note those that are remembered; by the time its blocks come they may not be."""
        self._asked = beneficiary
        for key in beneficiary.chain.keys:
            if key in self._ghosts:
                del self._ghosts[key]
                self._remember(self._returning, key)

    def _from_small(self) -> Block | None:
        while (block := self._small.pop()) is not None:
            if block.note.num_hits < self._threshold:
                self._remember(self._ghosts, block.key)
                return block
            self._to_main(block, 0)
        return None

    def _from_main(self) -> Block | None:
        while (block := self._main.pop()) is not None:
            if not block.note.num_hits:
                return block
            self._to_main(block, min(block.note.num_hits, _MOST_HITS) - 1)
        return None

    def _to_main(self, block: Block, num_hits: int) -> None:
        self._num_come += 1
        block.note = _Place(True, self._num_come, num_hits)
        self._main.add(block, self._num_come)

    def _remember(self, keys: OrderedDict[int | None, None], key: int | None) -> None:
        if self._ghost_size and key is not None:
            keys[key] = None
            while len(keys) > self._ghost_size:
                keys.popitem(last=False)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[Block]:
        """Hits are left out of account."""
        yield from self._small
        yield from self._main

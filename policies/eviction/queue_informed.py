"""Blocks that waiting requests will look for go last; else the one released longest ago (as proposed in vLLM #48485).

The queue is known future: what its first requests will find is worth more than anything that may come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from policies.eviction._leaves import ByKey, LeafHeap
from policies.types import Block, RequestState


class QueueInformed:
    """`lookahead`: how many of the waiting, in the order in which they began to wait, are looked at."""

    def __init__(self, lookahead: int = 128) -> None:
        if lookahead < 1:
            raise ValueError(f"lookahead ({lookahead}) must be at least 1 request; lru looks at none")
        self._lookahead = lookahead
        self._heap = LeafHeap()
        self._by_key = ByKey()
        self._wanted: dict[int, int] = {}  # key -> how many of the first want it
        self._first = OrderedDict[RequestState, Sequence[int]]()
        self._rest = OrderedDict[RequestState, Sequence[int]]()
        self._num_released = 0

    def waiting_changed(self, state: RequestState, waits: bool) -> None:
        if waits:
            self._rest[state] = tuple(state.chain.keys)
        elif state in self._rest:
            del self._rest[state]
        else:
            self._want(self._first.pop(state), -1)
        while self._rest and len(self._first) < self._lookahead:
            each, keys = self._rest.popitem(last=False)
            self._first[each] = keys
            self._want(keys, 1)

    def _want(self, keys: Sequence[int], change: int) -> None:
        for key in keys:
            before = self._wanted.get(key, 0)
            self._wanted[key] = before + change
            if not self._wanted[key]:
                del self._wanted[key]
            if not before or not before + change:
                for block in self._by_key.of(key):
                    self._heap.rerank(block, self._rank(block))

    def _rank(self, block: Block) -> tuple[bool, int]:
        """Wanted or not, then the order of its release."""
        return block.key in self._wanted, block.note

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        self._num_released += 1
        block.note = self._num_released
        self._by_key.add(block)
        self._heap.add(block, self._rank(block))

    def discard(self, block: Block) -> None:
        self._heap.discard(block)
        self._by_key.discard(block)

    def touch(self, block: Block) -> None:
        pass

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        block = self._heap.take()
        self._by_key.discard(block)
        return block

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._heap)

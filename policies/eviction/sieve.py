"""A hand goes from the oldest block to the newest; what was found since it last came by is spared once (SIEVE).

Blocks never move, and a new one is met by the hand only after all older ones (Zhang et al., NSDI 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from policies.eviction._leaves import LeafHeap
from policies.types import Block, RequestState


@dataclass(slots=True)
class _Place:
    order: int  # of coming
    found: bool = False  # since the hand came by


class Sieve:
    def __init__(self) -> None:
        self._ahead = LeafHeap()  # of the hand
        self._behind = LeafHeap(self._ahead.tree)
        self._hand = 0  # where it stands, in the order of coming
        self._num_come = 0

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        if block.note is None:
            self._num_come += 1
            block.note = _Place(self._num_come)
        heap = self._ahead if block.note.order > self._hand else self._behind
        heap.add(block, block.note.order)

    def discard(self, block: Block) -> None:
        (self._ahead if block in self._ahead else self._behind).discard(block)

    def touch(self, block: Block) -> None:
        if block.note is not None:
            block.note.found = True

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        while True:
            block = self._ahead.pop()
            if block is None:
                assert len(self), "no block is left to give up"
                self._go_round()
                continue
            place = block.note
            self._hand = place.order
            is_spared, place.found = place.found, False
            if is_spared:
                self._behind.add(block, place.order)
            if not self._ahead:
                self._go_round()
            if not is_spared:
                return block

    def _go_round(self) -> None:
        self._ahead, self._behind, self._hand = self._behind, self._ahead, 0

    def __len__(self) -> int:
        return len(self._ahead) + len(self._behind)

    def __iter__(self) -> Iterator[Block]:
        """Whether they were found is left out of account."""
        yield from self._ahead
        yield from self._behind

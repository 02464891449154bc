"""First come, first served; a preempted request goes back to the front (vLLM's default)."""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.ordered import OrderedLine
from policies.types import RequestState


class FirstComeFirstServed:
    reorders = False
    promises_a_turn = True

    def __init__(self) -> None:
        self._line = OrderedLine[int]()
        self._num_requeued = 0

    def add(self, state: RequestState, now: float) -> None:
        self._line.add(state, state.sequence)

    def requeue(self, state: RequestState, now: float) -> None:
        self._num_requeued += 1
        self._line.add(state, -self._num_requeued)

    def discard(self, state: RequestState) -> None:
        self._line.discard(state)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        return iter(self)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._line)

    def __len__(self) -> int:
        return len(self._line)

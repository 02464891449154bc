"""First come, first served; a preempted request goes back to the front (vLLM's default)."""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.ordered import OrderedLine
from policies.types import RequestState


class FirstComeFirstServed:
    charges = False

    def __init__(self) -> None:
        self._line = OrderedLine[int](lambda state: self._front.get(state, state.sequence))
        self._front: dict[RequestState, int] = {}  # places before everybody else, for the preempted
        self._num_requeued = 0

    def add(self, state: RequestState, now: float) -> None:
        self._line.add(state)

    def requeue(self, state: RequestState, now: float) -> None:
        self._num_requeued += 1
        self._front[state] = -self._num_requeued
        self._line.add(state)

    def discard(self, state: RequestState) -> None:
        self._line.discard(state)
        self._front.pop(state, None)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        return iter(self._line)

    def charge(self, state: RequestState, input_tokens: int, output_tokens: int) -> None:
        pass

    def __len__(self) -> int:
        return len(self._line)

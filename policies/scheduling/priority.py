"""Most urgent first, then first come; a preempted request keeps its place by that order (vLLM's priority mode).

Lower numbers are more urgent. Nobody ages: a steady stream of urgent requests starves the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.ordered import OrderedLine
from policies.types import RequestState


class PriorityOrder:
    reorders = False
    promises_a_turn = True  # to whoever is as urgent as those before him

    def __init__(self) -> None:
        self._line = OrderedLine[tuple[int, float, int]]()

    def add(self, state: RequestState, now: float) -> None:
        self._line.add(state, (state.priority, state.arrival_time, state.sequence))

    def requeue(self, state: RequestState, now: float) -> None:
        self.add(state, now)

    def discard(self, state: RequestState) -> None:
        self._line.discard(state)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        return iter(self._line)

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return waiting.priority < running.priority

    def __len__(self) -> int:
        return len(self._line)

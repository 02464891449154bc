"""EDF: the earliest deadline is next (Liu and Layland, 1973); whoever has none comes last, in order of arrival.

Under overload everybody is late, and EDF spends its time on those who are latest: shed them, at admission. Band first.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.ordered import OrderedLine
from policies.types import RequestState


class EarliestDeadlineFirst:
    """`otherwise`: seconds after arrival that count as the deadline of those who have none; 0: they come last."""

    reorders = False

    def __init__(self, otherwise: float = 0.0) -> None:
        if not 0 <= otherwise < float("inf"):
            raise ValueError(f"otherwise ({otherwise}) must be a finite number of seconds, 0 (they come last) or more")
        self._otherwise = otherwise
        self._line = OrderedLine[tuple[int, float, int]]()
        self.promises_a_turn = otherwise > 0  # a later arrival's deadline is later from some time on

    def add(self, state: RequestState, now: float) -> None:
        self._line.add(state, (state.priority, self._deadline(state), state.sequence))

    def requeue(self, state: RequestState, now: float) -> None:
        self.add(state, now)

    def discard(self, state: RequestState) -> None:
        self._line.discard(state)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        return iter(self._line)

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return (waiting.priority, self._deadline(waiting)) < (running.priority, self._deadline(running))

    def _deadline(self, state: RequestState) -> float:
        if state.request.deadline is not None:
            return state.request.deadline
        return state.arrival_time + self._otherwise if self._otherwise else float("inf")

    def __len__(self) -> int:
        return len(self._line)

"""HRRN: the longest wait for each token to compute is next, cached tokens not counted (Brinch Hansen, 1971).

Short prompts come soon, and long ones age: while the engine keeps up, whoever waits comes through. Wait and service
over service, (w + s) / s, orders as w / s does, so nobody has to say how fast the engine is. The cache is looked up for
the `window` best by their whole length, in each step; the rest stand behind. Band first.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.ordered import OrderedLine
from policies.types import RequestState


class HighestResponseRatioNext:
    """`window`: prompts that are looked up."""

    reorders = True
    promises_a_turn = True

    def __init__(self, window: int = 128) -> None:
        if window < 0:
            raise ValueError(f"window ({window}) must be 0 (nobody is looked up) or more")
        self._window = window
        self._line = OrderedLine[tuple[int, int]]()

    def add(self, state: RequestState, now: float) -> None:
        self._line.add(state, (state.priority, state.sequence))

    def requeue(self, state: RequestState, now: float) -> None:
        self.add(state, now)

    def discard(self, state: RequestState) -> None:
        self._line.discard(state)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        waiting = self._line.snapshot()
        waiting.sort(key=lambda state: _rank(state, state.num_tokens, now))
        first = waiting[: self._window]
        first.sort(key=lambda state: _rank(state, state.num_tokens - view.matched_tokens(state), now))
        return iter(first + waiting[self._window :])

    def __len__(self) -> int:
        return len(self._line)


def _rank(state: RequestState, num_tokens: int, now: float) -> tuple[int, int, int]:
    """The smallest is next: of a band, the most nanoseconds waited for each token."""
    waited = round((now - state.arrival_time) * 1e9)
    return state.priority, -(waited // max(1, num_tokens)), state.sequence

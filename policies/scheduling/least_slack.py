"""Least slack: who must start soonest to keep a deadline is next (Dertouzos and Mok, 1989); who is too late gives way.

The latest start is the deadline less the time to compute the prompt, cached tokens not counted. Edf spends an overload
on those who are late anyhow; here they wait until nobody is left who could be in time, and after them come those who
have no deadline. The cache is looked up for the `window` best by their whole length. Band first.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.ordered import OrderedLine
from policies.types import RequestState


class LeastSlackFirst:
    """`prefill_rate`: prompt tokens a second, as in shed_late. `window`: prompts that are looked up."""

    reorders = True

    def __init__(self, prefill_rate: float = 10000.0, window: int = 128) -> None:
        if not 0 < prefill_rate < float("inf"):
            raise ValueError(f"prefill_rate ({prefill_rate}) must be a finite number of tokens a second above 0")
        if window < 0:
            raise ValueError(f"window ({window}) must be 0 (nobody is looked up) or more")
        self._prefill_rate = prefill_rate
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
        waiting.sort(key=lambda state: self._rank(state, state.num_tokens, now))
        first = waiting[: self._window]
        first.sort(key=lambda state: self._rank(state, state.num_tokens - view.matched_tokens(state), now))
        return iter(first + waiting[self._window :])

    def _rank(self, state: RequestState, num_tokens: int, now: float) -> tuple[int, bool, bool, float, int]:
        """The smallest is next. Who has begun to answer was in time, or it is no matter any more."""
        deadline = state.request.deadline
        if deadline is None:
            return state.priority, True, False, 0.0, state.sequence
        latest_start = deadline - num_tokens / self._prefill_rate
        is_late = latest_start < now and not state.num_output_tokens
        return state.priority, False, is_late, latest_start, state.sequence

    def __len__(self) -> int:
        return len(self._line)

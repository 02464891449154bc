"""SJF by the prompt: the fewest tokens to compute before the first answer are next, cached ones not counted.

Every `patience` admissions past it, the one that came first gets a seat: long prompts come through under a steady
stream of short ones. The cache is looked up for the `window` shortest prompts, in each step; the rest stand behind by
their whole length. Band first.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.ordered import OrderedLine
from policies.types import RequestState, Status


class ShortestPromptFirst:
    """`patience`: others that may be let in before the head of the line, the first to come, is; 0: any number.
    `window`: prompts that are looked up.
    """

    reorders = True

    def __init__(self, patience: int = 16, window: int = 128) -> None:
        if patience < 0:
            raise ValueError(f"patience ({patience}) must be 0 (without end) or more")
        if window < 0:
            raise ValueError(f"window ({window}) must be 0 (nobody is looked up) or more")
        self._patience = patience
        self._window = window
        self._by_length = OrderedLine[tuple[int, int, int]]()
        self._by_arrival = OrderedLine[tuple[int, int]]()
        self._num_passed = 0  # let in past the head since it became that
        self.promises_a_turn = patience > 0

    def add(self, state: RequestState, now: float) -> None:
        self._by_length.add(state, (state.priority, state.num_tokens, state.sequence))
        self._by_arrival.add(state, (state.priority, state.sequence))
        if self._by_arrival.head is state:
            self._num_passed = 0

    def requeue(self, state: RequestState, now: float) -> None:
        self.add(state, now)

    def discard(self, state: RequestState) -> None:
        if state is self._by_arrival.head:
            self._num_passed = 0
        elif state.status is not Status.FINISHED:
            self._num_passed += 1
        self._by_length.discard(state)
        self._by_arrival.discard(state)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        seated = set[RequestState]()
        for state in self._by_work(view):
            head = self._by_arrival.head
            if 0 < self._patience <= self._num_passed and head not in seated:
                seated.add(head)
                yield head
            if state not in seated:
                yield state

    def _by_work(self, view: View) -> list[RequestState]:
        waiting = self._by_length.snapshot()
        ranked = [
            (state.priority, state.num_tokens - view.matched_tokens(state), state.sequence, state)
            for state in waiting[: self._window]
        ]
        ranked.sort()
        return [state for *_, state in ranked] + waiting[self._window :]

    def __len__(self) -> int:
        return len(self._by_arrival)

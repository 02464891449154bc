"""A waiting line in a total order that may be walked while its head is taken out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from policies.types import RequestState

Key = TypeVar("Key", int, tuple[int, float, int])


class OrderedLine(Generic[Key]):
    """Requests sorted by a unique key. Adding and removing cost a binary search and a move of pointers."""

    def __init__(self, key: Callable[[RequestState], Key]) -> None:
        self._key: Callable[[RequestState], Key] = key
        self._keys: list[Key] = []
        self._states: list[RequestState] = []

    def add(self, state: RequestState) -> None:
        key = self._key(state)
        at = bisect_left(self._keys, key) if self._keys and key < self._keys[-1] else len(self._keys)
        self._keys.insert(at, key)
        self._states.insert(at, state)

    def discard(self, state: RequestState) -> None:
        at = bisect_left(self._keys, self._key(state))
        assert self._states[at] is state, f"request {state.request_id} is not in the line"
        del self._keys[at], self._states[at]

    def __iter__(self) -> Iterator[RequestState]:
        at = 0
        while at < len(self._states):
            state = self._states[at]
            yield state
            if at < len(self._states) and self._states[at] is state:
                at += 1

    def __len__(self) -> int:
        return len(self._states)

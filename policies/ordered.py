"""A waiting line in a total order that may be walked while its head is taken out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from policies.types import RequestState

Key = TypeVar("Key", int, tuple[Any, ...])


class OrderedLine(Generic[Key]):
    """Requests sorted by the unique key each came with. Adding and removing cost a search and a move of pointers."""

    def __init__(self) -> None:
        self._key_of: dict[RequestState, Key] = {}
        self._keys: list[Key] = []
        self._states: list[RequestState] = []

    def add(self, state: RequestState, key: Key) -> None:
        at = bisect_left(self._keys, key) if self._keys and key < self._keys[-1] else len(self._keys)
        self._keys.insert(at, key)
        self._states.insert(at, state)
        self._key_of[state] = key

    def discard(self, state: RequestState) -> None:
        at = bisect_left(self._keys, self._key_of.pop(state))
        assert self._states[at] is state, f"request {state.request_id} is not where its key belongs"
        del self._keys[at], self._states[at]

    @property
    def head(self) -> RequestState:
        return self._states[0]

    def snapshot(self) -> list[RequestState]:
        """All of them, whatever becomes of the line."""
        return self._states[:]

    def __iter__(self) -> Iterator[RequestState]:
        at = 0
        while at < len(self._states):
            state = self._states[at]
            yield state
            if at < len(self._states) and self._states[at] is state:
                at += 1

    def __len__(self) -> int:
        return len(self._states)

"""A scheduling policy whose changes an eviction policy hears of: who waits is who will look for blocks."""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import EvictionPolicy, HearsOfWaiting, SchedulingPolicy, View
from policies.types import RequestState


def overheard(scheduling: SchedulingPolicy, eviction: EvictionPolicy) -> SchedulingPolicy:
    """The scheduling policy itself where nobody listens."""
    return Overheard(scheduling, eviction) if isinstance(eviction, HearsOfWaiting) else scheduling


class Overheard:
    def __init__(self, scheduling: SchedulingPolicy, listener: HearsOfWaiting) -> None:
        self._scheduling = scheduling
        self._listener = listener
        self.reorders = scheduling.reorders

    def add(self, state: RequestState, now: float) -> None:
        self._scheduling.add(state, now)
        self._listener.waiting_changed(state, waits=True)

    def requeue(self, state: RequestState, now: float) -> None:
        self._scheduling.requeue(state, now)
        self._listener.waiting_changed(state, waits=True)

    def discard(self, state: RequestState) -> None:
        self._scheduling.discard(state)
        self._listener.waiting_changed(state, waits=False)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        return self._scheduling.candidates(view, now)

    def __len__(self) -> int:
        return len(self._scheduling)

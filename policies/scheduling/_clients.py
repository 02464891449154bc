"""The waiting by band (lower is more urgent), then by client, then first come first served."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from policies.named import counts_by_name
from policies.scheduling.fcfs import FirstComeFirstServed
from policies.types import RequestState

Lines = dict[str, FirstComeFirstServed]


class ClientLines:
    """`by_class`: the classes are the clients."""

    def __init__(self, by_class: bool = False) -> None:
        self._by_class = by_class
        self._bands: dict[int, Lines] = {}
        self._num_waiting: dict[str, int] = {}
        self._total = 0

    def client(self, state: RequestState) -> str:
        return state.request.class_name if self._by_class else state.request.client_id

    def add(self, state: RequestState, now: float) -> None:
        self._join(state).add(state, now)

    def requeue(self, state: RequestState, now: float) -> None:
        self._join(state).requeue(state, now)

    def _join(self, state: RequestState) -> FirstComeFirstServed:
        client = self.client(state)
        self._num_waiting[client] = self._num_waiting.get(client, 0) + 1
        self._total += 1
        lines = self._bands.setdefault(state.priority, {})
        return lines.setdefault(client, FirstComeFirstServed())

    def discard(self, state: RequestState) -> None:
        client, lines = self.client(state), self._bands[state.priority]
        lines[client].discard(state)
        if not len(lines[client]):
            del lines[client]
        self._num_waiting[client] -= 1
        if not self._num_waiting[client]:
            del self._num_waiting[client]
        self._total -= 1

    @property
    def waiting(self) -> Iterator[str]:
        """Clients of whom somebody waits, in order of their coming."""
        return iter(self._num_waiting)

    def has(self, client: str) -> bool:
        return client in self._num_waiting

    def bands(self) -> list[tuple[int, Lines]]:
        """The most urgent first; its clients in the order in which they began to wait, or had their turns."""
        return [(priority, self._bands[priority]) for priority in sorted(self._bands) if self._bands[priority]]

    def turn_to(self, state: RequestState) -> None:
        """Clients of its band that stand before its own go to the end."""
        lines, client = self._bands[state.priority], self.client(state)
        for other in list(lines):
            if other == client:
                return
            lines[other] = lines.pop(other)

    def __len__(self) -> int:
        return self._total


class Shares:
    """Whole weights by name, 1 unless given. What is paid counts for `per_token(name)` units a token.

    Units are fractions of a token that all weights divide, so that accounts stay whole numbers and all weights times
    the same factor change nothing.
    """

    def __init__(self, weights: str) -> None:
        self._weights = counts_by_name("weights", weights)
        for name, weight in self._weights.items():
            if not weight:
                raise ValueError(f"the weight of {name!r} (0) must be at least 1: nobody of that name would ever run")
        self._unit = lcm(*self._weights.values())

    def weight(self, name: str) -> int:
        return self._weights.get(name, 1)

    def per_token(self, name: str) -> int:
        return self._unit // self._weights.get(name, 1)

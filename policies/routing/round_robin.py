"""Each replica in its turn, whatever it has to do."""

from __future__ import annotations

from collections.abc import Sequence

from policies.interfaces import ReplicaLoad
from policies.types import Request


class RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def choose_replica(self, request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
        index = self._next % len(replicas)
        self._next = index + 1
        return index

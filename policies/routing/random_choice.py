"""Any replica, with equal chances; the same one for the same request and seed, whoever else there is."""

from __future__ import annotations

from collections.abc import Sequence

from policies.interfaces import ReplicaLoad
from policies.prompt import digest
from policies.types import Request


class RandomChoice:
    """`seed`: another one deals the requests otherwise."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = str(seed).encode()

    def choose_replica(self, request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
        return digest(b"", self._seed, request.request_id.encode()) % len(replicas)

"""Each session to the replica its name falls to on a ring; the next one if that has more than its share of the load.

Few sessions move when a replica comes or goes, and none overloads one (Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from policies.interfaces import ReplicaLoad
from policies.prompt import digest
from policies.types import Request

KINDS = ("session", "user", "tenant", "application")


class ConsistentHash:
    """`by`: whose requests stay together; a request without one goes by its own name. `load_factor`: how far above the
    mean load a replica may be filled. `points`: places of each replica on the ring."""

    def __init__(self, by: str = "session", load_factor: float = 1.25, points: int = 64) -> None:
        if by not in KINDS:
            raise ValueError(f"by ({by!r}) must be one of: {', '.join(KINDS)}")
        if not 1 < load_factor < math.inf:
            raise ValueError(f"load_factor ({load_factor}) must be finite and above 1, or nobody would have room")
        if points < 1:
            raise ValueError(f"points ({points}) must be at least 1")
        self._by = by
        self._load_factor = load_factor
        self._points = points
        self._ring: list[tuple[int, int]] = []
        self._num_replicas = 0

    def choose_replica(self, request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
        if len(replicas) != self._num_replicas:
            self._lay_out(len(replicas))
        loads = [each.num_running + each.num_waiting for each in replicas]
        most = math.ceil(self._load_factor * (sum(loads) + 1) / len(replicas))
        name = self._name(request)
        at = bisect_right(self._ring, (digest(b"", *(part.encode() for part in name)), -1))
        for place in range(len(self._ring)):
            index = self._ring[(at + place) % len(self._ring)][1]
            if loads[index] < most:
                return index
        raise AssertionError("not all can be above the mean")

    def _name(self, request: Request) -> tuple[str, ...]:
        context = request.context
        value: str = getattr(context, self._by)
        if not value:
            return "request", request.request_id
        return self._by, "" if self._by == "application" else context.tenant, value

    def _lay_out(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._ring = sorted(
            (digest(b"", b"replica", str(index).encode(), str(point).encode()), index)
            for index in range(num_replicas)
            for point in range(self._points)
        )

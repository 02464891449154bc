"""Each tenant to a replica of its own, or to one in turn where tenants are more than replicas.

With `exclusive`, replicas are dedicated: neither memory nor device nor queue is shared, and nothing can leak.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.interfaces import ReplicaLoad
from policies.types import Request


class PinnedTenants:
    """`exclusive`: a tenant for whom no replica is left is an error, not a guest."""

    def __init__(self, exclusive: bool = False) -> None:
        self._exclusive = exclusive
        self._place_of: dict[str, int] = {}

    def choose_replica(self, request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
        tenant = request.context.tenant
        if tenant not in self._place_of:
            if self._exclusive and len(self._place_of) >= len(replicas):
                raise ValueError(
                    f"tenant {tenant!r} finds each of {len(replicas)} replicas dedicated to another: "
                    f"add replicas, or pin without exclusive"
                )
            self._place_of[tenant] = len(self._place_of) % len(replicas)
        return self._place_of[tenant]

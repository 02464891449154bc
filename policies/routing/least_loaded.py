"""Who has the least to do, as far as the router knows: fewest requests, or fewest prompt tokens; ties to the first."""

from __future__ import annotations

from collections.abc import Sequence

from policies.interfaces import ReplicaLoad
from policies.types import Request

KINDS = ("requests", "tokens")


class LeastLoaded:
    def __init__(self, by: str = "requests") -> None:
        if by not in KINDS:
            raise ValueError(f"by ({by!r}) must be one of: {', '.join(KINDS)}")
        self._by_tokens = by == "tokens"

    def choose_replica(self, request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
        return min(range(len(replicas)), key=lambda index: (self._load(replicas[index]), index))

    def _load(self, replica: ReplicaLoad) -> int:
        return replica.num_prompt_tokens if self._by_tokens else replica.num_running + replica.num_waiting

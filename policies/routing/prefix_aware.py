"""Where fewest tokens are in the way: those to compute for this prompt, and those of the requests already there.

The more of a prompt a replica has cached, the more load it may have and still be chosen (as in Dynamo's router).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.interfaces import ReplicaLoad
from policies.types import Request


class PrefixAware:
    """`weight`: of a token to compute against one that is there; 0 looks at load alone.

    `index_staleness`: seconds by which the router's knowledge of the caches may be old.
    """

    def __init__(self, weight: float = 1.0, index_staleness: float = 0.0) -> None:
        for name, value in (("weight", weight), ("index_staleness", index_staleness)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} ({value}) must be finite, 0 or more")
        self._weight = weight
        self.index_staleness = index_staleness

    def choose_replica(self, request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
        num_tokens = request.prompt.num_tokens

        def in_the_way(index: int) -> tuple[float, int, int]:
            each = replicas[index]
            work = self._weight * (num_tokens - each.num_matched_tokens) + each.num_prompt_tokens
            return work, each.num_running + each.num_waiting, index

        return min(range(len(replicas)), key=in_the_way)

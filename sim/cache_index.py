"""What a router knows of the replicas' caches: the keys each had when it last heard of them."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from policies.engine import EngineCore
from policies.types import Request


class CacheIndex:
    """Renewed when it is `staleness` seconds old and somebody asks; at 0 it is the caches themselves."""

    def __init__(self, engines: Sequence[EngineCore], staleness: float) -> None:
        self._engines = engines
        self._staleness = staleness
        self._seen: Sequence[Container[int]] = [engine.kv.known_keys for engine in engines]
        self._seen_at = -math.inf

    def matched_tokens(self, request: Request, now: float) -> list[int]:
        """Of its prompt, by replica. All have one secret, block size and isolation."""
        if self._staleness and now - self._seen_at >= self._staleness:
            self._seen, self._seen_at = [frozenset(engine.kv.known_keys) for engine in self._engines], now
        engine = self._engines[0]
        keys, size = engine.keys_of(request), engine.config.block_size
        return [_num_known(keys, known) * size for known in self._seen]


def _num_known(keys: Sequence[int], known: Container[int]) -> int:
    return next((index for index, key in enumerate(keys) if key not in known), len(keys))

"""What policies see of the engine: interfaces.View, read-only, and no true output length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from policies.types import RequestState

if TYPE_CHECKING:
    from policies.engine import EngineCore


class EngineView:
    __slots__ = ("_engine", "block_size", "max_model_len", "num_blocks")

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self.num_blocks = engine.config.num_blocks
        self.block_size = engine.config.block_size
        self.max_model_len = engine.config.max_model_len

    @property
    def num_free_blocks(self) -> int:
        return self._engine.kv.num_free - self._engine.kv.num_held_back

    @property
    def num_cached_blocks(self) -> int:
        return self._engine.kv.num_idle_cached

    @property
    def running(self) -> Sequence[RequestState]:
        return self._engine.running

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduling)

    @property
    def num_waiting_tokens(self) -> int:
        return self._engine.num_waiting_tokens

    def matched_tokens(self, state: RequestState) -> int:
        return len(self._engine.find_cached(state)) * self.block_size

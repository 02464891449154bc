"""What policies see of the engine: interfaces.View, read-only, and no true output length; what a run keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from policies.totals import Totals
from policies.types import RequestState, Sample, StepPlan

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
    def step_id(self) -> int:
        return self._engine.next_step_id

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduling)

    @property
    def num_waiting_tokens(self) -> int:
        return self._engine.num_waiting_tokens

    @property
    def num_waiting_blocks(self) -> int:
        return self._engine.num_waiting_blocks

    def matched_tokens(self, state: RequestState) -> int:
        self._engine.order_reads_cache = True
        return len(self._engine.find_cached(state)) * self.block_size

    def num_held(self, line: str) -> int:
        return self._engine.held.num_in(line)

    def of_class(self, class_name: str) -> Totals:
        return self._engine.totals_by("class_name").of(class_name)

    def of_client(self, client_id: str) -> Totals:
        return self._engine.totals_by("client_id").of(client_id)


def sample(engine: EngineCore, plan: StepPlan) -> Sample:
    """How things stand with this plan just scheduled."""
    kv = engine.kv
    free, cached = kv.num_free, kv.num_idle_cached
    return Sample(plan.time, plan.repeat, plan.num_running, len(engine.scheduling), plan.num_tokens,
                  plan.num_padding_tokens, kv.num_blocks - free, cached, free - cached, kv.num_evicted)  # fmt: skip

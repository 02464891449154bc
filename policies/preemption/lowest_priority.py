"""The least urgent yields, of those the latest to arrive (vLLM V1, priority)."""

from __future__ import annotations

from collections.abc import Sequence

from policies.types import RequestState


class LowestPriority:
    def choose_victim(
        self, candidates: Sequence[RequestState], beneficiary: RequestState, now: float
    ) -> RequestState | None:
        return max(candidates, key=lambda state: (state.priority, state.arrival_time, state.sequence))

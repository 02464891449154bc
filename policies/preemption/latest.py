"""Whoever was admitted last yields, even if it is the one in need (vLLM V1, fcfs)."""

from __future__ import annotations

from collections.abc import Sequence

from policies.types import RequestState


class LatestAdmitted:
    def choose_victim(
        self, candidates: Sequence[RequestState], beneficiary: RequestState, now: float
    ) -> RequestState | None:
        return candidates[-1]

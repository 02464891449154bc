"""Who has the least to compute again yields (vLLM issue 54644); of equals the latest to come.

What is found in the cache on return counts as computed too. The eldest of the running is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.preemption._eldest import all_but_the_eldest
from policies.types import RequestState


class LeastComputed:
    def choose_victim(
        self, candidates: Sequence[RequestState], beneficiary: RequestState, now: float
    ) -> RequestState | None:
        return min(all_but_the_eldest(candidates), key=lambda state: (state.num_computed_tokens, -state.sequence))

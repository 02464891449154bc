"""Who has answered the least yields, and of those the longest prompt (SGLang's retraction order).

Of equals the latest to come. The eldest of the running is left alone, where SGLang spares nobody but the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.preemption._eldest import all_but_the_eldest
from policies.types import RequestState


class FewestOutputs:
    def choose_victim(
        self, candidates: Sequence[RequestState], beneficiary: RequestState, now: float
    ) -> RequestState | None:
        return min(
            all_but_the_eldest(candidates),
            key=lambda state: (state.num_output_tokens, -state.num_prompt_tokens, -state.sequence),
        )

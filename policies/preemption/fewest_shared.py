"""Who shares the fewest blocks with the running yields: what is shared is not freed by his going (latest of equals).

The eldest of the running is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policies.preemption._eldest import all_but_the_eldest
from policies.types import RequestState


class FewestShared:
    def choose_victim(
        self, candidates: Sequence[RequestState], beneficiary: RequestState, now: float
    ) -> RequestState | None:
        uses = Counter(block_id for state in candidates for block_id in state.block_ids)
        return min(
            all_but_the_eldest(candidates),
            key=lambda state: (sum(uses[block_id] > 1 for block_id in state.block_ids), -state.sequence),
        )

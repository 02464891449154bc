"""Who holds the most blocks yields: the fewest preemptions for the room; of equals the latest to come.

It has the most to compute again, and starves where long requests meet many short ones. The eldest is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.preemption._eldest import all_but_the_eldest
from policies.types import RequestState


class MostBlocks:
    def choose_victim(
        self, candidates: Sequence[RequestState], beneficiary: RequestState, now: float
    ) -> RequestState | None:
        return min(all_but_the_eldest(candidates), key=lambda state: (-len(state.block_ids), -state.sequence))

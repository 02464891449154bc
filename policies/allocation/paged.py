"""Only the blocks of the first chunk are asked for (vLLM with scheduler_reserve_full_isl off).

Admits the most and preempts the most: long prompts may be let in by their first chunk and thrown out half-way.
"""

from __future__ import annotations

from policies.allocation._blocks import blocks_for, checked_watermark, slack_blocks
from policies.interfaces import Promise, View
from policies.types import RequestState


class Paged:
    """`watermark`: share of the pool that stays free when somebody enters beside others."""

    shares_blocks = True

    def __init__(self, watermark: float = 0.0) -> None:
        self.watermark = checked_watermark(watermark)

    def promise(self, state: RequestState, num_hit_tokens: int, num_new_tokens: int, view: View) -> Promise:
        now = blocks_for(num_hit_tokens + num_new_tokens, view)
        return Promise(now, num_blocks_required=now, num_blocks_slack=slack_blocks(self.watermark, view))

"""A request enters when its whole prompt fits; blocks are still taken chunk by chunk (vLLM V1's default).

The room is seen, not held: requests admitted later may take it. Output grows into what is free and preempts when
nothing is.
"""

from __future__ import annotations

from policies.allocation._blocks import blocks_for, checked_watermark, slack_blocks
from policies.interfaces import Promise, View
from policies.types import RequestState


class PagedFullPrompt:
    """`watermark`: share of the pool that stays free when somebody enters beside others."""

    shares_blocks = True

    def __init__(self, watermark: float = 0.0) -> None:
        self.watermark = checked_watermark(watermark)

    def promise(self, state: RequestState, num_hit_tokens: int, num_new_tokens: int, view: View) -> Promise:
        now = blocks_for(num_hit_tokens + num_new_tokens, view)
        required = max(now, blocks_for(state.num_tokens, view))
        return Promise(now, required, num_blocks_slack=slack_blocks(self.watermark, view))

"""Prompt and whole output are held back at admission, so nobody is ever preempted (TensorRT-LLM's no-evict mode).

Blocks are still taken as they fill; what is held back but never written is the price of the guarantee.
"""

from __future__ import annotations

from policies.allocation._blocks import blocks_for
from policies.interfaces import Promise, View
from policies.types import RequestState


class PagedReserveOutput:
    shares_blocks = True

    def promise(self, state: RequestState, num_hit_tokens: int, num_new_tokens: int, view: View) -> Promise:
        now = blocks_for(num_hit_tokens + num_new_tokens, view)
        # The last output token's KV is never computed.
        total = blocks_for(state.num_prompt_tokens + state.token_limit - 1, view)
        return Promise(now, num_blocks_required=total, num_blocks_held=total)

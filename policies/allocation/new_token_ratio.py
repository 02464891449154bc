"""Whoever enters leaves room for a share of what the others may still answer; the share learns (SGLang 0.5).

It falls with each step, and is set anew by whoever yields: what was answered so far, and 20 tokens more each, in
parts of what may be answered. It begins anew when nobody runs. SGLang counts tokens; here its sums are rounded up to
whole blocks, and a request that finds nobody running enters if it fits at all.
"""

from __future__ import annotations

from policies.allocation._blocks import blocks_for
from policies.interfaces import Promise, View
from policies.types import RequestState

CLIPPED_OUTPUT = 4096  # tokens of an answer that are reckoned with
INITIAL_RATIO, LOWEST_SHARE, DECAY_STEPS = 0.7, 0.14, 600
RETRACT_STEPS = 20  # decode steps for which a retraction makes room


class NewTokenRatio:
    """`conservativeness`: the first share is 0.7 times this, at most 1."""

    shares_blocks = True
    depends_on_progress = True

    def __init__(self, conservativeness: float = 1.0) -> None:
        if not 0 < conservativeness < float("inf"):
            raise ValueError(f"conservativeness ({conservativeness}) must be a finite number above 0")
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._lowest = self._initial * LOWEST_SHARE
        self._last_set = (self._initial, 0)  # the share, and the first step after it was set

    def ratio(self, step_id: int) -> float:
        share, step = self._last_set
        decay = (self._initial - self._lowest) / DECAY_STEPS
        return max(share - decay * (step_id - step), self._lowest)

    def promise(self, state: RequestState, num_hit_tokens: int, num_new_tokens: int, view: View) -> Promise:
        now = blocks_for(num_hit_tokens + num_new_tokens, view)
        if not view.running:
            self._last_set = (self._initial, view.step_id)
            return Promise(now, max(now, blocks_for(state.num_tokens, view)))
        # Its tokens, its answer, a page and one token more, as what is left must exceed the sum of the others.
        tokens = state.num_tokens + _left(state) + view.block_size + 1
        required = -(-tokens // view.block_size)
        return Promise(now, min(required, view.num_blocks), num_blocks_slack=self._reserved_blocks(view))

    def preempted(self, state: RequestState, view: View) -> None:
        answered = sum(each.num_output_tokens for each in view.running)
        may_be = sum(each.request.max_tokens for each in view.running)
        share = (answered + RETRACT_STEPS * len(view.running)) / (may_be + 1)
        self._last_set = (min(1.0, share), view.step_id)

    def _reserved_blocks(self, view: View) -> int:
        ratio, fresh, running, prompts = self.ratio(view.step_id), 0, 0, 0
        for each in view.running:
            if each.admitted_step == view.step_id:
                fresh += _left(each)  # whoever entered in this very step counts in full
            else:
                running += _left(each)
            prompts += max(0, each.num_prompt_tokens - len(each.block_ids) * view.block_size)
        tokens = fresh + running * ratio + prompts
        return -int(-tokens // view.block_size)


def _left(state: RequestState) -> int:
    return min(state.request.max_tokens - state.num_output_tokens, CLIPPED_OUTPUT)

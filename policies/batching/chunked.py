"""Running requests first, in order of admission, then new ones; prompts are cut to what is left (vLLM V1).

Prefill and decode are one thing: each request closes the gap between its tokens and those computed. A long prompt
admitted early is served before later decodes and can use up the budget.
"""

from __future__ import annotations

from policies.step import Step


class ChunkedPrefill:
    repeats = True
    returns_together = False

    def compose(self, step: Step) -> None:
        threshold = self._threshold(step)
        step.grant_running(threshold)  # 0.32.0 stops at the first that yields, even if to itself
        for state in step.candidates():
            num = min(step.uncached(state), threshold)
            if num > step.token_budget and not step.config.enable_chunked_prefill:
                break
            step.admit(state, min(num, step.token_budget))

    def _threshold(self, step: Step) -> int:
        """The largest chunk: it binds only while there is somebody to be kept waiting."""
        config, present = step.config, step.num_running + step.num_waiting
        if not config.long_prefill_token_threshold or present <= 1:
            return config.max_num_batched_tokens + config.max_model_len
        if config.long_prefill_token_threshold_adaptive:
            return max(config.long_prefill_token_threshold, config.max_num_batched_tokens // present)
        return config.long_prefill_token_threshold

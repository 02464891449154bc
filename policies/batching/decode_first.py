"""Nobody enters while anybody decodes: the shortest gaps between tokens, and the longest waits for the first one.

Request-level batching as in FasterTransformer, but each answer goes out when it is done. The other extreme to
`prefill_first`; what lies between is `stall_free`.
"""

from __future__ import annotations

from policies.step import Step


class DecodeFirst:
    repeats = True
    returns_together = False

    def compose(self, step: Step) -> None:
        if not step.grant_running(limit=1, decoding=True) or step.entries:
            return
        if not step.grant_running(step.token_budget, decoding=False):
            return
        for state in step.candidates():
            num = step.uncached(state)
            if num > step.token_budget and not step.config.enable_chunked_prefill:
                return
            step.admit(state, min(num, step.token_budget))

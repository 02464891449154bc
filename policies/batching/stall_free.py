"""Decodes first, then prompts under way, then new ones, within a chunk of tokens (Sarathi-Serve, OSDI 2024).

No decode waits for a prefill. `chunk_size` bounds all tokens of a step; smaller steps are shorter, and so are the
gaps between tokens, at the cost of more steps a prompt.
"""

from __future__ import annotations

from policies.step import Grant, Step


class StallFree:
    repeats = True
    returns_together = False

    def __init__(self, chunk_size: int = 512) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size ({chunk_size}) must be at least 1 token")
        self.chunk_size = chunk_size

    def compose(self, step: Step) -> None:
        chunked = step.config.enable_chunked_prefill
        unused = max(0, step.token_budget - self.chunk_size) if chunked else 0  # of the engine's budget
        if not step.grant_running(limit=1, decoding=True) or step.token_budget <= unused:
            return
        for state in step.running:
            num = min(step.remaining(state), step.token_budget - unused)
            if num > 0 and not state.is_decoding and step.grant(state, num) is not Grant.GRANTED:
                return
        for state in step.candidates():
            num, room = step.uncached(state), step.token_budget - unused
            if room <= 0 or (num > room and not chunked):
                return
            step.admit(state, min(num, room))

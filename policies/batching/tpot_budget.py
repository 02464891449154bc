"""As many prompt tokens a step as a target for the time between tokens allows (Sarathi-Serve's choice of chunk).

The largest chunk whose step is not longer than `tpot`, if a step takes step_time + token_time * tokens +
context_time * tokens of context that its decodes read. The three come from a profile of the engine.
"""

from __future__ import annotations

from policies.batching.stall_free import StallFree
from policies.step import Step


class TpotBudget:
    """`tpot`: seconds between tokens. `step_time`, `token_time`, `context_time`: seconds a step, a token of it, a token
    of context. `min_chunk`: tokens that a step may have though it lasts longer, or prompts would never end."""

    repeats = True
    returns_together = False

    def __init__(
        self,
        tpot: float = 0.05,
        step_time: float = 0.008,
        token_time: float = 3e-5,
        context_time: float = 0.0,
        min_chunk: int = 64,
    ) -> None:
        for name, value in (("tpot", tpot), ("token_time", token_time)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} ({value}) must be a finite number of seconds above 0")
        for name, value in (("step_time", step_time), ("context_time", context_time)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} ({value}) must be a finite number of seconds, 0 or more")
        if min_chunk < 1:
            raise ValueError(f"min_chunk ({min_chunk}) must be at least 1 token")
        self.tpot = tpot
        self.step_time = step_time
        self.token_time = token_time
        self.context_time = context_time
        self.depends_on_progress = context_time > 0
        self._chunks = StallFree(min_chunk)
        self._min_chunk = min_chunk

    def compose(self, step: Step) -> None:
        self._chunks.chunk_size = self.chunk_size(self._context(step) if self.context_time else 0)
        self._chunks.compose(step)

    @property
    def last_chunk_size(self) -> int:
        return self._chunks.chunk_size

    def chunk_size(self, num_context_tokens: int) -> int:
        left = self.tpot - self.step_time - self.context_time * num_context_tokens
        return max(self._min_chunk, int(left / self.token_time))

    def _context(self, step: Step) -> int:
        return sum(state.num_computed_tokens + 1 for state in step.running if state.is_decoding)

"""Who comes to a full queue is refused at once (vLLM's max_num_queued_reqs and max_num_queued_tokens).

A bound on tokens keeps a promise on the first token: about the TTFT that is aimed at times the prefill throughput.
"""

from __future__ import annotations

from policies.interfaces import View
from policies.types import Admit, Reject, Request, Verdict


class BoundedQueue:
    """`max_waiting`: requests in line, 0 for any number. `max_prompt_tokens`: of all prompts without a first token,
    counted whole, 0 for any number; a longer one is let in when no other is there. `retry_after`: seconds, the hint to
    who is refused."""

    def __init__(self, max_waiting: int = 0, max_prompt_tokens: int = 0, retry_after: float = 1.0) -> None:
        for name, value in (("max_waiting", max_waiting), ("max_prompt_tokens", max_prompt_tokens)):
            if value < 0:
                raise ValueError(f"{name} ({value}) must be 0 (any number) or more")
        if not 0 <= retry_after < float("inf"):
            raise ValueError(f"retry_after ({retry_after}) must be a finite number of seconds, 0 or more")
        self.max_waiting = max_waiting
        self.max_prompt_tokens = max_prompt_tokens
        self.retry_after = retry_after

    def decide(self, request: Request, view: View, now: float) -> Verdict:
        if self.max_waiting and view.num_waiting >= self.max_waiting:
            return Reject(f"the queue is full: {view.num_waiting} requests wait", self.retry_after)
        if self.max_prompt_tokens:
            queued = self._queued_tokens(view)
            if queued and queued + request.prompt.num_tokens > self.max_prompt_tokens:
                return Reject(f"the queue is full: {queued} prompt tokens wait", self.retry_after)
        return Admit()

    def _queued_tokens(self, view: View) -> int:
        """Cached tokens included: what is a hit now may be gone when its turn comes."""
        in_prefill = sum(state.num_prompt_tokens for state in view.running if not state.num_output_tokens)
        return view.num_waiting_tokens + in_prefill

"""Who cannot have a first token by the deadline is told at once, and who can no more leaves the queue.

A request is refused if the prefill of all that wait before it, and its own, ends too late, and shed once its own alone
would. Without it an overloaded queue works for nobody: all are served, each too late.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, nextafter

from policies.interfaces import View
from policies.types import Admit, Reject, Request, RequestState, Verdict


class ShedLate:
    """`prefill_rate`: prompt tokens a second that the engine computes. `ttft`: seconds to the deadline of requests that
    bring none; 0: they have none. `retry_after`: seconds, the hint to who is shed."""

    def __init__(self, prefill_rate: float = 10000.0, ttft: float = 0.0, retry_after: float = 1.0) -> None:
        if not 0 < prefill_rate < float("inf"):
            raise ValueError(f"prefill_rate ({prefill_rate}) must be a finite number of tokens a second above 0")
        for name, value in (("ttft", ttft), ("retry_after", retry_after)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} ({value}) must be a finite number of seconds, 0 or more")
        self.prefill_rate = prefill_rate
        self.ttft = ttft
        self.retry_after = retry_after
        self._latest_starts: list[tuple[float, str, float]] = []  # heap; with the deadline
        self._present: dict[str, float] = {}  # deadlines of those who have come and not left

    def decide(self, request: Request, view: View, now: float) -> Verdict:
        deadline = self._deadline(request)
        if deadline is None:
            return Admit()
        own, backlog = request.prompt.num_tokens / self.prefill_rate, self._backlog(view) / self.prefill_rate
        late = now + backlog + own - deadline
        if late > 0:
            hint = backlog if backlog > 0 else self.retry_after
            return Reject(f"its first token would come {late:.3g} s after its deadline", hint)
        self._present[request.request_id] = deadline
        heappush(self._latest_starts, (deadline - own, request.request_id, deadline))
        return Admit()

    def shed(self, view: View, now: float) -> list[tuple[str, Reject]]:
        shed = []
        while self._latest_starts and self._latest_starts[0][0] < now:
            _, request_id, deadline = heappop(self._latest_starts)
            if self._present.get(request_id) == deadline:
                shed.append((request_id, Reject("its deadline cannot be met any more", self.retry_after)))
        return shed

    def next_wakeup(self, now: float) -> float | None:
        return nextafter(self._latest_starts[0][0], inf) if self._latest_starts else None

    def finished(self, state: RequestState, now: float) -> None:
        self._present.pop(state.request_id, None)

    def _deadline(self, request: Request) -> float | None:
        if request.deadline is not None or not self.ttft:
            return request.deadline
        return request.arrival_time + self.ttft

    def _backlog(self, view: View) -> int:
        """Prompt tokens before it, as far as nothing is found in the cache."""
        under_way = sum(max(0, state.num_prompt_tokens - state.num_computed_tokens) for state in view.running)
        return view.num_waiting_tokens + under_way

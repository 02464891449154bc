"""A device of no weights: says the position of each token, waits when told to, throws when told to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from policies.types import FinishReason, Request, StepOutput, StepPlan


class Echo:
    """Knows how far each request is, and takes no step that its tokens do not reach.

    `fails` holds ids of steps that throw; `gate`, while cleared, keeps every step waiting; `begun` counts steps begun;
    `open_for` lets so many steps through and closes the gate behind them.
    """

    def __init__(self, fails: Sequence[int] = ()) -> None:
        self.fails = set(fails)
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self._num_open_for = -1
        self.plans: list[StepPlan] = []
        self.known: dict[str, int] = {}  # tokens, prompt and answer
        self._ends: dict[str, int | None] = {}

    def open_for(self, num_steps: int) -> None:
        self._num_open_for = num_steps
        self.gate.set()

    def check(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        if request.sampling is not None and request.sampling.temperature < 0:
            raise ValueError("temperature must be 0 or more")

    def add(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        assert request.request_id not in self.known, f"{request.request_id} has not been discarded"
        self.known[request.request_id] = request.prompt.num_tokens
        self._ends[request.request_id] = None if length is None else request.prompt.num_tokens + length

    def discard(self, request_id: str) -> None:
        self.known.pop(request_id, None)

    def execute(self, plan: StepPlan) -> StepOutput:
        self.begun.release()
        assert self.gate.wait(timeout=10), "nobody opened the gate"
        self._num_open_for -= 1
        if self._num_open_for == 0:
            self.gate.clear()
        self.plans.append(plan)
        if plan.step_id in self.fails:
            self.fails.discard(plan.step_id)
            raise ArithmeticError(f"step {plan.step_id} went wrong")
        said, stopped = dict[str, list[int]](), dict[str, FinishReason]()
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            assert end <= self.known[chunk.request_id], f"{chunk.request_id} has no token {end - 1} yet"
            if chunk.samples:
                self.known[chunk.request_id] = end + 1
                said[chunk.request_id] = [end]
                if end + 1 == self._ends[chunk.request_id]:
                    stopped[chunk.request_id] = FinishReason.STOP
        return StepOutput(0.0, stopped, said)

"""A real core over a real model, step by step: `Server` plays the live loop without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from backend.executor import TorchExecutor
from backend.model import Decoder
from policies.catalogue import build
from policies.config import EngineConfig
from policies.types import Request, RequestRecord, StepOutput, StepPlan


class Server:
    """Orders reach the executor as the live loop's do: a step as soon as it is decided, then who left."""

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self.engine = build(config)
        self.executor = TorchExecutor(decoder, config)
        self.records: dict[str, RequestRecord] = {}
        self.said: dict[str, dict[int, int]] = {}  # id -> position -> token
        self.num_steps = 0
        self._in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
        self._depth = config.async_depth
        self.now = 0.0

    def add(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> bool:
        self.executor.check(request, length, answer)
        accepted = self.engine.add(request, self.now).accepted
        if accepted:
            self.said[request.request_id] = {}
            self.executor.add(request, length, answer)
        return accepted

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id, self.now)
        self._drain()

    def step(self) -> StepPlan | None:
        """Decide and compute one more, unless as many are in flight as may be; then hear of the oldest."""
        plan = self.engine.schedule(self.now) if len(self._in_flight) < self._depth else None
        if plan is not None:
            self._in_flight.append((plan, self.executor.execute(plan)))
            self.num_steps += 1
        if self._in_flight and (plan is None or len(self._in_flight) == self._depth):
            self._update(*self._in_flight.popleft())
        return plan

    def run(self) -> dict[str, list[int]]:
        """Until everybody has left. Returns each answer."""
        while self.engine.has_work:
            self.step()
        return {request_id: self.answer(request_id) for request_id in self.said}

    def answer(self, request_id: str) -> list[int]:
        """Tokens that count, in order."""
        said = self.said[request_id]
        return [said[position] for position in sorted(said)][: self.records[request_id].num_output_tokens]

    def fail(self, plan: StepPlan) -> None:
        """The step threw."""
        self.engine.fail(plan, self.now)
        self._drain()

    def _update(self, plan: StepPlan, output: StepOutput) -> None:
        self.now += 1.0
        for chunk in plan.chunks:
            for token in output.token_ids.get(chunk.request_id, ()):
                self.said.setdefault(chunk.request_id, {})[chunk.start + chunk.num_tokens] = token
        self.engine.update(plan, output, self.now)
        self._drain()

    def _drain(self) -> None:
        for record in self.engine.drain_records():
            self.records[record.request_id] = record
            self.executor.discard(record.request_id)

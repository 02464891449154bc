"""One turn of the live loop around a device that takes no time: engine, threads, streams; by the wall clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, pairwise

from backend.front import Front
from policies.catalogue import build
from policies.config import EngineConfig
from policies.prompt import LengthPrompt
from policies.types import FinishReason, Request, StepOutput, StepPlan

NUM_TURNS = 48


class Idle:
    """An executor whose device is infinitely fast: the next token is 0."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def check(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        assert length is not None, "an idle device has no model that could end an answer"

    def add(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        self._left[request.request_id] = length or 1

    def discard(self, request_id: str) -> None:
        del self._left[request_id]

    def execute(self, plan: StepPlan) -> StepOutput:
        sampled = list(compress(plan.request_ids, plan.samples))
        for name in sampled:
            self._left[name] -= 1
        stopped = {name: FinishReason.STOP for name in sampled if not self._left[name]}
        return StepOutput(0.0, stopped, {name: [0] for name in sampled})


def turn_time(config: EngineConfig, running: int) -> float:
    """Seconds of wall clock a step in which `running` requests decode: the median of many turns."""
    return asyncio.run(_turn_time(config, running))


async def _turn_time(config: EngineConfig, running: int) -> float:
    most = max(running, config.max_num_seqs)
    wide = replace(
        config, max_num_seqs=most, max_num_batched_tokens=max(most, config.max_num_batched_tokens), async_depth=1
    )
    async with Front(build(wide), Idle()) as front:
        requests = [Request(f"idle-{index}", 0.0, LengthPrompt(1), max_tokens=NUM_TURNS) for index in range(running)]
        answers = [front.ask(request, length=NUM_TURNS) for request in requests]
        for answer in answers:
            await answer.whole()
        ends = front.replica.step_ends
    turns = sorted(later - earlier for earlier, later in pairwise(ends[8:]))
    return turns[len(turns) // 2]

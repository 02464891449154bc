"""A live engine over a real model: whatever happened to others, an answer is that of a lone run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from backend.executor import TorchExecutor
from backend.front import Answer, Front
from backend.load import load_model
from policies.prompt import TokenPrompt
from policies.types import Request, StepOutput, StepPlan
from tests.worlds import request, tiny_config, tiny_engine

TINY = load_model("tiny").decoder
DEPTHS = pytest.mark.parametrize("async_depth", [1, 2])


class Faulty(TorchExecutor):
    """Throws in these steps: before anything is computed, or when all is and nobody has heard of it."""

    def __init__(self, fails: Sequence[int], late: bool, **settings: Any) -> None:
        super().__init__(TINY, tiny_config(**settings))
        self._fails, self._late = set(fails), late

    def execute(self, plan: StepPlan) -> StepOutput:
        fails = plan.step_id in self._fails
        output = super().execute(plan) if self._late or not fails else None
        if fails or output is None:
            raise ArithmeticError(f"step {plan.step_id} went wrong")
        return output


def asked(name: str, *token_ids: int, max_tokens: int = 6, **fields: Any) -> Request:
    return request(name, TokenPrompt(token_ids), max_tokens=max_tokens, **fields)


def lone(wanted: Request) -> list[int]:
    """Its answer where nobody else is and nothing is cached."""

    async def scene() -> list[int]:
        engine = tiny_engine(enable_prefix_caching=False)
        async with Front(engine, TorchExecutor(TINY, engine.config)) as front:
            return await front.ask(wanted).whole()

    return asyncio.run(scene())


SHARED = tuple(range(40, 52))


@DEPTHS
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fails", [(0,), (1,), (0, 2), (3,)])
def test_after_a_step_that_threw_answers_are_those_of_a_lone_run(
    fails: tuple[int, ...], late: bool, async_depth: int
) -> None:
    """Nobody hits KV that was never written: the same prompts come again until all are answered."""
    wanted = {name: asked(name, *SHARED, *tail) for name, tail in (("a", (1, 2)), ("b", (3,)), ("c", ()))}
    settings = {"async_depth": async_depth, "num_blocks": 16}

    async def scene() -> tuple[dict[str, list[int]], int]:
        engine = tiny_engine(**settings)
        answers, num_failed = dict[str, list[int]](), 0
        async with Front(engine, Faulty(fails, late, **settings)) as front:
            while len(answers) < len(wanted):
                for answer in [front.ask(each) for name, each in wanted.items() if name not in answers]:
                    try:
                        answers[answer.request.request_id] = await answer.whole()
                    except RuntimeError:
                        num_failed += 1
        return answers, num_failed

    answers, num_failed = asyncio.run(scene())
    assert num_failed > 0
    assert answers == {name: lone(each) for name, each in wanted.items()}


def test_s11_decode_is_no_faster_on_a_hit() -> None:
    """By steps and by tokens: a hit spares prefill, and after it every step is what it was without."""
    plans: list[dict[str, Any]] = []

    async def scene() -> list[Answer]:
        lines: list[str] = []
        engine = tiny_engine(lines.append, max_num_batched_tokens=8)
        async with Front(engine, TorchExecutor(TINY, engine.config)) as front:
            answers = []
            for name in ("miss", "hit"):
                answers.append(front.ask(asked(name, *range(100, 122), max_tokens=8)))
                await answers[-1].end()
        plans.extend(line for line in map(json.loads, lines) if "plan" in line)
        return answers

    miss, hit = asyncio.run(scene())
    steps = {
        name: [chunk[1:3] for plan in plans for chunk in plan["chunks"] if chunk[0] == name] for name in ("miss", "hit")
    }
    assert steps["miss"][:3] == [[0, 8], [8, 8], [16, 6]]
    assert steps["hit"][:1] == [[20, 2]], "five blocks of four were found, and are spared"
    decodes = [[position, 1] for position in range(22, 29)]
    assert steps["miss"][3:] == steps["hit"][1:] == decodes
    assert miss.tokens == hit.tokens and len(hit.tokens) == 8


@DEPTHS
def test_crowded_or_alone_the_same_answers(async_depth: int) -> None:
    """Eight requests in a pool for three: they yield, come back, hit each other's blocks."""
    wanted = [asked(str(i), *SHARED[: 4 + i], i, max_tokens=10) for i in range(8)]

    async def scene() -> list[Answer]:
        engine = tiny_engine(num_blocks=10, async_depth=async_depth)
        async with Front(engine, TorchExecutor(TINY, engine.config)) as front:
            answers = [front.ask(each) for each in wanted]
            for answer in answers:
                await answer.end()
        return answers

    answers = asyncio.run(scene())
    records = [answer.record for answer in answers if answer.record]
    assert (
        sum(record.num_preemptions for record in records) > 0
        and sum(record.num_cached_tokens for record in records) > 0
    )
    assert [answer.tokens for answer in answers] == [lone(each) for each in wanted]

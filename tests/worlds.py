"""The smallest worlds: tiny engines, requests of a few tokens, and a clock that ticks once a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policies.catalogue import build
from policies.config import EngineConfig
from policies.engine import EngineCore
from policies.journal import Write
from policies.prompt import ContentPrompt, LengthPrompt, Prompt
from policies.types import Context, FinishReason, Request, RequestRecord, RequestState, StepOutput, StepPlan

TINY: Mapping[str, Any] = {
    "num_blocks": 8,
    "block_size": 4,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "max_model_len": 32,
}


def tiny_config(**settings: Any) -> EngineConfig:
    """8 blocks of 4 tokens, 32 tokens a step, 4 requests at once, unless said otherwise."""
    return EngineConfig(**{**TINY, **settings})


def tiny_engine(journal: Write | None = None, secret: bytes = b"", **settings: Any) -> EngineCore:
    return build(tiny_config(**settings), journal, secret)


def request(
    request_id: str | int,
    prompt: int | Sequence[int] | Prompt = 4,
    max_tokens: int = 4,
    arrival_time: float = 0.0,
    tenant: str = "",
    **fields: Any,
) -> Request:
    """`prompt` is a length (content like no other's), the content of each token, or a prompt."""
    if isinstance(prompt, int):
        prompt = LengthPrompt(prompt)
    elif isinstance(prompt, Sequence):
        prompt = ContentPrompt(len(prompt), tuple(prompt), content_size=1)
    return Request(str(request_id), arrival_time, prompt, max_tokens, context=Context(tenant=tenant), **fields)


def step(engine: EngineCore, now: float, stop: Iterable[str] = ()) -> StepPlan:
    """One step of a second; the answers of `stop` end with it."""
    plan = engine.schedule(now)
    assert plan is not None, "nobody can run"
    finish(engine, plan, now + 1.0, stop)
    return plan


def finish(engine: EngineCore, plan: StepPlan, now: float, stop: Iterable[str] = ()) -> None:
    """The device is done with the plan."""
    engine.update(plan, StepOutput(now - plan.time, dict.fromkeys(stop, FinishReason.STOP)), now)


def run_to_end(engine: EngineCore, now: float = 0.0, max_steps: int = 1000) -> dict[str, RequestRecord]:
    """Steps of a second until everybody has left; answers end at max_tokens. Returns the records by id."""
    for _ in range(max_steps):
        if not engine.has_work:
            return {record.request_id: record for record in engine.drain_records()}
        plan = engine.schedule(now)
        if plan is None:
            wakeup = engine.next_wakeup(now)
            assert wakeup is not None, "work is left, but nobody can run and nothing will change"
            now = wakeup
        else:
            now += 1.0
            finish(engine, plan, now)
    raise AssertionError(f"work is left after {max_steps} steps")


def shown(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """(request, first token, tokens) of each chunk."""
    return [(chunk.request_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks] if plan else []


def state_of(engine: EngineCore, request_id: str) -> RequestState:
    return next(state for state in engine.states if state.request_id == request_id)


def waiting_state(each: Request) -> RequestState:
    """Of an engine that knows nobody else."""
    engine = tiny_engine()
    engine.add(each, each.arrival_time)
    return state_of(engine, each.request_id)


def free_ids(engine: EngineCore) -> list[int]:
    """Free blocks, the next to be reused first."""
    return [block.block_id for block in engine.kv.free_order()]

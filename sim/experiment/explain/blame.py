"""What a waiting request waits for after a step was decided, and who holds it.

Only looked at, never asked: a policy that is asked once more than in the run would decide otherwise. So what stands in
the way is read off the step. Whoever is let in needs a slot, tokens of the step's budget, and blocks, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.catalogue import make
from policies.engine import EngineCore
from policies.types import RequestState, Status

Chunk = Sequence[Any]  # of a journal's plan: request, first token, tokens, new blocks if any

ADMISSION = "admission to let it in"
GROUP = "the group that runs to be done"
SLOTS = "a slot"
BUDGET = "tokens of a step"
BLOCKS = "blocks"
TURN = "its turn in the order"
STEP = "the step in progress"
NEXT_STEP = "the next step"
PREFILLS = "prefills"
ANSWERS = "longer answers"
NOTHING = ""  # it is served, or on its way


@dataclass(frozen=True, slots=True)
class Cause:
    """`holders`: by request, what each holds of it, in parts that add up to 1; empty where it is nobody's."""

    what: str
    holders: Mapping[str, float] = field(default_factory=dict)


def why_waiting(state: RequestState, engine: EngineCore, line: Mapping[str, Any]) -> Cause:
    """After the step of a journal's line was decided, or no step."""
    config, chunks, running = engine.config, line.get("chunks", ()), engine.running
    if state.status is Status.HELD:
        return Cause(ADMISSION)
    if running and make("batching", config.batching).returns_together:
        return Cause(GROUP, _evenly(running))
    if len(running) >= config.max_num_seqs:
        return Cause(SLOTS, _evenly(running))
    left = config.max_num_batched_tokens - sum(chunk[2] for chunk in chunks) - line.get("padding", 0)
    if left <= 0 or (not config.enable_chunked_prefill and 0 < left < state.num_tokens and chunks):
        return Cause(BUDGET, shares({name: num for name, _, num, *_ in chunks}))
    if running and any(_may_want(each, engine) > engine.kv.num_available(each) for each in engine.states):
        return Cause(BLOCKS, shares({each.request_id: len(each.block_ids) for each in running}))
    return Cause(TURN)


def _may_want(state: RequestState, engine: EngineCore) -> int:
    """Blocks a waiting request may be asked for, whatever allocation promises: for its prompt and its whole answer."""
    if state.status is Status.RUNNING or state.status is Status.HELD:
        return 0
    tokens = min(state.num_prompt_tokens + state.token_limit, engine.config.max_model_len)
    return -(-tokens // engine.config.block_size)


def why_not_done(engine: EngineCore) -> Cause:
    """Of an answer that is complete and goes out with its group's."""
    return Cause(ANSWERS, _evenly([state for state in engine.running if state.stop_reason is None]))


def _evenly(states: Sequence[RequestState]) -> dict[str, float]:
    return shares({state.request_id: 1 for state in states})


def shares(amounts: Mapping[str, float]) -> dict[str, float]:
    """In parts of the whole, those of nothing left out."""
    whole = sum(amounts.values())
    return {name: amount / whole for name, amount in amounts.items() if amount}

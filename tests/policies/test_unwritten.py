"""A request thrown out of the very step that was to fill its blocks: nobody may find what was never written."""

from __future__ import annotations

import pytest

from tests.worlds import request, shown, step, tiny_engine


@pytest.mark.parametrize(("drops", "findable"), [(True, 4), (False, 5)])
def test_blocks_a_victim_did_not_live_to_write_lose_their_keys(drops: bool, findable: int) -> None:
    """Seven blocks of 4. `low` is granted its fifth and sixth block, both full; then `high` needs one, and `low` yields
    in the step in which it was granted. vLLM keeps the keys (the sixth block's goes as `high` takes it)."""
    engine = tiny_engine(
        num_blocks=7, max_num_batched_tokens=16, long_prefill_token_threshold=8, scheduling="priority",
        preemption="lowest_priority", drop_unwritten_keys=drops,
    )  # fmt: skip
    engine.add(request("low", prompt=list(range(25)), max_tokens=2, priority=9), now=0.0)
    engine.add(request("other", prompt=1, max_tokens=1, priority=9), now=0.0)
    assert shown(step(engine, 0.0)) == [("low", 0, 8), ("other", 0, 1)]
    engine.add(request("high", prompt=list(range(50, 54)), max_tokens=6, priority=0), now=1.0)
    assert shown(step(engine, 1.0)) == [("low", 8, 8), ("high", 0, 4)]
    plan = engine.schedule(2.0)
    assert plan is not None and plan.preempted == ("low",) and shown(plan) == [("high", 4, 1)]
    low = next(state for state in engine.states if state.request_id == "low")
    assert len(engine.find_cached(low)) == findable

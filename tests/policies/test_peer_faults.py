"""Public faults of other engines, each in the smallest world that shows it; numbers are those of our list of them."""

from __future__ import annotations

from typing import Any

import pytest

from policies.engine import EngineCore, PrefixStats
from policies.prompt import Namespace, seals
from policies.step import Grant, Step
from policies.types import FinishReason
from tests.worlds import finish, free_ids, request, run_to_end, shown, state_of, step, tiny_engine

# -- preemption -------------------------------------------------------------------------------------------------------


def two_that_outgrow_the_pool() -> EngineCore:
    """a and b fill 2 of 5 blocks each; in the second step a takes the last one and b, the latest, yields."""
    engine = tiny_engine(num_blocks=5)
    engine.add(request("a", prompt=8, max_tokens=4), now=0.0)
    engine.add(request("b", prompt=8, max_tokens=4), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 8), ("b", 0, 8)]
    plan = step(engine, now=1.0)
    assert (shown(plan), plan.preempted) == ([("a", 8, 1)], ("b",))
    return engine


def test_23_a_preempted_request_finds_its_own_blocks_again() -> None:
    """BLIS lost the hashes of freed blocks: one request prefilled its prompt 597 times."""
    engine = two_that_outgrow_the_pool()
    step(engine, now=2.0)
    step(engine, now=3.0)  # a is done
    plan = step(engine, now=4.0)
    assert plan.admitted == (("b", 8, True),)
    assert shown(plan) == [("b", 8, 1)]
    assert run_to_end(engine, now=5.0)["b"].num_recomputed_tokens == 0


def test_40_the_cached_tokens_of_a_resume_are_those_found_then() -> None:
    """Counted before the preemption they would reach past the table; the record keeps those of the first admission."""
    engine = two_that_outgrow_the_pool()
    run = [step(engine, now=now) for now in (2.0, 3.0, 4.0)]
    resumed = run[-1].chunks[0]
    assert (resumed.start, len(resumed.block_ids)) == (8, 3)
    record = run_to_end(engine, now=5.0)["b"]
    assert (record.num_cached_tokens, record.num_preemptions, record.num_output_tokens) == (0, 1, 4)


def test_46_the_first_token_keeps_its_time_and_the_stall_is_in_the_end_to_end_time() -> None:
    """The user saw the first token before the preemption, and waits through it."""
    record = run_to_end(two_that_outgrow_the_pool(), now=2.0)["b"]
    assert record.first_token_time == 1.0
    assert record.requeue_time == 3.0  # from 1 s, when it yielded, to 4 s, when a was done
    assert record.finish_time == 7.0
    assert (record.queue_time, record.prefill_time, record.decode_time, record.stall_time) == (0.0, 1.0, 3.0, 0.0)


def test_43_resumes_do_not_raise_the_hit_rate() -> None:
    """In vLLM a preempted request's recomputation counted as hits: 30 % on random data."""
    engine = two_that_outgrow_the_pool()
    run_to_end(engine, now=2.0)
    assert engine.prefix_stats == PrefixStats(num_requests=2, num_query_tokens=16, num_hit_tokens=0)
    assert engine.prefix_stats_resumed == PrefixStats(num_requests=1, num_query_tokens=9, num_hit_tokens=8)


def lo_before_hi_before_mid() -> EngineCore:
    """All run, lo longest; the pool of 4 is full, and hi is about to need one block more."""
    engine = tiny_engine(num_blocks=4, scheduling="priority", preemption="lowest_priority")
    engine.add(request("lo", prompt=5, max_tokens=6, priority=2), now=0.0)
    step(engine, now=0.0)
    engine.add(request("hi", prompt=4, max_tokens=6, priority=0), now=1.0)
    engine.add(request("mid", prompt=2, max_tokens=6, priority=1), now=1.0)
    assert shown(step(engine, now=1.0)) == [("lo", 5, 1), ("hi", 0, 4), ("mid", 0, 2)]
    return engine


def test_27_a_victim_that_was_already_granted_is_taken_out_of_the_step() -> None:
    engine = lo_before_hi_before_mid()
    plan = engine.schedule(now=2.0)
    assert plan is not None and plan.preempted == ("lo",)
    lo = state_of(engine, "lo")
    assert (lo.num_computed_tokens, lo.block_ids, lo.num_output_tokens) == (0, [], 2)
    finish(engine, plan, now=3.0)
    assert lo.num_output_tokens == 2, "a step it was taken out of yields it no token"


def test_27_the_tokens_of_such_a_victim_go_back_to_the_budget() -> None:
    engine = lo_before_hi_before_mid()
    lo, hi, _ = engine.running
    composed = Step(engine, now=2.0)
    assert composed.grant(lo, 1) is composed.grant(hi, 1) is Grant.GRANTED
    assert composed.preempted == ["lo"]
    assert composed.token_budget == 32 - 1


def test_28_who_stands_behind_a_removed_victim_is_not_skipped() -> None:
    """lo stood before hi in the running list; taking it out moves mid up by one place."""
    assert shown(lo_before_hi_before_mid().schedule(now=2.0)) == [("hi", 4, 1), ("mid", 2, 1)]


def test_29_a_step_ends_at_the_one_that_yields_to_itself() -> None:
    """vLLM 0.32.0, kept for parity: hi, which stands behind lo and has room, loses the step."""
    engine = tiny_engine(num_blocks=2, scheduling="priority", preemption="lowest_priority")
    engine.add(request("lo", prompt=3, priority=1), now=0.0)
    step(engine, now=0.0)
    engine.add(request("hi", prompt=3, priority=0), now=1.0)
    assert shown(step(engine, now=1.0)) == [("lo", 3, 1), ("hi", 0, 3)]
    lost = step(engine, now=2.0)
    assert (shown(lost), lost.preempted) == ([], ("lo",))
    assert shown(step(engine, now=3.0)) == [("hi", 3, 1)]


def test_52_a_preemption_leaves_no_placeholder_and_the_token_in_flight_counts() -> None:
    engine = tiny_engine(num_blocks=5, async_depth=2)
    engine.add(request("a", prompt=8, max_tokens=4), now=0.0)
    engine.add(request("b", prompt=8, max_tokens=4), now=0.0)
    first = engine.schedule(now=0.0)
    second = engine.schedule(now=0.0)
    assert first is not None and second is not None and second.preempted == ("b",)
    b = state_of(engine, "b")
    assert (b.num_placeholders, b.num_output_tokens) == (0, 0)
    finish(engine, first, now=1.0)
    assert (b.num_placeholders, b.num_output_tokens, b.num_tokens) == (0, 1, 9)
    finish(engine, second, now=1.0)
    records = run_to_end(engine, now=1.0)
    assert [records[name].num_output_tokens for name in "ab"] == [4, 4]


# -- admission --------------------------------------------------------------------------------------------------------


def four_that_leave_two_blocks(allocation: str) -> EngineCore:
    engine = tiny_engine(
        num_blocks=10, block_size=16, max_num_batched_tokens=84, max_num_seqs=5, max_model_len=64,
        long_prefill_token_threshold=20, allocation=allocation,
    )  # fmt: skip
    for name in "abcd":
        engine.add(request(name, prompt=20, max_tokens=8), now=0.0)
    step(engine, now=0.0)
    engine.add(request("fifth", prompt=48, max_tokens=8), now=1.0)
    return engine


def test_18_a_long_prompt_is_not_let_in_by_its_first_chunk() -> None:
    engine = four_that_leave_two_blocks("paged_full_prompt")
    for now in (1.0, 2.0, 3.0):
        assert step(engine, now).admitted == (), "3 blocks are needed, 2 are free"
    assert run_to_end(engine, now=4.0)["fifth"].num_preemptions == 0


def test_18_without_the_full_prompt_it_is_let_in_and_thrown_out_half_way() -> None:
    """vLLM with scheduler_reserve_full_isl off: 100 tokens a second became 1.5."""
    engine = four_that_leave_two_blocks("paged")
    plan = step(engine, now=1.0)
    assert shown(plan)[-1] == ("fifth", 0, 20)
    assert step(engine, now=2.0).preempted == ("fifth",)


LARGE: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 256, "max_model_len": 256}


def test_16_a_prompt_larger_than_the_cache_is_refused_and_does_not_block_the_line() -> None:
    engine = tiny_engine(**LARGE)
    outcome = engine.add(request("big", prompt=200, max_tokens=4), now=0.0)
    engine.add(request("small", prompt=20), now=0.0)
    assert not outcome.accepted
    assert outcome.reason == (
        "request big needs 203 tokens of KV cache, but the cache holds 128 (8 blocks of 16): "
        "lower max_tokens or enlarge the cache"
    )
    records = run_to_end(engine)
    assert records["big"].reason is FinishReason.REJECTED
    assert records["small"].reason is FinishReason.LENGTH


def test_16_an_answer_that_would_outgrow_the_cache_is_refused() -> None:
    """PR 52530: the prompt fits, prompt and answer do not; alone, it would preempt itself for ever."""
    engine = tiny_engine(**LARGE)
    assert "needs 149 tokens" in engine.add(request("grows", prompt=120, max_tokens=30), now=0.0).reason
    assert engine.add(request("fits", prompt=120, max_tokens=9), now=0.0).accepted, "the last token needs no KV"
    assert run_to_end(engine)["fits"].num_preemptions == 0


def test_16_a_prompt_of_max_model_len_leaves_no_room_for_an_answer() -> None:
    engine = tiny_engine(num_blocks=20)
    assert "has a prompt of 32 tokens, but max_model_len is 32" in engine.add(request("a", prompt=32), 0.0).reason
    assert engine.add(request("b", prompt=31), 0.0).accepted
    assert run_to_end(engine)["b"].num_output_tokens == 1


def test_16_with_the_refusal_off_the_line_waits_for_ever_as_in_vllm() -> None:
    engine = tiny_engine(**LARGE, refuse_unfittable=False)
    engine.add(request("big", prompt=200), now=0.0)
    engine.add(request("small", prompt=20), now=0.0)
    assert engine.schedule(now=0.0) is None
    assert engine.next_wakeup(now=0.0) is None
    engine.abort("big", now=1.0)
    assert shown(engine.schedule(now=1.0)) == [("small", 0, 20)]


def test_24_idle_blocks_that_are_hit_are_no_longer_free() -> None:
    """Counting only new blocks over-admits: 3 are new, 4 are free, but 2 of these are the ones that are hit."""
    engine = tiny_engine(num_blocks=6)
    engine.add(request("first", prompt=range(8), max_tokens=1), now=0.0)
    step(engine, now=0.0)
    engine.add(request("holds", prompt=7, max_tokens=4), now=1.0)
    step(engine, now=1.0)
    engine.add(request("hits", prompt=range(17), max_tokens=1), now=2.0)
    assert engine.kv.num_free == 4
    assert step(engine, now=2.0).admitted == ()


def test_44_failed_admissions_do_not_count_as_lookups() -> None:
    """vLLM counted big's lookup again in each of 38 steps in which it did not fit."""
    engine = tiny_engine()
    engine.add(request("runs", prompt=8, max_tokens=12), now=0.0)
    engine.add(request("big", prompt=25, max_tokens=1), now=0.0)
    for now in range(5):
        step(engine, now=float(now))
    assert engine.prefix_stats == PrefixStats(1, 8, 0)
    run_to_end(engine, now=5.0)
    assert engine.prefix_stats == PrefixStats(2, 33, 0)


# -- cancellation -----------------------------------------------------------------------------------------------------


def test_5_an_abort_in_the_step_in_which_it_would_finish_is_an_abort() -> None:
    engine = tiny_engine()
    engine.add(request("a", prompt=5, max_tokens=1), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    assert engine.abort("a", now=0.5)
    assert engine.kv.num_free == 8, "its blocks are free at once"
    finish(engine, plan, now=1.0, stop=["a"])
    (record,) = engine.drain_records()
    assert (record.reason, record.num_output_tokens, record.finish_time) == (FinishReason.ABORT, 0, 0.5)


def test_6_a_request_that_vanishes_between_schedule_and_update_disturbs_nobody() -> None:
    engine = tiny_engine()
    for name in "abc":
        engine.add(request(name, prompt=5, max_tokens=2), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    engine.abort("b", now=0.5)
    finish(engine, plan, now=1.0)
    assert shown(step(engine, now=1.0)) == [("a", 5, 1), ("c", 5, 1)]
    assert {name: record.num_output_tokens for name, record in run_to_end(engine, 2.0).items()} == {
        "b": 0,
        "a": 2,
        "c": 2,
    }


def test_6_an_abort_while_waiting_is_not_scheduled_and_a_second_one_is_nothing() -> None:
    engine = tiny_engine()
    engine.add(request("a"), now=0.0)
    assert engine.abort("a", now=0.0)
    assert not engine.abort("a", now=0.0)
    assert not engine.abort("never", now=0.0)
    assert engine.schedule(now=0.0) is None
    assert not engine.has_work


def test_6_an_id_may_return_while_its_first_bearer_is_still_in_flight() -> None:
    """What the step says of the first must not be told to the second."""
    engine = tiny_engine()
    engine.add(request("a", prompt=5, max_tokens=3), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    engine.abort("a", now=0.0)
    engine.add(request("a", prompt=2, max_tokens=3), now=0.0)
    finish(engine, plan, now=1.0, stop=["a"])
    assert state_of(engine, "a").num_output_tokens == 0
    assert run_to_end(engine, now=1.0)["a"].num_output_tokens == 3


def test_12_usage_returns_to_nothing_after_each_request() -> None:
    engine = tiny_engine()
    for number in range(3):
        engine.add(request(number, prompt=range(9), max_tokens=3), now=float(10 * number))
        run_to_end(engine, now=float(10 * number))
        assert engine.kv.num_free == 8


# -- the cache --------------------------------------------------------------------------------------------------------


def test_tails_are_evicted_before_heads() -> None:
    """Root first, nothing would be left of the chain: a block whose parent is gone cannot be found."""
    engine = tiny_engine(num_blocks=4)
    engine.add(request("chain", prompt=range(12), max_tokens=1), now=0.0)
    step(engine, now=0.0)
    assert free_ids(engine) == [4, 3, 2, 1]
    engine.add(request("other", prompt=8, max_tokens=1), now=1.0)
    step(engine, now=1.0)  # takes 4, which is empty, and 3, the tail
    assert engine.kv.num_evicted == 1
    engine.add(request("again", prompt=range(12), max_tokens=1), now=2.0)
    assert step(engine, now=2.0).admitted == (("again", 8, False),)


def test_15_a_shared_block_is_counted_once() -> None:
    engine = tiny_engine()
    for name in "abc":
        engine.add(request(name, prompt=range(8), max_tokens=3), now=0.0)
    step(engine, now=0.0)
    assert engine.kv.num_free == 8 - 4, "a head of one block for all, a second block for each"
    run_to_end(engine, now=1.0)
    assert engine.kv.num_free == 8
    assert len(set(free_ids(engine))) == 8


def test_41_blocks_of_the_same_step_are_hit_only_where_they_are_cached_at_schedule() -> None:
    """Right only if a step writes all KV before any is read."""
    for cache_at, num_hit in (("schedule", 8), ("step_end", 0)):
        engine = tiny_engine(cache_at=cache_at)
        engine.add(request("first", prompt=range(9)), now=0.0)
        engine.add(request("second", prompt=range(9)), now=0.0)
        assert step(engine, now=0.0).admitted[1].num_cached_tokens == num_hit


@pytest.mark.parametrize(
    "one, other",
    [
        (("org_1", "2345"), ("org_12345", "")),
        (("ab", "c"), ("a", "bc")),
        (("tenant", "X"), ("user", "X")),
        (("tenant", ""), ("tenant",)),
        (("", "X"), ("X", "")),
    ],
)
def test_35_salts_of_different_fields_never_meet(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert seals([Namespace(0, one)], 4, b"") != seals([Namespace(0, other)], 4, b"")


def test_35_two_salts_on_one_block_are_told_apart_from_one() -> None:
    both = seals([Namespace(0, ("a",)), Namespace(1, ("b",))], 4, b"")
    assert both.keys() == {0}
    assert both != seals([Namespace(0, ("a", "b"))], 4, b"")
    assert both != seals([Namespace(0, ("b",)), Namespace(1, ("a",))], 4, b"")

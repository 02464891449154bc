"""Each entry of each menu in the smallest world that shows what it decides, and each mechanism switched off alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.catalogue import make
from policies.config import MENUS, EngineConfig
from policies.engine import EngineCore, Policies
from policies.eviction.lru import LeastRecentlyUsed
from policies.preemption.latest import LatestAdmitted
from policies.preemption.lowest_priority import LowestPriority
from policies.step import Step
from policies.types import Admit, Block, Context, FinishReason, Hold, Reject, Request, RequestState, Status, Verdict
from tests.worlds import (
    finish,
    free_ids,
    request,
    run_to_end,
    shown,
    state_of,
    step,
    tiny_config,
    tiny_engine,
    waiting_state,
)


def engine_with(num_blocks: int = 8, **policies: object) -> EngineCore:
    """A tiny engine with somebody's own policies."""
    config = tiny_config(num_blocks=num_blocks)
    chosen = {menu: make(menu, getattr(config, menu)) for menu in MENUS}
    return EngineCore(config, Policies(**{**chosen, **policies}))


def ids(engine: EngineCore) -> list[str]:
    return [state.request_id for state in engine.running]


def order(engine: EngineCore) -> list[str]:
    return [state.request_id for state in engine.scheduling.candidates(engine.view, 0.0)]


# -- admission --------------------------------------------------------------------------------------------------------


def test_accept_all_lets_a_queue_of_any_length_grow() -> None:
    engine = tiny_engine()
    assert all(engine.add(request(number), now=0.0).accepted for number in range(100))


class OneAtATime:
    """Holds who comes while somebody is there; refuses whoever has waited for a second."""

    def decide(self, request: Request, view: object, now: float) -> Verdict:
        if now - request.arrival_time >= 1.0:
            return Reject("too late", retry_after=2.0)
        return Hold() if view.running or view.num_waiting else Admit()  # type: ignore[attr-defined]


def guarded_engine() -> EngineCore:
    return engine_with(admission=OneAtATime())


def test_the_held_are_asked_again_at_each_schedule_and_count_as_present() -> None:
    engine = guarded_engine()
    assert engine.add(request("a", max_tokens=1), now=0.0).accepted
    assert engine.add(request("b", max_tokens=1), now=0.0).accepted
    assert state_of(engine, "b").status is Status.HELD
    plan = engine.schedule(now=0.0)
    assert plan is not None and shown(plan) == [("a", 0, 4)]
    finish(engine, plan, now=0.5)
    assert shown(engine.schedule(now=0.5)) == [("b", 0, 4)]


def test_a_refusal_is_a_result_with_its_reason() -> None:
    engine = guarded_engine()
    outcome = engine.add(request("late"), now=1.0)
    assert (outcome.accepted, outcome.reason, outcome.retry_after) == (False, "too late", 2.0)
    (record,) = engine.drain_records()
    assert (record.reason, record.detail, record.queue_time) == (FinishReason.REJECTED, "too late", 1.0)


def test_the_held_may_be_shed_and_aborted() -> None:
    engine = guarded_engine()
    engine.add(request("runs", max_tokens=3), now=0.0)
    for name in ("shed", "aborted"):
        engine.add(request(name), now=0.0)
    assert engine.abort("aborted", now=0.5)
    plan = engine.schedule(now=1.0)
    assert shown(plan) == [("runs", 0, 4)]
    left = [(record.request_id, record.reason) for record in engine.drain_records()]
    assert left == [("aborted", FinishReason.ABORT), ("shed", FinishReason.REJECTED)]


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ({"prompt": 0}, "has an empty prompt"),
        ({"max_tokens": 0}, "has max_tokens 0"),
        ({"arrival_time": float("nan")}, "has arrival_time nan"),
        ({"arrival_time": float("inf")}, "has arrival_time inf"),
    ],
)
def test_what_no_server_would_accept_is_an_error(wrong: dict[str, float], complaint: str) -> None:
    engine = tiny_engine()
    with pytest.raises(ValueError, match=complaint):
        engine.add(request("a", **wrong), now=0.0)  # type: ignore[arg-type]
    assert not engine.has_work


def test_a_live_id_is_an_error_and_a_finished_one_may_return() -> None:
    engine = tiny_engine()
    engine.add(request("a", max_tokens=1), now=0.0)
    with pytest.raises(ValueError, match="request id 'a' is live"):
        engine.add(request("a"), now=0.0)
    step(engine, now=0.0)
    assert engine.add(request("a"), now=1.0).accepted


def test_time_does_not_run_backwards() -> None:
    engine = tiny_engine()
    engine.schedule(now=2.0)
    for now in (1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be finite and not before"):
            engine.schedule(now)
    with pytest.raises(ValueError, match="must be finite and not before"):
        engine.abort("a", now=1.0)


# -- scheduling -------------------------------------------------------------------------------------------------------


def test_fcfs_goes_by_the_order_of_adding() -> None:
    engine = tiny_engine(max_num_seqs=1)
    for name, arrival_time in (("a", 0.0), ("b", -1.0), ("c", 0.0)):
        engine.add(request(name, max_tokens=1, arrival_time=arrival_time, priority=-9), now=0.0)
    assert order(engine) == ["a", "b", "c"]


def test_fcfs_puts_the_preempted_before_everybody_and_the_last_preempted_first() -> None:
    engine = tiny_engine()
    for name in "abc":
        engine.add(request(name), now=0.0)
    step(engine, now=0.0)
    engine.add(request("new"), now=1.0)
    for name in "bca":
        engine.preempt(state_of(engine, name), now=1.0)
    assert order(engine) == ["a", "c", "b", "new"]


def test_priority_goes_by_priority_then_arrival_then_the_order_of_adding() -> None:
    engine = tiny_engine(scheduling="priority")
    for name, priority, arrival_time in (("d", 1, 0.0), ("c", 0, 0.5), ("a", 0, 0.0), ("b", 0, 0.0), ("top", -1, 0.5)):
        engine.add(request(name, priority=priority, arrival_time=arrival_time), now=0.5)
    assert order(engine) == ["top", "a", "b", "c", "d"]


def test_priority_gives_the_preempted_no_credit() -> None:
    engine = tiny_engine(scheduling="priority")
    engine.add(request("late", arrival_time=1.0), now=1.0)
    step(engine, now=1.0)
    engine.add(request("early", arrival_time=0.0), now=2.0)
    engine.preempt(state_of(engine, "late"), now=2.0)
    assert order(engine) == ["early", "late"]


def test_priority_does_not_preempt_for_the_waiting() -> None:
    """Inversion, as in vLLM: the urgent one waits for the slot of one that is not."""
    engine = tiny_engine(scheduling="priority", preemption="lowest_priority", max_num_seqs=1)
    engine.add(request("low", priority=5, max_tokens=3), now=0.0)
    step(engine, now=0.0)
    engine.add(request("urgent", priority=0), now=1.0)
    assert shown(step(engine, now=1.0)) == [("low", 4, 1)]


# -- batching: chunked ------------------------------------------------------------------------------------------------


def test_chunked_serves_the_running_first_and_cuts_new_prompts_to_what_is_left() -> None:
    engine = tiny_engine(max_num_batched_tokens=8)
    engine.add(request("a", prompt=5), now=0.0)
    engine.add(request("b", prompt=10), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 5), ("b", 0, 3)]
    assert shown(step(engine, now=1.0)) == [("a", 5, 1), ("b", 3, 7)]
    assert shown(step(engine, now=2.0)) == [("a", 6, 1), ("b", 10, 1)]


def test_chunked_lets_a_long_prompt_use_up_the_budget_of_later_decodes() -> None:
    engine = tiny_engine(max_num_batched_tokens=8, max_num_seqs=2)
    engine.add(request("hog", prompt=20), now=0.0)
    engine.add(request("short", prompt=1), now=0.0)
    assert [shown(step(engine, now=float(now))) for now in range(3)] == [
        [("hog", 0, 8)],
        [("hog", 8, 8)],
        [("hog", 16, 4), ("short", 0, 1)],
    ]


def test_a_threshold_cuts_long_prefills_while_others_are_there() -> None:
    engine = tiny_engine(max_num_batched_tokens=16, long_prefill_token_threshold=3)
    engine.add(request("alone", prompt=7, max_tokens=2), now=0.0)
    assert shown(step(engine, now=0.0)) == [("alone", 0, 7)], "nobody is kept waiting"
    engine.add(request("long", prompt=7), now=1.0)
    assert shown(step(engine, now=1.0)) == [("alone", 7, 1), ("long", 0, 3)]
    assert shown(step(engine, now=2.0)) == [("long", 3, 4)], "alone has left"


def test_an_adaptive_threshold_shares_the_budget_among_those_present() -> None:
    engine = tiny_engine(long_prefill_token_threshold=2, long_prefill_token_threshold_adaptive=True)
    for name in "ab":
        engine.add(request(name, prompt=25), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 16)], "32 tokens for 2; b does not fit into the cache beside a"
    engine = tiny_engine(num_blocks=16, long_prefill_token_threshold=2, long_prefill_token_threshold_adaptive=True)
    for name in "abcd":
        engine.add(request(name, prompt=10), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 8), ("b", 0, 8), ("c", 0, 8), ("d", 0, 8)]


def test_chunking_off_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    engine = tiny_engine(enable_chunked_prefill=False, num_blocks=16)
    for name in "ab":
        engine.add(request(name, prompt=20, max_tokens=1), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 20)]
    assert shown(step(engine, now=1.0)) == [("b", 0, 20)]


def test_nobody_is_let_in_by_a_step_that_preempted() -> None:
    engine = tiny_engine(num_blocks=4)
    for name in "abc":
        engine.add(request(name, prompt=4), now=0.0)
    step(engine, now=0.0)
    engine.add(request("new", prompt=1, max_tokens=1), now=1.0)
    plan = step(engine, now=1.0)  # a takes the last block, b takes c's
    assert (shown(plan), plan.preempted, plan.admitted) == ([("a", 4, 1), ("b", 4, 1)], ("c",), ())


def test_the_head_of_the_line_blocks_it_unless_some_may_be_passed_over() -> None:
    for hol_skip, running in ((0, ["runs"]), (1, ["runs", "small"]), (2, ["runs", "small", "tiny"])):
        engine = tiny_engine(hol_skip=hol_skip, max_num_seqs=3)
        engine.add(request("runs", prompt=7), now=0.0)
        step(engine, now=0.0)
        for name, prompt in (("big", 28), ("small", 4), ("huge", 27), ("tiny", 1)):
            engine.add(request(name, prompt=prompt), now=1.0)
        step(engine, now=1.0)
        assert ids(engine) == running


# -- batching: prefill_first ------------------------------------------------------------------------------------------


def test_prefill_first_holds_prompts_or_decodes_never_both() -> None:
    engine = tiny_engine(batching="prefill_first", max_num_batched_tokens=8)
    engine.add(request("a", prompt=5), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 5)]
    engine.add(request("b", prompt=6), now=1.0)
    engine.add(request("c", prompt=6), now=1.0)
    assert shown(step(engine, now=1.0)) == [("b", 0, 6)], "c would have to be cut"
    assert shown(step(engine, now=2.0)) == [("c", 0, 6)], "a has been waiting for two steps"
    assert shown(step(engine, now=3.0)) == [("a", 5, 1), ("b", 6, 1), ("c", 6, 1)]


def test_prefill_first_cuts_a_prompt_only_if_it_alone_exceeds_the_budget() -> None:
    engine = tiny_engine(batching="prefill_first", max_num_batched_tokens=8)
    engine.add(request("long", prompt=12), now=0.0)
    engine.add(request("short", prompt=3), now=0.0)
    assert shown(step(engine, now=0.0)) == [("long", 0, 8)]
    assert shown(step(engine, now=1.0)) == [("long", 8, 4), ("short", 0, 3)]


# -- batching: stall_free ---------------------------------------------------------------------------------------------


def test_stall_free_serves_decodes_first_then_prompts_under_way_then_new_ones() -> None:
    engine = tiny_engine(batching="stall_free,chunk_size=6", num_blocks=16)
    engine.add(request("long", prompt=14), now=0.0)
    assert shown(step(engine, now=0.0)) == [("long", 0, 6)]
    engine.add(request("b", prompt=1), now=1.0)
    engine.add(request("c", prompt=3), now=1.0)
    assert shown(step(engine, now=1.0)) == [("long", 6, 6)]
    assert shown(step(engine, now=2.0)) == [("long", 12, 2), ("b", 0, 1), ("c", 0, 3)]
    engine.add(request("new", prompt=9), now=3.0)
    assert shown(step(engine, now=3.0)) == [("long", 14, 1), ("b", 1, 1), ("c", 3, 1), ("new", 0, 3)]
    assert shown(step(engine, now=4.0)) == [("long", 15, 1), ("b", 2, 1), ("c", 4, 1), ("new", 3, 3)]


def test_stall_free_lets_nobody_in_once_decodes_fill_the_chunk() -> None:
    engine = tiny_engine(batching="stall_free,chunk_size=2")
    for name in "abc":
        engine.add(request(name, prompt=1, max_tokens=3), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 1), ("b", 0, 1)]
    assert shown(step(engine, now=1.0)) == [("a", 1, 1), ("b", 1, 1)]


# -- batching: static -------------------------------------------------------------------------------------------------


def test_a_static_group_starts_when_it_is_complete() -> None:
    engine = tiny_engine(batching="static,group_size=2,max_wait=5")
    engine.add(request("a"), now=0.0)
    assert engine.schedule(now=0.0) is None
    assert engine.next_wakeup(now=0.0) == 5.0
    engine.add(request("b"), now=1.0)
    assert shown(step(engine, now=1.0)) == [("a", 0, 4), ("b", 0, 4)]
    assert engine.next_wakeup(now=2.0) is None


def test_a_static_group_starts_when_the_first_has_waited_long_enough() -> None:
    engine = tiny_engine(batching="static,group_size=2,max_wait=5")
    engine.add(request("a"), now=0.0)
    assert engine.schedule(now=0.0) is None
    assert engine.schedule(now=4.75) is None
    assert shown(engine.schedule(now=5.0)) == [("a", 0, 4)]


def test_a_static_group_is_as_large_as_may_run_unless_said_otherwise() -> None:
    engine = tiny_engine(batching="static", max_num_seqs=3)
    for name in "abcd":
        engine.add(request(name), now=0.0)
    step(engine, now=0.0)
    assert ids(engine) == ["a", "b", "c"]


def test_a_static_group_is_answered_together_and_nobody_joins_it() -> None:
    engine = tiny_engine(batching="static,group_size=2")
    engine.add(request("short", prompt=2, max_tokens=1), now=0.0)
    engine.add(request("long", prompt=4, max_tokens=3), now=0.0)
    step(engine, now=0.0)
    engine.add(request("next", prompt=2, max_tokens=1), now=1.0)
    plans = [step(engine, now=1.0), step(engine, now=2.0)]
    assert [shown(plan) for plan in plans] == [[("long", 4, 1)], [("long", 5, 1)]]
    assert [plan.num_running for plan in plans] == [2, 2], "short keeps its slot"
    records = {record.request_id: record for record in engine.drain_records()}
    assert {name: record.finish_time for name, record in records.items()} == {"short": 3.0, "long": 3.0}
    assert {record.first_token_time for record in records.values()} == {3.0}
    assert [records[name].num_output_tokens for name in ("short", "long")] == [1, 3]


def test_a_static_group_computes_its_missing_ends_and_its_finished_members_as_padding() -> None:
    engine = tiny_engine(batching="static,group_size=2")
    engine.add(request("short", prompt=2, max_tokens=1), now=0.0)
    engine.add(request("long", prompt=5, max_tokens=3), now=0.0)
    padding = [step(engine, now=float(now)).num_padding_tokens for now in range(3)]
    assert sum(padding) == (5 - 2) + 2, "a prompt filled up to 5 tokens, and a member that is done for 2 steps"


def test_a_stopped_member_keeps_its_memory_until_the_group_is_done() -> None:
    engine = tiny_engine(batching="static,group_size=2")
    engine.add(request("short", prompt=4, max_tokens=1), now=0.0)
    engine.add(request("long", prompt=3, max_tokens=2), now=0.0)
    step(engine, now=0.0)
    assert engine.kv.num_free == 6
    step(engine, now=1.0)
    assert engine.kv.num_free == 8


def test_a_static_group_takes_as_many_as_memory_holds() -> None:
    engine = tiny_engine(batching="static,group_size=3,max_wait=2", num_blocks=5)
    for name in "abc":
        engine.add(request(name, prompt=7, max_tokens=1), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 7), ("b", 0, 7)]
    assert engine.schedule(now=1.0) is None, "a group of one waits for company"
    assert shown(engine.schedule(now=2.0)) == [("c", 0, 7)]


# -- allocation -------------------------------------------------------------------------------------------------------


def test_paged_asks_for_the_first_chunk_only() -> None:
    engine = tiny_engine(num_blocks=4, allocation="paged", max_num_batched_tokens=9)
    engine.add(request("a", prompt=5), now=0.0)
    engine.add(request("b", prompt=11), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 5), ("b", 0, 4)], "3 blocks for b, 2 are free, 1 is asked for"
    assert len(state_of(engine, "b").block_ids) == 1


def test_paged_full_prompt_sees_room_for_the_prompt_but_does_not_hold_it() -> None:
    engine = tiny_engine(num_blocks=5, max_num_batched_tokens=9)
    engine.add(request("a", prompt=5), now=0.0)
    engine.add(request("b", prompt=11), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 5), ("b", 0, 4)]
    assert (engine.kv.num_free, engine.kv.num_held_back) == (2, 0)
    engine.abort("b", now=1.0)
    engine.add(request("c", prompt=13), now=1.0)
    assert shown(step(engine, now=1.0)) == [("a", 5, 1)], "c needs 4 blocks, 3 are free"


def test_a_watermark_keeps_blocks_free_beside_others_but_not_from_the_only_one() -> None:
    for allocation in ("paged,watermark=0.5", "paged_full_prompt,watermark=0.5"):
        engine = tiny_engine(allocation=allocation)  # int(0.5 * 9) = 4 blocks
        engine.add(request("only", prompt=20), now=0.0)
        engine.add(request("beside", prompt=1), now=0.0)
        assert shown(step(engine, now=0.0)) == [("only", 0, 20)]


def test_paged_reserve_output_holds_back_prompt_and_answer_and_never_preempts() -> None:
    engine = tiny_engine(num_blocks=5, allocation="paged_reserve_output")
    for name in "ab":
        engine.add(request(name, prompt=4, max_tokens=6), now=0.0)  # 4 + 6 - 1 tokens: 3 blocks
    assert shown(step(engine, now=0.0)) == [("a", 0, 4)]
    assert (engine.kv.num_free, engine.kv.num_held_back, engine.view.num_free_blocks) == (4, 2, 2)
    step(engine, now=1.0)
    assert (engine.kv.num_free, engine.kv.num_held_back) == (3, 1), "what is held back is taken as it fills"
    run_to_end(engine, now=2.0)
    assert engine.num_preemptions == 0
    assert (engine.kv.num_free, engine.kv.num_held_back) == (5, 0)


def test_paged_reserve_output_lets_two_in_that_the_last_block_would_part() -> None:
    """Exactly enough for both, to the last token."""
    engine = tiny_engine(num_blocks=6, allocation="paged_reserve_output")
    for name in "ab":
        engine.add(request(name, prompt=4, max_tokens=9), now=0.0)
    step(engine, now=0.0)
    assert ids(engine) == ["a", "b"]
    assert [record.num_output_tokens for record in run_to_end(engine, now=1.0).values()] == [9, 9]


def test_contiguous_max_len_takes_a_whole_region_whatever_the_length() -> None:
    engine = tiny_engine(allocation="contiguous_max_len", enable_prefix_caching=False, max_model_len=12)
    for name in "abc":
        engine.add(request(name, prompt=1, max_tokens=1), now=0.0)
    step(engine, now=0.0)
    assert engine.kv.num_free == 8, "all are done"
    assert shown(step(engine, now=1.0)) == [("c", 0, 1)], "regions of 3 blocks: 2 of them in 8"


def test_contiguous_regions_stay_contiguous_in_whatever_order_they_return() -> None:
    engine = tiny_engine(allocation="contiguous_max_len", enable_prefix_caching=False, max_model_len=12, num_blocks=10)
    for name in "abc":
        engine.add(request(name, prompt=1), now=0.0)
    step(engine, now=0.0)
    for name, follower in (("b", "d"), ("a", "e"), ("d", "f")):
        engine.abort(name, now=1.0)
        engine.add(request(follower, prompt=1), now=1.0)
    step(engine, now=1.0)
    assert {state.request_id: state.block_ids for state in engine.running} == {
        "c": [7, 8, 9], "e": [1, 2, 3], "f": [4, 5, 6],
    }  # fmt: skip


def test_contiguous_regions_refuse_to_share() -> None:
    with pytest.raises(ValueError, match="allocation 'contiguous_max_len' cannot share blocks"):
        tiny_engine(allocation="contiguous_max_len")


# -- preemption -------------------------------------------------------------------------------------------------------


def some_running(*priorities: int) -> list[RequestState]:
    engine = tiny_engine()
    for number, priority in enumerate(priorities):
        engine.add(request(number, prompt=1, priority=priority), now=0.0)
    step(engine, now=0.0)
    return engine.running


def test_latest_yields_whoever_was_admitted_last_even_the_one_in_need() -> None:
    running = some_running(5, 0, 0)
    assert LatestAdmitted().choose_victim(running, running[2], now=1.0) is running[2]
    assert LatestAdmitted().choose_victim(running, running[0], now=1.0) is running[2]


def test_lowest_priority_yields_the_least_urgent_and_of_those_the_latest() -> None:
    running = some_running(1, 2, 2, 0)
    assert LowestPriority().choose_victim(running, running[3], now=1.0) is running[2]
    assert LowestPriority().choose_victim(running[:1] + running[3:], running[3], now=1.0) is running[0]


class NobodyYields:
    def choose_victim(
        self, candidates: Sequence[RequestState], beneficiary: RequestState, now: float
    ) -> RequestState | None:
        return None


def test_without_a_victim_a_request_waits_where_it_is() -> None:
    engine = engine_with(num_blocks=2, preemption=NobodyYields())
    engine.add(request("a", prompt=3), now=0.0)
    engine.add(request("b", prompt=4), now=0.0)
    step(engine, now=0.0)
    assert shown(step(engine, now=1.0)) == [("a", 3, 1)]
    assert ids(engine) == ["a", "b"]
    assert state_of(engine, "b").status is Status.RUNNING


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_lru_gives_up_what_was_released_longest_ago() -> None:
    lru, blocks, holder = LeastRecentlyUsed(), [Block(number) for number in range(3)], waiting_state(request("a"))
    for block in blocks:
        lru.add(block, holder, now=0.0)
    lru.touch(blocks[0])
    lru.discard(blocks[1])
    assert list(lru) == [blocks[0], blocks[2]]
    assert lru.pop(None, now=0.0) is blocks[0], "being found does not count, being released does"
    assert len(lru) == 1


def test_lru_a_chain_that_is_hit_goes_to_the_end_of_the_line_when_it_is_released() -> None:
    engine = tiny_engine(num_blocks=6)
    for now, prompt in enumerate((range(8), range(50, 54), range(8))):
        engine.add(request(now, prompt=prompt, max_tokens=1), now=float(now))
        step(engine, now=float(now))
    assert free_ids(engine) == [5, 6, 2, 3, 4, 1], "4 is 2 computed again, as the last token must be; 1 was hit"


def test_free_blocks_without_a_key_are_reused_first_newest_first() -> None:
    engine = tiny_engine()
    engine.add(request("a", prompt=6, max_tokens=1), now=0.0)
    step(engine, now=0.0)
    assert free_ids(engine) == [2, 3, 4, 5, 6, 7, 8, 1]


def test_unhashed_first_off_all_blocks_stand_in_one_line() -> None:
    engine = tiny_engine(unhashed_first=False)
    engine.add(request("a", prompt=6, max_tokens=1), now=0.0)
    step(engine, now=0.0)
    assert free_ids(engine) == [3, 4, 5, 6, 7, 8, 2, 1]


# -- isolation --------------------------------------------------------------------------------------------------------


def hits_of_a_second(isolation: str, first: Context, second: Context) -> int:
    engine = tiny_engine(isolation=isolation)
    for now, (name, context) in enumerate((("first", first), ("second", second))):
        engine.add(replace(request(name, prompt=range(9), max_tokens=1), context=context), now=float(now))
        step(engine, now=float(now))
    return engine.drain_records()[1].num_cached_tokens


ALICE, BOB = Context(tenant="alice"), Context(tenant="bob")


@pytest.mark.parametrize(
    "isolation, same_tenant, other_tenant", [("global", 8, 8), ("tenant", 8, 0), ("no_reuse", 0, 0)]
)
def test_who_hits_whom(isolation: str, same_tenant: int, other_tenant: int) -> None:
    """Paired, or the test would pass with caching off."""
    assert hits_of_a_second(isolation, ALICE, ALICE) == same_tenant
    assert hits_of_a_second(isolation, ALICE, BOB) == other_tenant


def test_requests_without_a_tenant_form_one_of_their_own() -> None:
    assert hits_of_a_second("tenant", Context(), Context(user="somebody")) == 8
    assert hits_of_a_second("tenant", Context(), ALICE) == 0


def test_no_reuse_still_lets_a_preempted_request_find_its_own_blocks() -> None:
    engine = tiny_engine(isolation="no_reuse")
    engine.add(request("a", prompt=range(8)), now=0.0)
    step(engine, now=0.0)
    engine.preempt(state_of(engine, "a"), now=1.0)
    assert step(engine, now=1.0).admitted == (("a", 8, True),)


def test_what_a_body_claims_cannot_reach_the_namespace() -> None:
    """The client id and the class are free text; only the verified context counts."""
    engine = tiny_engine(isolation="tenant")
    engine.add(request("first", prompt=range(9), max_tokens=1, tenant="alice"), now=0.0)
    step(engine, now=0.0)
    engine.add(
        request("spoof", prompt=range(9), max_tokens=1, tenant="bob", client_id="alice", class_name="alice"), now=1.0
    )
    assert step(engine, now=1.0).admitted[0].num_cached_tokens == 0


# -- caching ----------------------------------------------------------------------------------------------------------


def test_a_shared_prefix_is_computed_once() -> None:
    engine = tiny_engine()
    engine.add(request("first", prompt=range(8)), now=0.0)
    run_to_end(engine)
    engine.add(request("second", prompt=range(8)), now=9.0)
    assert step(engine, now=9.0).chunks[0].start == 4, "the last token must still be computed"


def test_caching_off_nothing_is_found_and_nothing_is_kept() -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    for now in (0.0, 1.0):
        engine.add(request("a", prompt=range(9), max_tokens=1), now=now)
        assert shown(step(engine, now)) == [("a", 0, 9)]
    assert engine.kv.num_idle_cached == engine.kv.num_evicted == 0
    assert engine.prefix_stats.num_requests == 0


def test_answers_are_cached_as_they_fill_blocks() -> None:
    """5 prompt and 8 answer tokens, the last of which has no KV: 3 blocks of 4."""
    engine = tiny_engine()
    engine.add(request("a", prompt=range(5), max_tokens=8), now=0.0)
    run_to_end(engine)
    assert engine.kv.num_idle_cached == 3


def test_step_end_caching_keeps_a_block_unknown_until_its_step_is_over() -> None:
    engine = tiny_engine(cache_at="step_end")
    engine.add(request("a", prompt=range(9)), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    assert not engine.kv._index
    finish(engine, plan, now=1.0)
    assert len(engine.kv._index) == 2


def test_a_reset_is_refused_while_a_block_is_held_and_forgets_all_otherwise() -> None:
    engine = tiny_engine()
    engine.add(request("a", prompt=range(9), max_tokens=1), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    assert not engine.reset_prefix_cache(now=0.5)
    finish(engine, plan, now=1.0)
    before = free_ids(engine)
    assert engine.reset_prefix_cache(now=1.0)
    assert free_ids(engine) == before, "the order of reuse stays"
    assert engine.kv.num_idle_cached == 0


def test_a_reset_with_requests_running_preempts_them_in_order_and_drops_what_is_in_flight() -> None:
    engine = tiny_engine()
    for name in "ab":
        engine.add(request(name, prompt=5, max_tokens=2), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    assert engine.reset_prefix_cache(now=0.5, reset_running=True)
    assert order(engine) == ["a", "b"]
    finish(engine, plan, now=1.0)
    assert [state.num_output_tokens for state in engine.states] == [0, 0]
    assert [record.num_output_tokens for record in run_to_end(engine, now=1.0).values()] == [2, 2]


# -- steps that throw -------------------------------------------------------------------------------------------------


def test_a_failed_step_fails_its_requests_and_whoever_hit_its_blocks() -> None:
    engine = tiny_engine(async_depth=2, max_num_seqs=3)
    engine.add(request("writes", prompt=range(9)), now=0.0)
    first = engine.schedule(now=0.0)
    assert first is not None
    engine.add(request("reads", prompt=range(9)), now=0.0)
    engine.add(request("other", prompt=5), now=0.0)
    second = engine.schedule(now=0.0)
    assert second is not None and second.admitted[0] == ("reads", 8, False)
    assert engine.fail(first, now=1.0) == ["writes", "reads"]
    assert ids(engine) == ["other"]
    finish(engine, second, now=2.0)
    assert state_of(engine, "other").num_output_tokens == 1


def test_nobody_finds_what_a_failed_step_was_to_write() -> None:
    engine = tiny_engine()
    engine.add(request("a", prompt=range(9)), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    engine.fail(plan, now=1.0)
    (record,) = engine.drain_records()
    assert (record.reason, record.detail) == (FinishReason.ERROR, "its step failed")
    engine.add(request("b", prompt=range(9)), now=1.0)
    assert step(engine, now=1.0).admitted[0].num_cached_tokens == 0


def test_outputs_are_applied_in_order_and_once() -> None:
    engine = tiny_engine(async_depth=2)
    engine.add(request("a", prompt=5), now=0.0)
    first, second = engine.schedule(now=0.0), engine.schedule(now=0.0)
    assert first is not None and second is not None
    with pytest.raises(ValueError, match="step 1 is not the oldest step in flight"):
        finish(engine, second, now=1.0)
    with pytest.raises(RuntimeError, match="2 steps are in flight, async_depth is 2"):
        engine.schedule(now=1.0)
    finish(engine, first, now=1.0)
    with pytest.raises(ValueError, match="step 0 is not the oldest step in flight"):
        finish(engine, first, now=1.0)


# -- asynchronous scheduling ------------------------------------------------------------------------------------------


def test_async_a_step_is_scheduled_before_the_last_ones_token_is_known() -> None:
    engine = tiny_engine(async_depth=2)
    engine.add(request("a", prompt=4, max_tokens=3), now=0.0)
    plans = [engine.schedule(now=0.0), engine.schedule(now=0.0)]
    assert [shown(plan) for plan in plans] == [[("a", 0, 4)], [("a", 4, 1)]]
    finish(engine, plans[0], now=1.0)  # type: ignore[arg-type]
    assert shown(engine.schedule(now=1.0)) == [("a", 5, 1)]
    finish(engine, plans[1], now=2.0)  # type: ignore[arg-type]
    assert engine.schedule(now=2.0) is None, "its last token is in flight"


def test_async_a_stop_is_seen_one_step_late_and_the_wasted_token_is_dropped() -> None:
    engine = tiny_engine(async_depth=2)
    engine.add(request("a", prompt=4, max_tokens=9), now=0.0)
    first, second = engine.schedule(now=0.0), engine.schedule(now=0.0)
    assert first is not None and second is not None
    finish(engine, first, now=1.0, stop=["a"])
    (record,) = engine.drain_records()
    assert (record.reason, record.num_output_tokens) == (FinishReason.STOP, 1)
    finish(engine, second, now=2.0)
    assert engine.drain_records() == []
    assert engine.kv.num_free == 8


# -- the mechanism guards ---------------------------------------------------------------------------------------------


class Overruns:
    repeats = returns_together = False

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def compose(self, step: Step) -> None:
        for state in step.candidates():
            step.admit(state, self.num_tokens)


@pytest.mark.parametrize("num_tokens", [0, -1, 33])
def test_a_batching_policy_cannot_overrun_the_budget(num_tokens: int) -> None:
    engine = engine_with(batching=Overruns(num_tokens))
    engine.add(request("a"), now=0.0)
    with pytest.raises(ValueError, match=f"with {num_tokens} tokens; the step has 32 left"):
        engine.schedule(now=0.0)


# -- the configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ({"num_blocks": 0}, r"num_blocks \(0\) must be at least 1"),
        ({"max_num_seqs": 2.0}, r"max_num_seqs \(2.0\) must be int, not float"),
        ({"enable_prefix_caching": 1}, r"enable_prefix_caching \(1\) must be bool, not int"),
        ({"block_size": True}, r"block_size \(True\) must be int, not bool"),
        ({"hol_skip": -1}, r"hol_skip \(-1\) must be 0 \(off\) or more"),
        ({"async_depth": 3}, r"async_depth \(3\) must be 1 \(synchronous\) or 2"),
        ({"cache_at": "end"}, r"cache_at \('end'\) must be 'schedule' or 'step_end'"),
        ({"max_num_batched_tokens": 3}, r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"),
        (
            {"enable_chunked_prefill": False, "max_model_len": 33},
            r"max_num_batched_tokens \(32\) must be at least max_model_len \(33\) when chunked prefill is off",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_checks_itself(wrong: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tiny_config(**wrong)


def test_a_configuration_goes_through_json_and_names_what_it_does_not_know() -> None:
    config = tiny_config(batching="static,group_size=2", hol_skip=1)
    assert EngineConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="unknown engine setting 'num_block'; known: admission, "):
        EngineConfig.from_dict({"num_block": 8})

"""Faults that random lives and reading found in the core, each as the smallest replay; comments say what came out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policies.catalogue import build, make
from policies.journal import replay
from policies.prompt import ContentPrompt, TokenPrompt
from policies.types import StepOutput
from tests.worlds import finish, request, run_to_end, shown, state_of, step, tiny_engine

STATIC = "static,group_size=2,max_wait=0"


# -- static -----------------------------------------------------------------------------------------------------------


def test_static_deadlock_abort_of_the_last_member_that_was_not_done() -> None:
    engine = tiny_engine(batching=STATIC)
    engine.add(request("short", max_tokens=1), now=0.0)
    engine.add(request("long", max_tokens=9), now=0.0)
    step(engine, now=0.0)
    engine.abort("long", now=1.0)
    assert run_to_end(engine, now=1.0).keys() == {"short", "long"}


def test_static_deadlock_failure_of_the_last_member_that_was_not_done() -> None:
    engine = tiny_engine(batching=STATIC)
    engine.add(request("short", max_tokens=1), now=0.0)
    engine.add(request("long", max_tokens=9), now=0.0)
    step(engine, now=0.0)
    plan = engine.schedule(now=1.0)
    assert plan is not None
    engine.fail(plan, now=2.0)
    assert run_to_end(engine, now=2.0).keys() == {"short", "long"}


def test_static_stopped_member_that_yields_gets_no_further_tokens() -> None:
    engine = tiny_engine(batching="static,max_wait=0", num_blocks=6, allocation="paged")
    engine.add(request("a", prompt=8, max_tokens=8), now=0.0)
    engine.add(request("b", prompt=8, max_tokens=2), now=0.0)
    assert run_to_end(engine)["b"].num_output_tokens == 2  # 3


def test_static_stopped_member_at_max_model_len_that_yields_does_not_hang() -> None:
    """12 tokens, of which 11 may be computed: in chunks of 8 it gets to 11 and never to its twelfth."""
    engine = tiny_engine(batching=STATIC, max_model_len=12, max_num_batched_tokens=8)
    engine.add(request("full", prompt=11, max_tokens=9), now=0.0)
    engine.add(request("other", prompt=1, max_tokens=9), now=0.0)
    for now in (0.0, 1.0):
        step(engine, now)
    engine.reset_prefix_cache(now=2.0, reset_running=True)
    assert run_to_end(engine, now=2.0)["full"].num_output_tokens == 1


def test_static_decode_time_is_not_negative() -> None:
    engine = tiny_engine(batching=STATIC)
    engine.add(request("short", max_tokens=1), now=0.0)
    engine.add(request("long", max_tokens=3), now=0.0)
    record = run_to_end(engine)["short"]
    assert (record.prefill_time, record.decode_time, record.stall_time) == (1.0, 0.0, 2.0)  # 3, -2, 2


def test_static_padding_is_the_same_when_steps_repeat() -> None:
    """The padding of the prompts is on the first decode plan, and `repeat` multiplies it."""
    counted = []
    for repeats in (None, lambda plan, limit: limit):
        engine, now, padding = tiny_engine(batching="static,max_wait=0"), 0.0, 0
        engine.add(request("a", prompt=4, max_tokens=8), now)
        engine.add(request("b", prompt=9, max_tokens=8), now)
        while engine.has_work:
            plan = engine.schedule(now, repeats)
            padding += plan.num_padding_tokens * plan.repeat
            now += plan.repeat
            finish(engine, plan, now)
        counted.append(padding)
    assert counted == [5, 5]  # 5, 35


def test_static_who_cancels_in_the_queue_does_not_start_the_clock_of_others() -> None:
    """T44. `_waiting_since` survives the abort if nobody calls schedule in between."""
    engine = tiny_engine(batching="static,group_size=2,max_wait=5")
    engine.add(request("gone"), now=0.0)
    assert engine.schedule(now=0.0) is None
    engine.abort("gone", now=4.0)
    engine.add(request("a"), now=4.5)
    assert engine.schedule(now=5.0) is None


def test_static_a_group_starts_when_its_first_has_waited_max_wait() -> None:
    """The docstring's rule; the clock starts when the last group has ended."""
    engine = tiny_engine(batching="static,group_size=2,max_wait=2")
    for name in "ab":
        engine.add(request(name, max_tokens=5), now=0.0)
    plan = engine.schedule(now=0.0)
    engine.add(request("waits"), now=0.5)
    for now in (1.0, 2.0, 3.0, 4.0):
        finish(engine, plan, now)
        plan = engine.schedule(now)
    finish(engine, plan, 5.0)
    assert shown(engine.schedule(now=5.0)) == [("waits", 0, 4)]


# -- memory that was never written ------------------------------------------------------------------------------------


def test_abort_then_fail_nobody_finds_what_was_never_written() -> None:
    engine = tiny_engine()
    engine.add(request("a", prompt=range(9)), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    engine.abort("a", now=0.5)
    engine.fail(plan, now=1.0)
    engine.add(request("b", prompt=range(9)), now=1.0)
    assert step(engine, now=1.0).admitted[0].num_cached_tokens == 0  # 8


def test_abort_then_fail_a_reader_that_left_takes_its_keys_along() -> None:
    """Depth 2: b read a's blocks, was cancelled, and a's step fails. Once somebody computes a's prefix again, the
    blocks of b behind it are found, though they were computed from rubbish."""
    engine = tiny_engine(async_depth=2)
    engine.add(request("a", prompt=range(5)), now=0.0)
    first = engine.schedule(now=0.0)
    engine.add(request("b", prompt=range(9)), now=0.0)
    second = engine.schedule(now=0.0)
    assert first is not None and second is not None and second.admitted[0].num_cached_tokens == 4
    engine.abort("b", now=0.5)
    engine.fail(first, now=1.0)
    finish(engine, second, now=1.0)
    for name, prompt in (("again", range(5)), ("victim", range(9))):
        engine.add(request(name, prompt=prompt, max_tokens=1), now=1.0)
    assert engine.schedule(now=1.0).admitted[1].num_cached_tokens == 4  # 8


def test_abort_then_fail_what_was_computed_behind_a_failed_step_is_not_found() -> None:
    """Depth 2: the prompt's second chunk is in flight behind the first, which fails."""
    engine = tiny_engine(async_depth=2, max_num_batched_tokens=4)
    engine.add(request("a", prompt=range(8), max_tokens=1), now=0.0)
    first, second = engine.schedule(now=0.0), engine.schedule(now=0.0)
    assert first is not None and second is not None
    engine.fail(first, now=1.0)
    finish(engine, second, now=1.0)
    assert engine.kv.num_idle_cached == 0  # 1: the second block, though computed from rubbish


def test_innocents_do_not_fail_with_a_step_they_had_no_part_in() -> None:
    """b was given the blocks of a, which was preempted; then the step in which a had written them failed."""
    engine = tiny_engine(num_blocks=7, block_size=2, max_num_batched_tokens=16, batching="prefill_first",
                         preemption="lowest_priority", async_depth=2, enable_prefix_caching=False)  # fmt: skip
    engine.add(request("e", prompt=5, max_tokens=9), now=0.0)
    engine.add(request("b", prompt=2, max_tokens=6), now=0.0)
    step(engine, now=0.0)
    engine.add(request("a", prompt=6, max_tokens=1, priority=1), now=1.0)
    prefill, decode = engine.schedule(now=1.0), engine.schedule(now=1.0)
    assert shown(prefill) == [("a", 0, 6)]
    assert (shown(decode), decode.preempted) == ([("e", 5, 1), ("b", 2, 1)], ("a",))
    assert engine.fail(prefill, now=2.0) == ["a"]  # a, b


def test_content_of_another_granularity_is_other_content() -> None:
    """Content id 1 of 4 tokens and content id 1 of 8 tokens; content_size is not in the key."""
    engine = tiny_engine(block_size=2)
    engine.add(request("a", ContentPrompt(4, (1,), 4), max_tokens=1), now=0.0)
    step(engine, now=0.0)
    engine.add(request("b", ContentPrompt(8, (1,), 8), max_tokens=1), now=1.0)
    assert step(engine, now=1.0).admitted[0].num_cached_tokens == 0  # 4


# -- liveness and regions ---------------------------------------------------------------------------------------------


def test_region_larger_than_the_pool_is_refused_not_waited_for() -> None:
    """T27: refuse_unfittable is on, the request is accepted and can never run."""
    try:
        engine = tiny_engine(allocation="contiguous_max_len", enable_prefix_caching=False, max_model_len=64)
    except ValueError:
        return  # refused with the configuration: as good
    engine.add(request("a"), now=0.0)
    assert run_to_end(engine).keys() == {"a"}


def test_leftover_blocks_cannot_break_a_region() -> None:
    """unhashed_first off: the block left over of a pool would be taken before a region that came back."""
    with pytest.raises(ValueError, match="leave unhashed_first on"):
        tiny_engine(num_blocks=7, allocation="contiguous_max_len", enable_prefix_caching=False, unhashed_first=False)


def test_prefill_livelock_prefill_first_and_paged_come_to_an_end() -> None:
    """b is let in by its first chunk, yields to itself in the next step, and so on; a never decodes."""
    engine = tiny_engine(num_blocks=6, batching="prefill_first", allocation="paged", max_num_batched_tokens=8,
                         enable_prefix_caching=False)  # fmt: skip
    engine.add(request("a", prompt=9, max_tokens=3), now=0.0)
    for now in (0.0, 1.0):
        step(engine, now)
    engine.add(request("b", prompt=17, max_tokens=1), now=2.0)
    assert run_to_end(engine, now=2.0, max_steps=200).keys() == {"a", "b"}


# -- where time went --------------------------------------------------------------------------------------------------


def test_stall_a_gap_between_update_and_schedule_counts_whether_or_not_tokens_are_told() -> None:
    """The short way of `update` leaves it out: a live record and its replay differ."""
    times = []
    for token_ids in ({}, {"a": (9,)}):
        engine, now = tiny_engine(), 0.0
        engine.add(request("a", max_tokens=3), now)
        while engine.has_work:
            plan = engine.schedule(now)
            engine.update(plan, StepOutput(1.0, token_ids=token_ids), now + 1.0)
            now += 3.0
        times.append(engine.drain_records()[0].stall_time)
    assert times == [4.0, 4.0]  # 2, 4


def test_stall_of_one_that_was_not_granted_lasts_until_it_is_cancelled() -> None:
    """It ends with the start of the step in flight, though that step is not one of its own."""
    engine = tiny_engine(batching="prefill_first")
    engine.add(request("stalled"), now=0.0)
    step(engine, now=0.0)
    engine.add(request("prompt"), now=1.0)
    assert shown(engine.schedule(now=1.0)) == [("prompt", 0, 4)]
    engine.abort("stalled", now=1.75)
    (record,) = engine.drain_records()
    assert (record.stall_time, record.decode_time) == (0.75, 0.0)  # 0, 0.75


def test_stall_is_not_the_time_in_a_step_that_failed() -> None:
    engine = tiny_engine()
    engine.add(request("a"), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    engine.fail(plan, now=1.0)
    (record,) = engine.drain_records()
    assert (record.prefill_time, record.stall_time) == (1.0, 0.0)  # 0, 1: an abort at that time gives 1, 0


def test_stall_is_not_the_time_in_a_step_that_a_reset_threw_away() -> None:
    engine = tiny_engine()
    engine.add(request("a", max_tokens=1), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    engine.reset_prefix_cache(now=0.75, reset_running=True)
    finish(engine, plan, now=1.0)
    assert run_to_end(engine, now=1.0)["a"].stall_time == 0.0  # 0.75


def test_stall_is_not_the_time_before_a_reset_if_the_step_it_threw_away_fails() -> None:
    engine = tiny_engine()
    engine.add(request("a"), now=0.0)
    step(engine, now=0.0)
    plan = engine.schedule(now=2.0)
    assert plan is not None
    engine.reset_prefix_cache(now=3.0, reset_running=True)
    engine.fail(plan, now=4.0)
    (record,) = engine.drain_records()
    assert (record.stall_time, record.decode_time, record.requeue_time) == (1.0, 1.0, 1.0)  # 2, 0, 1


def test_stall_of_a_static_member_that_is_done_lasts_until_its_group_is_answered() -> None:
    """Depth 2: the step in flight computes a token for it that nobody wants."""
    engine = tiny_engine(batching=STATIC, async_depth=2)
    for name in ("done", "other"):
        engine.add(request(name, max_tokens=9), now=0.0)
    first, _ = engine.schedule(now=0.0), engine.schedule(now=0.0)
    assert first is not None
    finish(engine, first, now=1.0, stop=["done"])
    engine.abort("other", now=1.5)
    record = next(each for each in engine.drain_records() if each.request_id == "done")
    assert (record.prefill_time, record.decode_time, record.stall_time) == (1.0, 0.0, 0.5)  # 1, 0.5, 0


# -- repeated steps ---------------------------------------------------------------------------------------------------


def test_token_repeats_prompts_of_tokens_do_not_break_a_jump() -> None:
    engine = tiny_engine()
    engine.add(request("a", TokenPrompt((1, 2, 3)), max_tokens=9), now=0.0)
    plan = engine.schedule(now=0.0)
    engine.update(plan, StepOutput(1.0, token_ids={"a": (5,)}), 1.0)
    assert engine.schedule(1.0, repeats=lambda plan, limit: limit) is not None  # AssertionError in TokenChain.extend


def both_ways(cache_at: str, batching: str) -> list[tuple[int, int]]:
    """a decodes, is interrupted by b's prefill, decodes on for three steps, and is cancelled within the third."""
    found = []
    for jumps in (True, False):
        engine = tiny_engine(batching=batching, cache_at=cache_at)
        engine.add(request("a", prompt=4, max_tokens=20), now=0.0)
        for now in (0.0, 1.0):
            step(engine, now)
        engine.add(request("b", prompt=4, max_tokens=1), now=2.0)
        step(engine, now=2.0)
        if shown(plan := engine.schedule(3.0, repeats=(lambda plan, limit: 4) if jumps else None)) and not jumps:
            for now in (4.0, 5.0, 6.0):
                finish(engine, plan, now)
                plan = engine.schedule(now)
        engine.abort("a", now=6.5)
        finish(engine, plan, now=7.0)
        record = next(each for each in engine.drain_records() if each.request_id == "a")
        found.append((record.num_output_tokens, engine.kv.num_idle_cached))
    return found


def test_a_return_that_looks_like_a_decode_is_not_repeated() -> None:
    """b finds all its blocks again and enters by one token; c, whose prompt is not cut beside it, enters next."""
    engine = tiny_engine(num_blocks=5, max_num_batched_tokens=8, max_model_len=20, batching="prefill_first")
    for name, prompt, max_tokens in (("a", 7, 4), ("b", 7, 12), ("c", 8, 2)):
        engine.add(request(name, prompt, max_tokens), now=0.0)
    now = 0.0
    plan = engine.schedule(now, repeats=lambda plan, limit: limit)
    while not any(entry.resumed for entry in plan.admitted):
        now += plan.repeat
        finish(engine, plan, now)
        plan = engine.schedule(now, repeats=lambda plan, limit: limit)
    assert (shown(plan), plan.repeat) == ([("b", 8, 1)], 1)  # 10


def test_abort_in_jump_counts_the_tokens_single_steps_would_have_given() -> None:
    jumped, stepped = both_ways("schedule", "prefill_first")
    assert jumped[0] == stepped[0]  # 2, 5


def test_abort_in_jump_caches_the_blocks_single_steps_would_have_cached() -> None:
    jumped, stepped = both_ways("step_end", "chunked")
    assert jumped[1] == stepped[1]


def test_reset_in_jump_drops_only_the_last_token() -> None:
    found = []
    for jumps in (True, False):
        engine = tiny_engine()
        engine.add(request("a", prompt=4, max_tokens=20), now=0.0)
        step(engine, now=0.0)
        plan = engine.schedule(1.0, repeats=(lambda plan, limit: 3) if jumps else None)
        if not jumps:
            for now in (2.0, 3.0):
                finish(engine, plan, now)
                plan = engine.schedule(now)
        engine.reset_prefix_cache(now=3.5, reset_running=True)
        finish(engine, plan, now=4.0)
        found.append(state_of(engine, "a").num_output_tokens)
    assert found[0] == found[1]  # 1, 3


def test_abort_in_jump_after_a_reset_counts_its_tokens_once() -> None:
    engine = tiny_engine()
    engine.add(request("a", prompt=4, max_tokens=20), now=0.0)
    step(engine, now=0.0)
    engine.schedule(1.0, repeats=lambda plan, limit: 3)
    engine.reset_prefix_cache(now=3.5, reset_running=True)
    engine.abort("a", now=3.75)
    assert engine.drain_records()[0].num_output_tokens == 3  # 5


# -- counts -----------------------------------------------------------------------------------------------------------


def test_cached_blocks_are_those_with_a_key_also_where_all_stand_in_one_line() -> None:
    """view.num_cached_blocks: `those that still carry a key`; sim's samples are taken from it."""
    engine = tiny_engine(unhashed_first=False)
    engine.add(request("a", prompt=6, max_tokens=1), now=0.0)
    step(engine, now=0.0)
    assert engine.view.num_cached_blocks == 1  # 2


# -- mistakes that are not one line of ValueError ---------------------------------------------------------------------


def journal(token_prompt: bool = False) -> list[str]:
    lines: list[str] = []
    engine, now = tiny_engine(lines.append), 0.0
    engine.add(request("a", TokenPrompt((1, 2, 3)) if token_prompt else 3, max_tokens=9), now)
    while engine.has_work:
        plan = engine.schedule(now, None if token_prompt else lambda plan, limit: 2)
        now += 1.0
        engine.update(plan, StepOutput(1.0, token_ids={"a": (7,)} if token_prompt else {}), now)
    return lines


DAMAGES = {
    "without an update (RuntimeError)": lambda: journal()[:3] + journal()[4:],
    "stopped is a list (AttributeError)": lambda: [*journal()[:3], '{"update":0,"now":1.0,"stopped":[]}'],
    "keys is a list (AttributeError)": lambda: [*journal(True)[:3], '{"update":0,"now":1.0,"keys":[1]}'],
    "no repeats (AssertionError)": lambda: [line.replace('"repeat":2', '"repeat":0') for line in journal()],
    "an update without its keys (AssertionError)": lambda: [
        json.dumps({name: value for name, value in json.loads(line).items() if (name, index > 1) != ("keys", True)})
        .replace(" ", "") for index, line in enumerate(journal(True))
    ],
}  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_journal_is_a_difference_or_a_complaint(damaged) -> None:  # type: ignore[no-untyped-def]
    try:
        assert replay(damaged(), lambda config, write: build(config, write)).divergence is not None
    except ValueError as error:
        assert "\n" not in str(error)


def test_a_policy_file_whose_knob_has_no_default_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    def __init__(self, needed):\n        pass\n")
    with pytest.raises(ValueError, match="needed"):
        make("preemption", f"{path}:Mine")  # TypeError


def test_a_knob_given_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="group_size"):
        make("batching", "static,group_size=1,group_size=2")  # the last one wins, silently

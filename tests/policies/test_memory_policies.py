"""What memory is promised, and who yields: worked examples, brute force, and no two that take turns for ever."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.allocation.new_token_ratio import NewTokenRatio
from policies.allocation.past_future import Growth, PastFuture, peak_blocks, peak_tokens
from policies.catalogue import PREEMPTION, make
from policies.config import MENUS
from policies.engine import EngineCore, Policies
from policies.step import Step
from policies.types import RequestState
from tests.worlds import finish, request, run_to_end, shown, state_of, step, tiny_config, tiny_engine

ONE_TOKEN_BLOCKS: dict[str, Any] = {
    "block_size": 1,
    "max_num_batched_tokens": 200,
    "max_num_seqs": 16,
    "max_model_len": 200,
}


# -- past-future ------------------------------------------------------------------------------------------------------


def test_the_peak_of_three_requests_lies_where_the_second_ends() -> None:
    """Left 8, 5, 1 beside 3, 4, 6 held: 8 + 3, 2 * 5 + 7, 3 * 1 + 13. In 5 steps the first two hold 8 and 9."""
    growths = [Growth(6, 1), Growth(3, 8), Growth(4, 5)]
    assert peak_tokens(growths) == 17
    assert peak_tokens([]) == 0


GROWTHS = st.lists(st.builds(Growth, st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=7)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(growths=GROWTHS, block_size=st.sampled_from((1, 2, 3, 16)))
def test_the_peak_is_that_of_watching_all_grow(growths: list[Growth], block_size: int) -> None:
    def held(time: int) -> Iterator[int]:
        return (growth.held + time for growth in growths if growth.left >= time)

    times = range(max(growth.left for growth in growths) + 1)
    assert peak_tokens(growths) == max(sum(held(time)) for time in times)
    in_blocks = max(sum(-(-tokens // block_size) for tokens in held(time)) for time in times)
    assert peak_blocks(growths, block_size) == in_blocks


def test_an_answer_is_foretold_from_longer_ones() -> None:
    policy = PastFuture(quantile=0.5, window=4)
    state: Any = SimpleNamespace(num_output_tokens=0, token_limit=50)
    assert policy.foretold(state) == 50, "nothing is known: all it may say"
    for length in (99, 10, 20, 30, 40):
        policy.finished(SimpleNamespace(num_output_tokens=length), 0.0)  # type: ignore[arg-type]
    assert policy.foretold(state) == 20, "the middle of 10, 20, 30, 40; 99 is out of the window"
    state.num_output_tokens = 20
    assert policy.foretold(state) == 30, "of 30 and 40"
    state.num_output_tokens = 40
    assert policy.foretold(state) == 50


def test_past_future_lets_in_as_many_as_fit_at_the_peak() -> None:
    """Prompts of 4 and answers of 6, told by max_tokens: 9 blocks each at the end, all at once."""
    for num_blocks, num_admitted in ((35, 3), (36, 4)):
        engine = tiny_engine(allocation="past_future", num_blocks=num_blocks, **ONE_TOKEN_BLOCKS)
        for number in range(5):
            engine.add(request(number, prompt=4, max_tokens=6), now=0.0)
        assert len(step(engine, now=0.0).admitted) == num_admitted
        assert run_to_end(engine, now=1.0) and engine.num_preemptions == 0


def test_past_future_counts_on_those_who_end_sooner() -> None:
    """Two steps later than `old`, a newcomer fits under a peak that two of its kind at once would burst."""
    engine = tiny_engine(allocation="past_future", num_blocks=15, **ONE_TOKEN_BLOCKS)
    engine.add(request("old", prompt=4, max_tokens=6), now=0.0)
    engine.add(request("new", prompt=4, max_tokens=6), now=0.0)
    admitted = [[entry.request_id for entry in step(engine, now=float(now)).admitted] for now in range(5)]
    assert admitted == [["old"], [], [], ["new"], []]  # 9 + 4 + 2, where 9 + 4 + 3 is more than 15
    run_to_end(engine, now=5.0)
    assert engine.num_preemptions == 0


# -- SGLang's share of what may still be answered ---------------------------------------------------------------------


def test_the_share_falls_over_600_steps_to_14_percent_of_where_it_began() -> None:
    policy = NewTokenRatio()
    assert [policy.ratio(step_id) for step_id in (0, 300, 600, 9000)] == pytest.approx([0.7, 0.399, 0.098, 0.098])
    assert NewTokenRatio(conservativeness=2).ratio(0) == 1.0


def test_whoever_enters_leaves_the_share_of_the_others_and_a_page_free() -> None:
    """Beside one of 10 + 20 tokens: 10 + 20 + 1 + 1 of the newcomer and 0.7 of 19 that may still come, rounded up."""
    share = 0.7 - 0.7 * 0.86 / 600
    needed = 10 + 20 + 2 + ceil(19 * share)
    for free, is_let_in in ((needed - 1, False), (needed, True)):
        engine = tiny_engine(allocation="new_token_ratio", num_blocks=11 + free, **ONE_TOKEN_BLOCKS)
        engine.add(request("first", prompt=10, max_tokens=20), now=0.0)
        step(engine, now=0.0)
        engine.add(request("second", prompt=10, max_tokens=20), now=1.0)
        # `first` takes a block for its next token in this step.
        assert bool(step(engine, now=1.0).admitted) is is_let_in, free


def test_who_entered_in_the_same_step_counts_in_full() -> None:
    for num_blocks, num_admitted in ((10 + 20 + 32 - 1, 1), (10 + 20 + 32, 2)):
        engine = tiny_engine(allocation="new_token_ratio", num_blocks=num_blocks, **ONE_TOKEN_BLOCKS)
        for name in "ab":
            engine.add(request(name, prompt=10, max_tokens=20), now=0.0)
        assert len(step(engine, now=0.0).admitted) == num_admitted


def test_a_retraction_sets_the_share_to_what_was_answered_and_20_tokens_more_each() -> None:
    engine = tiny_engine(allocation="new_token_ratio,conservativeness=0.1", num_blocks=90, **ONE_TOKEN_BLOCKS)
    policy, now = engine._policies.allocation, 0.0
    assert isinstance(policy, NewTokenRatio)
    for name in "abc":
        engine.add(request(name, prompt=4, max_tokens=60), now)
    while not engine.num_preemptions:
        answered = [state.num_output_tokens for state in engine.running]
        step(engine, now)
        now += 1.0
    assert [state.request_id for state in engine.running] == ["a", "b"]
    expected = (sum(answered[:2]) + 20 * 2) / (60 * 2 + 1)
    assert expected < 1 and policy.ratio(engine.next_step_id - 1) == pytest.approx(expected)


# -- who yields -------------------------------------------------------------------------------------------------------


def some_running() -> tuple[EngineCore, list[RequestState]]:
    """a: 9 prompt tokens, 3 answered. b shares two blocks with a. c is long. d has answered most but a."""
    engine = tiny_engine(num_blocks=40, max_num_batched_tokens=60)
    for now, (name, prompt) in enumerate((("a", range(9)), ("d", [50, 51]), ("b", range(12)), ("c", range(70, 90)))):
        engine.add(request(name, prompt=list(prompt), max_tokens=9), now=float(now))
        step(engine, now=float(now))
    return engine, engine.running


@pytest.mark.parametrize(
    ("policy", "victim"),
    [("least_computed", "d"), ("most_blocks", "c"), ("fewest_shared", "c"), ("fewest_outputs", "c")],
)
def test_who_yields_and_never_the_eldest(policy: str, victim: str) -> None:
    _, running = some_running()
    chooser = make("preemption", policy)
    assert chooser.choose_victim(running, running[0], 9.0).request_id == victim
    for state in running[1:]:
        assert chooser.choose_victim([running[0], state], running[0], 9.0) is state
    assert chooser.choose_victim(running[:1], running[0], 9.0) is running[0], "there is no other"


def test_sglang_retracts_the_fewest_answered_and_of_those_the_longest_prompt() -> None:
    """Order of staying: answered most first, then the shortest prompt; the last of it yields."""
    engine = tiny_engine(num_blocks=60, max_num_batched_tokens=90, max_num_seqs=8)
    for name, prompt in (("eldest", 1), ("long", 12), ("short", 4), ("longer", 16)):
        engine.add(request(name, prompt=prompt, max_tokens=9), now=0.0)
    step(engine, now=0.0)
    engine.add(request("new", prompt=2, max_tokens=9), now=1.0)
    step(engine, now=1.0)
    running, order = list(engine.running), []
    while running:
        order.append(make("preemption", "fewest_outputs").choose_victim(running, running[0], 2.0))
        running.remove(order[-1])
    assert [state.request_id for state in order] == ["new", "longer", "long", "short", "eldest"]


@pytest.mark.parametrize("policy", PREEMPTION)
@pytest.mark.parametrize("allocation", ["paged", "paged_full_prompt", "new_token_ratio"])
def test_memory_for_one_and_a_half_still_answers_everybody(policy: str, allocation: str) -> None:
    """Nobody and his victim take turns for ever (T27): 8 blocks, and each of five needs 7 at its end."""
    for max_num_batched_tokens, shared in product((4, 32), (True, False)):
        engine = tiny_engine(preemption=policy, allocation=allocation, max_num_batched_tokens=max_num_batched_tokens)
        for number in range(5):
            prompt = list(range(20)) if shared else list(range(100 * number, 100 * number + 20))
            engine.add(request(number, prompt=prompt, max_tokens=8), now=0.0)
        records = run_to_end(engine, max_steps=600)
        assert [record.num_output_tokens for record in records.values()] == [8] * 5


# -- who waits takes the place of who runs ----------------------------------------------------------------------------

RANKS: dict[str, Any] = {"scheduling": "priority", "preempt_for_waiting": True}


def test_the_urgent_takes_the_slot_of_one_that_is_not() -> None:
    engine = tiny_engine(max_num_seqs=1, **RANKS)
    engine.add(request("low", priority=5, max_tokens=3), now=0.0)
    step(engine, now=0.0)
    engine.add(request("urgent", priority=0, max_tokens=2), now=1.0)
    plan = step(engine, now=1.0)
    assert (plan.preempted, shown(plan)) == (("low",), [("urgent", 0, 4)])
    step(engine, now=2.0)
    assert [entry.request_id for entry in step(engine, now=3.0).admitted] == ["low"]


def test_equal_ranks_never_take_each_others_place() -> None:
    engine = tiny_engine(max_num_seqs=1, **RANKS)
    for name, arrival in (("later", 1.0), ("sooner", 0.0)):
        engine.add(request(name, priority=3, arrival_time=arrival), now=1.0)
        plan = engine.schedule(now=1.0)
        assert plan is not None and plan.preempted == ()
        finish(engine, plan, now=1.0)
    assert [state.request_id for state in engine.running] == ["later"]


def test_nobody_yields_in_vain() -> None:
    """8 blocks: `mid` holds 4, `high` 3. The urgent one needs 6: without `mid` 5 are free, and `high` is no victim."""
    engine = tiny_engine(**RANKS)
    engine.add(request("mid", prompt=13, priority=5), now=0.0)
    engine.add(request("high", prompt=9, priority=0), now=0.0)
    step(engine, now=0.0)
    engine.add(request("urgent", prompt=24, priority=1), now=1.0)
    plan = step(engine, now=1.0)
    assert plan.preempted == () and not plan.admitted
    engine.add(request("smaller", prompt=16, priority=0), now=2.0)
    plan = step(engine, now=2.0)
    assert plan.preempted == ("mid",) and [entry.request_id for entry in plan.admitted] == ["smaller"]


def test_hysteresis_gives_whoever_entered_some_steps() -> None:
    for min_steps, taken_at in ((0, 1), (1, 1), (3, 3)):
        engine = tiny_engine(max_num_seqs=1, preempt_min_steps=min_steps, **RANKS)
        engine.add(request("low", priority=5, max_tokens=8), now=0.0)
        step(engine, now=0.0)
        engine.add(request("urgent", priority=0), now=1.0)
        taken = next(now for now in range(1, 9) if step(engine, now=float(now)).preempted)
        assert taken == taken_at, min_steps


def test_the_lowest_yields_to_who_must_grow_though_it_is_the_eldest() -> None:
    """Or the urgent one would lose the place it has just taken."""
    engine = tiny_engine(preemption="fewest_outputs", num_blocks=6, **RANKS)
    engine.add(request("low", prompt=9, priority=5, max_tokens=9), now=0.0)
    step(engine, now=0.0)
    engine.add(request("urgent", prompt=12, priority=0, max_tokens=9), now=1.0)
    step(engine, now=1.0)
    plan = step(engine, now=2.0)
    assert plan.preempted == ("low",) and plan.request_ids == ["urgent"]


def test_ranks_need_an_order_that_has_them() -> None:
    with pytest.raises(ValueError, match="scheduling 'fcfs' does not: choose priority, or switch it off"):
        tiny_engine(preempt_for_waiting=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), preemption=st.sampled_from(sorted(PREEMPTION)))
def test_ranks_and_growth_do_not_take_turns(seed: int, preemption: str) -> None:
    """Whoever takes a place by rank must not lose it to one below him when he grows (found: 3 requests, 8 blocks)."""
    random = Random(seed)
    engine = tiny_engine(preemption=preemption, allocation="paged", block_size=2, max_num_batched_tokens=6, **RANKS)
    for number in range(5):
        priority = random.randint(0, 2)
        engine.add(request(number, random.randint(1, 9), random.randint(2, 7), priority=priority), now=0.0)
    assert len(run_to_end(engine, max_steps=400)) == 5


# -- host memory ------------------------------------------------------------------------------------------------------


LOW = [90, 91, 92, 93, 94, 95, 96]


def swapping(num_host_blocks: int = 8, **settings: Any) -> EngineCore:
    engine = tiny_engine(max_num_seqs=1, num_host_blocks=num_host_blocks, **RANKS, **settings)
    engine.add(request("low", prompt=LOW, priority=5, max_tokens=4), now=0.0)
    step(engine, now=0.0)
    step(engine, now=1.0)
    engine.add(request("urgent", prompt=list(range(30)), priority=0, max_tokens=1), now=2.0)
    return engine


def test_kv_of_the_preempted_waits_in_host_memory_and_nothing_is_computed_twice() -> None:
    engine = swapping(isolation="no_reuse")
    plan = step(engine, now=2.0)
    assert plan.transfers == (("low", 2, True),) and engine.host.num_free == 6
    plan = step(engine, now=3.0)
    assert plan.transfers == (("low", 2, False),) and engine.host.num_free == 8
    assert shown(plan) == [("low", 8, 1)], "it goes on where it was"
    assert run_to_end(engine, now=4.0)["low"].num_recomputed_tokens == 0


def test_only_what_the_cache_has_lost_comes_back() -> None:
    engine = swapping()
    engine.abort("urgent", now=2.0)
    engine.add(request("urgent", prompt=6, priority=0, max_tokens=1), now=2.0)  # evicts nothing of low's
    step(engine, now=2.0)
    plan = step(engine, now=3.0)
    assert plan.admitted[0].num_cached_tokens == 8 and plan.transfers == ()


def test_what_host_memory_cannot_take_is_computed_again() -> None:
    engine = swapping(num_host_blocks=1)
    assert step(engine, now=2.0).transfers == ()
    assert run_to_end(engine, now=3.0)["low"].num_recomputed_tokens == 8


@pytest.mark.parametrize("how", ["abort", "fail", "reset"])
def test_host_memory_is_given_back_however_the_wait_ends(how: str) -> None:
    engine = swapping()
    plan = engine.schedule(now=2.0)
    assert plan is not None and engine.host.num_free == 6
    if how == "fail":
        engine.fail(plan, now=3.0)  # the KV was on its way
    else:
        finish(engine, plan, now=3.0)
    if how == "abort":
        engine.abort("low", now=3.0)
    if how == "reset":
        assert engine.reset_prefix_cache(now=3.0)
    assert engine.host.num_free == 8
    records = run_to_end(engine, now=4.0)
    if how != "abort":
        assert records["low"].num_recomputed_tokens == 8, "whatever is not trusted is computed again"


def test_a_step_that_failed_leaves_no_key_on_what_it_brought_back() -> None:
    engine = swapping()
    step(engine, now=2.0)
    plan = engine.schedule(now=3.0)
    assert plan is not None and plan.transfers
    engine.fail(plan, now=4.0)
    engine.add(request("alike", prompt=LOW, max_tokens=1), now=4.0)
    assert engine.find_cached(state_of(engine, "alike")) == []


class AdmitsFirst:
    """Lets somebody in before the running have their tokens."""

    repeats = True
    returns_together = False

    def compose(self, step: Step) -> None:
        for state in step.candidates():
            step.admit(state, min(step.uncached(state), 1))
        for state in step.running:
            if state.granted_step != step.step_id and step.token_budget:
                step.grant(state, 1)


def test_what_was_never_computed_is_not_kept() -> None:
    """`b` finds a block in the cache, and yields in the step that let it in: there is nothing of its own to keep."""
    config = tiny_config(num_blocks=5, block_size=1, num_host_blocks=8, allocation="paged")
    chosen = {menu: make(menu, getattr(config, menu)) for menu in MENUS}
    engine = EngineCore(config, Policies(**{**chosen, "batching": AdmitsFirst()}))
    engine.add(request("a", prompt=[1], max_tokens=5), now=0.0)
    for now in range(4):
        step(engine, now=float(now))
    engine.add(request("b", prompt=[1, 5], max_tokens=1), now=4.0)
    plan = step(engine, now=4.0)  # b takes the last block, and a needs a fifth
    assert plan.preempted == ("b",) and plan.request_ids == ["a"]
    assert plan.transfers == ()


def test_swapping_needs_synchronous_steps() -> None:
    with pytest.raises(ValueError, match="needs async_depth 1: swapping is modelled step by step"):
        swapping(async_depth=2)


def test_a_swapped_request_is_who_it_was() -> None:
    engine = swapping()
    step(engine, now=2.0)
    assert state_of(engine, "low").num_swapped_tokens == 8

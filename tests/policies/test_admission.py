"""Who comes in: bounds that hold, budgets that are kept and not wasted, buckets that add up, deadlines."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.shed_late import ShedLate
from policies.admission.token_buckets import TokenBuckets
from policies.catalogue import make
from policies.engine import EngineCore
from policies.types import FinishReason, RequestRecord, Status
from tests.worlds import finish, request, run_to_end, state_of, step, tiny_engine


def refusals(engine: EngineCore) -> dict[str, tuple[str, float | None]]:
    """Of those who were told to go: why, and when to come back."""
    left = engine.drain_records()
    return {each.request_id: (each.detail, each.retry_after) for each in left if each.reason is FinishReason.REJECTED}


def running_by_class(engine: EngineCore) -> Counter[str]:
    return Counter(state.request.class_name for state in engine.running)


# -- bounded queue ----------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_a_reason_and_a_time_to_come_back() -> None:
    engine = tiny_engine(admission="bounded_queue,max_waiting=2,retry_after=3", max_num_seqs=1)
    engine.add(request("runs"), now=0.0)
    step(engine, now=0.0)
    answers = [engine.add(request(name), now=1.0) for name in ("a", "b", "c")]
    assert [answer.accepted for answer in answers] == [True, True, False]
    assert (answers[2].reason, answers[2].retry_after) == ("the queue is full: 2 requests wait", 3.0)
    assert refusals(engine) == {"c": ("the queue is full: 2 requests wait", 3.0)}


def test_prompts_count_whole_until_their_first_token_and_then_no_more() -> None:
    engine = tiny_engine(admission="bounded_queue,max_prompt_tokens=20", max_num_batched_tokens=8)
    assert engine.add(request("a", prompt=12), now=0.0).accepted
    step(engine, now=0.0)  # 8 of 12 are computed
    assert not engine.add(request("b", prompt=9), now=1.0).accepted, "12 + 9 are more than 20"
    assert engine.add(request("c", prompt=8), now=1.0).accepted
    step(engine, now=1.0)
    assert engine.add(request("d", prompt=12), now=2.0).accepted, "a has answered: 8 + 12"


def test_a_prompt_over_the_bound_comes_in_when_it_is_alone() -> None:
    engine = tiny_engine(admission="bounded_queue,max_prompt_tokens=10")
    assert engine.add(request("mega", prompt=25), now=0.0).accepted
    assert not engine.add(request("small", prompt=1), now=0.0).accepted


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), most=st.integers(1, 5), tokens=st.integers(1, 40))
def test_bounds_on_the_queue_hold_whoever_floods_it(seed: int, most: int, tokens: int) -> None:
    random = Random(seed)
    engine = tiny_engine(admission=f"bounded_queue,max_waiting={most},max_prompt_tokens={tokens}", max_num_seqs=2)
    for number in range(60):
        length = random.randint(1, 24)
        engine.add(request(number, prompt=length, max_tokens=2), now=float(number))
        new = [state for state in engine.states if state.status is Status.WAITING]
        assert len(new) <= most, "the preempted may be more: they are not new"
        waiting = [state.num_prompt_tokens for state in engine.states if not state.num_output_tokens]
        assert sum(waiting) <= tokens or len(waiting) == 1
        if random.random() < 0.4 and (plan := engine.schedule(now=float(number))):
            finish(engine, plan, now=float(number))


# -- class budgets ----------------------------------------------------------------------------------------------------


def test_a_class_runs_as_many_as_it_may_and_the_rest_of_it_waits_in_its_own_line() -> None:
    engine = tiny_engine(admission="class_budgets,max_running=batch:1", num_blocks=20)
    for name, class_name in (("b1", "batch"), ("b2", "batch"), ("b3", "batch"), ("i1", "chat"), ("i2", "chat")):
        engine.add(request(name, class_name=class_name, max_tokens=2), now=0.0)
    assert [entry.request_id for entry in step(engine, now=0.0).admitted] == ["b1", "i1", "i2"]
    assert [state_of(engine, name).status for name in ("b2", "b3")] == [Status.HELD] * 2
    step(engine, now=1.0)
    assert [entry.request_id for entry in step(engine, now=2.0).admitted] == ["b2"], "b1 is done"


def test_blocks_of_a_class_are_budgeted_at_their_longest() -> None:
    """8 blocks of 4: prompts of 4 that may answer with 5 tokens need 2."""
    engine = tiny_engine(admission="class_budgets,max_blocks=batch:5")
    for name in ("a", "b", "c"):
        engine.add(request(name, class_name="batch", max_tokens=5), now=0.0)
    step(engine, now=0.0)
    assert [state.request_id for state in engine.running] == ["a", "b"]
    answer = engine.add(request("huge", prompt=20, max_tokens=5, class_name="batch"), now=1.0)
    assert not answer.accepted and answer.retry_after is None, "it could never enter"
    assert answer.reason == "it may need 6 KV blocks, but class 'batch' may hold 5: lower max_tokens"


def test_the_queue_of_a_class_is_bounded_by_requests_and_by_tokens() -> None:
    engine = tiny_engine(admission="class_budgets,max_running=x:1,max_queued=x:2,max_queued_tokens=x:12/y:6")
    engine.add(request("runs", class_name="x"), now=0.0)
    step(engine, now=0.0)
    for name, prompt in (("a", 9), ("b", 4), ("c", 3), ("d", 1)):
        engine.add(request(name, prompt=prompt, class_name="x"), now=1.0)
    assert refusals(engine) == {
        "b": ("the queue of class 'x' is full: 9 tokens wait", 1.0),
        "d": ("the queue of class 'x' is full: 2 requests wait", 1.0),
    }
    assert engine.add(request("other", prompt=9, class_name="y"), now=1.0).accepted, "it is the only one of its class"


CLASSES = ("chat", "batch", "other")


def flood(engine: EngineCore, random: Random, num: int, now: float) -> None:
    for number in range(num):
        made = request(
            f"{now}-{number}", random.randint(1, 12), random.randint(1, 8), class_name=random.choice(CLASSES)
        )
        engine.add(made, now)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_budgets_are_never_exceeded_and_nothing_is_left_idle_that_they_allow(seed: int) -> None:
    random = Random(seed)
    limits = {"chat": random.randint(1, 3), "batch": random.randint(1, 3)}
    blocks = {"batch": random.randint(5, 9)}
    spec = f"max_running=chat:{limits['chat']}/batch:{limits['batch']},max_blocks=batch:{blocks['batch']}"
    engine = tiny_engine(admission=f"class_budgets,{spec}", num_blocks=40, max_num_seqs=8, max_num_batched_tokens=200)
    for now in range(12):
        flood(engine, random, random.randint(0, 5), float(now))
        plan = engine.schedule(now=float(now))
        held, running = Counter[str](), Counter[str]()
        for state in engine.states:
            if state.status is not Status.HELD:  # it is past admission
                running[state.request.class_name] += 1
                held[state.request.class_name] += -(-(state.num_prompt_tokens + state.token_limit - 1) // 4)
        assert all(running[name] <= limit for name, limit in limits.items())
        assert all(held[name] <= limit for name, limit in blocks.items())
        waiting = [state for state in engine.states if state.status is Status.HELD]
        for name in CLASSES:  # the first of each line lacks what its budget says, or there is no line
            first = next((state for state in waiting if state.request.class_name == name), None)
            if first is not None:
                longest = -(-(first.num_prompt_tokens + first.token_limit - 1) // 4)
                assert running[name] == limits.get(name) or held[name] + longest > blocks.get(name, 99), name
        if plan is not None:
            finish(engine, plan, now=now + 0.5)
    run_to_end(engine, now=20.0)
    assert engine.kv.num_free == 40


# -- reserves ---------------------------------------------------------------------------------------------------------

RESERVE = "class_budgets,reserve_blocks=chat:4"


def test_a_reserve_is_lent_out_and_taken_back_when_its_owner_comes() -> None:
    """8 blocks, 4 of them chat's. Batch takes all; chat comes, and the latest of batch yields."""
    engine = tiny_engine(admission=RESERVE, max_num_seqs=8)
    for name in ("b1", "b2", "b3", "b4"):
        engine.add(request(name, prompt=7, class_name="batch", max_tokens=9), now=0.0)
    step(engine, now=0.0)
    assert running_by_class(engine) == {"batch": 4}, "work-conserving: nobody of chat is there"
    engine.add(request("c1", prompt=7, class_name="chat", max_tokens=2), now=1.0)
    plan = step(engine, now=1.0)
    assert [entry.request_id for entry in plan.admitted] == ["c1"] and plan.preempted == ("b4",)


def test_nobody_yields_to_one_whose_class_has_what_is_reserved_for_it() -> None:
    engine = tiny_engine(admission=RESERVE, max_num_seqs=8)
    for name in ("b1", "b2"):
        engine.add(request(name, prompt=7, class_name="batch", max_tokens=2), now=0.0)
    for name in ("c1", "c2", "c3"):
        engine.add(request(name, prompt=7, class_name="chat", max_tokens=2), now=0.0)
    plan = step(engine, now=0.0)
    assert [entry.request_id for entry in plan.admitted] == ["b1", "b2", "c1", "c2"]
    assert plan.preempted == () and state_of(engine, "c3").status is Status.HELD


def test_a_running_owner_takes_its_block_from_a_borrower_and_not_from_its_own() -> None:
    engine = tiny_engine(admission=RESERVE, max_num_seqs=8)
    engine.add(request("b1", prompt=19, class_name="batch", max_tokens=9), now=0.0)
    step(engine, now=0.0)
    for name in ("c1", "c2"):
        engine.add(request(name, prompt=4, class_name="chat", max_tokens=9), now=1.0)
    step(engine, now=1.0)  # b1 has 5 blocks and c1, c2 one each: one is left for the first of them
    assert step(engine, now=2.0).preempted == ("b1",), "latest alone would have chosen c2"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), reserve=st.integers(3, 10))
def test_an_owner_within_its_reserve_never_waits_for_borrowed_blocks(seed: int, reserve: int) -> None:
    """The first of chat that waits would go beyond chat's reserve, or waits for the next step: whoever came in with
    this one is not thrown out at once, and nobody comes in while memory is short for the running."""
    random, engine = Random(seed), tiny_engine(
        admission=f"class_budgets,reserve_blocks=chat:{reserve}", num_blocks=12, max_num_seqs=12,
        max_num_batched_tokens=100, enable_prefix_caching=False,
    )  # fmt: skip
    owed = None
    for now in range(15):
        flood(engine, random, 3, float(now))
        plan = engine.schedule(now=float(now))
        held = sum(len(state.block_ids) for state in engine.running if state.request.class_name == "chat")
        closed = plan is not None and plan.preempted and not plan.admitted
        waiting = [*engine.scheduling.candidates(engine.view, float(now))]
        waiting += [state for state in engine.states if state.status is Status.HELD]
        first = next((state for state in waiting if state.request.class_name == "chat"), None)
        if not closed and first is not None and held + -(-first.num_tokens // 4) <= reserve:
            assert first is not owed, f"{first.request_id} waits for what is its own"
            owed = first
        elif not closed:
            owed = None
        if plan is not None:
            finish(engine, plan, now=now + 0.5)
    run_to_end(engine, now=20.0)


def test_two_reserves_do_not_take_turns_with_one_place() -> None:
    """Both classes ask for more than their reserve: whoever is in stays in (T27)."""
    engine = tiny_engine(admission="class_budgets,reserve_blocks=x:4/y:4")
    for name, class_name in (("x1", "x"), ("y1", "y")):
        engine.add(request(name, prompt=20, class_name=class_name, max_tokens=3), now=0.0)
    records = run_to_end(engine, max_steps=40)
    assert {name: record.num_preemptions for name, record in records.items()} == {"x1": 0, "y1": 0}


# -- token buckets ----------------------------------------------------------------------------------------------------


def test_a_bucket_reserves_an_estimate_and_settles_when_the_request_leaves() -> None:
    engine = tiny_engine(admission="token_buckets,rate=2,burst=10")  # 20 tokens
    bucket = engine._policies.admission
    assert isinstance(bucket, TokenBuckets)
    engine.add(request("a", prompt=4, max_tokens=8, client_id="ann"), now=0.0)
    assert bucket.tokens_left("ann", 0.0) == 20 - 12
    plan = engine.schedule(now=0.0)
    assert plan is not None
    finish(engine, plan, now=0.0, stop=("a",))
    assert bucket.tokens_left("ann", 0.0) == 20 - 5, "four of the prompt and one answered"


def test_who_finds_too_little_waits_for_exactly_as_long_as_it_takes() -> None:
    engine = tiny_engine(admission="token_buckets,rate=2,burst=5")
    for name in "abc":
        engine.add(request(name, prompt=4, max_tokens=6, client_id="ann"), now=0.0)  # 10 tokens: a whole bucket
    engine.add(request("other", prompt=4, max_tokens=6, client_id="bob"), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None and [entry.request_id for entry in plan.admitted] == ["a", "other"]
    assert engine.next_wakeup(0.0) == 5.0
    for now in range(6):
        finish(engine, plan, now=float(now))
        plan = engine.schedule(now=float(now))
        names = [] if plan is None else [entry.request_id for entry in plan.admitted]
        assert names == (["b"] if now == 5 else []), now
        plan = plan or engine.schedule(now=float(now))


def test_nobody_wakes_for_one_who_has_gone() -> None:
    engine = tiny_engine(admission="token_buckets,rate=2,burst=5")
    for name in "ab":
        engine.add(request(name, prompt=4, max_tokens=6, client_id="ann"), now=0.0)
    step(engine, now=0.0)
    assert engine.next_wakeup(1.0) == 5.0
    engine.abort("b", now=1.0)
    assert engine.next_wakeup(1.0) is None


def test_a_bucket_does_not_run_over_however_long_nobody_draws_from_it() -> None:
    engine = tiny_engine(admission="token_buckets,rate=2,burst=5,waits=false")
    engine.add(request("a", prompt=4, max_tokens=2, client_id="ann"), now=0.0)
    engine.abort("a", now=0.0)
    answers = [engine.add(request(name, prompt=4, max_tokens=6, client_id="ann"), now=1000.0) for name in "bc"]
    assert [answer.accepted for answer in answers] == [True, False]


def test_a_long_prompt_pays_a_surcharge_and_a_request_larger_than_a_bucket_takes_a_full_one() -> None:
    bucket = make("admission", "token_buckets,rate=1,burst=30,long_prompt=10,surcharge=2,output_share=0.5")
    engine = tiny_engine(admission="accept_all")
    bucket.decide(request("a", prompt=14, max_tokens=4, client_id="ann"), engine.view, 0.0)
    assert bucket.tokens_left("ann", 0.0) == 30 - (14 + 2 * 4 + 2)
    bucket.decide(request("b", prompt=100, max_tokens=4, client_id="bob"), engine.view, 0.0)
    assert bucket.tokens_left("bob", 0.0) == 30 - (100 + 2 * 90 + 2), "let in, and owes the rest"


def test_cached_tokens_come_back_where_only_the_others_are_charged() -> None:
    left = {}
    for only in ("true", "false"):
        engine = tiny_engine(admission=f"token_buckets,rate=1,burst=100,uncached_only={only}")
        for now in (0.0, 0.0):
            engine.add(request("a", prompt=range(9), max_tokens=1, client_id="ann"), now)
            plan = engine.schedule(now)
            assert plan is not None
            finish(engine, plan, now)
        left[only] = engine._policies.admission.tokens_left("ann", 0.0)  # type: ignore[attr-defined]
    assert left["true"] == pytest.approx(100 - 10 - (10 - 8)) and left["false"] == pytest.approx(80)


def test_who_may_not_wait_is_told_when_to_come_back() -> None:
    engine = tiny_engine(admission="token_buckets,rate=2,burst=5,waits=false")
    engine.add(request("a", prompt=4, max_tokens=6, client_id="ann"), now=0.0)
    answer = engine.add(request("b", prompt=4, max_tokens=4, client_id="ann"), now=1.0)
    assert (answer.accepted, answer.reason, answer.retry_after) == (False, "its quota of tokens is used up", 3.0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_what_a_client_gets_is_bounded_by_its_bucket_and_its_rate(seed: int) -> None:
    """Used by time t <= burst + rate * t + one request; and a bucket never holds more than it can (conservation)."""
    random = Random(seed)
    engine = tiny_engine(admission="token_buckets,rate=3,rates=bob:6,burst=4", num_blocks=40)
    bucket, used, done = engine._policies.admission, Counter[str](), list[RequestRecord]()
    assert isinstance(bucket, TokenBuckets)
    now = 0.0
    for number in range(60):
        now += random.choice((0.0, 0.25, 1.0))
        made = request(number, random.randint(1, 8), random.randint(1, 6), client_id=random.choice(("ann", "bob")))
        engine.add(made, now)
        if random.random() < 0.1:
            engine.abort(str(random.randint(0, number)), now)
        plan = engine.schedule(now)
        if plan is not None:
            finish(engine, plan, now, stop=[name for name in plan.request_ids if random.random() < 0.2])
        for record in engine.drain_records():
            done.append(record)
            if record.first_scheduled_time is not None:
                used[record.client_id] += record.num_prompt_tokens + record.num_output_tokens
        for client, rate in (("ann", 3), ("bob", 6)):
            assert used[client] <= rate * (4 + now) + 14, "more than flowed in"
            assert bucket.tokens_left(client, now) <= 4 * rate + 1e-9
    run_to_end(engine, now)
    assert not bucket._reserved, "whoever left has settled"


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_who_would_be_late_behind_the_backlog_is_told_at_once() -> None:
    engine = tiny_engine(admission="shed_late,prefill_rate=4", max_num_seqs=1)
    assert engine.add(request("a", prompt=8, deadline=2.0), now=0.0).accepted, "8 tokens take 2 s"
    answer = engine.add(request("b", prompt=8, deadline=3.0), now=0.0)
    assert (answer.reason, answer.retry_after) == ("its first token would come 1 s after its deadline", 2.0)
    assert engine.add(request("c", prompt=8), now=0.0).accepted, "no deadline, no haste"


def test_who_can_no_more_be_in_time_leaves_the_queue_and_who_runs_stays() -> None:
    engine = tiny_engine(admission="shed_late,prefill_rate=4,ttft=5", max_num_seqs=1)
    engine.add(request("runs", prompt=4, max_tokens=20), now=0.0)
    step(engine, now=0.0)
    engine.add(request("waits", prompt=8, arrival_time=1.0), now=1.0)  # deadline 6, and 2 s of its own
    assert engine.next_wakeup(1.0) == pytest.approx(4.0)
    step(engine, now=4.0)
    assert not refusals(engine), "it could still begin now"
    step(engine, now=5.0)
    assert refusals(engine) == {"waits": ("its deadline cannot be met any more", 1.0)}
    assert [state.request_id for state in engine.running] == ["runs"], "its own deadline has passed as well"


def test_a_request_that_came_back_under_its_old_id_is_judged_by_its_new_deadline() -> None:
    engine = tiny_engine(admission="shed_late,prefill_rate=100", max_num_seqs=1)
    engine.add(request("runs", max_tokens=20), now=0.0)
    step(engine, now=0.0)
    engine.add(request("a", deadline=3.0), now=1.0)
    engine.abort("a", now=1.0)
    engine.add(request("a", deadline=30.0), now=1.0)
    engine.drain_records()
    step(engine, now=5.0)
    assert not refusals(engine)


# -- knobs ------------------------------------------------------------------------------------------------------------

WRONG = {
    "bounded_queue,max_waiting=-1": "max_waiting (-1) must be 0 (any number) or more",
    "bounded_queue,retry_after=inf": "retry_after (inf) must be a finite number of seconds, 0 or more",
    "class_budgets,max_running=batch": "max_running entry 'batch' must read name:number, as in interactive:40/batch:20",
    "class_budgets,max_running=x:0": "max_running of class 'x' (0) must be at least 1: nobody of it could ever run",
    "class_budgets,max_blocks=a:1/a:2": "max_blocks names 'a' twice: say it once",
    "class_budgets,retry_after=-1": "retry_after (-1.0) must be a finite number of seconds, 0 or more",
    "token_buckets,rate=0": "rate (0.0) must be a finite number above 0",
    "token_buckets,burst=nan": "burst (nan) must be a finite number above 0",
    "token_buckets,rates=ann:-2": "rates entry 'ann:-2' must read name:number above 0, as in alice:1000/bob:500",
    "token_buckets,output_share=2": "output_share (2.0) must be a share of max_tokens: 0 to 1",
    "token_buckets,surcharge=inf": "long_prompt (0) and surcharge (inf) must be 0 or more, and finite",
    "shed_late,prefill_rate=0": "prefill_rate (0.0) must be a finite number of tokens a second above 0",
    "shed_late,ttft=-1": "ttft (-1.0) must be a finite number of seconds, 0 or more",
}


@pytest.mark.parametrize("spec", WRONG)
def test_a_wrong_knob_says_what_is_right(spec: str) -> None:
    with pytest.raises(ValueError) as error:
        make("admission", spec)
    assert str(error.value) == WRONG[spec]


def test_reserves_and_ranks_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="leave out the reserves, or preempt_for_waiting"):
        tiny_engine(admission=RESERVE, scheduling="priority", preempt_for_waiting=True)


def test_shed_late_forgets_those_who_have_left() -> None:
    engine = tiny_engine(admission="shed_late,ttft=9")
    for number in range(5):
        engine.add(request(number, max_tokens=1), now=0.0)
    run_to_end(engine)
    policy = engine._policies.admission
    assert isinstance(policy, ShedLate) and not policy._present

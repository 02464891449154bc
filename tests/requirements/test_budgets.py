"""The article's requirements on classes, budgets, overload and hostile loads, held by the policies of the core.

Under each test stands a change to the code that makes it fail; each was tried.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from policies.catalogue import MENU
from policies.engine import EngineCore
from policies.kv import AllBlocksCleared, BlocksRemoved, BlocksStored
from policies.types import FinishReason, RequestRecord, Status
from sim.cost import AffineCost
from sim.simulate import Run, simulate
from sim.workload.workload import WorkItem, Workload
from tests.laws import check_drained
from tests.worlds import request, run_to_end, state_of, step, tiny_config, tiny_engine

COST = AffineCost(per_step=0.01, per_token=0.001)
POOL: dict[str, Any] = {"num_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 128}


def item(
    name: object, arrival: float, prompt: int, output: int, patience: float | None = None, **fields: Any
) -> WorkItem:
    made = request(f"{name}", prompt=prompt, max_tokens=output, arrival_time=arrival, **fields)
    return WorkItem(made, output, patience)


def of_class(run: Run, name: str) -> list[RequestRecord]:
    return [record for record in run.records if record.class_name == name]


def worst_wait(run: Run, name: str) -> float:
    return max((record.first_token_time or record.finish_time) - record.arrival_time for record in of_class(run, name))


# -- KV cache ---------------------------------------------------------------------------------------------------------


def test_s05_blocks_are_taken_addressed_evicted_and_given_back_by_name() -> None:
    """Allocate: the plan's tables. Address: keys stored. Evict: keys removed. Release: at the end, and on cancelling.
    Mutation: `release` leaves a reference."""
    engine = tiny_engine(num_blocks=4)
    engine.kv.events = []
    engine.add(request("a", prompt=list(range(8)), max_tokens=1), now=0.0)
    assert [len(chunk.block_ids) for chunk in step(engine, now=0.0).chunks] == [2]
    stored = [event for event in engine.kv.events if isinstance(event, BlocksStored)]
    assert [(event.request_id, len(event.keys)) for event in stored] == [("a", 2)]
    assert engine.kv.num_free == 4, "given back on completion"
    engine.add(request("b", prompt=list(range(50, 62)), max_tokens=3), now=1.0)
    step(engine, now=1.0)
    removed = [event.keys for event in engine.kv.events if isinstance(event, BlocksRemoved)]
    assert removed == [(stored[0].keys[1],)], "the tail of a's two goes first"
    assert engine.kv.num_free == 1
    engine.abort("b", now=2.0)
    assert engine.kv.num_free == 4, "given back on cancelling"
    assert engine.reset_prefix_cache(now=2.0) and isinstance(engine.kv.events[-1], AllBlocksCleared)


# -- batching, and policies as plug points ----------------------------------------------------------------------------


def test_s29_admission_chunking_preemption_and_fairness_are_chosen_apart() -> None:
    """One load under the default and with each of the four changed alone: each change alone changes what happens.
    Mutation: `build` ignores a menu."""
    items = [
        item(n, n * 0.02, 8 + 8 * (n % 3), 40, client_id="ab"[n % 4 == 0], class_name="xy"[n % 2]) for n in range(24)
    ]

    def played(**change: Any) -> list[tuple[str, float]]:
        run = simulate(tiny_config(**{**POOL, "num_blocks": 36, **change}), Workload("it", items), COST)
        return [(record.request_id, record.finish_time) for record in run.records]

    plain = played()
    changes = {
        "admission": "class_budgets,max_running=x:1", "batching": "stall_free,chunk_size=8",
        "preemption": "most_blocks", "scheduling": "vtc",
    }  # fmt: skip
    for menu, entry in changes.items():
        assert entry.partition(",")[0] in MENU[menu]
        assert played(**{menu: entry}) != plain, menu


# -- classes, budgets, reserves ---------------------------------------------------------------------------------------


def offline_and_chat(num_offline: int = 40, num_output_tokens: int = 60) -> Workload:
    """Offline work that would fill the pool many times over, and a chat request every half second."""
    offline = [item(f"o{n}", 0.0, 40, num_output_tokens, class_name="offline", priority=1) for n in range(num_offline)]
    chat = [item(f"c{n}", 0.25 + 0.5 * n, 16, 8, class_name="chat", priority=0) for n in range(12)]
    return Workload("it", sorted([*offline, *chat], key=lambda each: each.request.arrival_time))


RESERVED = "class_budgets,reserve_blocks=chat:16"


def test_s30_a_class_is_an_attribute_of_a_request_that_policies_can_tell() -> None:
    """Mutation: `of_class` counts everybody."""
    engine = tiny_engine()
    engine.add(request("a", class_name="chat"), now=0.0)
    engine.add(request("b", class_name="offline"), now=0.0)
    assert engine.view.of_class("chat").num_waiting == engine.view.of_class("offline").num_waiting == 1


def test_s31_offline_work_does_not_hold_what_is_reserved_for_the_assistant() -> None:
    """Borrowed blocks come back with the next step: chat is answered as if it were alone, but for the longer steps.
    Mutation: `borrowers` returns nobody."""
    pool = {**POOL, "allocation": "paged_reserve_output"}  # two of 30 blocks each hold all 60 to their end
    load = offline_and_chat(num_output_tokens=81)
    run = simulate(tiny_config(**pool, admission=RESERVED), load, COST)
    step_time = 0.01 + 0.001 * POOL["max_num_batched_tokens"]
    assert worst_wait(run, "chat") <= 3 * step_time
    assert worst_wait(simulate(tiny_config(**pool), load, COST), "chat") > 10 * step_time
    held = max(sample.num_held_blocks for sample in run.samples)
    assert held > POOL["num_blocks"] - 16, "and while nobody of chat is there, offline work uses its blocks"
    assert run.summary.num_preemptions > 0


def test_s32_requests_tokens_and_queue_of_a_class_are_bounded_and_refusals_counted() -> None:
    """Mutation: any of the three limits is not looked at."""
    budgets = "class_budgets,max_running=offline:3,max_blocks=offline:20,max_queued=offline:6,max_queued_tokens=chat:40"
    engine = tiny_engine(admission=budgets, **{**POOL, "max_num_batched_tokens": 200})
    for number in range(12):
        engine.add(request(f"o{number}", prompt=24, max_tokens=9, class_name="offline"), now=0.0)
        engine.add(request(f"c{number}", prompt=16, max_tokens=9, class_name="chat"), now=0.0)
    step(engine, now=0.0)
    running = Counter(state.request.class_name for state in engine.running)
    assert running == {"offline": 2, "chat": 2}, "2 of 8 blocks each; 2 of 16 tokens in the queue"
    refused = Counter(record.class_name for record in engine.drain_records())
    assert refused == {"offline": 6, "chat": 10}
    tighter = tiny_engine(admission="class_budgets,max_running=offline:1", **POOL)
    for number in range(3):
        tighter.add(request(number, class_name="offline"), now=0.0)
    step(tighter, now=0.0)
    assert len(tighter.running) == 1


@pytest.mark.parametrize(
    "protection", [{"admission": RESERVED}, {"scheduling": "wfq,weights=chat:8/offline:1", "hol_skip": 0}]
)
def test_s33_capacity_is_reserved_or_weighted(protection: dict[str, Any]) -> None:
    """Either way chat waits less than without, and offline work still gets done.
    Mutation: reserves, or weights, are not read."""
    plain = simulate(tiny_config(**POOL), offline_and_chat(), COST)
    run = simulate(tiny_config(**{**POOL, **protection}), offline_and_chat(), COST)
    assert worst_wait(run, "chat") < worst_wait(plain, "chat") / 2
    assert {record.reason for record in run.records} == {FinishReason.STOP}


def test_s35_a_long_prompt_costs_more_of_a_quota_than_its_tokens() -> None:
    """Mutation: the surcharge is 0."""
    engine = tiny_engine(admission="token_buckets,rate=1,burst=100,long_prompt=20,surcharge=3,waits=false", **POOL)
    bucket: Any = engine._policies.admission
    engine.add(request("short", prompt=20, max_tokens=1, client_id="ann"), now=0.0)
    engine.add(request("long", prompt=30, max_tokens=1, client_id="bob"), now=0.0)
    assert bucket.tokens_left("ann", 0.0) == 100 - 21
    assert bucket.tokens_left("bob", 0.0) == 100 - 31 - 3 * 10
    answer = engine.add(request("again", prompt=30, max_tokens=1, client_id="bob"), now=0.0)
    assert not answer.accepted and answer.retry_after == pytest.approx(61 - 39)


def test_s62_offline_work_cannot_exhaust_what_is_interactive() -> None:
    """As S31, from the other side: the more offline work there is, the same for chat.
    Mutation: a claim waits for the head of the line."""
    worst = {
        num: worst_wait(simulate(tiny_config(**POOL, admission=RESERVED), offline_and_chat(num), COST), "chat")
        for num in (20, 80)
    }
    assert worst[80] <= worst[20] + 0.075, "one step more at most"


# -- hostile loads ----------------------------------------------------------------------------------------------------

GUARDS = (
    "accept_all",
    "bounded_queue,max_waiting=4",
    "class_budgets,max_running=chat:4,reserve_blocks=chat:6",
    "token_buckets,rate=200,burst=2",
    "shed_late,prefill_rate=2000,ttft=2",
)


@pytest.mark.parametrize("admission", GUARDS)
def test_s53_after_a_storm_of_cancellations_everything_is_back_and_the_survivors_go_on(admission: str) -> None:
    """Nine in ten of those present leave at once, some of them held, some waiting, some running, some swapped out.
    Mutation: an aborted request keeps its slot, its line, its tokens or its host blocks."""
    random = Random(1)
    settings = {**POOL, "num_blocks": 20, "num_host_blocks": 10, "admission": admission}
    engine = tiny_engine(**settings)
    for number in range(40):
        class_name = random.choice(("chat", "offline"))
        engine.add(request(number, random.randint(4, 30), 20, class_name=class_name, client_id=class_name), now=0.0)
    for now in range(8):
        step(engine, now=float(now))
    present = [state.request_id for state in engine.states]
    survivors = set(random.sample(present, max(1, len(present) // 10)))
    for request_id in present:
        if request_id not in survivors:
            assert engine.abort(request_id, now=8.0)
    assert {state.request_id for state in engine.states} == survivors
    held = {block_id for state in engine.running for block_id in state.block_ids}
    assert engine.kv.num_blocks - engine.kv.num_free == len(held), "only the survivors hold blocks"
    before = {name: state_of(engine, name).num_output_tokens for name in survivors}
    records = run_to_end(engine, now=8.0)
    answered = [records[name] for name in survivors if records[name].reason is not FinishReason.REJECTED]
    assert all(record.num_output_tokens == 20 > before[record.request_id] for record in answered)
    check_drained(engine)


def test_s54_a_mega_prompt_bounds_nobodys_gap_beyond_its_chunk_and_wedges_nothing() -> None:
    """Prompts of 100 among decodes: no gap is longer than a step of 16 tokens. One that can never fit is told why.
    Mutation: the chunk is not looked at; an unfittable prompt is queued."""
    items = [item("decodes", 0.0, 4, 60)] + [item(f"mega{n}", 0.1 + 0.4 * n, 100, 2) for n in range(4)]
    items.insert(2, item("unfittable", 0.3, 126, 120))
    for batching, bound in (("stall_free,chunk_size=16", 0.01 + 0.016), ("chunked", 0.01 + 0.064)):
        run = simulate(tiny_config(**{**POOL, "max_model_len": 400, "batching": batching}),
                       Workload("it", items), COST)  # fmt: skip
        assert run.summary.itl.max == pytest.approx(bound), batching
        refused = [record for record in run.records if record.reason is FinishReason.REJECTED]
        assert [record.request_id for record in refused] == ["unfittable"]
        assert "needs 245 tokens of KV cache, but the cache holds 240" in refused[0].detail
        assert len(run.records) == len(items)


def test_a_flood_of_kv_stays_within_the_budget_of_its_class() -> None:
    """Many answers as long as they may be: the flooder never holds more than its blocks, and others keep theirs."""
    engine = tiny_engine(admission="class_budgets,max_blocks=flood:20", **POOL)
    for number in range(50):
        engine.add(request(f"f{number}", prompt=4, max_tokens=60, class_name="flood"), now=0.0)
    quiet = []
    for now in range(40):
        if now % 5 == 0:
            engine.add(request(f"q{now}", prompt=8, max_tokens=4, arrival_time=float(now)), now=float(now))
        step(engine, now=float(now))
        quiet += [record for record in engine.drain_records() if record.class_name != "flood"]
        assert sum(len(state.block_ids) for state in engine.running if state.request.class_name == "flood") <= 20
    assert len(quiet) == 8 and all(record.queue_time == 0 and record.num_preemptions == 0 for record in quiet)


@pytest.mark.parametrize("preemption", ["latest", "least_computed", "most_blocks", "fewest_outputs"])
def test_fill_and_squeeze_costs_the_victim_time_and_not_its_answer(preemption: str) -> None:
    """Fill the pool with short prompts, then let all grow at once: preempted, perhaps, but everybody is answered."""
    items = [item("victim", 0.0, 20, 30, class_name="chat")]
    items += [item(f"f{n}", 0.01, 4, 100, class_name="flood") for n in range(15)]
    run = simulate(tiny_config(**POOL, preemption=preemption), Workload("it", items), COST)
    assert run.summary.num_preemptions > 0, "no squeeze, no proof"
    assert {record.reason for record in run.records} == {FinishReason.STOP} and len(run.records) == len(items)
    guarded = simulate(tiny_config(**POOL, preemption=preemption, admission="class_budgets,max_blocks=flood:45"),
                       Workload("it", items), COST)  # fmt: skip
    (victim,) = of_class(guarded, "chat")
    assert victim.num_preemptions == 0, "a budget on the flooder ends it"


# -- mechanisms apart -------------------------------------------------------------------------------------------------

SWITCHES: dict[str, dict[str, Any]] = {
    "prefix cache": {"enable_prefix_caching": False},
    "continuous batching": {"batching": "static,group_size=4,max_wait=1"},
    "chunking": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "preemption": {"allocation": "paged_reserve_output"},
    "quotas": {"admission": "accept_all"},
    "salting": {"isolation": "global"},
}


def test_s69_each_mechanism_can_be_switched_off_alone() -> None:
    """An ablation: with all on, and each of six off in turn; each makes a difference of its own.
    Mutation: a switch that does nothing."""
    random = Random(3)
    tenants = ("ann", "bob")
    items = [
        WorkItem(
            request(n, prompt=[*range(20), *range(100 * n, 100 * n + random.randint(4, 60))], max_tokens=16,
                    arrival_time=n * 0.03, tenant=tenants[n % 2], client_id=tenants[n % 2]),
            random.randint(4, 16),
        )
        for n in range(40)
    ]  # fmt: skip

    def finishes(**change: Any) -> tuple[tuple[str, float], ...]:
        base = {**POOL, "isolation": "tenant", "admission": "token_buckets,rate=250,burst=1"}
        engine = {**base, "num_blocks": 36, **change}
        run = simulate(tiny_config(**engine), Workload("it", items), COST)
        assert len(run.records) == len(items)
        return tuple((record.request_id, record.finish_time) for record in run.records)

    outcomes = {name: finishes(**change) for name, change in SWITCHES.items()}
    outcomes["all on"] = finishes()
    assert len(set(outcomes.values())) == len(outcomes)


def present(engine: EngineCore) -> set[Status]:
    return {state.status for state in engine.states}


def test_the_storm_meets_requests_in_every_state() -> None:
    """The case above is not empty: with budgets, some are held, some wait, some run."""
    engine = tiny_engine(**{**POOL, "num_blocks": 20, "max_num_seqs": 2}, admission="class_budgets,max_running=chat:4")
    for number in range(8):
        engine.add(request(number, class_name="chat"), now=0.0)
    step(engine, now=0.0)
    assert present(engine) == {Status.HELD, Status.WAITING, Status.RUNNING}

"""The article's requirements on order and fairness: who is next, by whose measure, and what the others notice of it.

Under each test stands what it was seen to fall for: a change to the project that breaks the requirement.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from policies.catalogue import MENU
from policies.engine import EngineCore
from policies.types import FinishReason
from sim.cost import AffineCost
from sim.simulate import Run, simulate
from sim.workload.workload import WorkItem, Workload
from tests.laws import check_blocks, check_drained
from tests.specs import examples
from tests.worlds import finish, request, run_to_end, shown, step, tiny_config, tiny_engine

SCHEDULINGS = [spec for name in MENU["scheduling"] for spec in examples("scheduling", name)]
FAIR = ["vtc", "drr,quantum=20", "dlpm,quantum=20"]
BY_CLASS = ["wfq,weights=interactive:4/batch:1"]


def flood(num: int = 40) -> Workload:
    """At 0 s a flood of one client's batch requests; from then on now and then a short one of another, interactive."""
    batch = [
        WorkItem(request(f"batch-{i}", 12, max_tokens=8, client_id="flooder", class_name="batch"), 8)
        for i in range(num)
    ]
    quiet = [
        WorkItem(request(f"quiet-{i}", 4, max_tokens=4, arrival_time=5.0 * i, client_id="quiet",
                         class_name="interactive"), 4)
        for i in range(6)
    ]  # fmt: skip
    return Workload("flood", sorted(batch + quiet, key=lambda item: item.request.arrival_time))


def run(made: Workload, **settings: Any) -> Run:
    config = tiny_config(**{"max_num_seqs": 2, "num_blocks": 16, **settings})
    return simulate(config, made, AffineCost(per_step=1.0))


def longest_wait(done: Run, client: str) -> float:
    return max(record.queue_time for record in done.records if record.client_id == client)


# -- a plug point of its own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduling", FAIR + BY_CLASS)
def test_s29_fairness_is_chosen_by_itself_and_a_flood_is_the_flooders_loss(scheduling: str) -> None:
    """Nothing else is set: same memory, same batches, same work done in the same time."""
    unfair, fair = run(flood()), run(flood(), scheduling=scheduling)
    assert longest_wait(unfair, "quiet") > 100
    assert longest_wait(fair, "quiet") <= 12, "one of the flooder's takes 8 s, and he has two at a time"
    assert longest_wait(fair, "flooder") >= longest_wait(unfair, "flooder"), "he who floods waits for it"
    assert fair.summary.num_completed == unfair.summary.num_completed == 46


# Falls if vtc charges nothing for what is computed (`Served.collect` yields nothing), if drr never ends a turn, if dlpm
# hands out credit without being in debt, if wfq leaves out the cost of a tag.


@pytest.mark.parametrize("weights, share", [("x:1/y:1", 1.0), ("x:3/y:1", 3.0), ("x:1/y:4", 0.25)])
@pytest.mark.parametrize("policy", ["wfq", "vtc"])
def test_s33_capacity_goes_by_weight_while_all_want_it(policy: str, weights: str, share: float) -> None:
    """Equal requests of two classes, or clients, both with endless lines: what each got done in 200 s."""
    engine = tiny_engine(scheduling=f"{policy},weights={weights}", max_num_seqs=1)
    for number in range(400):
        name = "xy"[number % 2]
        engine.add(request(f"{name}{number}", 4, max_tokens=2, client_id=name, class_name=name), now=0.0)
    for now in range(200):
        step(engine, float(now))
    done = Counter(record.client_id for record in engine.drain_records())
    assert done["x"] / done["y"] == pytest.approx(share, rel=0.07)


# Falls if `Shares.per_token` forgets the weight, or takes its inverse.


def test_s34_equal_totals_hide_who_waited() -> None:
    """The same throughput to the last token; what tells the orders apart is the table by class."""
    unfair, fair = run(flood()), run(flood(), scheduling="wfq,weights=interactive:4/batch:1")
    assert _tokens(unfair) == _tokens(fair)
    assert unfair.summary.duration == pytest.approx(fair.summary.duration, rel=0.1)
    waits = {
        name: [each.summary.classes[name].queue_delay.p99 for each in (unfair, fair)]
        for name in ("interactive", "batch")
    }
    assert waits["interactive"][0] > 10 * waits["interactive"][1]


def _tokens(done: Run) -> tuple[int, int]:
    return sum(each.num_prompt_tokens for each in done.records), sum(each.num_output_tokens for each in done.records)


# Falls if wfq goes by order of arrival (a tag without a cost).


# -- offline work and interactive -------------------------------------------------------------------------------------


def test_s62_offline_work_does_not_exhaust_the_places_of_interactive_requests() -> None:
    """The flood holds every slot and all memory. First come, first served, they wait it out; in a band of their own
    they come next; allowed to take places, at once."""
    bands = [
        WorkItem(request(item.request.request_id, item.request.prompt, max_tokens=item.num_output_tokens,
                         arrival_time=item.request.arrival_time, client_id=item.request.client_id,
                         priority=int(item.request.client_id == "flooder")), item.num_output_tokens)
        for item in flood().items
    ]  # fmt: skip
    made = Workload("bands", bands)
    assert longest_wait(run(made), "quiet") > 100
    for scheduling in ("priority", "sjf", "edf", "vtc"):
        assert longest_wait(run(made, scheduling=scheduling), "quiet") <= 8, "one of the flooder's, to its end"
    at_once = run(made, scheduling="priority", preempt_for_waiting=True, preemption="lowest_priority")
    assert longest_wait(at_once, "quiet") <= 1.0
    assert at_once.summary.num_completed == 46


# Falls if the band is left out of an order's key (tried on each of the four).


# -- cancellations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_s53_a_storm_of_cancellations_leaves_every_order_whole(scheduling: str) -> None:
    """Of 40 requests 28 are cancelled within three seconds, waiting or running: blocks return, the rest go on."""
    random, engine = Random("storm"), tiny_engine(scheduling=scheduling, num_blocks=24)
    for number in range(40):
        engine.add(_some(random, number), now=0.0)
    doomed = random.sample(range(40), 28)
    for now in range(3):
        step(engine, float(now))
        for number in doomed[now * 10 : now * 10 + 10]:
            engine.abort(str(number), now + 1.0)
            check_blocks(engine)
    before = {record.request_id for record in engine.drain_records()}
    records = run_to_end(engine, now=3.0)
    check_drained(engine)
    survivors = {str(number) for number in range(40)} - {str(number) for number in doomed}
    assert survivors <= records.keys() | before
    assert all(record.reason is FinishReason.LENGTH for name, record in records.items() if name in survivors)
    assert _stalls(records) == 0, "whoever runs decodes in every step again"


def _some(random: Random, number: int) -> Any:
    return request(
        number, [random.randint(0, 1)] * random.randint(1, 8), max_tokens=random.randint(1, 6),
        client_id=random.choice("uvw"), class_name=random.choice("xy"), priority=random.randint(0, 1),
    )  # fmt: skip


def _stalls(records: dict[str, Any]) -> float:
    return max((record.stall_time for record in records.values()), default=0.0)


# Falls if a policy keeps a cancelled request in its line (`discard` that returns at once for status FINISHED).


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_s63_nothing_is_computed_for_who_has_hung_up_in_the_line(scheduling: str) -> None:
    engine = tiny_engine(scheduling=scheduling, max_num_seqs=1)
    random = Random("hang-up")
    for number in range(12):
        engine.add(_some(random, number), now=0.0)
    first = step(engine, 0.0).request_ids
    gone = {str(number) for number in range(0, 12, 2)} - set(first)
    for name in sorted(gone):
        engine.abort(name, 1.0)
    computed, now = set[str](), 1.0
    while plan := engine.schedule(now):
        computed |= {name for name, *_ in shown(plan)}
        now += 1.0
        finish(engine, plan, now)
    assert not computed & gone


# Falls as above.


# -- very long prompts ------------------------------------------------------------------------------------------------


def test_s54_a_very_long_prompt_waits_for_short_ones_but_not_for_ever() -> None:
    """A mega-prompt comes first. Shortest first lets short ones by; every so often the long one's turn has come."""
    engine = mega_prompt("sjf,patience=4")
    came = []
    for now in range(40):
        engine.add(request(f"late-{now}", 2, max_tokens=1), now=float(now))
        came += [entry.request_id for entry in step(engine, float(now)).admitted]
    assert came.index("mega") == 4, "after four short ones"
    assert "mega" not in _admitted_in(mega_prompt("sjf,patience=0"), 40), "without the seat it starves"


def mega_prompt(scheduling: str) -> EngineCore:
    engine = tiny_engine(scheduling=scheduling, max_num_seqs=1, max_num_batched_tokens=4, num_blocks=8)
    engine.add(request("mega", 28, max_tokens=1), now=0.0)
    for number in range(4):
        engine.add(request(f"short-{number}", 2, max_tokens=1), now=0.0)
    return engine


def _admitted_in(engine: EngineCore, num_steps: int) -> list[str]:
    came = []
    for now in range(num_steps):
        engine.add(request(f"late-{now}", 2, max_tokens=1), now=float(now))
        came += [entry.request_id for entry in step(engine, float(now)).admitted]
    return came


# Falls if the seat is given to the shortest, or its count starts again at every admission.


# -- across tenants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduling", ["lpm", "dlpm", "sjf"])
def test_s57_an_order_by_what_is_cached_sees_only_ones_own(scheduling: str) -> None:
    """Paired. Alice's prefix is cached. A second request of hers goes before one that came earlier; Bob's same prompt
    does not, and his wait tells him nothing."""
    placed = {}
    for tenant in ("alice", "bob"):
        engine = tiny_engine(scheduling=scheduling, isolation="tenant", num_blocks=30)
        engine.add(request("warm", range(17), max_tokens=1, tenant="alice"), now=0.0)
        step(engine, now=0.0)
        engine.add(request("other", [9] * 16, tenant="carol"), now=1.0)
        engine.add(request("asks", range(17), tenant=tenant), now=1.0)
        first = next(engine.scheduling.candidates(engine.view, 1.0))
        placed[tenant] = first.request_id
    assert placed == {"alice": "asks", "bob": "other"}


def test_s57_two_tenants_with_one_prompt_do_not_begin_alike() -> None:
    """Nor does lpm put off the one because the other waits with the same words."""
    for tenant, expected in (("alice", ["a", "c", "b"]), ("bob", ["a", "b", "c"])):
        engine = tiny_engine(scheduling="lpm,alike=4", isolation="tenant")
        engine.add(request("a", [5] * 9, tenant="alice"), now=0.0)
        engine.add(request("b", [5] * 9, tenant=tenant), now=0.0)
        engine.add(request("c", [6] * 3, tenant="alice"), now=0.0)
        line = [state.request_id for state in engine.scheduling.candidates(engine.view, 0.0)]
        assert line == expected


# Both fall if keys are made without the namespace (`EngineCore._seals` returns {}).

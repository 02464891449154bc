"""Several replicas: who gets what, what a router that knows little costs, and that they share nothing but the clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import simpy

from policies.catalogue import BATCHING, build, make
from policies.config import EngineConfig
from policies.interfaces import ReplicaLoad
from policies.journal import replay
from policies.prompt import ContentPrompt, LengthPrompt
from policies.types import Context, FinishReason, Request
from sim.cache_index import CacheIndex
from sim.cluster import Cluster, NoFrontEnd, next_besides_steps
from sim.cost import AffineCost, DatasheetCost
from sim.frontend import FrontEndTimes
from sim.hardware import device
from sim.models import model
from sim.replica import Late, Moment
from sim.simulate import Run, simulate
from sim.workload.sessions import FollowUp, Sessions
from sim.workload.workload import WorkItem, Workload
from tests.theory import simulate_with

REPOSITORY = Path(__file__).resolve().parents[2]
STEP = AffineCost(per_step=1 / 32)
DECIMAL = AffineCost(per_step=0.031, per_token=0.0007, per_request=0.0013)
DATASHEET = DatasheetCost(model("llama-3-8b"), device("h100"))
ROUTING = ("round_robin", "least_loaded", "least_loaded,by=tokens", "random", "prefix_aware",
           "prefix_aware,index_staleness=2", "consistent_hash")  # fmt: skip


def item(
    name: object, arrival: float = 0.0, prompt: int = 8, output: int = 4, patience: float | None = None
) -> WorkItem:
    return WorkItem(Request(str(name), arrival, LengthPrompt(prompt), max_tokens=1024), output, patience)


def small(**settings: Any) -> EngineConfig:
    sizes = {"num_blocks": 32, "block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 128}
    return EngineConfig(**{**sizes, **settings})


def crowd(seed: int, num: int = 90, span: float = 6.0, impatient: float = 0.0) -> Workload:
    random = Random(seed)
    arrivals = sorted(random.randrange(int(64 * span)) / 64 for _ in range(num))
    return Workload("crowd", [
        item(index, arrival, random.randint(1, 60), random.randint(1, 40),
             random.randrange(1, 256) * 0.0079 if random.random() < impatient else None)
        for index, arrival in enumerate(arrivals)
    ])  # fmt: skip


def users(num: int, turns: int) -> Sessions:
    """Each asks again half a second after an answer."""
    random = Random(num)
    first = [item(f"{user}.0", user / 16, random.randint(1, 40), random.randint(1, 20)) for user in range(num)]
    names = [(f"{user}.{turn}", f"{user}.{turn - 1}") for user in range(num) for turn in range(1, turns)]
    later = [
        FollowUp(item(name, 0.0, random.randint(1, 40), random.randint(1, 20)), (before,), 0.5)
        for name, before in names
    ]
    return Sessions("users", first, follow_ups=later)


def places(workload: Workload, **how: Any) -> dict[str, int | None]:
    """The replica of each request."""
    run = simulate(small(), workload, STEP, front_end=FrontEndTimes.off(), **how)
    return {client.request_id: client.replica for client in run.clients}


def mean_ttft(run: Run) -> float:
    return run.summary.ttft.mean


# -- one replica -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", BATCHING)
def test_one_replica_behind_any_router_is_a_replica(batching: str) -> None:
    config, workload = small(batching=batching), crowd(1)
    bare = simulate_with(config, workload, DECIMAL)
    for routing in ROUTING:
        run = simulate(config, workload, DECIMAL, routing=routing)
        assert (run.records, list(run.step_ends)) == (bare.records, bare.step_ends)


# -- who gets what -----------------------------------------------------------------------------------------------------


def test_round_robin_goes_round() -> None:
    workload = Workload("few", [item(index, index / 8) for index in range(9)])
    assert places(workload, num_replicas=3) == {str(index): index % 3 for index in range(9)}


def test_least_loaded_counts_those_that_run_those_that_wait_and_those_on_their_way() -> None:
    """Three at once: one each. The next goes where the short answer is done; ties go to the first."""
    workload = Workload(
        "few", [item("a", output=40), item("b", output=2), item("c", output=40), item("d", arrival=0.5)]
    )
    assert places(workload, num_replicas=3, routing="least_loaded") == {"a": 0, "b": 1, "c": 2, "d": 1}


def test_least_loaded_by_tokens_weighs_prompts() -> None:
    workload = Workload("few", [item("long", prompt=60), item("b"), item("c"), item("d")])
    where = places(workload, num_replicas=2, routing="least_loaded,by=tokens")
    assert where == {"long": 0, "b": 1, "c": 1, "d": 1}


def test_loads_are_forgotten_with_those_who_leave_wherever_they_are() -> None:
    """Answered, refused, or given up at the API server: nothing is left of them. The next three get one each."""
    items = [item("answered"), item("refused", prompt=999), item("left", patience=0.0005)]
    later = [item(name, arrival=9.0, output=2) for name in "abc"]
    run = simulate(small(), Workload("few", [*items, *later]), STEP, front_end=FrontEndTimes(), num_replicas=3,
                   routing="least_loaded")  # fmt: skip
    reasons = [(client.request_id, client.reason, client.replica) for client in run.clients[:3]]
    assert reasons == [
        ("answered", FinishReason.STOP, 0),
        ("refused", FinishReason.REJECTED, 1),
        ("left", FinishReason.ABORT, 2),
    ]
    assert [client.replica for client in run.clients[3:]] == [0, 1, 2]


def skewed(seed: int, num: int = 400) -> Workload:
    """Every other answer is long, so that taking turns gives all of them to one of two replicas."""
    random, now, items = Random(seed), 0.0, list[WorkItem]()
    for index in range(num):
        now += random.expovariate(11.0)
        items.append(item(index, now, 8, 60 if index % 2 else 4))
    return Workload("skewed", items)


ROOMY = EngineConfig(num_blocks=4096, block_size=8, max_num_seqs=8, max_model_len=128)


@pytest.mark.parametrize("seed", range(3))
def test_knowing_the_loads_helps_where_requests_differ(seed: int) -> None:
    turns, loads = (
        simulate(ROOMY, skewed(seed), STEP, num_replicas=2, routing=routing)
        for routing in ("round_robin", "least_loaded")
    )
    assert mean_ttft(loads) < 0.5 * mean_ttft(turns)


@pytest.mark.parametrize("seed", range(3))
def test_what_was_known_a_while_ago_misleads(seed: int) -> None:
    """Everybody is sent to the one that had the least to do when it was last looked at."""
    random, now, items = Random(seed), 0.0, list[WorkItem]()
    for index in range(600):
        now += random.expovariate(20.0)
        items.append(item(index, now, 8, random.randint(1, 60)))
    fresh, stale, old = (
        mean_ttft(
            simulate(ROOMY, Workload("load", items), STEP, num_replicas=4, routing="least_loaded", load_staleness=each)
        )
        for each in (0.0, 1.0, 4.0)
    )
    assert fresh < stale < old


def test_a_look_lasts_until_it_is_as_old_as_it_may_get() -> None:
    """All have come to the first by the second look, which finds it loaded."""
    workload = Workload("few", [item(index, index / 16, output=40) for index in range(8)])
    where = places(workload, num_replicas=2, routing="least_loaded", load_staleness=0.25)
    assert list(where.values()) == [0, 0, 0, 0, 1, 1, 1, 1]


# -- they share nothing but the clock ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("front_end", [None, FrontEndTimes(gateway_time_per_request=0.004)], ids=["none", "front end"])
def test_in_turn_is_each_alone(front_end: FrontEndTimes | None, jumps: bool) -> None:
    """T47: three replicas that take turns are three runs of every third request, bit for bit."""
    workload = crowd(47)
    run = simulate(small(), workload, DECIMAL, jumps=jumps, front_end=front_end, num_replicas=3)
    together = {record.request_id: record for record in run.records}
    shift = 0
    for first in range(3):
        third = Workload("third", workload.items[first::3])
        alone = simulate(small(), third, DECIMAL, front_end=front_end)
        for record in alone.records:
            spans = tuple((step + shift, num) for step, num in record.token_spans)
            assert together[record.request_id] == replace(record, token_spans=spans)
        shift += len(alone.step_ends)
    assert len(run.step_ends) == shift


def test_figures_of_several_replicas_are_those_of_all_their_requests() -> None:
    workload = crowd(48)
    run = simulate(small(), workload, DECIMAL, num_replicas=3)
    parts = [simulate(small(), Workload("third", workload.items[first::3]), DECIMAL) for first in range(3)]
    whole, summaries = run.summary, [part.summary for part in parts]
    assert whole.num_steps == sum(each.num_steps for each in summaries)
    assert whole.itl.num == sum(each.itl.num for each in summaries)
    assert whole.itl.mean * whole.itl.num == pytest.approx(sum(each.itl.mean * each.itl.num for each in summaries))
    assert whole.busy_time == pytest.approx(sum(each.busy_time for each in summaries))


@pytest.mark.parametrize("routing", ROUTING)
def test_each_replica_writes_a_journal_that_replays(routing: str) -> None:
    journals: list[list[str]] = [[], [], []]
    simulate(small(), crowd(49, impatient=0.3), DECIMAL, [lines.append for lines in journals],
             front_end=FrontEndTimes(), num_replicas=3, routing=routing)  # fmt: skip
    for lines in journals:
        outcome = replay(lines, build)
        assert outcome.divergence is None and outcome.num_decisions > 50


# -- jumps -------------------------------------------------------------------------------------------------------------

WORKLOADS = {"open": crowd(50), "impatient": crowd(51, impatient=0.3), "closed": users(12, 6)}
FRONTS = {
    "none": None,
    "front end": FrontEndTimes(client_link_time=0.003),
    "bounded": FrontEndTimes(max_concurrency=9, num_api_servers=2),
}


@pytest.mark.parametrize("cost", [STEP, DECIMAL], ids=["dyadic", "decimal"])  # with equal steps, replicas end as one
@pytest.mark.parametrize("routing", ROUTING)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("front_end", FRONTS.values(), ids=FRONTS)
def test_many_steps_at_once_are_many_steps_everywhere(
    front_end: FrontEndTimes | None, workload: Workload, routing: str, cost: AffineCost
) -> None:
    jumped, stepped = (
        simulate(small(), workload, cost, jumps=jumps, front_end=front_end, num_replicas=3, routing=routing,
                 load_staleness=0.05)
        for jumps in (True, False)
    )  # fmt: skip
    if workload is WORKLOADS["open"] and front_end is not FRONTS["bounded"]:
        assert jumped.num_plans < 0.9 * stepped.num_plans
    assert (jumped.records, jumped.step_ends) == (stepped.records, stepped.step_ends)
    assert jumped.clients == stepped.clients
    if jumped.deliveries is not None and stepped.deliveries is not None:
        assert jumped.deliveries.gaps().tolist() == stepped.deliveries.gaps().tolist()


def test_the_steps_of_others_do_not_end_a_jump_where_nothing_follows_from_answers() -> None:
    workload = Workload("few", [item(index, output=100, prompt=8 + index) for index in range(4)])
    run = simulate(ROOMY, workload, DECIMAL, num_replicas=4)
    assert run.num_plans < 20 < len(run.step_ends)


@pytest.mark.parametrize("seed", range(20))
def test_a_moment_is_met_to_the_last_bit(seed: int) -> None:
    """Now and a delay, added and rounded, may miss it."""
    random, env, seen = Random(seed), simpy.Environment(), list[float]()
    times = [random.uniform(1.0, 2.0) * 4.0**power for power in range(-12, 12)]

    def process() -> Iterator[simpy.Event]:
        for time in times:
            yield Moment(env, time)
            seen.append(env.now)

    env.process(process())
    env.run()
    assert seen == times


def test_the_next_event_besides_steps_is_found_in_any_heap() -> None:
    random = Random(0)
    for _ in range(200):
        env, times = simpy.Environment(), list[float]()
        for _ in range(random.randrange(12)):
            time = random.randrange(20) / 4
            if random.random() < 0.6:
                Late(env, time, rank=random.randrange(4))
            else:
                Moment(env, time)
                times.append(time)
        assert next_besides_steps(env) == min(times, default=float("inf"))


# -- one instant, one seed ---------------------------------------------------------------------------------------------


def test_replicas_that_end_a_step_together_go_by_their_index() -> None:
    """All four send the same work at the same time; the records of an instant are in the order of the replicas."""
    workload = Workload("few", [item(index, output=5) for index in range(4)])
    for jumps in (True, False):
        run = simulate(small(), workload, STEP, jumps=jumps, num_replicas=4)
        assert [record.request_id for record in run.records] == ["0", "1", "2", "3"]
        assert {record.finish_time for record in run.records} == {5 / 32}


def test_a_router_hears_of_what_ends_at_its_instant_only_afterwards() -> None:
    """Order at one instant: arrivals come before the ends of steps, so that a place about to be free is still taken."""
    workload = Workload("few", [item("a", output=4), item("b", output=40), item("c", arrival=4 / 32)])
    where = places(workload, num_replicas=2, routing="least_loaded")
    assert where["c"] == 0, "a tie"
    later = Workload("few", [*workload.items[:1], item("b", output=3), item("c", arrival=4 / 32)])
    assert places(later, num_replicas=2, routing="least_loaded")["c"] == 1


PROGRAM = """
from tests.sim.test_cluster import DECIMAL, FRONTS, crowd, simulate, small, users
for workload in (crowd(51, impatient=0.3), users(12, 6)):
    journals = [[], [], []]
    run = simulate(small(scheduling="priority"), workload, DECIMAL, [lines.append for lines in journals],
                   front_end=FRONTS["bounded"], num_replicas=3, routing="least_loaded")
    print(run.clients, list(run.step_ends), run.deliveries.gaps().tolist(), *journals, sep="\\n")
"""


def test_output_does_not_hang_on_the_hash_seed() -> None:
    outputs = [
        subprocess.run([sys.executable, "-c", PROGRAM], cwd=REPOSITORY, env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, check=True).stdout
        for seed in ("0", "1", "31337")
    ]  # fmt: skip
    assert len(outputs[0]) > 10_000
    assert outputs[0] == outputs[1] == outputs[2]


# -- routing by name, by cache, by chance --------------------------------------------------------------------------


def asks(name: str, tenant: str = "", session: str = "", content: Sequence[int] | None = None, **kw: Any) -> WorkItem:
    asked = item(name, **kw)
    prompt = asked.request.prompt if content is None else ContentPrompt(len(content), tuple(content), 1)
    context = Context(tenant=tenant, session=session)
    return replace(asked, request=replace(asked.request, prompt=prompt, context=context))


def choices(routing: str, requests: Sequence[WorkItem], loads: Sequence[int]) -> list[int]:
    """Where a policy sends each, with so many requests at each replica whatever it does."""
    policy, replicas = make("routing", routing), [ReplicaLoad(load, 0, 0) for load in loads]
    return [policy.choose_replica(each.request, replicas, 0.0) for each in requests]


def test_random_spreads_evenly_by_the_requests_own_name() -> None:
    requests = [item(index) for index in range(3000)]
    found = choices("random", requests, [0, 0, 0])
    assert found == choices("random", requests[::-1], [9, 0, 0])[::-1], "neither order nor load matters"
    assert all(abs(found.count(index) - 1000) < 104 for index in range(3)), "4 standard deviations"
    assert found != choices("random,seed=1", requests, [0, 0, 0])


def test_a_session_stays_where_it_is_and_few_move_when_a_replica_comes() -> None:
    requests = [asks(str(index), session=f"s{index % 300}") for index in range(600)]
    before, after = (choices("consistent_hash", requests, [0] * num) for num in (4, 5))
    assert before[:300] == before[300:]
    moved = sum(a != b for a, b in zip(before[:300], after[:300], strict=True))
    assert 30 < moved < 100, "about a fifth, those that the newcomer takes"
    assert all(b == 4 for a, b in zip(before, after, strict=True) if a != b)


def test_no_replica_is_filled_beyond_its_bound_however_popular_a_session_is() -> None:
    """With factor 1.25, 40 requests of one session over 4 replicas: at most ceil(1.25 * 40 / 4) = 13 each."""
    policy, loads = make("routing", "consistent_hash"), [0, 0, 0, 0]
    for index in range(40):
        replicas = [ReplicaLoad(load, 0, 0) for load in loads]
        loads[policy.choose_replica(asks(str(index), session="hot").request, replicas, 0.0)] += 1
    assert max(loads) == 13 and sum(loads) == 40


def test_requests_without_a_session_are_spread_by_their_own_names() -> None:
    found = choices("consistent_hash", [item(index) for index in range(400)], [0] * 4)
    assert min(found.count(index) for index in range(4)) > 40
    same = choices("consistent_hash,by=tenant", [asks(str(i), tenant="acme") for i in range(9)], [0] * 4)
    assert len(set(same)) == 1


def test_a_tenant_is_pinned_to_its_replica_whatever_the_load() -> None:
    requests = [asks(str(index), tenant=tenant) for index, tenant in enumerate("abacbaca")]
    assert choices("pinned", requests, [50, 0, 0]) == [0, 1, 0, 2, 1, 0, 2, 0]
    assert choices("pinned", [asks("1", tenant=t) for t in "abcd"], [0, 0, 0]) == [0, 1, 2, 0]


def test_a_tenant_for_whom_no_dedicated_replica_is_left_is_an_error() -> None:
    with pytest.raises(ValueError, match="tenant 'd' finds each of 3 replicas dedicated to another: add replicas"):
        choices("pinned,exclusive=true", [asks("1", tenant=t) for t in "abcd"], [0, 0, 0])


def test_dedicated_replicas_are_servers_of_their_own() -> None:
    """T47, S21: three tenants on three replicas, and each alone on one: the same journals, line by line."""
    random = Random(47)
    items = [
        asks(str(index), tenant=random.choice("abc"), content=[random.randrange(2) for _ in range(24)],
             arrival=index / 16, output=random.randint(1, 20))
        for index in range(90)
    ]  # fmt: skip
    tenants = list(dict.fromkeys(each.request.context.tenant for each in items))
    together: list[list[str]] = [[], [], []]
    simulate(small(), Workload("all", items), DECIMAL, [lines.append for lines in together],
             jumps=False, num_replicas=3, routing="pinned,exclusive=true")  # fmt: skip
    for tenant, journal in zip(tenants, together, strict=True):
        alone: list[str] = []
        own = [each for each in items if each.request.context.tenant == tenant]
        simulate(small(), Workload("own", own), DECIMAL, alone.append, jumps=False)
        assert journal == alone


FAMILIES = [[family * 100 + position for position in range(32)] for family in range(2)]


def in_families(num: int, seed: int = 1) -> Workload:
    """Two prefixes of four blocks, drawn at random, so that going round sends each to both replicas."""
    random = Random(seed)
    return Workload("families", [
        asks(str(index), content=[*random.choice(FAMILIES), 1000 + index], arrival=index / 2, output=2)
        for index in range(num)
    ])  # fmt: skip


def hit_tokens(routing: str, workload: Workload, **how: Any) -> int:
    run = simulate(small(), workload, STEP, num_replicas=2, routing=routing, **how)
    return sum(record.num_cached_tokens for record in run.records)


def test_prefix_aware_sends_a_prompt_where_its_prefix_is() -> None:
    """Forty prompts of two families over two replicas: each prefix is computed once, not once a replica."""
    workload = in_families(40)
    assert hit_tokens("prefix_aware", workload) == 38 * 32
    assert hit_tokens("round_robin", workload) == 36 * 32
    assert hit_tokens("prefix_aware,weight=0", workload) == 38 * 32, "one replica has no load at all times"


def test_a_stale_index_sends_prompts_where_their_prefix_is_not_known_to_be() -> None:
    """One replica is busy when the second prompt comes: a fresh index sends it after its prefix all the same."""
    items = [
        asks("first", content=[*FAMILIES[0], 1], output=40),
        asks("second", content=[*FAMILIES[0], 2], arrival=0.5),
    ]
    workload = Workload("two", items)
    assert hit_tokens("prefix_aware,weight=2", workload) == 32
    assert hit_tokens("prefix_aware,weight=2,index_staleness=60", workload) == 0
    assert hit_tokens("prefix_aware,weight=2,index_staleness=0.4", workload) == 32


def test_load_outweighs_a_prefix_when_it_must() -> None:
    policy = make("routing", "prefix_aware,weight=2")
    request = item("a", prompt=40).request

    def chosen(matched: int, load: int) -> int:
        replicas = [ReplicaLoad(1, 0, load, num_matched_tokens=matched), ReplicaLoad(0, 0, 0)]
        return int(policy.choose_replica(request, replicas, 0.0))

    assert [chosen(32, 63), chosen(32, 64), chosen(32, 65), chosen(0, 0)] == [0, 1, 1, 1]


def test_the_index_asks_for_keys_as_the_replicas_would() -> None:
    """Of another tenant's prefix the router knows nothing: it does not send by what it must not tell."""
    for isolation, known in (("global", 32), ("tenant", 0), ("no_reuse", 0)):
        engine = build(small(isolation=isolation))
        first = asks("first", tenant="acme", content=[*FAMILIES[0], 1]).request
        engine.add(first, 0.0)
        engine.schedule(0.0)
        other = asks("other", tenant="globex", content=[*FAMILIES[0], 2]).request
        assert CacheIndex([engine], 0.0).matched_tokens(other, 0.0) == [known]
        own = CacheIndex([engine], 0.0).matched_tokens(first, 0.0)
        assert own == [0 if isolation == "no_reuse" else 32]


# -- what makes no sense -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_replicas": 0}, r"num_replicas \(0\) must be at least 1"),
        ({"load_staleness": -1.0}, r"load_staleness \(-1.0\) must be a finite number of seconds, 0 or more"),
        ({"routing": "rr"}, "unknown routing policy 'rr'; known: consistent_hash, least_loaded"),
        ({"routing": "prefix_aware,weight=-1"}, r"weight \(-1.0\) must be finite, 0 or more"),
        ({"routing": "prefix_aware,index_staleness=inf"}, r"index_staleness \(inf\) must be finite, 0 or more"),
        ({"routing": "consistent_hash,by=age"}, r"by \('age'\) must be one of: session, user, tenant, application"),
        ({"routing": "consistent_hash,load_factor=1"}, r"load_factor \(1.0\) must be finite and above 1"),
        ({"routing": "consistent_hash,points=0"}, r"points \(0\) must be at least 1"),
        ({"routing": "least_loaded,by=age"}, r"by \('age'\) must be one of: requests, tokens"),
        ({"num_replicas": 2, "journal": [print]}, "1 journals for 2 replicas: each writes one of its own"),
        ({"num_replicas": 2, "journal": print}, "1 journals for 2 replicas: each writes one of its own"),
    ],
)
def test_clusters_that_make_no_sense_are_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate(small(), Workload("one", [item("a")]), STEP, **how)


def test_a_router_must_choose_one_of_the_replicas() -> None:
    class Lost:
        def choose_replica(self, request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
            return len(replicas)

    front_end = NoFrontEnd(lambda index, record: None, lambda record: None)
    cluster = Cluster(simpy.Environment(), [build(small())], STEP, Lost(), front_end)
    front_end.connect(cluster)
    with pytest.raises(ValueError, match="a routing policy chose replica 1; there are 1"):
        front_end.send(item("a"))


def test_turns_are_even() -> None:
    policy, loads = make("routing", "round_robin"), [ReplicaLoad(9, 9, 9), ReplicaLoad(0, 0, 0), ReplicaLoad(1, 0, 1)]
    chosen = Counter(policy.choose_replica(item(i).request, loads, float(i)) for i in range(30))
    assert chosen == {0: 10, 1: 10, 2: 10}
    assert np.ptp(list(chosen.values())) == 0

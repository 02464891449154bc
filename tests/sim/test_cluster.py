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
from policies.prompt import LengthPrompt
from policies.types import FinishReason, Request
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
ROUTING = ("round_robin", "least_loaded", "least_loaded,by=tokens")


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


# -- what makes no sense -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_replicas": 0}, r"num_replicas \(0\) must be at least 1"),
        ({"load_staleness": -1.0}, r"load_staleness \(-1.0\) must be a finite number of seconds, 0 or more"),
        ({"routing": "rr"}, "unknown routing policy 'rr'; known: least_loaded, round_robin"),
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

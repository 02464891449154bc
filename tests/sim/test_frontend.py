"""The front end: what clients see, hop by hop, and the laws that every queue keeps. Times are powers of two, so that
sums are exact, unless the very bits are compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalogue import BATCHING
from policies.config import EngineConfig
from policies.prompt import LengthPrompt
from policies.types import FinishReason, Request, RequestRecord
from sim.cost import AffineCost, DatasheetCost, StepCost, StepWork
from sim.frontend import FrontEnd, FrontEndTimes
from sim.hardware import device
from sim.models import model
from sim.simulate import Run, Simulation, simulate
from sim.stream import StreamLoop, merged
from sim.visit import ClientRecord
from sim.workload.sessions import FollowUp, Sessions
from sim.workload.workload import WorkItem, Workload

MS = 1 / 1024  # nearly
TIMES = FrontEndTimes(
    client_link_time=2 * MS,
    gateway_time_per_request=MS,
    server_link_time=MS / 2,
    api_time_per_request=4 * MS,
    tokenise_time_per_request=MS,
    tokenise_time_per_token=MS / 16,
    engine_link_time=MS / 4,
    stream_time_per_request=MS,
    stream_time_per_token=MS / 8,
)
STEP = AffineCost(per_step=1 / 32)
DYADIC = AffineCost(per_step=1 / 32, per_token=1 / 1024, per_request=1 / 512)
DECIMAL = AffineCost(per_step=0.031, per_token=0.0007, per_request=0.0013)
DATASHEET = DatasheetCost(model("llama-3-8b"), device("h100"))


def item(
    name: object, arrival: float = 0.0, prompt: int = 8, output: int = 4, patience: float | None = None
) -> WorkItem:
    return WorkItem(Request(str(name), arrival, LengthPrompt(prompt), max_tokens=1024), output, patience)


def small(**settings: Any) -> EngineConfig:
    """Memory for three or four requests, so that they preempt each other."""
    sizes = {"num_blocks": 32, "block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 128}
    return EngineConfig(**{**sizes, **settings})


def crowd(seed: int, num: int = 60, span: float = 8.0, impatient: float = 0.0, tick: float = 1 / 128) -> Workload:
    """More than a small engine can take at once; a share of the clients gives up within 255 ticks."""
    random = Random(seed)
    arrivals = sorted(random.randrange(int(64 * span)) / 64 for _ in range(num))
    return Workload("crowd", [
        item(index, arrival, random.randint(1, 60), random.randint(1, 40),
             random.randrange(1, 256) * tick if random.random() < impatient else None)
        for index, arrival in enumerate(arrivals)
    ])  # fmt: skip


def alone(*items: WorkItem, times: FrontEndTimes = TIMES, **how: Any) -> list[ClientRecord]:
    """Clients of a small engine whose steps take 1/32 s."""
    return list(simulate(small(), Workload("few", items), STEP, front_end=times, **how).clients)


def seen(client: ClientRecord) -> list[float | None]:
    """All that a client was told, and when."""
    return [getattr(client, each.name) for each in fields(client) if each.name != "record"]


# -- one request alone -------------------------------------------------------------------------------------------------


def test_every_stage_of_the_way_is_stamped() -> None:
    (client,) = alone(item("a", arrival=1.0, prompt=8, output=3))
    gateway = 1.0 + 2 * MS
    api = gateway + MS + MS / 2
    engine = api + 4 * MS + MS + 8 * MS / 16 + MS / 4
    assert (client.gateway_in_time, client.gateway_out_time) == (gateway, gateway + MS)
    assert (client.api_in_time, client.api_out_time, client.tokenised_time) == (api, api + 4 * MS, engine - MS / 4)
    assert (client.added_time, client.record.first_scheduled_time) == (engine, engine)
    back = MS / 4 + MS / 2 + 2 * MS
    assert client.first_token_time == engine + 1 / 32 + back + MS + MS / 8
    assert client.last_token_time == client.finish_time == engine + 3 / 32 + back + MS / 8
    assert (client.reason, client.num_tokens) == (FinishReason.STOP, 3)
    assert (client.ttft, client.e2e) == (client.first_token_time - 1.0, client.finish_time - 1.0)


@settings(max_examples=60)
@given(
    arrival=st.floats(0, 1e4),
    prompt=st.integers(1, 3000),
    answer=st.integers(1, 100),
    budget=st.sampled_from([128, 512, 8192]),
    jumps=st.booleans(),
)
def test_at_no_load_latencies_are_the_sums_of_their_parts(
    arrival: float, prompt: int, answer: int, budget: int, jumps: bool
) -> None:
    """T20 with the front end, to the last bit: parts are added up in the order of time."""
    times = FrontEndTimes(client_link_time=0.0123)
    now = arrival + times.client_link_time + times.gateway_time_per_request + times.server_link_time
    now = now + times.api_time_per_request
    now = now + (times.tokenise_time_per_request + times.tokenise_time_per_token * prompt) + times.engine_link_time
    tokens, free = list[float](), 0.0
    for end in step_ends(now, prompt, answer, budget):
        free = max(end + times.engine_link_time, free)
        free += times.stream_time_per_token + (0.0 if tokens else times.stream_time_per_request)
        tokens.append(free + times.server_link_time + times.client_link_time)
    config = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=1)
    run = simulate(config, Workload("one", [item("a", arrival, prompt, answer)]), DATASHEET, jumps=jumps,
                   front_end=times)  # fmt: skip
    (client,) = run.clients
    assert (client.first_token_time, client.finish_time) == (tokens[0], tokens[-1])
    assert run.deliveries is not None and run.deliveries.times().tolist() == tokens


def step_ends(now: float, prompt: int, answer: int, budget: int) -> Iterator[float]:
    """Of the steps that give the tokens of a request that nobody disturbs; the first looks for its prefix, in vain."""
    start = 0
    while start < prompt:
        num = min(budget, prompt - start)
        end = start + num
        if num == 1:
            work = StepWork(1, 1, int(end == prompt), 1, end)
        else:
            work = StepWork(num, 1, int(end == prompt), 0, 0, 1, num * (2 * start + num + 1), end)
        if not start:  # it enters: its blocks are hashed and looked up
            work = work._replace(num_blocks_hashed=prompt // 16, num_lookups=1)
        if not start:
            work = work._replace(num_blocks_hashed=prompt // EngineConfig().block_size, num_lookups=1)
        now += DATASHEET.host_time(work) + DATASHEET.device_time(work)
        start = end
    yield now
    for j in range(1, answer):
        work = StepWork(1, 1, 1, 1, prompt + j)
        now += DATASHEET.host_time(work) + DATASHEET.device_time(work)
        yield now


def test_a_staircase_of_prompts_that_come_at_once() -> None:
    """32 prompts of 1,024 tokens, two a step of 442 ms: the last is answered after 16 steps, 7.07 s."""
    config = EngineConfig(num_blocks=4096, max_num_batched_tokens=2048)
    prompts = Workload("wave", [item(index, prompt=1024, output=1) for index in range(32)])
    cost = AffineCost(per_step=0.442)
    clients = simulate(config, prompts, cost, front_end=FrontEndTimes.off()).clients
    counts = Counter(round(client.ttft / 0.442, 9) for client in clients if client.ttft is not None)
    assert counts == {step: 2 for step in range(1, 17)}
    assert max(client.ttft or 0.0 for client in clients) == pytest.approx(7.072)

    times = FrontEndTimes()
    clients = simulate(config, prompts, cost, front_end=times).clients
    # The first prompt has a step to itself, while the others are still tokenised one by one.
    first = sum((times.gateway_time_per_request, times.server_link_time, times.api_time_per_request,
                 times.tokenise_time(prompts.items[0].request), times.engine_link_time))  # fmt: skip
    back = times.engine_link_time + times.server_link_time + times.stream_time_per_request + times.stream_time_per_token
    assert max(client.ttft or 0.0 for client in clients) == pytest.approx(first + 17 * 0.442 + back)


# -- no front end, or one that takes no time ---------------------------------------------------------------------------


@pytest.mark.parametrize("async_depth", [1, 2])
@pytest.mark.parametrize("batching", BATCHING)
def test_a_front_end_that_takes_no_time_is_none(batching: str, async_depth: int) -> None:
    config, workload = small(batching=batching, async_depth=async_depth), crowd(1, impatient=0.3)
    none, off = (simulate(config, workload, DECIMAL, front_end=times) for times in (None, FrontEndTimes.off()))
    assert (none.records, none.step_ends) == (off.records, off.step_ends)
    assert Counter(record.reason for record in none.records)[FinishReason.ABORT] > 5
    assert not none.clients and len(off.clients) == len(none.records)


def test_a_front_end_that_takes_no_time_is_none_in_a_closed_loop() -> None:
    none, off = (simulate(small(), users(4, 5), DECIMAL, front_end=times) for times in (None, FrontEndTimes.off()))
    assert (none.records, none.step_ends) == (off.records, off.step_ends)


# -- jumps -------------------------------------------------------------------------------------------------------------

LOOPS = {"open": {}, "two API servers": {"num_api_servers": 2}, "bounded": {"max_concurrency": 5}}


@pytest.mark.parametrize("cost", [DECIMAL, DATASHEET], ids=["decimal", "datasheet"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("batching", BATCHING)
def test_many_steps_at_once_are_many_steps_to_clients(batching: str, loop: dict[str, int], cost: StepCost) -> None:
    """Not a bit of a time differs, though some leave in the middle of a jump."""
    workload = crowd(2, span=0.5 if cost is DATASHEET else 8.0, impatient=0.3, tick=0.0079)
    times = FrontEndTimes(client_link_time=0.003, **loop)
    config = small(batching=batching, num_blocks=64)
    jumped, stepped = (simulate(config, workload, cost, jumps=jumps, front_end=times) for jumps in (True, False))
    assert jumped.num_plans < stepped.num_plans
    assert jumped.records == stepped.records
    assert list(map(seen, jumped.clients)) == list(map(seen, stepped.clients))
    assert gaps(jumped).tolist() == gaps(stepped).tolist()


def gaps(run: Run) -> np.ndarray[Any, np.dtype[np.float64]]:
    assert run.deliveries is not None
    return run.deliveries.gaps()


# -- the stream loop ---------------------------------------------------------------------------------------------------


def one_by_one(
    batches: Sequence[tuple[list[int], float]], per_request: float, per_token: float
) -> dict[int, list[float]]:
    """Each token as a customer of a server of its own: what the fold stands for."""
    env, left = simpy.Environment(), dict[int, list[float]]()
    server = simpy.Resource(env)

    def token(answer: int, arrival: float) -> Iterator[simpy.Event]:
        yield env.timeout(arrival)
        with server.request() as turn:
            yield turn
            yield env.timeout(per_token + (0.0 if answer in left else per_request))
            left.setdefault(answer, []).append(env.now)

    for answers, arrival in batches:
        for answer in answers:
            env.process(token(answer, arrival))
    env.run()
    return left


@given(seed=st.integers(0, 10_000))
def test_the_fold_over_steps_is_a_queue_of_tokens(seed: int) -> None:
    random, loop = Random(seed), StreamLoop(MS, MS / 4)
    batches, arrival, known = list[tuple[list[int], float]](), 0.0, set[int]()
    for _ in range(random.randint(1, 12)):
        answers = random.sample(range(8), random.randint(1, 8))
        for answer in set(answers) - known:
            loop.open(answer)
        repeat = 1 if set(answers) - known else random.randint(1, 4)
        arrivals = [arrival := arrival + random.randint(0, 12) * MS / 4 for _ in range(repeat)]
        loop.send(answers, arrivals)
        batches += [(answers, each) for each in arrivals]
        known |= set(answers)
    expected = one_by_one(batches, MS, MS / 4)
    deliveries = merged([loop.deliveries()])
    found: dict[int, list[float]] = {}
    for run, answer in enumerate(deliveries.answers.tolist()):
        found.setdefault(answer, []).extend(deliveries.times(slice(run, run + 1)).tolist())
    assert found == expected
    assert sorted(deliveries.gaps()) == sorted(b - a for each in expected.values() for a, b in pairwise(each))
    for answer in batches[-1][0]:
        assert loop.sent_at(answer) == expected[answer][-1]


def test_an_answer_that_is_given_whole_comes_whole() -> None:
    run = simulate(small(batching="static,group_size=2"), Workload("two", [item("a", output=2), item("b", output=5)]),
                   STEP, front_end=TIMES)  # fmt: skip
    short, long = run.clients
    done = run.step_ends[-1] + MS / 4
    assert short.first_token_time == short.finish_time == done + (2 * MS / 8 + MS) + MS / 2 + 2 * MS
    assert long.finish_time - short.finish_time == 5 * MS / 8 + MS
    assert (short.num_tokens, long.num_tokens, len(gaps(run))) == (2, 5, 0)


def test_another_api_server_takes_every_other_request_and_its_tokens() -> None:
    together = [item(index, output=8) for index in range(8)]
    one, two = (alone(*together, times=replace(TIMES, num_api_servers=num)) for num in (1, 2))
    assert max(client.api_out_time or 0.0 for client in one) - one[0].api_in_time == 8 * 4 * MS  # type: ignore[operator]
    assert max(client.api_out_time or 0.0 for client in two) - two[0].api_in_time == 4 * 4 * MS  # type: ignore[operator]


# -- giving up ---------------------------------------------------------------------------------------------------------

STAGES = {"gateway": MS / 2, "API loop": 4 * MS, "tokeniser": 9.5 * MS}  # and when to leave, to be dropped there


@pytest.mark.parametrize(("stage", "patience"), STAGES.items())
def test_who_leaves_before_the_engine_has_the_request_costs_it_nothing(stage: str, patience: float) -> None:
    """The second passes the gateway at 3 ms, has the API loop from 7.5 to 11.5 ms, and a tokeniser to 13 ms."""
    first, second = alone(item("a"), item("b", patience=patience))
    assert (second.reason, second.finish_time, second.left_time) == (FinishReason.ABORT, patience, patience)
    assert second.gateway_cancel_time == patience + 2 * MS
    assert second.api_cancel_time == (None if stage == "gateway" else patience + 2.5 * MS)
    assert (second.gateway_out_time is None) == (stage == "gateway")
    assert (second.api_out_time is None) == (stage != "tokeniser")
    assert (second.tokenised_time, second.added_time, second.engine_cancel_time) == (None, None, None)
    assert (second.num_zombie_tokens, second.num_tokens, second.cancel_latency) == (0, 0, None)
    assert (first.reason, second.record.reason) == (FinishReason.STOP, FinishReason.ABORT)


def test_who_leaves_a_running_answer_is_heard_of_hop_by_hop() -> None:
    """Left 1/64 s into the third step: the news takes 2.75 ms, less than the step has left."""
    (stays,) = alone(item("a", output=20))
    begin = stays.added_time
    assert begin is not None
    left = begin + 2 / 32 + 1 / 64
    (leaves,) = alone(item("a", output=20, patience=left))
    hops = (leaves.left_time, leaves.gateway_cancel_time, leaves.api_cancel_time, leaves.engine_cancel_time)
    assert hops == (left, left + 2 * MS, left + 2.5 * MS, left + 2.75 * MS)
    assert leaves.record.finish_time == begin + 3 / 32, "blocks are freed when the step ends"
    assert leaves.cancel_latency == 1 / 64
    assert leaves.num_zombie_tokens == 1, "that of the step in which it left"
    assert leaves.num_tokens == 2


def test_slow_news_lets_the_engine_go_on_for_nobody() -> None:
    """The news takes 1/8 s, four steps; those tokens that the API server had before it knew were sent for nothing."""
    slow = replace(TIMES, server_link_time=1 / 16, engine_link_time=1 / 16)
    (client,) = alone(item("a", output=40, patience=1.0), times=slow)
    assert client.engine_cancel_time == 1.0 + 2 * MS + 1 / 8
    assert client.num_zombie_tokens == math.ceil((client.record.finish_time - 1.0) * 32)
    assert client.num_zombie_tokens <= math.ceil((1 / 8 + 2 * MS) * 32) + 1
    assert client.cancel_latency is not None and client.cancel_latency <= 1 / 8 + 2 * MS + 1 / 32


def test_the_stream_loop_sends_nothing_to_who_is_known_to_have_left() -> None:
    slow = replace(TIMES, engine_link_time=1 / 4)
    workload = Workload("one", [item("a", output=40, patience=1.0)])
    simulation = Simulation(small(), workload, STEP, front_end=slow)
    (client,) = simulation.run().clients
    assert isinstance(simulation.front_end, FrontEnd) and client.api_cancel_time is not None
    ends = simulation.cluster.replicas[0].step_ends
    sent = simulation.front_end.servers[0][0].stream.deliveries().times()
    assert len(sent) == sum(end <= client.api_cancel_time for end in ends) < client.record.num_output_tokens


def test_who_leaves_while_the_last_tokens_are_on_their_way_was_not_answered() -> None:
    (stays,) = alone(item("a"))
    (leaves,) = alone(item("a", patience=stays.finish_time - MS))
    assert (stays.reason, leaves.reason, leaves.record.reason) == (
        FinishReason.STOP,
        FinishReason.ABORT,
        FinishReason.STOP,
    )
    assert (leaves.num_tokens, leaves.engine_cancel_time) == (stays.num_tokens - 1, None)
    (in_time,) = alone(item("a", patience=stays.finish_time))
    assert in_time.reason is FinishReason.STOP


@pytest.mark.parametrize("front_end", [None, FrontEndTimes.off()], ids=["none", "off"])
def test_who_leaves_while_in_the_inbox_comes_and_goes(front_end: FrontEndTimes | None) -> None:
    """A step is under way when it comes, and still when its client leaves."""
    items = [item("a", output=4), item("b", arrival=1 / 128, patience=1 / 128)]
    run = simulate(small(), Workload("two", items), STEP, front_end=front_end)
    left = next(record for record in run.records if record.request_id == "b")
    assert (left.reason, left.finish_time, left.num_output_tokens) == (FinishReason.ABORT, 1 / 32, 0)
    assert run.engine.kv.num_free == run.engine.kv.num_blocks


@pytest.mark.parametrize("async_depth", [1, 2])
@pytest.mark.parametrize("jumps", [True, False])
def test_a_storm_of_cancellations_gives_everything_back(jumps: bool, async_depth: int) -> None:
    """Of 60 that run, 40 leave within a quarter of a second."""
    random, times = Random(53), FrontEndTimes()
    items = [
        item(index, index / 256, random.randint(1, 60), 60, 3.0 + random.randrange(64) / 256 if index % 3 else None)
        for index in range(60)
    ]
    config = EngineConfig(num_blocks=512, block_size=8, max_num_seqs=64, async_depth=async_depth)
    run = simulate(config, Workload("storm", items), DECIMAL, jumps=jumps, front_end=times)
    assert run.engine.kv.num_free == run.engine.kv.num_blocks, "blocks came back"
    assert Counter(client.reason for client in run.clients) == {FinishReason.ABORT: 40, FinishReason.STOP: 20}

    news = times.client_link_time + times.server_link_time + times.engine_link_time
    steps = np.diff(run.step_ends)
    for client in run.clients:
        assert client.num_zombie_tokens <= math.ceil(news / min(steps)) + async_depth
        if client.left_time is not None:
            assert client.cancel_latency is not None and client.cancel_latency <= news + max(steps)
    told = run.summary.cancel_latency
    assert told.num == 40 and 0.0 < told.p50 <= told.p99 <= told.max <= news + max(steps)

    ends = np.array(run.step_ends)[1:]
    before, after = steps[(ends > 2.0) & (ends < 3.0)], steps[(ends > 4.0) & (ends < 5.0)]
    assert max(after) < 0.6 * min(before), "who stays is served faster"


# -- what comes of answers ---------------------------------------------------------------------------------------------


def users(num: int, turns: int, think: float = 0.5, patience: float | None = None) -> Sessions:
    """Each asks again `think` seconds after an answer."""
    random = Random(num)
    first = [item(f"{user}.0", user / 16, random.randint(1, 40), random.randint(1, 20)) for user in range(num)]
    later = [
        FollowUp(item(f"{user}.{turn}", 0.0, random.randint(1, 40), random.randint(1, 20), patience),
                 (f"{user}.{turn - 1}",), think)
        for user in range(num) for turn in range(1, turns)
    ]  # fmt: skip
    return Sessions("users", first, follow_ups=later, goes_on=True)


def test_the_next_turn_comes_a_think_time_after_the_client_has_the_answer() -> None:
    chat = Sessions("chat", [item("a")], follow_ups=[FollowUp(item("b"), ("a",), 0.5)])
    first, second = simulate(small(), chat, STEP, front_end=TIMES).clients
    assert second.arrival_time == first.finish_time + 0.5


def test_who_gave_up_asks_again_without_waiting_for_the_engine() -> None:
    chat = Sessions("chat", [item("a", output=40, patience=0.5)], follow_ups=[FollowUp(item("b"), ("a",), 0.25)],
                    goes_on=True)  # fmt: skip
    for times in (TIMES, None):
        run = simulate(small(), chat, STEP, front_end=times)
        assert {record.request_id: record.arrival_time for record in run.records} == {"a": 0.0, "b": 0.75}


class Told(Workload):
    """Remembers what it was told, and when, by request."""

    def on_outcome(self, record: RequestRecord, now: float) -> Sequence[WorkItem]:
        outcomes.append((record.request_id, record.reason, now))
        return ()


outcomes: list[tuple[str, FinishReason, float]] = []


FRONTS = {"none": None, "off": FrontEndTimes.off(), "on": FrontEndTimes(), "far": FrontEndTimes(server_link_time=0.3)}


@pytest.mark.parametrize("front_end", FRONTS.values(), ids=FRONTS)
def test_a_workload_is_told_once_of_each_request_when_its_client_knows(front_end: FrontEndTimes | None) -> None:
    outcomes.clear()
    workload = Told("told", crowd(3, impatient=0.5).items)
    run = simulate(small(), workload, DECIMAL, front_end=front_end)
    assert Counter(name for name, _, _ in outcomes) == {each.request.request_id: 1 for each in workload.items}
    if run.clients:
        told = [(client.request_id, client.reason, client.finish_time) for client in run.clients]
        assert sorted(told, key=str) == sorted(outcomes, key=str)


def test_a_refusal_and_when_to_try_again_reach_the_client(tmp_path: Path) -> None:
    policy = tmp_path / "closed.py"
    policy.write_text(
        "from policies.types import Reject\n"
        "class Closed:\n"
        "    def decide(self, request, view, now):\n"
        "        return Reject('closed', retry_after=2.5)\n"
    )
    run = simulate(small(admission=f"{policy}:Closed"), Workload("one", [item("a")]), STEP, front_end=TIMES)
    (client,) = run.clients
    assert (client.reason, client.retry_after, client.record.detail) == (FinishReason.REJECTED, 2.5, "closed")
    assert client.added_time is not None
    assert client.finish_time == client.added_time + MS / 4 + MS / 2 + 2 * MS
    assert (client.first_token_time, client.num_tokens) == (None, 0)


def test_a_bounded_gateway_lets_so_many_past_in_order() -> None:
    clients = alone(*[item(index, output=10) for index in range(6)], times=replace(TIMES, max_concurrency=2))
    outs = [client.gateway_out_time or 0.0 for client in clients]
    ends = sorted(client.finish_time - TIMES.client_link_time for client in clients)
    assert outs == sorted(outs)
    assert outs[2:] == [end + TIMES.gateway_time_per_request for end in ends[:4]], (
        "a place is free when an answer is through"
    )


def test_who_is_never_answered_is_named() -> None:
    config = EngineConfig(num_blocks=2, block_size=4, max_model_len=64, refuse_unfittable=False)
    run = simulate(config, Workload("one", [item("a", prompt=40)]), STEP, front_end=TIMES)
    assert (run.unfinished, run.clients) == (("a",), [])


# -- laws --------------------------------------------------------------------------------------------------------------


class Areas:
    """Under the numbers present in each queue, by playing a simulation event by event."""

    def __init__(self, workload: Workload, times: FrontEndTimes, config: EngineConfig, cost: StepCost = DYADIC) -> None:
        self.simulation = Simulation(config, workload, cost, front_end=times)
        front_end = self.simulation.front_end
        assert isinstance(front_end, FrontEnd)
        (api,), (replica,) = front_end.servers[0], self.simulation.cluster.replicas
        self.watched: dict[str, Callable[[], int]] = {
            "loop": lambda: api.loop.count + len(api.loop.queue),
            "tokenisers": lambda: api.tokenisers.count + len(api.tokenisers.queue),
            "engine": lambda: len(list(replica.engine.states)) + len(replica._arrivals),
            "loop busy": lambda: api.loop.count,
        }
        if front_end.gateway is not None:
            gateway = front_end.gateway
            self.watched |= {"gateway": lambda: len(gateway.queue), "past the gateway": lambda: gateway.count}
        self.of = dict.fromkeys(self.watched, 0.0)
        self.run = self._play()

    def _play(self) -> Run:
        env = self.simulation.env
        while env.peek() < math.inf:
            passed = env.peek() - env.now
            if passed:
                for name, count in self.watched.items():
                    self.of[name] += count() * passed
            env.step()
        return self.simulation.outcome()


def between(begin: float | None, *ends: float | None) -> float:
    """From one time to the first of others that was reached; nothing if it never began."""
    return 0.0 if begin is None else next(end for end in ends if end is not None) - begin


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_concurrency", [None, 6])
def test_the_area_under_a_number_is_the_sum_of_sojourns(seed: int, max_concurrency: int | None) -> None:
    """T14, exactly, at every queue on the way, though some leave wherever they are."""
    times = replace(TIMES, gateway_time_per_request=0.0, max_concurrency=max_concurrency, api_time_per_request=64 * MS)
    areas = Areas(crowd(seed, impatient=0.5), times, small())
    clients = areas.run.clients
    assert len(clients) == 60 and sum(client.reason is FinishReason.ABORT for client in clients) > 10
    link = times.engine_link_time
    sums = {
        "loop": sum(between(c.api_in_time, c.api_out_time, c.api_cancel_time) for c in clients),
        "tokenisers": sum(between(c.api_out_time, c.tokenised_time, c.api_cancel_time) for c in clients),
        "engine": sum(c.record.finish_time - c.tokenised_time - link for c in clients if c.tokenised_time is not None),
    }
    if max_concurrency is not None:
        sums["gateway"] = sum(between(c.gateway_in_time, c.gateway_out_time, c.gateway_cancel_time) for c in clients)
        sums["past the gateway"] = sum(
            between(c.gateway_out_time, c.gateway_cancel_time, c.finish_time - times.client_link_time) for c in clients
        )
    assert sums == {name: areas.of[name] for name in sums}


def test_little_holds_at_the_stream_loop() -> None:
    """T14: tokens come when their step has ended, and the area under their number is the sum of their sojourns."""
    times = replace(TIMES, stream_time_per_token=8 * MS)
    run = simulate(small(), crowd(14), DYADIC, front_end=times)
    assert run.deliveries is not None
    back, link = times.server_link_time + times.client_link_time, times.engine_link_time
    leaves = np.sort(run.deliveries.times() - back)
    spans = [span for record in run.records for span in record.token_spans]
    comes = np.sort(np.concatenate([np.array(run.step_ends)[first : first + num] for first, num in spans])) + link
    moments = np.unique(np.concatenate((comes, leaves)))
    present = np.searchsorted(comes, moments, "right") - np.searchsorted(leaves, moments, "right")
    assert present[-1] == 0 and present.max() > 10
    assert (present[:-1] * np.diff(moments)).sum() == leaves.sum() - comes.sum()


def test_arrivals_see_what_time_sees() -> None:
    """T16, roughly: of Poisson arrivals at the API loop, as many find it busy as it is busy: the rate times 4 ms. Its
    queue is M/D/1: who waits, waits by Pollaczek and Khinchine."""
    rng, num, service, load = np.random.default_rng(16), 20_000, 4 * MS, 0.7
    arrivals = np.cumsum(rng.standard_exponential(num)) * service / load
    workload = Workload("poisson", [item(i, float(at), 1, 1) for i, at in enumerate(arrivals)])
    times = FrontEndTimes.off(api_time_per_request=service)
    config = EngineConfig(num_blocks=4096, max_num_seqs=512, enable_prefix_caching=False)
    clients = simulate(config, workload, AffineCost(per_step=MS), front_end=times).clients
    waits = np.array([(c.api_out_time or 0.0) - (c.api_in_time or 0.0) - service for c in clients])
    busy = num * service / (arrivals[-1] - arrivals[0])
    assert (waits > 1e-9).mean() == pytest.approx(busy, rel=0.03)
    assert waits.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)


@pytest.mark.parametrize("think", [0.0, 0.5, 4.0])
def test_in_a_closed_loop_users_are_throughput_times_cycle(think: float) -> None:
    """T17: N = X (R + Z), by the clients' clock. Each user is in one cycle at a time, from first ask to last answer."""
    num, turns = 8, 30
    loop = users(num, turns, think)
    clients = simulate(small(), loop, DYADIC, front_end=TIMES).clients
    assert len(clients) == num * turns
    begins, ends = [0.0] * num, [0.0] * num
    for client in clients:
        user, turn = map(int, client.request_id.split("."))
        begins[user] = client.arrival_time if turn == 0 else begins[user]
        ends[user] = max(ends[user], client.finish_time)
    cycles = sum(client.e2e for client in clients) + num * (turns - 1) * think
    assert cycles == sum(ends) - sum(begins)

    begin, end = max(begins), min(ends)  # all are in the loop
    inside = [client for client in clients if begin <= client.finish_time < end]
    throughput = len(inside) / (end - begin)
    cycle = np.mean([client.e2e for client in inside]) + think
    assert throughput * cycle == pytest.approx(num, rel=0.05)


BOTTLENECKS: dict[str, tuple[dict[str, Any], float]] = {  # and the rate in requests a second that it allows
    "API loop": ({"api_time_per_request": 16 * MS}, 64.0),
    "two API loops": ({"api_time_per_request": 32 * MS, "num_api_servers": 2}, 64.0),
    "tokenisers": ({"tokenise_time_per_token": MS, "num_tokenisers": 2}, 1024 * 2 / (8 + 1)),
    "stream loop": ({"stream_time_per_token": 4 * MS}, 1024 / (1 + 4 * 4)),
}


@pytest.mark.parametrize("name", BOTTLENECKS)
def test_a_backlog_goes_at_the_rate_of_the_slowest_stage(name: str) -> None:
    """T18: never above its bound, and hardly below."""
    changes, bound = BOTTLENECKS[name]
    num = 400
    config = EngineConfig(num_blocks=4096, block_size=16, max_num_seqs=512, enable_prefix_caching=False)
    backlog = Workload("backlog", [item(index) for index in range(num)])
    clients = simulate(config, backlog, AffineCost(per_step=MS), front_end=replace(TIMES, **changes)).clients
    rate = num / max(client.finish_time for client in clients)
    assert 0.97 * bound <= rate <= bound


def test_busy_is_throughput_times_work() -> None:
    """T19, exactly: at the API loop whoever comes when, and at the stream loop of a backlog, which never rests."""
    times = replace(TIMES, api_time_per_request=64 * MS)
    areas = Areas(crowd(19), times, small())
    assert areas.of["loop busy"] == 60 * 64 * MS

    slow = replace(TIMES, stream_time_per_token=64 * MS)
    items = [item(index, 0.0, 1 + index % 7, 1 + index % 5) for index in range(40)]
    run = simulate(small(num_blocks=512), Workload("backlog", items), STEP, front_end=slow)
    num_tokens = sum(each.num_output_tokens for each in items)
    begin = run.step_ends[0] + slow.engine_link_time
    end = max(client.finish_time for client in run.clients) - slow.client_link_time - slow.server_link_time
    assert end - begin == num_tokens * 64 * MS + 40 * MS


# -- what makes no sense -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"api_time_per_request": -1e-3},
            r"api_time_per_request \(-0.001\) must be a finite number of seconds, 0 or more",
        ),
        ({"client_link_time": math.inf}, r"client_link_time \(inf\) must be a finite number"),
        ({"stream_time_per_token": math.nan}, r"stream_time_per_token \(nan\) must be a finite number"),
        ({"num_tokenisers": 0}, r"num_tokenisers \(0\) must be a whole number, at least 1"),
        ({"max_concurrency": 2.5}, r"max_concurrency \(2.5\) must be a whole number, at least 1"),
    ],
)
def test_times_that_make_no_sense_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FrontEndTimes(**wrong)


def test_times_can_be_stored() -> None:
    assert FrontEndTimes(**FrontEndTimes().to_dict()) == FrontEndTimes()
    assert not any(value for name, value in FrontEndTimes.off().to_dict().items() if "_time" in name)

"""Laws that hold for every run, exactly: Little's, the work a step does, and what a request alone must take.

Times and costs are multiples of powers of two, so that sums of floats are exact in whatever order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.config import EngineConfig
from policies.prompt import ContentPrompt, LengthPrompt
from policies.types import FinishReason, Request, RequestRecord
from sim.cost import AffineCost, DatasheetCost, StepCost, StepWork
from sim.hardware import device
from sim.models import model
from sim.simulate import Run, simulate
from sim.workload.generate import from_lengths, generate
from sim.workload.workload import WorkItem, Workload
from tests.theory import cancel, simulate_with
from tests.worlds import request, run_to_end, tiny_engine

AFFINE = AffineCost(per_step=1 / 32, per_token=1 / 1024, per_request=1 / 512)
DATASHEET = DatasheetCost(model("llama-3-8b"), device("h100"), host_time_per_hash=0.0, host_time_per_lookup=0.0)


def crowd(seed: int, num: int = 60, prompt: int = 60, answer: int = 40) -> Workload:
    """More than a small engine can take at once."""
    random = Random(seed)
    arrivals = sorted(random.randrange(64 * 20) / 64 for _ in range(num))
    prompts = [random.randint(1, prompt) for _ in range(num)]
    return from_lengths(arrivals, prompts, [random.randint(1, answer) for _ in range(num)])


def small(**settings: Any) -> EngineConfig:
    """Memory for three or four requests, so that they preempt each other."""
    sizes = {"num_blocks": 32, "block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 128}
    return EngineConfig(**{**sizes, **settings})


# -- Little's law -----------------------------------------------------------------------------------------------------


class Move(NamedTuple):
    """Somebody comes, goes, or changes places."""

    time: float
    waiting: int
    running: int


def moves(journal: Sequence[str]) -> Iterator[Move]:
    """Who was where, from the engine's decisions alone; records tell the same by their own accounts."""
    is_running: dict[str, bool] = {}
    for line in map(json.loads, journal):
        if "add" in line:
            is_running[line["add"]] = False
            yield Move(line["arrival"], 1, 0)
        for name in line.get("preempted", ()):
            is_running[name] = False
            yield Move(line["now"], 1, -1)
        for name, _, _ in line.get("admitted", ()):
            is_running[name] = True
            yield Move(line["now"], -1, 1)
        left = [line["abort"]] if line.get("known") else [name for name, _ in line.get("left", ())]
        for name in left:
            was_running = is_running.pop(name)
            yield Move(line["now"], was_running - 1, -was_running)


def areas(journal: Sequence[str]) -> tuple[float, float]:
    """Under the numbers of waiting and of running requests over time."""
    waiting_area = running_area = now = 0.0
    waiting = running = 0
    for move in sorted(moves(journal), key=lambda move: move.time):
        waiting_area += waiting * (move.time - now)
        running_area += running * (move.time - now)
        now, waiting, running = move.time, waiting + move.waiting, running + move.running
    assert waiting == running == 0, "the run did not drain"
    return waiting_area, running_area


def waited(record: RequestRecord) -> float:
    return record.queue_time + record.requeue_time


def ran(record: RequestRecord) -> float:
    return record.prefill_time + record.decode_time + record.stall_time


@pytest.mark.parametrize("async_depth", [1, 2])
@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "stall_free,chunk_size=16", "static,max_wait=0.5"])
@pytest.mark.parametrize("allocation", ["paged", "paged_full_prompt", "paged_reserve_output"])
def test_the_area_under_a_number_is_the_sum_of_sojourns(batching: str, allocation: str, async_depth: int) -> None:
    """T14: waiting, running and both together, though some are preempted and a few are cancelled wherever they are."""
    workload, journal = crowd(seed=14), list[str]()
    random = Random(14)
    cancellations = [
        (item.request.arrival_time + random.randrange(1, 128) / 128, item.request.request_id)
        for item in workload.items[::7]
    ]
    run = simulate_with(
        small(batching=batching, allocation=allocation, async_depth=async_depth),
        workload,
        AFFINE,
        [cancel(time, name) for time, name in sorted(cancellations)],
        journal.append,
    )
    assert len(run.records) == len(workload.items)
    assert any(record.reason is FinishReason.ABORT for record in run.records)
    assert allocation == "paged_reserve_output" or any(record.num_preemptions for record in run.records)
    waiting, running = areas(journal)
    assert waiting == sum(map(waited, run.records))
    assert running == sum(map(ran, run.records))
    assert waiting + running == sum(record.finish_time - record.arrival_time for record in run.records)


def served(journal: Sequence[str]) -> float:
    """Seconds of steps, once for each request that had a part in them."""
    lines, seconds = list(map(json.loads, journal)), 0.0
    for plan, update in zip([each for each in lines if "plan" in each], [each for each in lines if "update" in each],
                            strict=True):  # fmt: skip
        assert plan["plan"] == update["update"]
        seconds += len(plan["chunks"]) * (update["now"] - plan["now"])
    return seconds


@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "stall_free,chunk_size=16"])
@pytest.mark.parametrize("allocation", ["paged", "paged_full_prompt", "paged_reserve_output"])
def test_prefill_and_decode_are_the_steps_a_request_had_a_part_in(batching: str, allocation: str) -> None:
    """T24: the rest of its time among the running is stall."""
    journal = list[str]()
    run = simulate(small(batching=batching, allocation=allocation), crowd(seed=24), AFFINE, journal.append)
    assert batching != "prefill_first" or sum(record.stall_time for record in run.records) > 0
    assert served(journal) == sum(record.prefill_time + record.decode_time for record in run.records)


def test_means_of_a_run_are_the_areas_over_its_busy_time() -> None:
    """L = rate * W for the running: the summary counts heads, the records count seconds."""
    run = simulate(small(), crowd(seed=15), AFFINE)
    assert run.summary.mean_running * run.summary.busy_time == pytest.approx(sum(map(ran, run.records)), rel=1e-12)


# -- Little's law for memory ------------------------------------------------------------------------------------------


def held_block_seconds(run: Run) -> float:
    """Each sample covers one step."""
    pairs = zip(run.samples, run.step_ends, strict=True)
    return sum(sample.num_held_blocks * (end - sample.time) for sample, end in pairs)


def block_steps(prompt: int, answer: int, block_size: int, chunk: int) -> int:
    """Blocks held in each step, added up, by a request that nobody disturbs.

    First the prompt by chunks, then one token a step; the KV of the last token is never computed.
    """
    ends = [*range(chunk, prompt, chunk), *range(prompt, prompt + answer)]
    return sum(-(-end // block_size) for end in ends)


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_memory_held_is_the_sum_of_what_each_request_holds(block_size: int, enable_prefix_caching: bool) -> None:
    """T15, exactly for a constant cost and ample memory, block rounding included."""
    config = EngineConfig(
        num_blocks=2**15 // block_size,
        block_size=block_size,
        max_num_batched_tokens=10_000,
        enable_prefix_caching=enable_prefix_caching,
    )
    workload = crowd(seed=16, num=200, prompt=200, answer=100)
    run = simulate(config, workload, AffineCost(per_step=1 / 32), jumps=False)
    sizes = [(item.request.prompt.num_tokens, item.num_output_tokens) for item in workload.items]
    assert held_block_seconds(run) == sum(block_steps(*size, block_size, chunk=10_000) for size in sizes) / 32


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_prompt_in_chunks_holds_no_more_than_it_has_computed(block_size: int) -> None:
    config = EngineConfig(num_blocks=2**15 // block_size, block_size=block_size, max_num_batched_tokens=48,
                          max_num_seqs=1)  # fmt: skip
    run = simulate(config, from_lengths([0.0], [1000], [50]), AffineCost(per_step=1 / 32), jumps=False)
    assert held_block_seconds(run) == block_steps(1000, 50, block_size, chunk=48) / 32


def test_decoding_holds_the_sum_of_its_contexts() -> None:
    """T15 in tokens: p for the prefill, p + j for each j from 1 to d - 1."""
    config = EngineConfig(num_blocks=1024, block_size=1, enable_prefix_caching=False)
    run = simulate(config, from_lengths([0.0], [100], [50]), AffineCost(per_step=1 / 8), jumps=False)
    assert held_block_seconds(run) == (100 + sum(100 + j for j in range(1, 50))) / 8


# -- one request alone ------------------------------------------------------------------------------------------------


def alone(
    cost: StepCost, arrival: float, prompt: int, hit: int, answer: int, budget: int, block_size: int = 16
) -> tuple[float, float]:
    """When the first and the last token of a request come that nobody disturbs: T20, added up in the order of time."""
    now, start = arrival, hit
    while start < prompt:
        num = min(budget, prompt - start)
        samples, end = start + num == prompt, start + num
        if num == 1:
            work = StepWork(1, 1, int(samples), 1, end, 0, 0, 0)
        else:
            work = StepWork(num, 1, int(samples), 0, 0, 1, num * (2 * start + num + 1), end)
        if start == hit:  # it enters: its blocks are hashed and looked up
            work = work._replace(num_blocks_hashed=prompt // block_size, num_lookups=hit // block_size + 1)
        now += cost.host_time(work) + cost.device_time(work)
        start = end
    first = now
    for j in range(1, answer):
        work = StepWork(1, 1, 1, 1, prompt + j)
        now += cost.host_time(work) + cost.device_time(work)
    return first, now


COSTS: dict[str, StepCost] = {
    "affine": AffineCost(per_step=0.0123, per_token=0.00045, per_request=0.0011),
    "datasheet": DATASHEET,
}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@settings(max_examples=60, deadline=None)
@given(
    arrival=st.floats(0, 1e4),
    prompt=st.integers(1, 3000),
    answer=st.integers(1, 200),
    budget=st.sampled_from([1, 7, 128, 512, 8192]),
    jumps=st.booleans(),
)
def test_a_request_alone_takes_its_chunks_and_its_decodes(
    cost: StepCost, arrival: float, prompt: int, answer: int, budget: int, jumps: bool
) -> None:
    """T20 to the last bit, whether steps are taken one by one or many at once."""
    prompt = min(prompt, 100) if budget == 1 else prompt
    config = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=1)
    (record,) = simulate(config, from_lengths([arrival], [prompt], [answer]), cost, jumps=jumps).records
    assert (record.first_token_time, record.finish_time) == alone(cost, arrival, prompt, 0, answer, budget)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 600),
    shared=st.integers(0, 600),
    answer=st.integers(1, 20),
    block_size=st.sampled_from([1, 4, 16]),
    budget=st.sampled_from([16, 100, 8192]),
)
def test_a_hit_spares_whole_blocks_and_never_the_last_token(
    cost: StepCost, prompt: int, shared: int, answer: int, block_size: int, budget: int
) -> None:
    """T20 with a hit h = min(shared // size, (p - 1) // size) * size: prefill begins at h."""
    shared = min(shared, prompt)
    first = Request("first", 0.0, ContentPrompt(prompt, tuple(range(prompt)), 1), max_tokens=1)
    content = (*range(shared), *range(-prompt, -shared))
    second = Request("second", 1000.0, ContentPrompt(prompt, content, 1), max_tokens=answer)
    config = EngineConfig(
        num_blocks=4096, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=1, max_model_len=1024
    )
    run = simulate(config, Workload("two", [WorkItem(first, 1), WorkItem(second, answer)]), cost)
    record = run.records[1]
    hit = min(shared // block_size, (prompt - 1) // block_size) * block_size
    assert record.num_cached_tokens == hit
    ends = alone(cost, 1000.0, prompt, hit, answer, budget, block_size)
    assert (record.first_token_time, record.finish_time) == ends


def test_blocks_are_hashed_and_looked_up_in_the_step_that_lets_a_request_in() -> None:
    """T20 with the time of a lookup: 6 whole blocks in 100 tokens, of which 2 are found and the third is not."""
    requests = [
        Request("first", 0.0, ContentPrompt(100, tuple(range(100)), 1), max_tokens=1),
        Request("second", 1000.0, ContentPrompt(100, (*range(40), *range(-60, 0)), 1), max_tokens=2),
    ]
    workload = Workload("two", [WorkItem(request, request.max_tokens) for request in requests])
    free = simulate(EngineConfig(), workload, DATASHEET).records[1]
    dear = replace(DATASHEET, host_time_per_hash=2.0, host_time_per_lookup=16.0)
    billed = simulate(EngineConfig(), workload, dear).records[1]
    assert billed.prefill_time - free.prefill_time == pytest.approx(6 * 2.0 + 3 * 16.0, rel=1e-12)
    assert billed.decode_time == pytest.approx(free.decode_time, rel=1e-9)


# -- the utilisation law ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "stall_free,chunk_size=48"])
@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
def test_a_backlog_takes_the_time_of_its_tokens_in_whatever_order(batching: str, scheduling: str) -> None:
    """T19: with a cost a token and none a step, all orders that never idle end at the same instant, exactly."""
    random = Random(19)
    items = [
        WorkItem(
            Request(str(index), 0.0, LengthPrompt(random.randint(1, 300)), 200, priority=random.randrange(3)),
            random.randint(1, 200),
        )
        for index in range(100)
    ]
    config = EngineConfig(num_blocks=8192, max_num_seqs=16, max_num_batched_tokens=64, batching=batching,
                          scheduling=scheduling)  # fmt: skip
    run = simulate(config, Workload("backlog", items), AffineCost(per_step=0.0, per_token=1 / 1024))
    num_tokens = sum(item.request.prompt.num_tokens + item.num_output_tokens - 1 for item in items)
    assert run.step_ends[-1] == num_tokens / 1024


# -- the clock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_an_idle_engine_begins_at_the_instant_of_an_arrival(seed: int) -> None:
    """T29, to the last bit: nobody is seen before it arrives, or a bit later, however far apart two arrivals are."""
    random = Random(seed)
    arrivals = [random.uniform(1.0, 2.0) * 4.0**power for power in range(-12, 12)]
    workload = from_lengths(arrivals, [50] * len(arrivals), [3] * len(arrivals))
    run = simulate(EngineConfig(), workload, AffineCost(per_step=1e-9, per_token=1.7e-10))
    assert [record.first_scheduled_time for record in run.records] == arrivals


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_request_ends_when_its_last_step_ends(cost: StepCost) -> None:
    run = simulate(EngineConfig(max_num_seqs=8), generate("chat", num_requests=200, rate=20.0, seed=30), cost)
    assert {record.finish_time for record in run.records} <= set(run.step_ends)
    assert {record.first_token_time for record in run.records} <= set(run.step_ends)


# -- liveness ---------------------------------------------------------------------------------------------------------


def test_a_prompt_too_large_for_what_is_left_does_not_stop_the_decodes() -> None:
    """T27: it is let in by its first chunk, yields for want of memory, and is let in again. The decodes that would
    free memory must come in between."""
    engine = tiny_engine(
        num_blocks=6,
        block_size=2,
        max_num_batched_tokens=6,
        max_num_seqs=2,
        max_model_len=24,
        batching="prefill_first",
        allocation="paged",
        enable_prefix_caching=False,
    )
    engine.add(request("short", prompt=5, max_tokens=6), 0.0)
    engine.add(request("long", prompt=7, max_tokens=5), 0.0)
    assert set(run_to_end(engine)) == {"short", "long"}

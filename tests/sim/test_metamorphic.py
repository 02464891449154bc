"""Changes that must change nothing, or only what is said: whole runs compared with each other, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from policies.catalogue import ALLOCATION, BATCHING, EVICTION, ISOLATION, PREEMPTION, SCHEDULING, build
from policies.config import EngineConfig
from policies.journal import replay
from policies.prompt import ContentPrompt, LengthPrompt, Prompt
from policies.types import Context, FinishReason, Request, RequestRecord
from sim.cost import AffineCost, DatasheetCost, StepCost
from sim.hardware import device
from sim.models import model
from sim.simulate import Run, simulate
from sim.workload.workload import WorkItem, Workload
from tests.theory import Played, cancel, simulate_with

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = 8

DYADIC = AffineCost(per_step=1 / 32, per_token=1 / 1024, per_request=1 / 512)  # sums of these are exact
DECIMAL = AffineCost(per_step=0.031, per_token=0.0007, per_request=0.0013)
DATASHEET = DatasheetCost(model("llama-3-8b"), device("h100"))


def small(**settings: Any) -> EngineConfig:
    """Memory for three or four requests, so that they preempt each other."""
    sizes = {
        "num_blocks": 32,
        "block_size": BLOCK,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 128,
    }
    return EngineConfig(**{**sizes, **settings})


def roomy(**settings: Any) -> EngineConfig:
    """Memory for everybody: nobody is preempted, nothing is evicted. Six at once, so that some wait."""
    return small(**{"num_blocks": 4096, "max_num_seqs": 6, **settings})


def crowd(
    seed: int, num: int = 60, *, unique: bool = False, tenant: Callable[[int], str] = str, span: float = 10.0
) -> Workload:
    """Requests of a few families whose prompts begin alike, unless all are unique; times are multiples of 1/64 s."""
    random = Random(seed)
    arrivals = sorted(random.randrange(int(64 * span)) / 64 for _ in range(num))
    items = []
    for index, arrival in enumerate(arrivals):
        length, answer = random.randint(1, 60), random.randint(1, 40)
        family, num_shared = random.randrange(4), random.randint(0, 6)
        content = tuple(1000 * family + i if i < num_shared else -100 * index - i for i in range(-(-length // BLOCK)))
        prompt: Prompt = LengthPrompt(length) if unique else ContentPrompt(length, content, BLOCK)
        request = Request(str(index), arrival, prompt, max_tokens=60, context=Context(tenant=tenant(index)))
        items.append(WorkItem(request, answer))
    return Workload("crowd", items)


def changed(workload: Workload, change: Callable[[WorkItem], WorkItem]) -> Workload:
    return Workload(workload.name, [change(item) for item in workload.items])


def came_out(run: Run | Played) -> tuple[list[RequestRecord], list[float]]:
    """All that users can tell: who got what and when, and when each step ended."""
    return run.records, list(run.step_ends)


def num_preempted(run: Run | Played) -> int:
    return sum(record.num_preemptions > 0 for record in run.records)


# -- sharing ----------------------------------------------------------------------------------------------------------

SHARING = [name for name in ALLOCATION if name != "contiguous_max_len"]


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("allocation", SHARING)
def test_a_cache_without_common_prefixes_is_no_cache(batching: str, allocation: str) -> None:
    """T37."""
    workload = crowd(37, unique=True)
    on, off = (
        simulate(roomy(batching=batching, allocation=allocation, enable_prefix_caching=caching), workload, DECIMAL)
        for caching in (True, False)
    )
    assert came_out(on) == came_out(off)


@pytest.mark.parametrize("batching", BATCHING)
def test_a_salt_for_each_request_is_no_cache(batching: str) -> None:
    """T38."""
    workload = crowd(38, tenant=str)
    salted, nobody, off, shared = (
        simulate(roomy(batching=batching, **settings), workload, DECIMAL)
        for settings in (
            {"isolation": "tenant"},
            {"isolation": "no_reuse"},
            {"enable_prefix_caching": False},
            {"isolation": "global"},
        )
    )
    assert came_out(salted) == came_out(off)
    assert came_out(nobody) == came_out(off)
    assert shared.summary.num_cached_tokens > 0, "there was nothing to salt"


@pytest.mark.parametrize("batching", BATCHING)
def test_one_salt_for_all_is_none(batching: str) -> None:
    """T38, preemptions included."""
    workload = crowd(39, tenant=lambda index: "everybody")
    salted, shared = (
        simulate(small(batching=batching, isolation=isolation), workload, DECIMAL) for isolation in ("tenant", "global")
    )
    assert came_out(salted) == came_out(shared)
    assert shared.summary.num_cached_tokens > 0


# -- time -------------------------------------------------------------------------------------------------------------


TIMES = [field.name for field in fields(RequestRecord) if field.name.endswith("_time")]


def scaled_record(record: RequestRecord, factor: float) -> RequestRecord:
    times: dict[str, Any] = {name: getattr(record, name) for name in TIMES}
    times = {name: None if time is None else time * factor for name, time in times.items()}
    return replace(record, **times)


@pytest.mark.parametrize("power", [-20, -1, 3, 30])
@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "stall_free,chunk_size=16", "static,max_wait={}"])
@pytest.mark.parametrize(
    "cost",
    [
        lambda factor: AffineCost(factor * DECIMAL.per_step, factor * DECIMAL.per_token, factor * DECIMAL.per_request),
        lambda factor: replace(DATASHEET, scale=1.1 * factor),
    ],
    ids=["affine", "datasheet"],
)
def test_slower_in_all_by_a_power_of_two_is_the_same_run(
    cost: Callable[[float], StepCost], batching: str, power: int
) -> None:
    """T41: costs and gaps times 2^k give all times times 2^k; a static group's patience is a time too."""
    factor = 2.0**power

    def later(item: WorkItem) -> WorkItem:
        request = item.request
        return replace(item, request=replace(request, arrival_time=request.arrival_time * factor))

    workload = crowd(41)
    one = simulate(small(batching=batching.format(0.5)), workload, cost(1.0))
    other = simulate(small(batching=batching.format(repr(0.5 * factor))), changed(workload, later), cost(factor))
    assert [scaled_record(record, factor) for record in one.records] == other.records
    assert [end * factor for end in one.step_ends] == list(other.step_ends)


def test_the_same_day_after_a_night_without_memory_is_the_same_day() -> None:
    """T45: a gap longer than the drain, and the cache flushed in it."""
    day, night = crowd(45), 512.0

    def next_day(item: WorkItem) -> WorkItem:
        request = item.request
        later = replace(request, request_id=f"{request.request_id}'", arrival_time=request.arrival_time + night)
        return replace(item, request=later)

    both = Workload("two days", [*day.items, *changed(day, next_day).items])
    flush = [(night / 2, lambda replica: replica.engine.reset_prefix_cache(replica.env.now))]
    first, flushed, kept = (
        simulate_with(small(), day, DYADIC),
        simulate_with(small(), both, DYADIC, flush),
        simulate_with(small(), both, DYADIC),
    )
    assert num_preempted(first) > 0
    assert max(first.step_ends) < night / 2
    num_steps = len(first.step_ends)

    def as_of_next_day(record: RequestRecord) -> RequestRecord:
        assert record.first_scheduled_time is not None and record.first_token_time is not None
        return replace(
            record,
            request_id=f"{record.request_id}'",
            arrival_time=record.arrival_time + night,
            first_scheduled_time=record.first_scheduled_time + night,
            first_token_time=record.first_token_time + night,
            finish_time=record.finish_time + night,
            token_spans=tuple((step + num_steps, num) for step, num in record.token_spans),
        )

    assert flushed.records == [*first.records, *map(as_of_next_day, first.records)]
    assert flushed.step_ends == [*first.step_ends, *(end + night for end in first.step_ends)]
    assert kept.records != flushed.records, "the flush made no difference"


# -- orders and chunks that come to the same --------------------------------------------------------------------------


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("seed", range(3))
def test_equal_priorities_are_first_come_first_served(batching: str, seed: int) -> None:
    """T43, though requests are preempted and queue again."""
    workload = crowd(430 + seed)
    # decode_first lets few in at once: they fill a smaller pool only.
    config = small(batching=batching, num_blocks=18 if batching == "decode_first" else 32)
    fcfs, priority = (simulate(replace(config, scheduling=each), workload, DECIMAL) for each in ("fcfs", "priority"))
    assert num_preempted(fcfs) > 0
    assert came_out(fcfs) == came_out(priority)


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_for_everything_cuts_no_prompt(seed: int) -> None:
    """T43: chunking with room for all prompts is no chunking, and so is a threshold no prompt reaches."""
    workload = crowd(433 + seed)
    config = small(max_num_batched_tokens=8 * 128)
    settings: list[dict[str, Any]] = [{}, {"enable_chunked_prefill": False}, {"long_prefill_token_threshold": 128}]
    whole, unchunked, threshold = (simulate(replace(config, **each), workload, DECIMAL) for each in settings)
    assert num_preempted(whole) > 0
    assert came_out(whole) == came_out(unchunked) == came_out(threshold)


# -- cancelling -------------------------------------------------------------------------------------------------------


def without(workload: Workload, request_ids: set[str]) -> Workload:
    return Workload("fewer", [item for item in workload.items if item.request.request_id not in request_ids])


def check_that_cancelling_is_staying_away(workload: Workload, cancelled: dict[str, float]) -> None:
    acts = [cancel(time, name) for name, time in sorted(cancelled.items(), key=lambda pair: pair[1])]
    run = simulate_with(roomy(), workload, DECIMAL, acts)
    absent = simulate_with(roomy(), without(workload, set(cancelled)), DECIMAL)
    reasons = {record.request_id: record.reason for record in run.records}
    assert [reasons[name] for name in cancelled] == [FinishReason.ABORT] * len(cancelled)
    assert [record for record in run.records if record.request_id not in cancelled] == absent.records
    assert run.step_ends == absent.step_ends


def test_who_cancels_in_the_queue_might_as_well_have_stayed_away() -> None:
    """T44, where slots are short and memory is not: nobody is held up by the head of the line."""
    workload = crowd(44, unique=True, span=4.0)
    patient = [record for record in simulate_with(roomy(), workload, DECIMAL).records if record.queue_time > 1.0]
    cancelled = {record.request_id: record.arrival_time + record.queue_time / 2 for record in patient[::3]}
    assert len(cancelled) > 5
    check_that_cancelling_is_staying_away(workload, cancelled)


def test_who_cancels_in_the_step_of_its_arrival_might_as_well_have_stayed_away() -> None:
    """T44, before the engine has heard of the request: a step is under way, and both wait in the inbox."""
    workload = crowd(44, unique=True, span=4.0)
    patient = [record for record in simulate_with(roomy(), workload, DECIMAL).records if record.queue_time > 1.0]
    check_that_cancelling_is_staying_away(
        workload, {record.request_id: record.arrival_time + 1e-6 for record in patient[::3]}
    )


@pytest.mark.parametrize("batching", BATCHING)
def test_cancelling_what_is_answered_does_nothing(batching: str) -> None:
    """T44."""
    workload = crowd(440)
    run = simulate_with(small(batching=batching), workload, DECIMAL)
    acts = sorted((record.finish_time + 0.01, record.request_id) for record in run.records)
    again = simulate_with(small(batching=batching), workload, DECIMAL, [cancel(*act) for act in acts])
    assert came_out(again) == came_out(run)


# -- the journal ------------------------------------------------------------------------------------------------------

REPLAYED: dict[str, dict[str, Any]] = {
    "chunked": {},
    "two steps in flight": {"async_depth": 2},
    "two steps in flight, by priority": {
        "async_depth": 2,
        "scheduling": "priority",
        "preemption": "lowest_priority",
    },
    "first chunks only": {"allocation": "paged", "cache_at": "step_end"},
    "static": {"batching": "static,max_wait=0.25"},
    "static, contiguous": {
        "batching": "static,group_size=3",
        "allocation": "contiguous_max_len",
        "enable_prefix_caching": False,
    },
    "prefill first": {"batching": "prefill_first", "isolation": "tenant"},
    "stall free": {"batching": "stall_free,chunk_size=16", "hol_skip": 2},
}


@pytest.mark.parametrize("settings", REPLAYED.values(), ids=REPLAYED)
def test_a_journal_replays_to_the_same_decisions(settings: dict[str, Any]) -> None:
    """T46, with cancellations and a reset of the cache on the way."""
    workload, lines = crowd(46), list[str]()
    acts = [cancel(item.request.arrival_time + 0.37, item.request.request_id) for item in workload.items[::6]]
    reset = (7.77, lambda replica: replica.engine.reset_prefix_cache(replica.env.now, reset_running=True))
    acts = sorted([*acts, reset] if settings.get("async_depth") != 2 else acts, key=lambda act: act[0])
    run = simulate_with(small(**settings), workload, DECIMAL, acts, lines.append)
    assert settings.get("allocation") == "contiguous_max_len" or num_preempted(run) > 0
    replayed = replay(lines, build)
    assert replayed.divergence is None, str(replayed.divergence)
    assert replayed.num_lines == len(lines)
    assert replayed.num_decisions > 100


def test_a_journal_of_another_run_is_found_out_at_the_first_line_that_differs() -> None:
    lines = list[str]()
    simulate_with(small(), crowd(47), DECIMAL, journal=lines.append)
    numbers = [number for number, line in enumerate(lines, 1) if "plan" in json.loads(line)]
    number = numbers[len(numbers) // 2]
    line = json.loads(lines[number - 1])
    line["chunks"][0][2] += 1
    lines[number - 1] = json.dumps(line, separators=(",", ":"))
    divergence = replay(lines, build).divergence
    assert divergence is not None
    assert divergence.line_number == number


# -- jumps ------------------------------------------------------------------------------------------------------------


def drawn(random: Random, batching: str, allocation: str) -> EngineConfig:
    """A small engine with all that may change when a step can be taken again."""
    knobs = {
        "stall_free": f",chunk_size={random.choice((4, 16, 64))}",
        "static": f",group_size={random.choice((0, 2, 3))},max_wait={random.choice((0.0, 0.25))}",
    }
    return small(
        num_blocks=random.choice((32, 48, 64)),
        block_size=random.choice((4, BLOCK)),
        max_num_batched_tokens=128 if batching == "prefill_first" else random.choice((16, 64, 128)),
        max_num_seqs=random.choice((2, 4, 8)),
        batching=batching + knobs.get(batching, ""),
        allocation=allocation,
        preemption=random.choice(list(PREEMPTION)),
        scheduling=random.choice(list(SCHEDULING)),
        eviction=random.choice(list(EVICTION)),
        isolation=random.choice(list(ISOLATION)),
        enable_prefix_caching=allocation in SHARING and random.random() < 0.7,
        long_prefill_token_threshold=random.choice((0, 0, 12)),
        cache_at=random.choice(("schedule", "step_end")),
        hol_skip=random.choice((0, 0, 2)),
        unhashed_first=allocation not in SHARING or random.choice((True, False)),
    )


def tables(journal: list[str]) -> dict[str, list[int]]:
    """Blocks that each request was given, in order; a repeated step gives many at once."""
    found: dict[str, list[int]] = {}
    for line in map(json.loads, journal):
        for name, _, _, *blocks in line.get("chunks", ()):
            found.setdefault(name, []).extend(block for new in blocks for block in new)
    return found


@pytest.mark.parametrize("cost", [DYADIC, DECIMAL, DATASHEET], ids=["dyadic", "decimal", "datasheet"])
@pytest.mark.parametrize(("batching", "allocation"), list(product(BATCHING, ALLOCATION)))
def test_many_steps_at_once_are_many_steps(batching: str, allocation: str, cost: StepCost) -> None:
    """Jumps change nothing: not a bit of a time, not a token, not a block, not an eviction."""
    num_plans = num_steps = 0
    for seed in range(5):
        config = drawn(Random(f"{batching} {allocation} {seed}"), batching, allocation)
        assert allocation != "contiguous_max_len" or config.num_blocks * config.block_size >= config.max_model_len
        workload = crowd(seed, num=30, span=0.5 if cost is DATASHEET else 8.0)
        journals = list[str](), list[str]()
        jumped, stepped = (
            simulate(config, workload, cost, journal.append, jumps)
            for journal, jumps in zip(journals, (True, False), strict=True)
        )
        assert not stepped.unfinished
        assert tables(journals[0]) == tables(journals[1]), config
        assert came_out(jumped) == came_out(stepped), config
        assert jumped.num_evicted_blocks == stepped.num_evicted_blocks, config
        assert jumped.engine.prefix_stats == stepped.engine.prefix_stats, config
        num_plans, num_steps = num_plans + jumped.num_plans, num_steps + stepped.num_plans
    assert num_plans < num_steps, "nothing was taken at once"


@pytest.mark.parametrize("allocation", ALLOCATION)
@pytest.mark.parametrize("batching", BATCHING)
def test_where_no_policy_forbids_it_many_steps_are_taken_at_once(batching: str, allocation: str) -> None:
    """All other policies are the defaults: drawn ones may have orders that change by themselves, and rightly do not."""
    config = small(batching=batching, allocation=allocation, enable_prefix_caching=allocation in SHARING)
    runs = [simulate(config, crowd(seed, num=12), DECIMAL) for seed in range(3)]
    assert sum(run.num_plans for run in runs) < 0.9 * sum(len(run.step_ends) for run in runs)


def test_preemption_and_eviction_were_among_what_jumps_left_alone() -> None:
    run = simulate(small(), crowd(0, num=30, span=8.0), DYADIC)
    assert num_preempted(run) > 0
    assert run.num_evicted_blocks > 0


@pytest.mark.parametrize("batching", BATCHING)
def test_a_prompt_that_waits_for_the_next_budget_ends_a_jump(batching: str) -> None:
    """The cache knows all but the last token of a prompt: its only prefill looks like a decode. Beside it there is no
    budget for a whole prompt; in the next step there is."""
    known, other = ContentPrompt(17, (1, 2, 3), BLOCK), LengthPrompt(16)
    requests = [Request("first", 0.0, known, 4), Request("again", 8.0, known, 12), Request("other", 8.0, other, 12)]
    workload = Workload("known", [WorkItem(request, request.max_tokens) for request in requests])
    config = small(max_num_batched_tokens=16, batching=batching)
    jumped, stepped = (simulate(config, workload, DYADIC, jumps=jumps) for jumps in (True, False))
    assert stepped.records[1].num_cached_tokens == 16
    assert came_out(jumped) == came_out(stepped)


def returns(num_requests: int, batching: str, cost: StepCost, jumps: bool) -> Run:
    """The second of two yields at a block's end and finds all its blocks again, so that its return looks like a decode.
    Beside it there is no budget for the prompt of a third; in the next step there is."""
    sizes = [("first", 7, 4), ("second", 7, 12), ("third", 8, 2)][:num_requests]
    requests = [Request(name, 0.0, LengthPrompt(prompt), answer) for name, prompt, answer in sizes]
    workload = Workload("returns", [WorkItem(request, request.max_tokens) for request in requests])
    config = small(num_blocks=5, block_size=4, max_model_len=20, max_num_batched_tokens=8, batching=batching)
    return simulate(config, workload, cost, jumps=jumps)


@pytest.mark.parametrize("cost", [DYADIC, DATASHEET], ids=["dyadic", "datasheet"])
@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "stall_free"])
@pytest.mark.parametrize("num_requests", [2, 3])
def test_a_return_that_looks_like_a_decode_does_not_hide_in_a_jump(
    num_requests: int, batching: str, cost: StepCost
) -> None:
    """Its lookup is billed once, and the prompt behind it enters a step later."""
    jumped, stepped = (returns(num_requests, batching, cost, jumps) for jumps in (True, False))
    assert stepped.engine.prefix_stats_resumed.num_hit_tokens >= 8
    assert came_out(jumped) == came_out(stepped)


# -- one seed, one output ---------------------------------------------------------------------------------------------

PROGRAM = """
import json
from policies.config import EngineConfig
from sim.cost import AffineCost
from sim.simulate import simulate
from sim.workload.generate import generate
config = EngineConfig(num_blocks=256, max_num_seqs=16, scheduling="priority", isolation="tenant")
journal = []
workload = generate("shared-prefix", num_requests=60, rate=8.0, seed=7)
run = simulate(config, workload, AffineCost(0.031, 0.0007), journal.append)
print(json.dumps(run.summary.to_dict()))
print(run.records, list(run.step_ends), *journal, sep="\\n")
"""


def test_output_does_not_hang_on_the_hash_seed() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "31337")
    ]
    assert len(outputs[0]) > 10_000
    assert outputs[0] == outputs[1] == outputs[2]

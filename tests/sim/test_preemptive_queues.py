"""One slot whose holder may be displaced, by rank or by what is left, and goes on where it was: as theory has it.

Host memory takes the KV of whoever yields and brings it back in no time: a resume that costs nothing (T10, T12).
Without that, order alone decides (T9, T11).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import ceil
from random import Random
from typing import Any, NamedTuple

import pytest

from sim.cost import AffineCost
from sim.simulate import Run, simulate
from sim.workload.workload import WorkItem, Workload
from tests.worlds import request, tiny_config

STEP = AffineCost(per_step=1.0)


class Job(NamedTuple):
    arrival: float
    size: int  # steps; the first is the prompt's
    rank: int


def config_of(**settings: Any) -> Any:
    sizes = {"num_blocks": 4000, "block_size": 1, "max_model_len": 2000, "max_num_batched_tokens": 2000}
    return tiny_config(**{**sizes, "max_num_seqs": 1, "enable_prefix_caching": False, **settings})


PREEMPTIVE: dict[str, Any] = {"preempt_for_waiting": True, "num_host_blocks": 10**6}


def play(jobs: Sequence[Job], predicted: bool = False, **settings: Any) -> Run:
    items = [
        WorkItem(
            request(
                number, prompt=1, max_tokens=job.size, arrival_time=job.arrival, priority=job.rank,
                predicted_output_tokens=job.size if predicted else None,
            ),
            job.size,
        )
        for number, job in enumerate(jobs)
    ]  # fmt: skip
    run = simulate(config_of(**settings), Workload("jobs", items), STEP)
    assert run.summary.num_recomputed_tokens == 0 and len(run.records) == len(jobs)
    return run


def finish_times(run: Run) -> list[float]:
    return [record.finish_time for record in sorted(run.records, key=lambda record: int(record.request_id))]


def some_jobs(seed: int, num: int, load: float, sizes: Callable[[Random], int]) -> list[Job]:
    """Poisson arrivals at multiples of a quarter of a step."""
    random, jobs, now = Random(seed), [], 0.0
    drawn = [sizes(random) for _ in range(num)]
    rate = load * num / sum(drawn)
    for size in drawn:
        now += random.expovariate(rate)
        jobs.append(Job(round(4 * now) / 4, size, random.randrange(3)))
    return jobs


def by_rank(job: Job, left: int) -> int:
    return job.rank


def reference(jobs: Sequence[Job], preemptive: bool = True, key: Callable[[Job, int], int] = by_rank) -> list[float]:
    """The queue alone, without an engine: whoever is first by (key, arrival) has the steps up to the next arrival."""
    ends, waiting, time, coming, holder = [0.0] * len(jobs), list[tuple[int, int, int]](), 0.0, 0, None
    while coming < len(jobs) or waiting or holder:
        while coming < len(jobs) and jobs[coming].arrival <= time:
            heappush(waiting, (key(jobs[coming], jobs[coming].size), coming, jobs[coming].size))
            coming += 1
        if holder and preemptive and waiting and waiting[0][0] < holder[0]:
            heappush(waiting, holder)
            holder = None
        if not holder and not waiting:
            time = jobs[coming].arrival
            continue
        _, number, left = holder or heappop(waiting)
        steps = min(left, ceil(jobs[coming].arrival - time)) if coming < len(jobs) else left
        time, left = time + steps, left - steps
        holder = (key(jobs[number], left), number, left) if left else None
        if holder is None:
            ends[number] = time
    return ends


def uniform(random: Random) -> int:
    return random.randint(1, 20)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_displace_each_other_as_in_a_preemptive_resume_queue(seed: int) -> None:
    """T10, to the last step: the engine is that queue, and the formula of the queue is tested below."""
    jobs = some_jobs(seed, 150, 0.85, uniform)
    run = play(jobs, scheduling="priority", preemption="lowest_priority", **PREEMPTIVE)
    assert run.summary.num_preemptions > 10
    assert finish_times(run) == reference(jobs)


def test_without_displacing_the_most_urgent_waits_for_the_holder_only() -> None:
    """T9, to the last step."""
    jobs = some_jobs(5, 150, 0.85, uniform)
    assert finish_times(play(jobs, scheduling="priority")) == reference(jobs, preemptive=False)


def test_the_reference_waits_as_cobham_and_the_preemptive_resume_formula_say() -> None:
    """W_k = W_0 / ((1 - s_{k-1})(1 - s_k)), and T_k = E[S] / (1 - s_{k-1}) + ... of three equal classes."""
    jobs = some_jobs(1, 40_000, 0.8, lambda random: random.randint(1, 100))
    mean = sum(job.size for job in jobs) / len(jobs)
    second = sum(job.size**2 for job in jobs) / len(jobs)
    rate = len(jobs) / jobs[-1].arrival
    load = rate * mean / 3
    for preemptive in (False, True):
        ends = reference(jobs, preemptive)
        for rank in range(3):
            below, upto = rank * load, (rank + 1) * load
            if preemptive:
                residual = rate / 3 * (rank + 1) * second / 2
                expected = mean / (1 - below) + residual / ((1 - below) * (1 - upto))
            else:
                expected = mean + rate * second / 2 / ((1 - below) * (1 - upto))
            sojourns = [end - job.arrival for end, job in zip(ends, jobs, strict=True) if job.rank == rank]
            assert sum(sojourns) / len(sojourns) == pytest.approx(expected, rel=0.08), (preemptive, rank)


ORDERS: tuple[dict[str, Any], ...] = (
    {"scheduling": "fcfs"},
    {"scheduling": "srpt"},
    {"scheduling": "edf"},
    {"scheduling": "srpt,error=0.5", **PREEMPTIVE},
)


@pytest.mark.parametrize("seed", range(3))
def test_shortest_remaining_first_is_the_fastest_on_the_whole(seed: int) -> None:
    """T12: with true sizes and free resumes, on the same jobs."""
    jobs = [job._replace(rank=0) for job in some_jobs(seed, 200, 0.9, uniform)]
    arrivals = sum(job.arrival for job in jobs)
    best = sum(finish_times(play(jobs, predicted=True, scheduling="srpt", **PREEMPTIVE))) - arrivals
    assert best == sum(reference(jobs, key=lambda job, left: left)) - arrivals
    for settings in ORDERS:
        assert best <= sum(finish_times(play(jobs, predicted=True, **settings))) - arrivals, settings


@pytest.mark.parametrize("seed", range(3))
def test_orders_that_do_not_look_at_sizes_share_one_sum_of_waits(seed: int) -> None:
    """T11, Kleinrock's law on one path: the work that waits is the same at any time, so where sizes are equal the mean
    is too, whoever goes first."""
    jobs = some_jobs(seed, 200, 0.9, lambda _: 7)
    totals = {
        scheduling: sum(finish_times(play(jobs, scheduling=scheduling)))
        for scheduling in ("fcfs", "priority", "sjf", "edf")
    }
    assert len(set(totals.values())) == 1, totals


def test_moving_kv_takes_its_time_and_computing_it_again_takes_more() -> None:
    jobs = [Job(0.0, 40, 2), Job(10.0, 5, 0)]
    settings = {"scheduling": "priority", "preempt_for_waiting": True}
    cost = AffineCost(per_step=1.0, per_token=0.125)
    items = [
        WorkItem(request(number, prompt=1, max_tokens=job.size, arrival_time=job.arrival, priority=job.rank), job.size)
        for number, job in enumerate(jobs)
    ]
    ends = {}
    for host, transfer in ((0, 0.0), (1000, 0.0), (1000, 0.0625)):
        config = config_of(num_host_blocks=host, **settings)
        run = simulate(config, Workload("jobs", items), cost, block_transfer_time=transfer)
        ends[host, transfer] = max(finish_times(run))
    free = 45 * 1.125
    assert ends[1000, 0.0] == free
    assert ends[1000, 0.0625] == free + 2 * 9 * 0.0625, "9 tokens of KV there and back"
    assert ends[0, 0.0] == free + 8 * 0.125 + 0.125, "they are computed again, in the step of the next token"

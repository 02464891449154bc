"""How often intervals hold the truth, equal arms are told apart, and a change of 2 % is found.

    .venv/bin/python -m benchmarks.coverage             # 500 macro-replications, 200 comparisons; minutes

Two queues whose truth can be known as well as one likes, played many at once in numpy: intervals are in question here,
not the simulator. M/M/1, and continuous batching of up to 16 with steps of a + b n (seconds, n requests in
them) and geometric answers. A macro-replication is what one user does: some seeds, and an interval.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.commands import Prepared
from sim.experiment.ab.compare import compare
from sim.experiment.runner import Outcome, Runner, Simulated
from sim.experiment.statistics import (
    Interval,
    batch_means,
    mean_interval,
    paired_effect,
    replications_needed,
    share_interval,
    warm_up,
)
from sim.setup import Setup, scaled

Floats = NDArray[np.float64]
CLAIMED = 0.9  # of intervals called 95 %: what is covered less often is not claimed
UTILISATIONS = (0.5, 0.9)
LENGTH, NUM_SLOTS, MEAN_ANSWER = 1000, 16, 10.0  # requests a run; of batching
PER_STEP, PER_REQUEST = 1.0, 0.05  # seconds
FEW = 5  # seeds


# -- queues, many runs at once ----------------------------------------------------------------------------------------


def mm1(num_runs: int, num: int, utilisation: float, seed: int, slower: float = 1.0) -> Floats:
    """Times in system, [run, request], of services of mean 1 (times `slower`); begins empty (Lindley, 1952)."""
    rng = np.random.default_rng((seed, 1))
    gaps = rng.standard_exponential((num, num_runs)) / utilisation
    services = slower * rng.standard_exponential((num, num_runs))
    found, wait = np.empty((num_runs, num)), np.zeros(num_runs)
    for index in range(num):
        found[:, index] = wait + services[index]
        if index + 1 < num:
            wait = np.maximum(0.0, wait + services[index] - gaps[index + 1])
    return found


def batching(num_runs: int, num: int, utilisation: float, seed: int, slower: float = 1.0) -> Floats:
    """Times from arrival to last token, [run, request]: steps take a + b n; who comes waits for a slot and a step."""
    rng = np.random.default_rng((seed, 2))
    best = NUM_SLOTS / (MEAN_ANSWER * (PER_STEP + PER_REQUEST * NUM_SLOTS))  # requests a second, all slots taken
    arrivals = np.cumsum(rng.standard_exponential((num_runs, num)), axis=1) / (utilisation * best)
    arrivals = np.hstack([arrivals, np.full((num_runs, 1), np.inf)])
    answers = np.hstack([rng.geometric(1.0 / MEAN_ANSWER, (num_runs, num)), np.ones((num_runs, 1), dtype=np.int64)])
    found, rows = np.empty((num_runs, num)), np.arange(num_runs)
    left = np.zeros((num_runs, NUM_SLOTS), dtype=np.int64)  # tokens to come, by slot
    owner = np.zeros((num_runs, NUM_SLOTS), dtype=np.int64)
    head, clock = np.zeros(num_runs, dtype=np.int64), arrivals[:, 0].copy()
    while True:
        while (enters := (arrivals[rows, head] <= clock) & (left.min(axis=1) == 0)).any():
            who = rows[enters]
            slot = left[who].argmin(axis=1)
            left[who, slot], owner[who, slot] = answers[who, head[who]], head[who]
            head[who] += 1
        active = left > 0
        in_step = active.sum(axis=1)
        if not in_step.any() and (head == num).all():
            return found
        idle_until = np.where(head < num, arrivals[rows, head], clock)
        clock = np.where(in_step > 0, clock + slower * (PER_STEP + PER_REQUEST * in_step), idle_until)
        left -= active
        run, slot = np.nonzero(active & (left == 0))
        found[run, owner[run, slot]] = clock[run] - arrivals[run, owner[run, slot]]


Queue = Callable[..., Floats]
QUEUES: dict[str, Queue] = {"M/M/1": mm1, "batching": batching}


# -- coverage ---------------------------------------------------------------------------------------------------------


class Covered(NamedTuple):
    """Of so many intervals, which share held the truth. `width`: half of one over the truth, on average."""

    what: str
    share: Interval
    width: float

    @property
    def is_claimed(self) -> bool:
        """Whether the 95 % may be said."""
        return self.share.mean >= CLAIMED


def covered(what: str, intervals: Sequence[Interval], truth: float) -> Covered:
    hits = sum(each.low <= truth <= each.high for each in intervals)
    width = float(np.mean([each.half_width for each in intervals])) / truth
    return Covered(what, share_interval(hits, len(intervals)), width)


def of_seeds(
    name: str, utilisation: float, num_macro: int, num_seeds: int = 20, length: int = LENGTH
) -> Iterator[Covered]:
    """Of runs that begin empty. What is estimated is the mean of such runs; all of them together tell it."""
    times = QUEUES[name](num_macro * num_seeds, length, utilisation, seed=7)
    p50, p99 = np.percentile(times, (50, 99), axis=1)
    for metric, values in (("mean", times.mean(axis=1)), ("p50", p50), ("p99", p99)):
        for num in (num_seeds, FEW):
            groups = [mean_interval(group.tolist()) for group in values[: num_macro * num].reshape(-1, num)]
            yield covered(f"{name}, {utilisation}, {metric} of {num} seeds", groups, float(values.mean()))
    if name == "M/M/1":
        means = [mean_interval(group.tolist()) for group in times.mean(axis=1).reshape(-1, num_seeds)]
        what = f"{name}, {utilisation}, mean of {num_seeds} seeds, taken for the steady state"
        yield covered(what, means, 1.0 / (1.0 - utilisation))


def of_one_run(utilisation: float, num_macro: int, length: int) -> Iterator[Covered]:
    """Batch means of one run after its warm-up, against theory's steady state; and as if requests were independent."""
    times = mm1(num_macro, length, utilisation, seed=9)
    truth = 1.0 / (1.0 - utilisation)
    warm = [run[warm_up(run.tolist()) or 0 :] for run in times]
    told = f"M/M/1, {utilisation}, mean of one run of {length:,}"
    yield covered(f"{told}: 20 batches", [batch_means(run.tolist()) for run in warm], truth)
    yield covered(f"{told}: requests as if independent", [mean_interval(run.tolist()) for run in warm], truth)


# -- equal arms, and arms that differ ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Queued:
    """A runner that plays the batching queue, all setups of one call beside each other."""

    utilisation: float
    length: int = 200

    def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]:
        for times in batching(len(setups), self.length, self.utilisation, setups[0].seed):
            metrics = {"ttft": {"mean": float(times.mean())}, "saturation": {"is_saturated": False}}
            yield Outcome({"engine": {}, "workload": {"name": "batching"}}, metrics)


SIMULATED = Setup(workload="chat", rate=8.0, num_requests=40, costs="datasheet", engine={"num_blocks": 2000})


def told_apart(num: int, runner: Runner, setup: Setup = SIMULATED, num_seeds: int = 10) -> Interval:
    """How often two equal arms with seeds of their own differ at 5 %."""
    found = 0
    for index in range(num):
        arm = replace(setup, seed=10_000 * index)
        done = compare(arm, arm, runner, num=num_seeds, metrics=("ttft.mean",), independent=True)
        found += done.compared[0].p_adjusted < 0.05
    return share_interval(found, num)


class Found(NamedTuple):
    """A change of 2 %: pairs that a pilot says are needed, how often so many find it, and runs an arm without pairs."""

    num_pairs: float
    share: Interval
    correlation: float
    num_unpaired: float


def two_percent(a: Floats, b: Floats, other: Floats, num: int, pilot: int = 20) -> Found:
    """`b` is `a` 2 % dearer by common random numbers, `other` as dear with seeds of its own; a value a run in each.

    A pilot's pairs say how many are needed for half an interval of half the effect that they show.
    """
    needed, apart, correlations, hits = [], [], [], 0
    for index in range(num):
        chosen = np.random.default_rng(index).permutation(len(a))
        first, rest = chosen[:pilot], chosen[pilot:]
        half = 0.5 * abs(float((b[first] - a[first]).mean()))
        needed.append(replications_needed((b[first] - a[first]).tolist(), half))
        apart.append(replications_needed((other[first] - a[first]).tolist(), half))
        effect = paired_effect(a[rest[: needed[-1]]].tolist(), b[rest[: needed[-1]]].tolist())
        correlations.append(effect.correlation)
        hits += effect.p_value < 0.05
    mean = [float(np.mean(each)) for each in (needed, correlations, apart)]
    return Found(mean[0], share_interval(hits, num), mean[1], mean[2])


Arms = tuple[Floats, Floats, Floats]


def queued(name: str, utilisation: float, num: int) -> Arms:
    """Mean times in system of as many runs; the same ones 2 % dearer; others, 2 % dearer."""

    def mean(seed: int, slower: float) -> Floats:
        found: Floats = QUEUES[name](num, LENGTH, utilisation, seed, slower).mean(axis=1)
        return found

    return mean(11, 1.0), mean(11, 1.02), mean(12, 1.02)


def simulated(num: int, setup: Setup = SIMULATED) -> Arms:
    """Mean TTFTs of the simulator, likewise."""

    def ttft(seed: int, by: float) -> float:
        prepared = Prepared.of(replace(setup, seed=seed))
        return prepared.summary(prepared.run(scaled(prepared.cost, by))).ttft.mean

    def mean(first: int, by: float) -> Floats:
        return np.array([ttft(first + index, by) for index in range(num)])

    return mean(0, 1.0), mean(0, 1.02), mean(10**6, 1.02)


# -- the tables -------------------------------------------------------------------------------------------------------


def main(num_macro: int = 500, num_comparisons: int = 200) -> None:
    print("| interval called 95 % | holds the truth | half width | claimed |\n|---|---|---|---|")
    for utilisation in UTILISATIONS:
        rows = [row for name in QUEUES for row in of_seeds(name, utilisation, num_macro)]
        for each in (*rows, *of_one_run(utilisation, num_macro, 20_000)):
            claim = "yes" if each.is_claimed else "no"
            print(f"| {each.what} | {percent(each.share)} | {100 * each.width:.1f} % | {claim} |", flush=True)
    print("\n| equal arms, seeds of their own | told apart at 5 % |\n|---|---|")
    for utilisation in UTILISATIONS:
        found = told_apart(num_comparisons, Queued(utilisation))
        print(f"| batching, {utilisation}, 10 seeds an arm | {percent(found)} |", flush=True)
    found = told_apart(num_comparisons, Simulated(1))
    print(f"| simulator, chat at 8/s, 10 seeds an arm | {percent(found)} |", flush=True)
    print("\n| all 2 % dearer | pairs needed | found by so many | r | runs an arm unpaired |\n|---|---|---|---|---|")
    arms = {f"{name}, {each}": queued(name, each, 400) for name in QUEUES for each in UTILISATIONS}
    for name, values in {**arms, "simulator, chat at 8/s": simulated(60)}.items():
        pairs, share, correlation, unpaired = two_percent(*values, num=100)
        print(f"| {name} | {pairs:.0f} | {percent(share)} | {correlation:.4f} | {unpaired:,.0f} |", flush=True)


def percent(share: Interval) -> str:
    return f"{100 * share.mean:.1f} % ({100 * share.low:.1f}–{100 * share.high:.1f})"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

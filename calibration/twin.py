"""One workload on both bodies: played live several times and simulated once, and what lies between the two.

A difference is held against a margin by an interval over the live repeats: `equal` if surely inside, `different` if
surely outside, `undecided` where the repeats themselves differ too much to tell. What is off is split: decisions
(replay, and the free-running match) from costs (each live step's time against its price).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from calibration.journalled import timed_steps
from policies.catalogue import build
from policies.config import EngineConfig
from policies.journal import Replayed, Write, replay
from sim.cost import StepCost
from sim.experiment.statistics import Interval, mean_interval
from sim.frontend import FrontEndTimes
from sim.match import Match, match
from sim.metrics import Summary, summarise
from sim.simulate import Run, simulate
from sim.workload.workload import Workload

PlayLive = Callable[[Write], Run]  # the workload on a live body, once; its journal is written line by line

# Relative margins: what a prediction may be off and still be called equal.
GATES = {"e2e.mean": 0.10, "e2e.p99": 0.15, "tpot.mean": 0.05, "ttft.mean": 0.08}
MEASURES = (
    "ttft.mean", "ttft.p50", "ttft.p99", "tpot.mean", "tpot.p99", "e2e.mean", "e2e.p50", "e2e.p99",
    "request_throughput", "output_throughput",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """Simulated over live, less 1: an interval over the live repeats."""

    measure: str
    live: float
    simulated: float
    error: Interval
    margin: float | None

    @property
    def verdict(self) -> str:
        if self.margin is None:
            return ""
        if -self.margin <= self.error.low and self.error.high <= self.margin:
            return "equal"
        if self.error.low > self.margin or self.error.high < -self.margin:
            return "different"
        return "undecided"


@dataclass(frozen=True, slots=True)
class Live:
    """One repeat, and the machine's load at its end."""

    summary: Summary
    journal: Sequence[str]
    replayed: Replayed
    load: float


@dataclass(frozen=True, slots=True)
class Twin:
    """`cost_error`: prices of the live runs' own steps over their times, less 1, in sum; `step_error`: the median of
    single steps' absolute errors."""

    differences: Sequence[Difference]
    repeats: Sequence[Live]
    matches: Sequence[Match]
    cost_error: float
    step_error: float
    utilisation: float  # busy share of the time between the first arrival and the last

    @property
    def num_replayed(self) -> int:
        return sum(live.replayed.num_decisions for live in self.repeats)

    @property
    def divergences(self) -> list[str]:
        return [str(live.replayed.divergence) for live in self.repeats if live.replayed.divergence is not None]

    @property
    def load(self) -> float:
        return max(live.load for live in self.repeats)


def compare(
    play_live: PlayLive,
    config: EngineConfig,
    workload: Workload,
    cost: StepCost,
    *,
    num_repeats: int = 5,
    front_end: FrontEndTimes | None = None,
    margins: Mapping[str, float] = GATES,
) -> Twin:
    """Raises ValueError for fewer than 2 repeats: one tells nothing of chance."""
    if num_repeats < 2:
        raise ValueError(f"{num_repeats} live repeats tell nothing of chance: ask for 2 or more, better 5")
    repeats = [_live(play_live) for _ in range(num_repeats)]
    simulated, lines = _simulated(config, workload, cost, front_end)
    prices, times = _priced([live.journal for live in repeats], cost)
    return Twin(
        differences=[_difference(name, repeats, simulated, margins.get(name)) for name in MEASURES],
        repeats=repeats,
        matches=[match(live.journal, lines) for live in repeats],
        cost_error=sum(prices) / sum(times) - 1.0,
        step_error=median(abs(price / time - 1.0) for price, time in zip(prices, times, strict=True)),
        utilisation=median(live.summary.busy_time / live.summary.duration for live in repeats),
    )


def _live(play_live: PlayLive) -> Live:
    journal: list[str] = []
    run = play_live(journal.append)
    return Live(summarise(run), journal, replay(journal, build), os.getloadavg()[0])


def _simulated(
    config: EngineConfig, workload: Workload, cost: StepCost, front_end: FrontEndTimes | None
) -> tuple[Summary, list[str]]:
    lines: list[str] = []
    run = simulate(config, workload, cost, lines.append, jumps=False, front_end=front_end)
    return summarise(run), lines


def _priced(journals: Sequence[Sequence[str]], cost: StepCost) -> tuple[list[float], list[float]]:
    """What the cost says of each live step, and what it took."""
    steps = [step for journal in journals for step in timed_steps(journal)]
    prices = [cost.host_time(step.work) + cost.device_time(step.work) for step in steps]
    return prices, [step.duration for step in steps]


def _difference(name: str, repeats: Sequence[Live], simulated: Summary, margin: float | None) -> Difference:
    predicted = value(simulated, name)
    measured = [value(live.summary, name) for live in repeats]
    return Difference(
        name,
        sum(measured) / len(measured),
        predicted,
        mean_interval([predicted / each - 1.0 for each in measured]),
        margin,
    )


def value(summary: Summary, name: str) -> float:
    found: object = summary
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, (int, float)) and math.isfinite(found), f"{name} of a run is {found}"
    return float(found)

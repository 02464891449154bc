"""One workload on both bodies: played live several times and simulated once, and what lies between the two.

A difference is held against a margin by an interval over the live repeats: `equal` if surely inside, `different` if
surely outside, `undecided` where the repeats themselves differ too much to tell. What is off is split: decisions
(replay, and the free-running match) from costs (each live step's time against its price).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from calibration.journalled import TimedStep, Told, timed_steps
from calibration.probe import EVERY, usual
from calibration.quiet import MOST, Usage, others
from calibration.samples import Floats
from calibration.served import own_steps
from policies.catalogue import build
from policies.config import EngineConfig
from policies.journal import Replayed, Write, replay
from sim.cost import StepCost, StepWork
from sim.cost.body import BodyCost
from sim.experiment.statistics import Interval, mean_interval
from sim.frontend import FrontEndTimes
from sim.match import Match, match
from sim.metrics import Summary, summarise
from sim.simulate import Run, simulate
from sim.workload.workload import WorkItem, Workload

CALM = 1.15  # times the speed of the calibration, or a part of it
PATIENCE = 2


class Played(NamedTuple):
    """A live run, and what the probes between its steps took."""

    run: Run
    probes: Sequence[float] = ()


PlayLive = Callable[[Write], Played]  # the workload on a live body, once; its journal is written line by line

# Relative margins: what a prediction may be off and still be called equal.
GATES = {"e2e.mean": 0.10, "e2e.p99": 0.15, "tpot.mean": 0.05, "ttft.mean": 0.08}
MEASURES = (
    "ttft.mean", "ttft.p50", "ttft.p99", "tpot.mean", "tpot.p99", "e2e.mean", "e2e.p50", "e2e.p99",
    "request_throughput", "output_throughput",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """Simulated over live, less 1: an interval over the live repeats. `simulated` and `error` are at the speed that the
    machine had beside each repeat, `as_calibrated` at the speed of the calibration."""

    measure: str
    live: float
    simulated: float
    error: Interval
    as_calibrated: Interval
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

    def __str__(self) -> str:
        off = f"{100 * self.error.mean:+.1f} ± {100 * self.error.half_width:.1f} %"
        return f"{self.measure} off by {off}" + ("" if self.margin is None else f" of {100 * self.margin:.0f} %")


Values = Mapping[str, float]  # by the names of MEASURES


@dataclass(frozen=True, slots=True)
class Live:
    """One repeat. `others`: cores of the machine that worked for other processes meanwhile, nan where nobody looked;
    `slowness`: what probes between its steps took, over what they did when costs were measured."""

    values: Values
    journal: Sequence[str]
    replayed: Replayed
    others: float = math.nan
    slowness: float = 1.0
    probes: Sequence[float] = ()

    @property
    def is_calm(self) -> bool:
        """Whether the machine was about as fast as when it was calibrated.

        A probe tells small changes; great ones hit it otherwise than they do steps.
        """
        return 1.0 / CALM <= self.slowness <= CALM

    def steps(self) -> list[TimedStep]:
        return own_steps(timed_steps(self.journal), self.probes)


class Simulated(NamedTuple):
    """A simulation of the workload, and its journal."""

    values: Values
    journal: Sequence[str]


@dataclass(frozen=True, slots=True)
class Twin:
    """`repeats` count; `set_aside` met a machine of another speed.

    `cost_error`: prices of the live runs' steps over their times, less 1, in sum; `step_error`: the median of single
    steps' absolute errors; `residuals`: as the first, of steps of each kind; `busy`: share of the time that a step was
    under way.
    """

    differences: Sequence[Difference]
    repeats: Sequence[Live]
    set_aside: Sequence[Live]
    matches: Sequence[Match]
    cost_error: float
    step_error: float
    residuals: Mapping[str, float]
    busy: float

    @classmethod
    def of(
        cls,
        repeats: Sequence[Live],
        simulate_at: Callable[[float], Simulated],
        cost: StepCost,
        margins: Values,
    ) -> Twin:
        """`simulate_at` a slowness. Raises ValueError for fewer than 2 repeats."""
        if len(repeats) < 2:
            raise ValueError(f"{len(repeats)} live repeats tell nothing of chance: ask for 2 or more, better 5")
        calm = [live for live in repeats if live.is_calm]
        set_aside = [live for live in repeats if not live.is_calm] if len(calm) >= 2 else []
        repeats = calm if len(calm) >= 2 else repeats
        at = {slowness: simulate_at(slowness) for slowness in {1.0, *(live.slowness for live in repeats)}}
        steps = [live.steps() for live in repeats]
        times = np.array([step.duration for each in steps for step in each])
        by = np.array([live.slowness for live, each in zip(repeats, steps, strict=True) for _ in each])
        prices = by * np.array([cost.host_time(s.work) + cost.device_time(s.work) for each in steps for s in each])
        return cls(
            differences=[_difference(name, repeats, at, margins.get(name)) for name in at[1.0].values],
            repeats=repeats,
            set_aside=set_aside,
            matches=[match(live.journal, at[live.slowness].journal) for live in repeats],
            cost_error=float(prices.sum() / times.sum() - 1.0),
            step_error=float(np.median(np.abs(prices / times - 1.0))),
            residuals=_residuals([step for each in steps for step in each], prices),
            busy=fmean(_busy(each) for each in steps),
        )

    @property
    def num_replayed(self) -> int:
        return sum(live.replayed.num_decisions for live in (*self.repeats, *self.set_aside))

    @property
    def divergences(self) -> list[str]:
        return [str(live.replayed.divergence) for live in (*self.repeats, *self.set_aside)
                if live.replayed.divergence is not None]  # fmt: skip

    @property
    def different(self) -> list[str]:
        return [each.measure for each in self.differences if each.verdict == "different"]

    @property
    def others(self) -> float:
        return fmean(live.others for live in self.repeats)

    @property
    def slowness(self) -> list[float]:
        return [live.slowness for live in self.repeats]

    @property
    def is_noisy(self) -> bool:
        """The live runs shared the machine, or it was another's: what they took says nothing of the costs."""
        return self.others > MOST or not all(live.is_calm for live in self.repeats)


def compare(
    play_live: PlayLive,
    config: EngineConfig,
    workload: Workload,
    cost: BodyCost,
    *,
    num_repeats: int = 5,
    front_end: FrontEndTimes | None = None,
    margins: Values = GATES,
) -> Twin:
    """Play the workload live so often, or up to twice as often while the machine is not calm, and simulate it.

    Latencies are those at the client's end. Where live runs are probed, the simulated ones take that time too, and each
    is as fast as the machine was in its own.
    """
    about = cost.costs.about
    repeats: list[Live] = []
    while sum(live.is_calm for live in repeats) < num_repeats and len(repeats) < PATIENCE * num_repeats:
        repeats.append(_live(play_live, about))
    probed = cost.with_time_per_step(about["probe"] / EVERY) if any(live.probes for live in repeats) else cost

    def simulate_at(slowness: float) -> Simulated:
        lines: list[str] = []
        slower = replace(probed, scale=slowness * cost.scale)
        run = simulate(config, workload, slower, lines.append, jumps=False, front_end=front_end)
        return Simulated(values(summarise(run)), lines)

    return Twin.of(repeats, simulate_at, cost, margins)


def from_journals(journals: Sequence[Sequence[str]], cost: StepCost, margins: Values = GATES) -> Twin:
    """Of live runs of one workload on a machine that is not here: simulate what the first journal tells was asked.

    Latencies are those at the engine, from the intended arrivals.
    """
    told = [Told.of(journal) for journal in journals]
    repeats = [
        Live(each.latencies(), journal, replay(journal, build)) for each, journal in zip(told, journals, strict=True)
    ]

    def simulate_at(_: float) -> Simulated:
        lines: list[str] = []
        simulate(told[0].config, _workload(told[0]), cost, lines.append, jumps=False)
        return Simulated(Told.of(lines).latencies(), lines)

    return Twin.of(repeats, simulate_at, cost, margins)


def _busy(steps: Sequence[TimedStep]) -> float:
    """Of the time from the first step's beginning to the last one's end."""
    return sum(step.duration for step in steps) / (steps[-1].end - steps[0].end + steps[0].duration)


def _residuals(steps: Sequence[TimedStep], prices: Floats) -> dict[str, float]:
    kinds = np.array([_kind(step.work) for step in steps])
    times = np.array([step.duration for step in steps])
    return {
        _called(kind): float(prices[kinds == kind].sum() / times[kinds == kind].sum() - 1.0)
        for kind in sorted(set(kinds.tolist()))
    }


def _kind(work: StepWork) -> int:
    """0: chunks alone, -1: chunks and decodes; else the power of two that holds the decodes."""
    if work.num_prefills:
        return -1 if work.num_decodes else 0
    return int(2 ** (work.num_decodes - 1).bit_length())


def _called(kind: int) -> str:
    return {-1: "chunks and decodes", 0: "chunks alone", 1: "1 decode"}.get(kind, f"up to {kind} decodes")


def _workload(told: Told) -> Workload:
    items = [WorkItem(request, num_tokens) for request, num_tokens in told.asked()]
    return Workload("as journalled", sorted(items, key=lambda item: item.request.arrival_time))


def _live(play_live: PlayLive, about: Mapping[str, Any]) -> Live:
    journal: list[str] = []
    since = Usage.now()
    run, probes = play_live(journal.append)
    used = others(since)
    slowness = (usual(probes) / about["probe"]) ** about["sensitivity"] if probes else 1.0
    return Live(values(summarise(run)), journal, replay(journal, build), used, slowness, probes)


def _difference(name: str, repeats: Sequence[Live], at: Mapping[float, Simulated], margin: float | None) -> Difference:
    measured = [live.values[name] for live in repeats]
    predicted = [at[live.slowness].values[name] for live in repeats]
    return Difference(
        name,
        fmean(measured),
        fmean(predicted),
        mean_interval([ours / live - 1.0 for ours, live in zip(predicted, measured, strict=True)]),
        mean_interval([at[1.0].values[name] / live - 1.0 for live in measured]),
        margin,
    )


def values(summary: Summary) -> dict[str, float]:
    return {name: _value(summary, name) for name in MEASURES}


def _value(summary: Summary, name: str) -> float:
    found: object = summary
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, (int, float)) and math.isfinite(found), f"{name} of a run is {found}"
    return float(found)

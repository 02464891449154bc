"""An answer to how many GPUs: the plan, and all that is told with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.experiment.capacity.misses import Term
from sim.experiment.capacity.slo_rate import SloRate, TermRate, Unmet
from sim.experiment.capacity.tune import Tried
from sim.experiment.statistics import Interval


@dataclass(frozen=True, slots=True)
class Point:
    """One rate of one replica. None where it was overloaded: such a run has no steady state."""

    rate: float
    num: int
    attained: Interval | None
    goodput: float | None
    tokens_per_user: float | None  # a second, of the median request: one over its TPOT
    tokens_per_gpu: float  # output, a second
    keeps: bool


@dataclass(frozen=True, slots=True)
class Binding:
    """What stops a replica: the objective that gives way, what it gives way to, and how full everything is there."""

    limit: str
    objective: Term | None
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """Replicas for a rate: those needed at the low end of a replica's rate, and the range over its interval."""

    rate: float
    num_replicas: int
    fewest: int
    most: int

    @classmethod
    def of(cls, rate: float, replica: Interval) -> Plan:
        need = [max(1, math.ceil(rate / each - 1e-9)) for each in (replica.low, replica.high)]
        return cls(rate, need[0], need[1], need[0])


@dataclass(frozen=True, slots=True)
class Band:
    """At costs as low, and as high, as the band of the calibration says."""

    factor: float
    low_cost: Interval
    high_cost: Interval
    plan_low: Plan
    plan_high: Plan


@dataclass(frozen=True, slots=True)
class Day:
    """A rate over time. `mean`: replicas, if they could follow it; `peak`: at its busiest."""

    rates: tuple[float, ...]
    source: str
    mean: float
    peak: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """After `seconds` at `factor` times what a replica serves. `after`: until no more were in the system than before;
    None: not within the run."""

    factor: float
    seconds: float
    rate: float
    after: float | None


@dataclass(frozen=True, slots=True)
class Check:
    """The heaviest part of the load as it came, on the plan."""

    num_requests: int
    rate: float
    missed: Mapping[str, float]
    kept: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """`found`: of one replica. `plan` and what rests on it: None where no rate keeps the objectives."""

    manifest: Mapping[str, Any]
    gpus_per_replica: int
    found: SloRate | Unmet
    bound: float
    bound_by: str
    bound_is_exact: bool  # or a guess from the mean step
    target: str  # where the plan's rate is from
    length: int
    num_runs: int
    how: str
    provenance: str
    record: tuple[str, ...]
    flags: str
    plan: Plan | None = None
    by_term: tuple[TermRate, ...] = ()
    binding: Binding | None = None
    band: Band | None = None
    points: tuple[Point, ...] = ()
    day: Day | None = None
    recovery: Recovery | None = None
    check: Check | None = None
    tokens_per_request: tuple[float, float] = (0.0, 0.0)  # of the prompt, and of the answer
    price: float | None = None  # of a GPU hour
    notes: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()  # other engine settings

    @property
    def num_gpus(self) -> int:
        return self.plan.num_replicas * self.gpus_per_replica if self.plan else 0

    @property
    def headroom(self) -> float:
        """What the plan serves beyond its rate, as a share; with one replica less: `headroom_without_one`."""
        return self._headroom(0)

    @property
    def headroom_without_one(self) -> float:
        return self._headroom(1)

    def _headroom(self, lost: int) -> float:
        if self.plan is None or isinstance(self.found, Unmet):
            return math.nan
        return (self.plan.num_replicas - lost) * self.found.rate.mean / self.plan.rate - 1.0

    @property
    def price_per_million(self) -> tuple[float, float] | None:
        """Of output tokens, and of all tokens, at the plan's rate."""
        if self.price is None or self.plan is None:
            return None
        prompt, output = self.tokens_per_request
        per_request = self.num_gpus * self.price / 3600.0 / self.plan.rate
        return 1e6 * per_request / output, 1e6 * per_request / (prompt + output)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other betters in tokens a second per GPU without losing per user; overloaded ones are none."""
    known = [(each, each.tokens_per_user) for each in points if each.tokens_per_user is not None]
    return [
        a for a, user in known if not any(other >= user and b.tokens_per_gpu > a.tokens_per_gpu for b, other in known)
    ]

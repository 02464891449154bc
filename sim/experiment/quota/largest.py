"""The largest budget of one class under which another keeps its limits, and what that budget buys.

A budget is so many requests at once, KV blocks, or tokens a second, set in the admission policy that has such budgets.
It counts as kept where the interval over seeds of the protected class's percentile lies beneath the limit; all budgets
are tried on the same seeds, so that they meet the same requests. Each seed alone has a largest budget too: these
tell how far the answer is luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from policies.catalogue import make
from policies.named import counts_by_name, rates_by_name
from sim.experiment.runner import Outcome, Runner
from sim.experiment.statistics import Interval, mean_interval
from sim.experiment.sweep.judged import PERCENTILES, number
from sim.setup import Setup
from sim.slo import Objective


class Kind(NamedTuple):
    """Where a budget is set. `also`: what the policy must be told besides. `first`: the smallest tried."""

    policy: str
    knob: str
    unit: str
    first: int
    also: Mapping[str, str] = {}


NO_RATE = "1e12"  # tokens a second of classes that have no budget: more than any server makes
KINDS = {
    "max_running": Kind("class_budgets", "max_running", "requests at once", 1),
    "max_blocks": Kind("class_budgets", "max_blocks", "KV blocks", 16),
    "rate": Kind("token_buckets", "rates", "tokens a second", 16, {"by_class": "true", "rate": NO_RATE}),
}
MOST = 2**40
FINE = 0.05  # budgets closer than this, in shares of themselves, are not told apart


@dataclass(frozen=True, slots=True)
class At:
    """All seeds under one budget (None: no limit). `worst`: the protected class's percentile over its limit, of the
    limit that is nearest. `bought`: the other class's output tokens a second. `num_refused`: of its requests, a run."""

    budget: int | None
    worst: Interval
    limited: tuple[Interval, ...]  # seconds, one a limit
    bought: Interval
    num_refused: float

    @property
    def is_kept(self) -> bool:
        return self.worst.high < 1.0


@dataclass(frozen=True, slots=True)
class Quota:
    """`verdict`: quota, none (the smallest budget breaks a limit), or no limit needed. `of_seeds`: each seed's own
    largest budget; None where there are none such. `tried`: all budgets, in order."""

    kind: str
    budgeted: str
    protected: str
    limits: tuple[Objective, ...]
    verdict: str
    best: At | None
    unlimited: At
    of_seeds: Interval | None
    tried: tuple[At, ...]
    notes: tuple[str, ...] = ()


def quota(
    setup: Setup, budgeted: str, protected: str, runner: Runner, kind: str = "max_running", num: int = 5
) -> Quota:
    """Raises ValueError for classes that are not there, limits that are no percentiles, or another admission policy."""
    if kind not in KINDS:
        raise ValueError(f"unknown budget {kind!r}; known: {', '.join(KINDS)}")
    if num < 2:
        raise ValueError(f"{num} seeds give no interval: ask for 2 or more, better 5")
    with_budget(setup, KINDS[kind], budgeted, KINDS[kind].first)  # can it be set at all?
    search = Search(setup, budgeted, protected, runner, KINDS[kind], num)
    unlimited = search.at(None)
    if unlimited.is_kept:
        return Quota(
            kind, budgeted, protected, search.limits, "no limit needed", unlimited, unlimited, None, (unlimited,)
        )
    largest = search.largest(lambda budget: search.at(budget).is_kept)
    own = [search.largest(partial(search.keeps_alone, seed)) for seed in range(num)]
    of_seeds = mean_interval([float(each or 0) for each in own])
    best = search.at(largest) if largest else None
    return Quota(
        kind, budgeted, protected, search.limits, "quota" if best else "none", best, unlimited, of_seeds,
        search.tried, tuple(search.notes(largest)),
    )  # fmt: skip


class Search:
    """What was played, by budget and seed: nothing twice."""

    def __init__(self, setup: Setup, budgeted: str, protected: str, runner: Runner, kind: Kind, num: int) -> None:
        self.limits = _limits(setup)
        self._setup, self._runner, self._kind, self._num = setup, runner, kind, num
        self._budgeted, self._protected = budgeted, protected
        self._played: dict[int | None, dict[int, Outcome]] = {}

    def at(self, budget: int | None) -> At:
        outcomes = self.outcomes(budget)
        limited = [[self._percentile(each, limit) for each in outcomes] for limit in self.limits]
        return At(
            budget,
            _interval(self.worst(budget)),
            tuple(map(_interval, limited)),
            _interval([self._of(each, self._budgeted, "output_throughput") for each in outcomes]),
            sum(self._of(each, self._budgeted, "num_rejected") for each in outcomes) / len(outcomes),
        )

    def worst(self, budget: int | None) -> list[float]:
        """Of each seed: above 1 where a limit is broken."""
        return [self._worst(each) for each in self.outcomes(budget)]

    def keeps_alone(self, seed: int, budget: int) -> bool:
        return self._worst(self._play(budget, [seed])[seed]) < 1.0

    def outcomes(self, budget: int | None) -> list[Outcome]:
        played = self._play(budget, range(self._num))
        return [played[seed] for seed in range(self._num)]

    def _play(self, budget: int | None, seeds: Sequence[int]) -> Mapping[int, Outcome]:
        played = self._played.setdefault(budget, {})
        setup = self._setup if budget is None else with_budget(self._setup, self._kind, self._budgeted, budget)
        missing = [seed for seed in seeds if seed not in played]
        setups = [replace(setup, seed=setup.seed + seed) for seed in missing]
        played.update(zip(missing, self._runner.run(setups), strict=True))
        return played

    def _worst(self, outcome: Outcome) -> float:
        return max(self._percentile(outcome, limit) / limit.limit for limit in self.limits)

    def largest(self, keeps: Callable[[int], bool]) -> int | None:
        """Doubled until it is not kept, then halved between. No budget at all is known not to be kept by all."""
        if not keeps(self._kind.first):
            return None
        low, high = self._kind.first, 2 * self._kind.first
        while keeps(high):
            low, high = high, 2 * high
            if high > MOST:
                return low
        while high - low > max(1, FINE * low):
            middle = (low + high) // 2
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return low

    @property
    def tried(self) -> tuple[At, ...]:
        return tuple(self.at(budget) for budget in sorted(self._whole()))

    def _whole(self) -> Iterator[int]:
        """Budgets that all seeds were played under."""
        for budget, played in self._played.items():
            if budget is not None and len(played) == self._num:
                yield budget

    def notes(self, largest: int | None) -> list[str]:
        found = []
        if kept := [each.budget for each in self.tried if each.is_kept and (each.budget or 0) > (largest or 0)]:
            found.append(f"larger budgets keep the limits too ({kept[0]}): the tail does not only grow with the budget")
        if largest and self.at(largest).num_refused:
            num = self.at(largest).num_refused
            found.append(f"{num:,.0f} requests of {self._budgeted} a run were refused: some are larger than the budget")
        return found

    def _percentile(self, outcome: Outcome, limit: Objective) -> float:
        return self._of(outcome, self._protected, limit.metric, f"p{limit.percentile:g}")

    def _of(self, outcome: Outcome, class_name: str, *path: str) -> float:
        classes = outcome.metrics.get("classes") or {}
        if class_name not in classes:
            known = ", ".join(classes) or "the workload has but one; --transform classes,interactive=0.8,batch=0.2"
            raise ValueError(f"there is no class {class_name!r}; known: {known}")
        return number(classes[class_name], path)


def _limits(setup: Setup) -> tuple[Objective, ...]:
    limits = setup.objectives()
    if not limits:
        raise ValueError("a quota needs a limit to protect: --slo 'ttft_p99<1s'")
    for each in limits:
        if each.percentile not in PERCENTILES:
            raise ValueError(f"{str(each)!r} is no limit for a class: bound its p50, p90 or p99, as in ttft_p99<1s")
    return limits


def with_budget(setup: Setup, kind: Kind, class_name: str, budget: int) -> Setup:
    """The setup with this budget; those of other classes stay. Raises ValueError for another admission policy."""
    spec = str(setup.engine.get("admission", "accept_all"))
    name, *knobs = spec.split(",")
    if name not in ("accept_all", kind.policy):
        raise ValueError(f"this budget is one of {kind.policy}, and the setup has admission {name!r}: leave that out")
    known = dict(each.split("=", 1) for each in knobs) if name == kind.policy else {}
    read: Callable[[str, str], Mapping[str, Any]] = rates_by_name if kind.knob == "rates" else counts_by_name
    budgets = {**read(kind.knob, known.get(kind.knob, "")), class_name: budget}
    known = {**kind.also, **known, kind.knob: "/".join(f"{each}:{value:g}" for each, value in budgets.items())}
    spec = ",".join((kind.policy, *(f"{knob}={value}" for knob, value in known.items())))
    make("admission", spec)
    return replace(setup, engine={**setup.engine, "admission": spec})


def _interval(values: Sequence[float]) -> Interval:
    """Not a number where some run has none: nothing is kept then."""
    if not all(map(math.isfinite, values)):
        return Interval(math.nan, math.nan, math.nan, len(values))
    return mean_interval(values)

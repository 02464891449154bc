"""Which point of a sweep is best: the objective counts only where a tail, and every class's tail, stays within limits.

An objective alone would be won by the largest batch, whoever pays for it. So it is refused without a tail constraint
and without a fairness constraint; a point meets a limit if its mean over seeds surely does; an overloaded one meets
none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sim.experiment.statistics import Interval, holm, mean_interval, paired_effect
from sim.experiment.sweep.rows import Row
from sim.experiment.sweep.space import Point
from sim.slo import Objective, parse_objectives

GAINS = ("goodput", "output_throughput", "request_throughput", "input_throughput", "token_hit_rate", "attainment")
PERCENTILES = (50, 90, 99)  # that a run's metrics hold
LEVEL = 0.05


class Limit(NamedTuple):
    """A percentile in seconds, of all requests or of each class on its own."""

    objective: Objective
    of_each_class: bool

    def values(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """By class; where there is but one, and of all requests, by no name."""
        path = (self.objective.metric, f"p{self.objective.percentile:g}")
        classes = (metrics.get("classes") or {}) if self.of_each_class else {}
        return {name: number(of, path) for name, of in classes.items()} or {"": number(metrics, path)}

    def __str__(self) -> str:
        return f"{self.objective}{' of each class' if self.of_each_class else ''}"


@dataclass(frozen=True, slots=True)
class Goal:
    """What a search is for, and what it must not cost. `objective` None: nothing is searched for, only measured."""

    objective: str | None = None
    tail: str | None = None
    fairness: str | None = None

    def __post_init__(self) -> None:
        limits = (("tail", "--tail 'ttft_p99<1s'"), ("fairness", "--fairness 'ttft_p99<2s', held by each class"))
        for name, way_out in limits:
            if self.objective is not None and not getattr(self, name):
                raise ValueError(f"the objective {self.objective!r} alone lets a {name} pay for it: add {way_out}")
        _ = self.limits

    @property
    def limits(self) -> tuple[Limit, ...]:
        tail, fairness = (tuple(_percentiles(text)) if text else () for text in (self.tail, self.fairness))
        return tuple(Limit(each, False) for each in tail) + tuple(Limit(each, True) for each in fairness)

    @property
    def is_gain(self) -> bool:
        """More is better of throughput and hits, less of all else."""
        return self.objective in GAINS


def _percentiles(text: str) -> Iterator[Objective]:
    for each in parse_objectives(text):
        if each.percentile not in PERCENTILES:
            raise ValueError(f"{str(each)!r} is no tail: bound a percentile, one of p50, p90 and p99")
        yield each


@dataclass(frozen=True, slots=True)
class Measured:
    """A point and its runs, in the order of their seeds; those that failed are left out of figures."""

    index: int
    point: Point
    rows: tuple[Row, ...]

    @property
    def metrics(self) -> list[Mapping[str, Any]]:
        return [row.metrics for row in self.rows if row.metrics is not None]

    @property
    def errors(self) -> list[str]:
        return [row.error for row in self.rows if row.error is not None]

    @property
    def is_saturated(self) -> bool:
        return any(each["saturation"]["is_saturated"] for each in self.metrics)

    @property
    def is_steady(self) -> bool:
        """All its runs were played, none of them overloaded: its latencies mean something."""
        return bool(self.rows) and not self.errors and not self.is_saturated

    def values(self, metric: str) -> list[float]:
        return [number(each, metric.split(".")) for each in self.metrics]

    def mean(self, metric: str) -> float:
        found = self.values(metric)
        return sum(found) / len(found) if found else math.nan


@dataclass(frozen=True, slots=True)
class Best:
    """`index` of the point, or None; why; and the other points that are not surely worse."""

    index: int | None
    reason: str
    tied: tuple[int, ...] = ()


def best(points: Sequence[Measured], goal: Goal) -> Best:
    """Of those that meet every limit the one with the best mean."""
    if goal.objective is None:
        return Best(None, "no objective was given")
    fit = [each for each in points if not broken(each, goal.limits) and math.isfinite(each.mean(goal.objective))]
    if not fit:
        return Best(None, _none(points, goal))
    sign = 1.0 if goal.is_gain else -1.0
    first = max(fit, key=lambda each: (sign * each.mean(goal.objective or ""), -each.index))
    limits = ", ".join(map(str, goal.limits))
    most = "most" if goal.is_gain else "least"
    reason = f"{most} {_words(goal.objective)} of the {len(fit)} of {len(points)} points that keep {limits}"
    return Best(first.index, reason, tuple(_tied(first, fit, goal.objective)))


def broken(point: Measured, limits: Sequence[Limit]) -> list[str]:
    """The limits that it does not surely keep, with what was measured; empty: it keeps all."""
    if point.errors or not point.metrics:
        return ["failed"]
    if point.is_saturated:
        return ["overloaded"]
    return [told for limit in limits for told in _broken(point.metrics, limit)]


def _broken(runs: Sequence[Mapping[str, Any]], limit: Limit) -> Iterator[str]:
    """A class that is not in every run, or has no such latency, keeps nothing."""
    found = [limit.values(each) for each in runs]
    for name in sorted({name for each in found for name in each}):
        values = [each.get(name, math.nan) for each in found]
        high = max(values) if len(values) == 1 else _interval(values).high
        if not high < limit.objective.limit:
            yield f"{limit.objective}{f' of {name}' if name else ''}: up to {high:.3g} s"


def _interval(values: Sequence[float]) -> Interval:
    if not all(map(math.isfinite, values)):
        return Interval(math.nan, math.nan, math.nan, len(values))
    return mean_interval(values)


def _tied(first: Measured, fit: Sequence[Measured], objective: str) -> Iterator[int]:
    """Points that paired runs under the same seeds do not tell apart from the best, nor from one another (Holm)."""
    others = {str(each.index): each for each in fit if each is not first}
    if len(first.metrics) < 2:
        return
    effects = {name: paired_effect(first.values(objective), each.values(objective)) for name, each in others.items()}
    adjusted = holm({name: effect.p_value for name, effect in effects.items()})
    yield from (others[name].index for name, p_value in adjusted.items() if p_value >= LEVEL)


def _none(points: Sequence[Measured], goal: Goal) -> str:
    """What stood in the way most often."""
    causes: dict[str, int] = {}
    for each in points:
        for cause in {told.partition(":")[0] for told in broken(each, goal.limits)} or {"not measured"}:
            causes[cause] = causes.get(cause, 0) + 1
    told = "; ".join(f"{cause} ({num})" for cause, num in sorted(causes.items(), key=lambda each: -each[1])[:4])
    return f"none of {len(points)} points keeps every limit. Broken, in points: {told}"


def number(metrics: Mapping[str, Any], path: Sequence[str]) -> float:
    """nan where it was not measured."""
    found: Any = metrics
    for part in path:
        if not isinstance(found, Mapping) or found.get(part) is None:
            return math.nan
        found = found[part]
    return float(found)


def _words(metric: str) -> str:
    return metric.replace(".", " ").replace("_", " ")


def front(points: Sequence[Measured], metrics: Sequence[str]) -> list[int]:
    """Indices of the steady points that no other betters in one of these without losing in another (Pareto)."""
    costs = {
        each.index: [(-1.0 if metric in GAINS else 1.0) * each.mean(metric) for metric in metrics]
        for each in points
        if each.is_steady
    }
    known = {index: row for index, row in costs.items() if all(map(math.isfinite, row))}
    return [index for index, row in known.items() if not any(_betters(other, row) for other in known.values())]


def _betters(a: Sequence[float], b: Sequence[float]) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))

"""Which knob moves which metric: by ranks, so that no scale and no outlier decides.

Of a knob with numbers, Spearman's correlation tells direction and how monotone the effect is. The share of a metric's
variance (of its ranks) between the knob's levels tells how much of what varied was this knob, whatever the form
(Kruskal and Wallis's H over n - 1); with one point a level it is the correlation's square. Both are main effects: in a
grid and a Latin hypercube all else is balanced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc, stdtr

from sim.experiment.statistics import holm
from sim.experiment.sweep.judged import Measured
from sim.experiment.sweep.space import Knob, Value

Floats = NDArray[np.float64]
MAX_LEVELS = 6  # of a knob with more values, so many parts of equal size


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Of one metric to one knob. `correlation`: nan for a knob without order. `share`: of the metric's rank variance.

    `first`, `last`: the metric's mean at the knob's lowest and highest level (first and last, where they have no
    order). `p_adjusted`: of no effect at all, among all pairs.
    """

    knob: str
    metric: str
    correlation: float
    share: float
    first: float
    last: float
    p_adjusted: float

    @property
    def change(self) -> float:
        """From the first level to the last, in shares of the first."""
        return (self.last - self.first) / abs(self.first) if self.first else math.nan


def sensitivities(knobs: Sequence[Knob], points: Sequence[Measured], metrics: Sequence[str]) -> list[Sensitivity]:
    """Over the points that have the metric; latencies of overloaded points are large, and are ranked as such."""
    found = [each for knob in knobs for metric in metrics for each in _of(knob, metric, points)]
    adjusted = holm({f"{each.knob} {each.metric}": each.p_adjusted for each in found})
    return [
        Sensitivity(s.knob, s.metric, s.correlation, s.share, s.first, s.last, adjusted[f"{s.knob} {s.metric}"])
        for s in found
    ]


def _of(knob: Knob, metric: str, points: Sequence[Measured]) -> Iterator[Sensitivity]:
    """Nothing where there is too little, or nothing varies."""
    known = [(each.point[knob.name], each.mean(metric)) for each in points if knob.name in each.point]
    pairs = [(value, y) for value, y in known if math.isfinite(y)]
    values, y = [value for value, _ in pairs], np.array([y for _, y in pairs], dtype=np.float64)
    levels = _levels(values, knob)
    num_levels = len(set(levels.tolist()))
    if num_levels < 2 or y.std() == 0.0:
        return
    r = _correlation(values, y)
    first, last = (float(y[levels == level].mean()) for level in (levels.min(), levels.max()))
    if num_levels < len(y):
        share = _share(_ranks(y), levels)
        p_value = float(chdtrc(num_levels - 1, share * (len(y) - 1)))
        yield Sensitivity(knob.name, metric, r, share, first, last, p_value)
    elif len(y) >= 4 and not math.isnan(r):  # a point a level: nothing tells a level's own spread
        yield Sensitivity(knob.name, metric, r, r * r, first, last, _monotone_p(r, len(y)))


def _monotone_p(r: float, num: int) -> float:
    """Of no correlation of ranks, two-sided; not below what the fewest orders there are allow."""
    least = 2.0 / math.factorial(num)
    if abs(r) > 1.0 - 1e-12:
        return least
    return max(least, 2.0 * float(stdtr(num - 2, -abs(r) * math.sqrt((num - 2) / (1.0 - r * r)))))


def _levels(values: Sequence[Value], knob: Knob) -> Floats:
    """A number for each value: its place among the knob's, or the part of the range it lies in."""
    num_parts = min(MAX_LEVELS, len(values) // 4)
    distinct = sorted(set(values), key=knob.levels.index if _has_no_order(values) else float)
    if len(distinct) <= MAX_LEVELS or _has_no_order(values) or num_parts < 2:
        places = {value: index for index, value in enumerate(distinct)}
        return np.array([places[value] for value in values], dtype=np.float64)
    ranks = _ranks(np.array([float(value) for value in values]))
    return np.floor((ranks - 0.5) * num_parts / len(values))


def _has_no_order(values: Sequence[Value]) -> bool:
    return any(isinstance(value, (str, bool)) for value in values)


def _correlation(values: Sequence[Value], y: Floats) -> float:
    if _has_no_order(values):
        return math.nan
    x, y = _ranks(np.array([float(value) for value in values])), _ranks(y)
    return float(np.corrcoef(x, y)[0, 1])


def _share(ranks: Floats, levels: Floats) -> float:
    """Of all squares how many lie between the levels."""
    within = sum(_squares(ranks[levels == level]) for level in sorted(set(levels.tolist())))
    return max(0.0, 1.0 - within / _squares(ranks))


def _squares(values: Floats) -> float:
    return float(((values - values.mean()) ** 2).sum())


def _ranks(values: Floats) -> Floats:
    """From 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - 0.5 * (counts - 1))[place].astype(np.float64)

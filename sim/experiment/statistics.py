"""What replications say: intervals, paired differences, equivalence, how many more are needed, when a run is warm.

A replication is one run with its own seed, and gives one number a metric: so intervals need no independence within a
run. Student's t throughout; what is skewed (the latencies of a nearly full server) is covered a little less often than
said, 89 to 93 times in a hundred (benchmarks/coverage.py). The truth is the mean of such runs, as long and from empty:
no steady state that they are too short to reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, stdtr, stdtrit

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of replications and where it may lie; `level` of such intervals hold the truth."""

    mean: float
    low: float
    high: float
    num: int
    level: float = 0.95

    @property
    def half_width(self) -> float:
        return 0.5 * (self.high - self.low)

    @property
    def relative(self) -> float:
        """Half its width over the mean; infinite at a mean of zero."""
        return self.half_width / abs(self.mean) if self.mean else math.inf

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's t over replications. Raises ValueError for fewer than 2."""
    array = _replications(values)
    error = float(array.std(ddof=1)) / math.sqrt(len(array))
    reach = float(stdtrit(len(array) - 1, 0.5 + level / 2)) * error
    mean = float(array.mean())
    return Interval(mean, mean - reach, mean + reach, len(array), level)


def share_interval(num_hits: int, num: int, level: float = 0.95) -> Interval:
    """Of a share of independent trials, exact (Clopper and Pearson, 1934)."""
    if not 0 <= num_hits <= num or not num:
        raise ValueError(f"{num_hits} of {num} is no share: 0 to all of 1 or more")
    rest = (1.0 - level) / 2
    low = float(betaincinv(num_hits, num - num_hits + 1, rest)) if num_hits else 0.0
    high = float(betaincinv(num_hits + 1, num - num_hits, 1.0 - rest)) if num_hits < num else 1.0
    return Interval(num_hits / num, low, high, num, level)


# -- two arms ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Effect:
    """B minus A over paired replications.

    `correlation`: of the pairs; 1 - it is about the share of the variance that common random numbers leave. `p_value`:
    of no difference, two-sided. `baseline`: A's mean.
    """

    difference: Interval
    baseline: float
    correlation: float
    p_value: float

    @property
    def relative(self) -> Interval:
        """In shares of A's mean; A's own error is left out, as it is common to both arms."""
        d, base = self.difference, abs(self.baseline)
        if not base:
            return Interval(math.nan, math.nan, math.nan, d.num, d.level)
        return Interval(d.mean / base, d.low / base, d.high / base, d.num, d.level)

    @property
    def is_exactly_zero(self) -> bool:
        """All pairs were the same to the bit: the factor changed nothing at all."""
        return self.difference.low == self.difference.high == 0.0


def paired_effect(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Effect:
    """Raises ValueError where the arms are not as long as each other, or shorter than 2."""
    left, right = _replications(a), _replications(b)
    if len(left) != len(right):
        raise ValueError(f"{len(left)} replications of A and {len(right)} of B: pairs are needed")
    difference = mean_interval((right - left).tolist(), level)
    return Effect(difference, float(left.mean()), correlation(left, right), _p_value(right - left))


def correlation(a: Floats, b: Floats) -> float:
    """Pearson's; nan where an arm does not vary."""
    if a.std() == 0.0 or b.std() == 0.0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def _p_value(differences: Floats) -> float:
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    mean = abs(float(differences.mean()))
    if error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return 2.0 * float(stdtr(len(differences) - 1, -mean / error))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted so that the chance of any false finding among them is at most its level (Holm, 1979)."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda each: (p_values[each], each))):
        largest = max(largest, min(1.0, p_values[name] * (len(p_values) - rank)))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


class Equivalence(NamedTuple):
    """Two one-sided tests against a margin (Schuirmann, 1987)."""

    verdict: str  # equivalent | different | undecided
    p_value: float  # of a difference as large as the margin
    margin: float


def equivalence(effect: Effect, margin: float, alpha: float = 0.05) -> Equivalence:
    """Is the difference surely smaller than the margin, surely not, or is the interval too wide to tell?"""
    if not margin > 0.0:
        raise ValueError(f"margin ({margin}) must be above 0: no two runs are equal to the last bit")
    d = effect.difference
    freedom = d.num - 1
    error = d.half_width / float(stdtrit(freedom, 0.5 + d.level / 2))
    if error == 0.0:
        inside = abs(d.mean) < margin
        return Equivalence("equivalent" if inside else "different", 0.0 if inside else 1.0, margin)
    above = float(stdtr(freedom, (d.mean - margin) / error))
    below = float(stdtr(freedom, (-margin - d.mean) / error))
    p_value = max(above, below)
    if p_value < alpha:
        return Equivalence("equivalent", p_value, margin)
    outside = d.low > margin or d.high < -margin
    return Equivalence("different" if outside else "undecided", p_value, margin)


# -- how many ---------------------------------------------------------------------------------------------------------


def replications_needed(values: Sequence[float], half_width: float, level: float = 0.95) -> int:
    """So that an interval as of these values would be no wider; at least as many as there are degrees to estimate."""
    if not half_width > 0.0:
        raise ValueError(f"half_width ({half_width}) must be above 0")
    deviation = float(_replications(values).std(ddof=1))
    num = 2
    while float(stdtrit(num - 1, 0.5 + level / 2)) * deviation / math.sqrt(num) > half_width:
        num = max(num + 1, math.ceil(num * 1.05))
    return num


class Look(NamedTuple):
    """At one of several looks: the interval that holds together with all others."""

    interval: Interval
    is_enough: bool


class Looks:
    """Stopping when the interval is narrow enough, without fooling oneself.

    Whoever stops at the first narrow interval looked several times. Look k spends (1 - level) / (k * (k + 1)) of the
    error, which adds up to less than the whole however long one goes on (Bonferroni); a look is taken when there are
    twice as many replications as at the last, so few are spent.
    """

    def __init__(self, half_width: float, first: int = 10, level: float = 0.95, is_relative: bool = True) -> None:
        if first < 2 or not half_width > 0.0:
            raise ValueError(f"first ({first}) must be 2 or more and half_width ({half_width}) above 0")
        self._half_width, self._level, self._is_relative = half_width, level, is_relative
        self._num_looks, self.next_num = 0, first

    def look(self, values: Sequence[float]) -> Look:
        assert len(values) >= self.next_num, f"{len(values)} replications, the next look is at {self.next_num}"
        self._num_looks += 1
        self.next_num = 2 * len(values)
        spent = (1.0 - self._level) / (self._num_looks * (self._num_looks + 1))
        interval = mean_interval(values, 1.0 - spent)
        width = interval.relative if self._is_relative else interval.half_width
        return Look(interval, width <= self._half_width)


# -- one long run -----------------------------------------------------------------------------------------------------


def warm_up(values: Sequence[float], batch: int = 5) -> int | None:
    """How many leading values to leave out (MSER-5: White, 1997); None if the run is too short to tell.

    The cut that makes the rest's standard error least. A cut in the second half says that nothing had settled.
    """
    num_batches = len(values) // batch
    if num_batches < 10:
        return None
    means = np.asarray(values[: num_batches * batch], dtype=np.float64).reshape(-1, batch).mean(axis=1)
    left = np.arange(num_batches, 0, -1)  # batches kept, by cut
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum((means * means)[::-1])[::-1]
    spread = np.maximum(squares - sums * sums / left, 0.0) / (left * left)
    cut = int(np.argmin(spread[: num_batches - 5]))  # the last few batches are too few to be judged by
    return cut * batch if cut <= num_batches // 2 else None


def batch_means(values: Sequence[float], num_batches: int = 20, level: float = 0.95) -> Interval:
    """Of one long warm run, by its parts. Raises ValueError for fewer than 10 values a batch.

    Not for a nearly full server: of 20,000 requests of M/M/1 at a load of 0.9 three such intervals in four hold the
    truth (docs/experiments.md). Seeds do better.
    """
    if len(values) < 10 * num_batches:
        raise ValueError(f"{len(values)} values are too few for {num_batches} batches: 10 or more each")
    array = np.asarray(values, dtype=np.float64)
    return mean_interval([float(part.mean()) for part in np.array_split(array, num_batches)], level)


def _replications(values: Sequence[float] | Floats) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        raise ValueError(f"{len(array)} replications give no interval: 2 or more, better 20")
    if not np.isfinite(array).all():
        raise ValueError("a replication gave no number: leave out metrics that do not exist in every run")
    return array

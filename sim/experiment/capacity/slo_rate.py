"""The largest rate at which objectives hold, with an interval.

The log odds of a miss are near a straight line in the log of the rate where they cross what is allowed: two rates about
the crossing give it. Leaving out one replication at a time gives its error (jackknife; Tukey, 1958), which Student's t
turns into an interval. An overloaded run has no steady state, and lends no number to this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from sim.experiment.capacity.misses import ALONE, RATIO, Curve, Seen, Term, steady
from sim.experiment.statistics import Interval, mean_interval, share_interval
from sim.slo import Objective

LEVEL = 0.95
STEEPNESS = 20.0  # of log odds by log rate: a guess that only sets how far the search steps
BOTTOM = -34  # the step of the ladder next above that at which requests hardly meet


class Unmet(NamedTuple):
    """Objectives that do not hold even where requests hardly meet; of each the share that missed it there."""

    rate: float
    missed: dict[str, float]


@dataclass(frozen=True, slots=True)
class SloRate:
    """`rate` in requests a second with its interval. `low` and `high`: the rates played about it, `high` None where
    the ceiling stopped the search. `by`: objective (it crosses there), stability or bound (it holds until there)."""

    rate: Interval
    low: float
    high: float | None
    by: str
    num: int
    is_enough: bool
    notes: tuple[str, ...] = ()


def slo_rate(curve: Curve, precision: float = 0.05, first: int = 8, most: int = 64) -> SloRate | Unmet:
    """Find two rates of the ladder about the crossing, then play as many replications as the interval asks for.

    In two stages (Stein, 1945): the first replications say how many there must be, and their spread alone makes the
    interval, so that it holds as often as it says although its width was chosen.
    """
    if missed := _surely_missed(curve, curve.alone()):
        return Unmet(curve.rate(ALONE), missed)
    step = bracket(curve)
    for num in sorted({min(each, first) for each in (2, 4, first)}):
        step = _about(curve, curve.top - 1 if step is None else step, num)
    if step is None:
        return _at_ceiling(curve, first)
    if step == BOTTOM and not _holds(curve, step):
        return Unmet(curve.rate(step), _surely_missed(curve, curve.rate(step)))
    low, high = curve.rate(step), curve.rate(step + 1)
    if curve.is_saturated(high):
        return _at_stability(curve, low, high, first, precision)
    spread = float(np.std(_pseudo_values(curve, low, high), ddof=1))
    reach = float(stdtrit(first - 1, 0.5 + LEVEL / 2)) * spread
    wanted = math.ceil((reach / (precision * _crossing(curve, low, high))) ** 2)
    num = min(most, max(first, wanted))
    curve.grow([low, high], num)
    mean = float(np.mean(_pseudo_values(curve, low, high)))
    half = reach / math.sqrt(num)
    interval = Interval(mean, max(0.0, mean - half), mean + half, num, LEVEL)
    return SloRate(interval, low, high, "objective", num, wanted <= most, _notes(curve))


def _surely_missed(curve: Curve, rate: float) -> dict[str, float]:
    """Terms missed by more than are allowed, whatever chance did; of each the share that missed it."""
    counts = curve.counts(rate).sum(axis=0).tolist()
    rows = [(term, known, missed) for term, (known, missed) in zip(curve.terms, counts, strict=True) if known]
    return {str(t): missed / n for t, n, missed in rows if share_interval(missed, n).low > t.allowed}


def bracket(curve: Curve, start: int = 0, scale: float = 1.0, num: int = 2) -> int | None:
    """The step of the ladder at or close to which the objectives cease to hold; None: they hold to its top.

    `scale` multiplies every limit. Two steps are played at once: there are most often two cores.
    """
    step, held, missed = min(start, curve.top - 1), -math.inf, math.inf
    while True:
        curve.grow([curve.rate(step), curve.rate(step + 1)], num)
        if _is_near(curve, step, scale):
            return step
        for each in (step, step + 1):
            if _holds(curve, each, scale, num):
                held = max(held, each)
            else:
                missed = min(missed, each)
        if held >= curve.top:
            return None
        if missed <= max(held + 1, BOTTOM):  # next to each other; the lower crossing where there are several
            return max(BOTTOM, int(missed) - 1)
        if math.isinf(missed):
            step = min(step + _stride(curve, step + 1, scale, num), curve.top - 1)
        elif math.isinf(held):
            step = max(BOTTOM, step - _stride(curve, step, scale, num))
        else:
            step = int(held + missed) // 2


def _holds(curve: Curve, step: int, scale: float = 1.0, num: int | None = None) -> bool:
    rate = curve.rate(step)
    return not curve.is_saturated(rate) and curve.keeps(rate, scale, num)


def _stride(curve: Curve, step: int, scale: float, num: int) -> int:
    """Steps to go, more where the objectives are far from where they would begin to hold, or to be missed."""
    rate = curve.rate(step)
    if curve.is_saturated(rate):
        return 2
    if not curve.counts(rate, scale)[:num, :, 1].any():
        return 3  # nobody missed anything: how far it is cannot be told
    away = abs(curve.excess(rate, scale, num=num)) / STEEPNESS
    return min(4, max(1, round(away / math.log(RATIO))))


def _about(curve: Curve, step: int, num: int) -> int | None:
    """Moved, where more replications say so, until the crossing lies between a step and the next, or close to them."""
    while True:
        curve.grow([curve.rate(step), curve.rate(step + 1)], num)
        holds = (_holds(curve, step), _holds(curve, step + 1))
        if holds == (True, False) or _is_near(curve, step) or (step == BOTTOM and not holds[1]):
            return step
        if holds[1] and step + 1 == curve.top:
            return None
        step += 1 if holds[1] else -1


def _is_near(curve: Curve, step: int, scale: float = 1.0, reach: float = 0.5) -> bool:
    """The line through a step and the next meets what is allowed no more than so many steps beyond them."""
    low, high = curve.rate(step), curve.rate(step + 1)
    if curve.is_saturated(low) or curve.is_saturated(high) or not curve.excess(low, scale) < curve.excess(high, scale):
        return False
    beyond = math.pow(RATIO, reach)
    return low / beyond < _crossing(curve, low, high, scale) < high * beyond


def _at_ceiling(curve: Curve, num: int) -> SloRate:
    """The objectives hold as far as a rate can be served at all."""
    low = curve.rate(curve.top)
    curve.grow([low], num)
    return SloRate(Interval(0.5 * (low + curve.ceiling), low, curve.ceiling, num), low, None, "bound", num, True)


def _at_stability(curve: Curve, low: float, high: float, num: int, precision: float) -> SloRate:
    """Kept at the one, overloaded at the other: what lies between is not known, only narrowed.

    A run tells a small overload from a full house only if it is long: so the interval begins a `precision` lower.
    """
    while high / low > 1.0 + precision:
        middle = math.sqrt(low * high)
        curve.grow([middle], num)
        kept = not curve.is_saturated(middle) and curve.keeps(middle)
        low, high = (middle, high) if kept else (low, middle)
    interval = Interval(math.sqrt(low * high), low / (1.0 + precision), high, num)
    return SloRate(interval, low, high, "stability", num, True, _notes(curve))


def _crossing(
    curve: Curve, low: float, high: float, scale: float = 1.0, without: int | None = None, num: int | None = None
) -> float:
    """Where the line through the two meets what is allowed; at most two of their distances away from them."""
    a, b = (curve.excess(rate, scale, without, num) for rate in (low, high))
    share = -a / (b - a) if b > a else 0.5
    return low * math.pow(high / low, min(3.0, max(-2.0, share)))


def _pseudo_values(curve: Curve, low: float, high: float) -> list[float]:
    """One a replication; their mean is the rate with its bias taken out, and their spread is its error."""
    num = min(len(curve.counts(low)), len(curve.counts(high)))
    whole = _crossing(curve, low, high, num=num)
    return [num * whole - (num - 1) * _crossing(curve, low, high, without=i, num=num) for i in range(num)]


def _notes(curve: Curve) -> tuple[str, ...]:
    """Kept above a rate at which it is not: then there is no largest rate, only a lowest crossing."""
    kept = [(s.rate, not s.is_saturated and curve.keeps(s.rate)) for s in curve.seen if len(s.runs) > 1]
    missed = [rate for rate, is_kept in kept if not is_kept]
    if any(is_kept and missed and rate > missed[0] for rate, is_kept in kept):
        return ("objectives are missed at a rate below one at which they are kept: more load helps here",)
    return ()


# -- other costs, other classes ---------------------------------------------------------------------------------------


def rate_at_costs(curve: Curve, found: SloRate, times: float, num: int = 2) -> Interval:
    """The rate if every cost were `times` as high.

    All times scaled is the clock scaled: costs k times as high at limit L are these costs at limit L / k, with
    arrivals k times as fast. So no cost is changed here, but the limits are, and the result is that of the same
    replications: its interval is as wide, in shares, as that of the rate itself.
    """
    if found.by != "objective" or found.high is None:
        return _scaled(found.rate, 1.0 / times)
    scale, step = 1.0 / times, curve.step_of(found.low)
    here = _crossing(curve, found.low, found.high)
    if _is_near(curve, step, scale, reach=1.5):
        return _scaled(found.rate, _crossing(curve, found.low, found.high, scale) / here / times)
    other_step = bracket(curve, step, scale, num)
    if other_step is None:
        return _scaled(found.rate, curve.ceiling / here / times)
    low, high = curve.rate(other_step), curve.rate(other_step + 1)
    other = math.sqrt(low * high) if curve.is_saturated(high) else _crossing(curve, low, high, scale, num=num)
    return _scaled(found.rate, other / _crossing(curve, found.low, found.high, num=num) / times)


def _scaled(interval: Interval, by: float) -> Interval:
    return Interval(interval.mean * by, interval.low * by, interval.high * by, interval.num, interval.level)


class TermRate(NamedTuple):
    """The largest rate of one term alone. `is_above`: only known to be above what was played. `missed`: at `at`."""

    term: Term
    rate: float
    is_above: bool
    missed: float
    at: float


def term_rates(curve: Curve, at: float) -> list[TermRate]:
    """Of each term alone, from the rates that were played; overloaded ones lend nothing."""
    return [_term_rate(curve, index, at) for index in range(len(curve.terms))]


def _term_rate(curve: Curve, index: int, at: float) -> TermRate:
    rates = [each.rate for each in curve.seen if not each.is_saturated]
    excess = [curve.excess_of(rate, index) for rate in rates]
    known, missed = curve.counts(at)[:, index].sum(axis=0).tolist()
    share = missed / known if known else math.nan
    for low, high, a, b in zip(rates, rates[1:], excess, excess[1:], strict=False):
        if a <= 0.0 < b:
            return TermRate(curve.terms[index], low * (high / low) ** (-a / (b - a)), False, share, at)
    return TermRate(curve.terms[index], rates[-1], excess[-1] <= 0.0, share, at)


def attained(curve: Curve, seen: Seen, objectives: Sequence[Objective]) -> Interval | None:
    """Share of requests that meet every objective, percentiles read as bounds on each; None where overloaded."""
    if seen.is_saturated:
        return None
    every = Term(None, tuple(objectives), 0.5)
    counts = [every.count(run, steady(run, seen.settled), 1.0) for run in seen.runs]
    shares = [1.0 - missed / known for known, missed in counts if known]
    if len(shares) < 2:
        only = shares[0] if shares else math.nan
        return Interval(only, only, only, 1)
    return mean_interval(shares)

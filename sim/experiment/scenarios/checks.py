"""Rules that cases are held to: counts exactly, times with an interval over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from operator import sub

from sim.experiment.scenarios.scenario import Arm, Check
from sim.experiment.statistics import Interval, mean_interval
from sim.report import seconds

_ALL = "num_requests"


def is_exactly(arm: Arm, metric: str, expected: float, what: str) -> Check:
    """Under every seed."""
    found = sorted(set(arm.values(metric)))
    told = ", ".join(f"{each:,.10g}" for each in found)
    return Check(f"{arm.name}: {what} exactly {expected:,.10g}", told, found == [expected])


def is_at_least(arm: Arm, metric: str, least: float, what: str) -> Check:
    """Under every seed."""
    found = min(arm.values(metric))
    return Check(f"{arm.name}: {what} at least {least:,.10g}", f"{found:,.10g}", found >= least)


def is_at_most(arm: Arm, metric: str, most: float, what: str) -> Check:
    """Under every seed."""
    found = max(arm.values(metric))
    return Check(f"{arm.name}: {what} at most {most:,.10g}", f"{found:,.10g}", found <= most)


def all_answered(arms: Iterable[Arm]) -> Check:
    """No error, no rejection, nobody left without an answer."""
    left = {arm.name: num for arm in arms if (num := sum(map(sub, arm.values(_ALL), arm.values("num_completed"))))}
    told = ", ".join(f"{name}: {num:,.0f} not" for name, num in left.items())
    return Check("everybody is answered", told or "yes", not left)


def falls(a: Arm, b: Arm, metric: str, share: float, what: str) -> Check:
    """B is surely (95 %) at most so large a share of A, by the mean of ratios under equal seeds."""
    ratio = _ratio(a, b, metric)
    rule = f"{b.name}: {what} at most {share:g} of {a.name}'s"
    return Check(rule, _told(a, b, metric, ratio), ratio.high <= share, is_timed=True)


def rises(a: Arm, b: Arm, metric: str, share: float, what: str) -> Check:
    """B is surely (95 %) at least so large a share of A."""
    ratio = _ratio(a, b, metric)
    rule = f"{b.name}: {what} at least {share:g} of {a.name}'s"
    return Check(rule, _told(a, b, metric, ratio), ratio.low >= share, is_timed=True)


def _ratio(a: Arm, b: Arm, metric: str) -> Interval:
    """Of B over A, by the logarithms: what disturbs a time multiplies it."""
    logs = [math.log(y / x) for x, y in zip(a.values(metric), b.values(metric), strict=True)]
    found = mean_interval(logs)
    return replace(found, mean=math.exp(found.mean), low=math.exp(found.low), high=math.exp(found.high))


def _told(a: Arm, b: Arm, metric: str, ratio: Interval) -> str:
    show = seconds if "." in metric or metric == "duration" else "{:,.4g}".format
    return f"{show(a.mean(metric))} -> {show(b.mean(metric))}, {ratio.low:.2f} to {ratio.high:.2f} of it"

"""Service-level objectives: what was promised, and whether it was kept.

`ttft_p99<1s` bounds a percentile of all answered requests; `ttft<1s` bounds each request. Attainment counts the
requests that meet every per-request bound over all arrivals: who was rejected, failed or never answered met none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
METRICS = ("ttft", "tpot", "itl", "e2e", "queue_delay")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_FORM = re.compile(
    r"(?P<metric>[a-z0-9_]+?)(?:_p(?P<percentile>\d+(?:\.\d+)?))?\s*<=?\s*(?P<limit>[\d.]+)\s*(?P<unit>\w+)"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """A bound in seconds; `percentile` None bounds every request."""

    metric: str
    limit: float
    percentile: float | None = None

    def __str__(self) -> str:
        at = "" if self.percentile is None else f" p{self.percentile:g}"
        return f"{self.metric}{at} < {self.limit:g} s"


@dataclass(frozen=True, slots=True)
class Kept:
    """An objective beside what was measured: a percentile in seconds, or the share of arrivals that met it."""

    objective: Objective
    measured: float
    is_met: bool


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """`ttft_p99<1s,tpot<50ms`. Raises ValueError naming the part that cannot be read."""
    return tuple(_objective(part.strip()) for part in text.split(","))


def _objective(text: str) -> Objective:
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"objective {text!r} must read like ttft_p99<1s or tpot<50ms")
    metric, unit, percentile = match["metric"], match["unit"], match["percentile"]
    if metric not in METRICS:
        raise ValueError(f"objective {text!r}: unknown metric {metric!r}; known: {', '.join(METRICS)}")
    if unit not in _UNITS:
        raise ValueError(f"objective {text!r}: unknown unit {unit!r}; known: {', '.join(_UNITS)}")
    if percentile is not None and not 0 < float(percentile) < 100:
        raise ValueError(f"objective {text!r}: percentile {percentile} must lie between 0 and 100")
    try:
        limit = float(match["limit"]) * _UNITS[unit]
    except ValueError:
        raise ValueError(f"objective {text!r}: {match['limit']!r} is not a number") from None
    if limit <= 0:
        raise ValueError(f"objective {text!r}: the limit must be above 0")
    return Objective(metric, limit, None if percentile is None else float(percentile))


def judge(objectives: Sequence[Objective], values: Mapping[str, Floats], num_arrivals: int) -> list[Kept]:
    """Each objective against the answered requests' values by metric (nan where a request has none, as TPOT of one
    token). A percentile of nothing is not met; a bound on every request must hold for all arrivals."""
    return [_judge(each, values[each.metric], num_arrivals) for each in objectives]


def _judge(objective: Objective, values: Floats, num_arrivals: int) -> Kept:
    if objective.percentile is not None:
        known = values[~np.isnan(values)]
        measured = float(np.percentile(known, objective.percentile)) if len(known) else float("nan")
        return Kept(objective, measured, bool(measured < objective.limit))
    share = float(_meets(objective, values).sum() / num_arrivals) if num_arrivals else float("nan")
    return Kept(objective, share, share == 1.0)


def _meets(objective: Objective, values: Floats) -> NDArray[np.bool_]:
    """A request without the metric breaks no promise about it."""
    return np.isnan(values) | (values < objective.limit)


def attainment(objectives: Sequence[Objective], values: Mapping[str, Floats], num_arrivals: int) -> float:
    """Share of all arrivals that met every objective, percentile objectives read as bounds on each request."""
    if not num_arrivals or not objectives:
        return float("nan")
    met = np.ones(len(values["e2e"]), dtype=bool)
    for each in objectives:
        met &= _meets(each, values[each.metric])
    return float(met.sum() / num_arrivals)

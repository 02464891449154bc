"""Clocks of traces: whether the times can be in the unit their format says, and whether they tick coarsely.

Few files declare their unit. Mooncake's milliseconds read as seconds make an hour last 41 days; the other way round, a
server sees a thousand times the load and every result is about its queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.workload.streams import stream

MAX_DAYS = 400
FASTEST, FASTEST_BURST = 1_000, 5_000  # requests a second; whole services are recorded at 2 to 200
SLOWEST, SLOWEST_DAYS = 1 / 60, 1  # less than one a minute for more than a day loads no server
FEW = 100  # rows below which a trace may be one burst, or a pause

_DAY = 86_400.0


class Unit(NamedTuple):
    name: str
    per_second: int


UNITS = {
    "s": Unit("seconds", 1),
    "ms": Unit("milliseconds", 10**3),
    "us": Unit("microseconds", 10**6),
    "ns": Unit("nanoseconds", 10**9),
}
WALL_CLOCK = Unit("wall-clock time", 1)


def check_span(times: Sequence[float], unit: Unit) -> None:
    if max(times) > MAX_DAYS * _DAY:
        raise ValueError(
            f"the last request arrives after {max(times) / _DAY:,.0f} days, read as {unit.name}, and no trace is "
            f"longer than {MAX_DAYS}: check the unit, and count the times from the start of the trace"
        )


def check_rate(times: Sequence[float], unit: Unit) -> None:
    """Refuses a mean rate that says the times are in another unit."""
    gaps, span = len(times) - 1, max(times) - min(times)
    if doubt := doubtful(gaps, span):
        units = likely_units(gaps, span, unit)
        otherwise = f", or timestamp_unit: {' or '.join(units)}" if units else ""
        raise ValueError(
            f"the trace runs at {doubt.seen} when its times are read as {unit.name}, {doubt.rule} to be true: convert "
            f"the times to {unit.name}, or give the rate you mean{otherwise}"
        )


class Doubt(NamedTuple):
    seen: str
    rule: str


def doubtful(gaps: int, span: float) -> Doubt | None:
    """What is wrong with so many gaps in so many seconds, if anything."""
    if span == 0:
        return None  # all at once: a batch, in any unit
    rate, many = gaps / span, gaps + 1 >= FEW
    fastest = FASTEST if many else FASTEST_BURST
    if rate > fastest:
        return Doubt(f"{rate:,.0f} requests a second", f"more than {fastest:,}")
    if many and rate < SLOWEST and span > SLOWEST_DAYS * _DAY:
        return Doubt(f"one request every {1 / rate:,.0f} s for {span / _DAY:,.1f} days", "too little load")
    return None


def likely_units(gaps: int, span: float, unit: Unit | None) -> list[str]:
    """Units in which times that span `span` seconds, read as `unit`, make a load that can be."""
    found = []
    for option, other in UNITS.items():
        seconds = span * (unit.per_second if unit else 1) / other.per_second
        if other != unit and seconds and not doubtful(gaps, seconds):
            found.append(f"{option} ({gaps / seconds:,.3g} requests a second)")
    return found


def find_tick(times: NDArray[np.float64]) -> float | None:
    """Seconds a tick, where the trace was recorded on a coarse clock.

    Two signs must meet: half of the requests share their instant with another, and the instants lie on a grid, give or
    take a hundredth. Ten instants at least: fewer may be a grid by chance.
    """
    instants, counts = np.unique(times, return_counts=True)
    if len(instants) < 10 or counts[counts > 1].sum() < len(times) / 2:
        return None
    gaps = np.diff(instants)
    tick = float(np.median(gaps[gaps < 1.5 * gaps.min()]))
    off_grid = np.abs(gaps - np.round(gaps / tick) * tick) > 0.01 * tick
    return tick if off_grid.mean() < 0.05 else None


def spread(times: NDArray[np.float64], tick: float, seed: int) -> NDArray[np.float64]:
    """Each request somewhere in the tick it was recorded at, uniformly.

    Sorting the times, and not the requests, keeps the order of the file: a follow-up stays behind what it follows.
    """
    return np.sort(times + tick * stream(seed, "ticks").random(len(times)))

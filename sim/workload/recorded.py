"""Arrivals as a trace had them, for requests of any other kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sim.workload.clock import find_tick, spread
from sim.workload.read import read_trace
from sim.workload.workload import mean_rate


@dataclass(frozen=True, slots=True)
class Recorded:
    """The arrivals of a trace, stretched to `rate`; begun again, a mean gap later, where it is too short."""

    recorded: tuple[float, ...]
    rate: float
    name: str = "given times"

    def __str__(self) -> str:
        return f"those of {self.name} ({len(self.recorded)}, again where more are needed)"

    def times(self, num: int, seed: int) -> list[float]:
        base = np.array(self.recorded) - self.recorded[0]
        gap = base[-1] / (len(base) - 1)
        rounds = np.arange(-(-num // len(base)))[:, None] * (base[-1] + gap)
        times: list[float] = ((rounds + base).ravel()[:num] / (gap * self.rate)).tolist()
        return times


def recorded(rate: float | None, file: str) -> Recorded:
    """Arrivals of a trace file, at their own rate unless told; a coarse clock's ticks are spread."""
    trace = read_trace(Path(file), any_rate=rate is not None)
    times = np.array([row.arrival_time for row in trace.rows])
    tick = find_tick(times) if trace.format.may_tick else None
    times = times if tick is None else spread(times, tick, 0)
    own = mean_rate(len(times) - 1, float(times[-1] - times[0]))
    if not 0 < own < math.inf:
        raise ValueError(f"{trace.name!r} has {len(times)} requests at one instant: arrivals need time between")
    return Recorded(tuple(times.tolist()), own if rate is None else rate, trace.name)

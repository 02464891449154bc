"""What a run is fed: a trace or a built-in workload, cut to size and at the rate asked for."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.workload.clock import find_tick, spread
from sim.workload.generate import generate
from sim.workload.read import read_trace
from sim.workload.rows import Trace
from sim.workload.streams import require_rate
from sim.workload.workload import Workload, mean_rate, output_limit, work_items

TICKS = ("spread", "as-is")


def load(
    trace: Path | None,
    workload: str | None,
    *,
    num_requests: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
    ticks: str = "spread",
) -> Workload:
    """Either a trace file, its format told by its content, or a built-in workload by name.

    `num_requests`: the first ones; all of a trace unless given. `rate`: of a generator, its Poisson rate; of a trace,
    all times are multiplied so that the mean rate becomes it. `max_tokens`: of every request; the largest output length
    unless given. `ticks`: arrivals recorded on a coarse clock are spread within its ticks, or left as they are.
    Raises ValueError of one line; what is wrong with a file is said with its line number.
    """
    _check(num_requests, rate, ticks)
    if workload is not None and trace is None:
        return generate(workload, num_requests=num_requests, rate=rate, seed=seed, max_tokens=max_tokens)
    if trace is None or workload is not None:
        raise ValueError("a run needs one workload: give either a trace file or the name of a built-in workload")
    found = read_trace(trace, any_rate=rate is not None)
    return from_trace(found, num_requests=num_requests, rate=rate, seed=seed, max_tokens=max_tokens, ticks=ticks)


def _check(num_requests: int | None, rate: float | None, ticks: str) -> None:
    if num_requests is not None and num_requests < 1:
        raise ValueError(f"num_requests ({num_requests}) must be at least 1")
    if rate is not None:
        require_rate(rate)
    if ticks not in TICKS:
        raise ValueError(f"unknown ticks {ticks!r}; known: {', '.join(TICKS)}")


def from_trace(
    trace: Trace, *, num_requests: int | None, rate: float | None, seed: int, max_tokens: int | None, ticks: str
) -> Workload:
    times, ticked = _unticked(trace, ticks, seed)
    rows = trace.rows[:num_requests]
    times, scaled = _scaled(times[:num_requests], rate)
    outputs = [row.num_output_tokens for row in rows]
    limit, limited = output_limit(outputs, max_tokens)
    prompts = [trace.format.prompt(row) for row in rows]
    items = work_items([float(time) for time in times], prompts, outputs, limit)
    findings = (*trace.findings, *ticked, *_cut(len(trace.rows), num_requests), *scaled, limited)
    return Workload(trace.name, items, findings, trace.source)


def _unticked(trace: Trace, ticks: str, seed: int) -> tuple[NDArray[np.float64], list[str]]:
    """Times of all rows, looked at together: how many are wanted must not change when the first ones come."""
    times = np.array([row.arrival_time for row in trace.rows])
    if not trace.format.may_tick:
        return times, []
    tick = find_tick(times)
    if tick is None:
        return times, ["arrivals are as recorded: no coarse clock found"]
    seen = f"arrivals were recorded in ticks of {tick:g} s, {len(times) / len(np.unique(times)):.1f} at once"
    if ticks == "as-is":
        return times, [f"{seen}; left as they are"]
    return spread(times, tick, seed), [f"{seen}; spread uniformly within their tick, seed {seed}"]


def _cut(num_rows: int, num_requests: int | None) -> list[str]:
    if num_requests is None or num_requests == num_rows:
        return []
    if num_requests > num_rows:
        return [f"{num_requests} requests were asked for, the trace has {num_rows}"]
    return [f"the first {num_requests} of {num_rows} requests"]


def _scaled(times: NDArray[np.float64], rate: float | None) -> tuple[NDArray[np.float64], list[str]]:
    if rate is None:
        return times, []
    recorded = mean_rate(len(times), float(times[-1] - times[0]))
    if math.isinf(recorded):
        raise ValueError(f"rate ({rate:g}) cannot be reached: all {len(times)} requests arrive at once; leave it out")
    factor = recorded / rate
    return times * factor, [f"times multiplied by {factor:.6g}: from {recorded:.6g} to {rate:g} requests a second"]

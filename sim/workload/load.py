"""What a run is fed: a trace or a built-in workload, cut to size and at the rate asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from policies.prompt import ContentPrompt, Prompt
from policies.types import Context, Request
from sim.workload.clock import find_tick, spread
from sim.workload.generate import generate
from sim.workload.read import read_trace
from sim.workload.rows import Trace, TraceRow
from sim.workload.sessions import FollowUp, Sessions
from sim.workload.streams import poisson_arrivals, require_rate
from sim.workload.workload import WorkItem, Workload, mean_rate, output_limit

TICKS = ("spread", "as-is")
SESSION_RATE = 0.01  # starts a second, where none are recorded; Claude Code's last 8,800 s: about 90 at once


def load(
    trace: Path | None,
    workload: str | None,
    *,
    num_requests: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
    ticks: str = "spread",
    timestamp_unit: str | None = None,
    content_size: int | None = None,
) -> Workload:
    """Either a trace, its format told by its content, or a built-in workload by name.

    `num_requests`: the first ones; all of a trace unless given. `rate`: of a generator, its Poisson rate; of a trace,
    all times are multiplied so that the mean rate becomes it; of sessions, the rate at which they start. `max_tokens`:
    of every request; the largest output length unless given. `ticks`: arrivals recorded on a coarse clock are spread
    within its ticks, or left as they are. `timestamp_unit` (s, ms, us, ns) and `content_size` (tokens a content id) are
    for traces that do not say theirs. Raises ValueError of one line; what is wrong with a file is said with its line.
    """
    _check(num_requests, rate, ticks)
    if workload is not None and trace is None:
        if timestamp_unit is not None or content_size is not None:
            raise ValueError("timestamp_unit and content_size say how to read a trace: leave them out, or give a trace")
        return generate(workload, num_requests=num_requests, rate=rate, seed=seed, max_tokens=max_tokens)
    if trace is None or workload is not None:
        raise ValueError("a run needs one workload: give either a trace file or the name of a built-in workload")
    found = read_trace(
        trace,
        timestamp_unit=timestamp_unit,
        content_size=content_size,
        any_rate=rate is not None,
        limit=num_requests,
        seed=seed,
    )
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
    rows = trace.rows[:num_requests]
    limit, limited = output_limit([row.num_output_tokens for row in rows], max_tokens)
    if trace.is_closed or not trace.has_starts:
        times, timed = _starts(trace, rows, rate, seed)
    else:
        times, timed = _arrivals(trace, len(rows), rate, seed, ticks)
    items = _items(rows, times, _prompts(trace, rows), limit)
    findings = (*trace.findings, *_cut(trace.num_rows, num_requests), *timed, limited)
    if not trace.is_closed:
        return Workload(trace.name, _by_arrival(items), findings, trace.source)
    by_clock = [item for item, row in zip(items, rows, strict=True) if row.delay is None]
    return Sessions(trace.name, _by_arrival(by_clock), findings, trace.source, follow_ups=_follow_ups(items, rows))


def _by_arrival(items: Sequence[WorkItem]) -> list[WorkItem]:
    return sorted(items, key=lambda item: item.request.arrival_time)


def _items(
    rows: Sequence[TraceRow], times: Sequence[float], prompts: Sequence[Prompt], max_tokens: int
) -> list[WorkItem]:
    """Requests named "0", "1", ... in the order of the rows."""
    return [
        WorkItem(
            Request(
                str(index),
                time,
                prompt,
                max_tokens,
                client_id=row.client,
                class_name=row.class_name,
                context=Context(tenant=row.client, session=row.session),
            ),
            row.num_output_tokens,
        )
        for index, (row, time, prompt) in enumerate(zip(rows, times, prompts, strict=True))
    ]


def _prompts(trace: Trace, rows: Sequence[TraceRow]) -> list[Prompt]:
    """Each knows its answer from the first follow-up that goes on from it."""
    prompts = [trace.prompt(row) for row in rows]
    for row, later in zip(rows, prompts, strict=True):
        for position in row.follows:
            earlier = prompts[position]
            if isinstance(earlier, ContentPrompt) and isinstance(later, ContentPrompt) and not earlier.continuation:
                prompts[position] = earlier.followed_by(later)
    return prompts


def _follow_ups(items: Sequence[WorkItem], rows: Sequence[TraceRow]) -> list[FollowUp]:
    return [
        FollowUp(item, tuple(str(position) for position in row.follows), row.delay)
        for item, row in zip(items, rows, strict=True)
        if row.delay is not None
    ]


# When


def _arrivals(trace: Trace, num_rows: int, rate: float | None, seed: int, ticks: str) -> tuple[list[float], list[str]]:
    times, ticked = _unticked(trace, ticks, seed)
    times, scaled = _scaled(times[:num_rows], rate, "requests")
    return [float(time) for time in times], [*ticked, *scaled]


def _unticked(trace: Trace, ticks: str, seed: int) -> tuple[NDArray[np.float64], list[str]]:
    """Times of all rows, looked at together: how many are wanted must not change when the first ones come."""
    times = np.array(trace.times)
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


def _scaled(times: NDArray[np.float64], rate: float | None, what: str) -> tuple[NDArray[np.float64], list[str]]:
    if rate is None:
        return times, []
    recorded = mean_rate(len(times), float(np.max(times) - np.min(times)))
    if math.isinf(recorded):
        raise ValueError(f"rate ({rate:g}) cannot be reached: all {len(times)} {what} arrive at once; leave it out")
    factor = recorded / rate
    return times * factor, [f"times multiplied by {factor:.6g}: from {recorded:.6g} to {rate:g} {what} a second"]


def _starts(trace: Trace, rows: Sequence[TraceRow], rate: float | None, seed: int) -> tuple[list[float], list[str]]:
    """Arrivals of the rows that come by the clock; those of the others are set when they follow."""
    sessions = list(dict.fromkeys(row.session for row in rows))
    loop = (
        f"closed loop: {len(sessions)} sessions; a request follows what it waits for, however long that takes, and a "
        "session ends where one is not answered"
    )
    if trace.has_starts:
        by_clock = np.array([row.arrival_time for row in rows if row.delay is None])
        scaled, said = _scaled(by_clock, rate, "requests by the clock")
        times = iter(scaled.tolist())
        return [next(times) if row.delay is None else 0.0 for row in rows], [loop, *said]
    rate = SESSION_RATE if rate is None else rate
    starts = dict(zip(sessions, poisson_arrivals(rate, len(sessions), seed), strict=True))
    times_in = [starts[row.session] + row.arrival_time for row in rows]
    return times_in, [loop, f"session starts are not recorded: Poisson at {rate:g} a second, seed {seed}"]

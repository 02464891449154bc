"""Did the server keep up? An overloaded run has no steady state, and its percentiles grow with the length of the trace.

Two signs, either of which is enough: requests wait longer and longer while they still arrive, or a good part of them
was still unserved when the last arrived. Rules and thresholds are stated here and shown with the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.types import RequestRecord

Floats = NDArray[np.float64]

NUM_BATCHES = 20
MIN_REQUESTS = 100  # fewer say nothing about a trend
TREND_T = 3.6  # one-sided t at 18 degrees of freedom, 0.1 %
BACKLOG_SHARE = 0.05  # of all arrivals, unserved at the last arrival


@dataclass(frozen=True, slots=True)
class Backlog:
    """How the queue developed. Rates in requests a second, times in seconds.

    `growth`: slope of the number waiting between the first and the last arrival. `time_to_recover`: from the last
    arrival until nobody waits; None if that never happened.
    """

    is_saturated: bool
    reason: str
    growth: float
    at_last_arrival: int
    time_to_recover: float | None


def backlog(records: Sequence[RequestRecord], num_unfinished: int = 0) -> Backlog:
    served = [record for record in records if record.first_scheduled_time is not None]
    arrivals = np.sort(np.array([record.arrival_time for record in records]))
    starts = np.sort(np.array([record.first_scheduled_time for record in served], dtype=np.float64))
    if len(served) < MIN_REQUESTS or arrivals[-1] <= arrivals[0]:
        return Backlog(False, "too few requests to tell", 0.0, 0, 0.0)
    left_unserved = np.sort(np.array([r.finish_time for r in records if r.first_scheduled_time is None]))
    waiting = _waiting_at(arrivals, arrivals, starts, left_unserved)
    at_last = int(waiting[-1]) + num_unfinished
    reason = _reason(served, at_last, len(records) + num_unfinished)
    return Backlog(
        is_saturated=bool(reason),
        reason=reason or "the queue did not grow",
        growth=float(np.polyfit(arrivals - arrivals[0], waiting, 1)[0]),
        at_last_arrival=at_last,
        time_to_recover=None if num_unfinished else max(0.0, float(starts[-1] - arrivals[-1])),
    )


def _waiting_at(times: Floats, arrivals: Floats, starts: Floats, left: Floats) -> Floats:
    """Requests that have arrived and neither started nor left, just after each of `times`."""
    waiting: Floats = (
        np.searchsorted(arrivals, times, "right")
        - np.searchsorted(starts, times, "right")
        - np.searchsorted(left, times, "right")
    ).astype(np.float64)
    return waiting


def _reason(served: Sequence[RequestRecord], at_last: int, num_requests: int) -> str:
    if at_last > BACKLOG_SHARE * num_requests:
        return f"{at_last:,} of {num_requests:,} requests were unserved when the last arrived"
    in_order = sorted(served, key=lambda record: record.arrival_time)
    delays = np.array([record.queue_time for record in in_order])
    means = np.array([batch.mean() for batch in np.array_split(delays, NUM_BATCHES)])
    half = NUM_BATCHES // 2
    first, second = means[:half].mean(), means[half:].mean()
    typical = float(np.median([record.finish_time - record.arrival_time - record.queue_time for record in in_order]))
    if _trend_t(means) > TREND_T and second > 2 * first and second > 0.5 * typical:
        return f"requests waited longer and longer: {first:.3g} s on average in the first half, then {second:.3g} s"
    return ""


def _trend_t(means: Floats) -> float:
    """t of the slope of batch means over their number."""
    x = np.arange(len(means)) - (len(means) - 1) / 2
    slope = float((x * means).sum() / (x * x).sum())
    rest = means - means.mean() - slope * x
    error = float(np.sqrt((rest * rest).sum() / (len(means) - 2) / (x * x).sum()))
    return slope / error if error else float("inf") if slope > 0 else 0.0

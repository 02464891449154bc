"""A run by columns: one entry a request, with the times its client saw.

Where a front end was simulated the client's times count; without one, they are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from policies.types import FinishReason, RequestRecord

if TYPE_CHECKING:
    from sim.simulate import Run

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in seconds; nan where never reached. `queue` and what follows are the engine's, in order of `arrivals`."""

    records: Sequence[RequestRecord]
    completed: Bools
    arrivals: Floats
    firsts: Floats
    lasts: Floats
    nums: Ints  # output tokens
    queue: Floats
    gaps: Floats  # between tokens, all completed answers pooled
    num_zombie_tokens: int = 0

    def of(self, column: Callable[[RequestRecord], float]) -> Floats:
        return np.array([column(record) for record in self.records], dtype=np.float64)

    def only(self, chosen: Bools, gaps: Floats) -> Timings:
        """Some of the requests, with the gaps of their answers."""
        records = [record for record, is_in in zip(self.records, chosen, strict=True) if is_in]
        return Timings(
            records,
            self.completed[chosen],
            self.arrivals[chosen],
            self.firsts[chosen],
            self.lasts[chosen],
            self.nums[chosen],
            self.queue[chosen],
            gaps,
        )


def timings(run: Run) -> Timings:
    if run.clients:
        return _of_clients(run)
    records = run.records
    return Timings(
        records=records,
        completed=np.array([record.reason in COMPLETED for record in records], dtype=bool),
        arrivals=_floats([record.arrival_time for record in records]),
        firsts=_floats([record.first_token_time for record in records]),
        lasts=_floats([record.finish_time for record in records]),
        nums=np.array([record.num_output_tokens for record in records], dtype=np.int64),
        queue=_floats([record.queue_time for record in records]),
        gaps=inter_token_latencies([r for r in records if r.reason in COMPLETED], np.asarray(run.step_ends)),
    )


def _of_clients(run: Run) -> Timings:
    clients = run.clients
    return Timings(
        records=[client.record for client in clients],
        completed=np.array([client.reason in COMPLETED for client in clients], dtype=bool),
        arrivals=_floats([client.arrival_time for client in clients]),
        firsts=_floats([client.first_token_time for client in clients]),
        lasts=_floats([client.finish_time for client in clients]),
        nums=np.array([client.num_tokens for client in clients], dtype=np.int64),
        queue=_floats([client.record.queue_time for client in clients]),
        gaps=run.deliveries.gaps() if run.deliveries is not None else np.empty(0),
        num_zombie_tokens=sum(client.num_zombie_tokens for client in clients),
    )


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array(values, dtype=np.float64)  # None becomes nan


def inter_token_latencies(records: Sequence[RequestRecord], step_ends: Floats) -> Floats:
    """Gaps between consecutive tokens of a request, all requests pooled."""
    gaps = [np.diff(_token_times(record, step_ends)) for record in records if record.num_output_tokens > 1]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _token_times(record: RequestRecord, step_ends: Floats) -> Floats:
    if len(record.token_spans) == 1:
        first, num = record.token_spans[0]
        return step_ends[first : first + num]
    return np.concatenate([step_ends[first : first + num] for first, num in record.token_spans] or [np.empty(0)])


def class_gaps(run: Run, found: Timings, chosen: Bools) -> Floats:
    """The gaps of some answers alone."""
    if run.clients and run.deliveries is not None:
        in_order = np.zeros(max(client.number for client in run.clients) + 1, dtype=bool)
        in_order[[client.number for client, is_in in zip(run.clients, chosen, strict=True) if is_in]] = True
        return run.deliveries.only(in_order).gaps()
    wanted = chosen & found.completed
    records = [record for record, is_in in zip(found.records, wanted, strict=True) if is_in]
    return inter_token_latencies(records, np.asarray(run.step_ends))

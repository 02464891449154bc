"""A request's way from its client to an engine and back: where it stands, and, once it is over, what its client saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import simpy
from simpy.resources.resource import Request as Slot

from policies.records import rejection
from policies.types import FinishReason, Request, RequestRecord
from sim.stream import Deliveries, Floats
from sim.workload.workload import WorkItem


@dataclass(eq=False, slots=True)
class Visit:
    """Owned by the front end. Times are None where not reached; `answer_time` is known before it has come."""

    number: int
    item: WorkItem
    process: simpy.Process | None = None
    slot: Slot | None = None  # of the gateway
    replica: int | None = None
    api: int | None = None  # the API server, of that replica's
    gateway_in_time: float | None = None
    gateway_out_time: float | None = None
    api_in_time: float | None = None
    api_out_time: float | None = None
    tokenised_time: float | None = None
    added_time: float | None = None
    answer_time: float | None = None
    left_time: float | None = None
    gateway_cancel_time: float | None = None
    api_cancel_time: float | None = None
    engine_cancel_time: float | None = None
    num_zombie_tokens: int = 0
    retry_after: float | None = None
    record: RequestRecord | None = None

    @property
    def request(self) -> Request:
        return self.item.request


class Tokens(NamedTuple):
    """Those that came to a client."""

    num: int = 0
    first_time: float | None = None
    last_time: float | None = None


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """What a client saw of a request, and what became of it on the way. Times in seconds; None where never reached.

    `reason` is the client's: ABORT if it gave up, though the engine may have finished meanwhile. `finish_time`: it had
    its last token, was refused, or gave up. Cancelling takes three hops: the times at which each heard of it.
    `num_zombie_tokens` were computed by steps that ended after the client had left.
    """

    number: int  # by order of arrival
    request_id: str
    replica: int | None
    reason: FinishReason
    arrival_time: float  # intended
    gateway_in_time: float | None
    gateway_out_time: float | None
    api_in_time: float | None
    api_out_time: float | None
    tokenised_time: float | None
    added_time: float | None  # to the engine, when its step allowed
    first_token_time: float | None
    last_token_time: float | None
    finish_time: float
    num_tokens: int  # that reached the client
    left_time: float | None
    gateway_cancel_time: float | None
    api_cancel_time: float | None
    engine_cancel_time: float | None
    num_zombie_tokens: int
    retry_after: float | None
    record: RequestRecord

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e(self) -> float:
        return self.finish_time - self.arrival_time

    @property
    def cancel_latency(self) -> float | None:
        """From giving up to blocks freed; None where nobody gave up, or the engine was done or never asked."""
        if self.left_time is None or self.added_time is None or self.record.reason is not FinishReason.ABORT:
            return None
        return self.record.finish_time - self.left_time


def client_record(visit: Visit, record: RequestRecord, tokens: Tokens) -> ClientRecord:
    left = visit.left_time
    finish = visit.answer_time if left is None else left
    assert finish is not None
    return ClientRecord(
        number=visit.number,
        request_id=record.request_id,
        replica=visit.replica,
        reason=record.reason if left is None else FinishReason.ABORT,
        arrival_time=record.arrival_time,
        gateway_in_time=visit.gateway_in_time,
        gateway_out_time=visit.gateway_out_time,
        api_in_time=visit.api_in_time,
        api_out_time=visit.api_out_time,
        tokenised_time=visit.tokenised_time,
        added_time=visit.added_time,
        first_token_time=tokens.first_time,
        last_token_time=tokens.last_time,
        finish_time=finish,
        num_tokens=tokens.num,
        left_time=left,
        gateway_cancel_time=visit.gateway_cancel_time,
        api_cancel_time=visit.api_cancel_time,
        engine_cancel_time=visit.engine_cancel_time,
        num_zombie_tokens=visit.num_zombie_tokens,
        retry_after=visit.retry_after,
        record=record,
    )


def client_records(
    visits: Sequence[Visit], deliveries: Deliveries, placed: Callable[[int, RequestRecord], RequestRecord]
) -> list[ClientRecord]:
    """Of all whose visit is over, in order of arrival; answers are numbered as the visits.

    `placed` makes of a replica's record the one that is kept.
    """
    bounds = np.searchsorted(deliveries.answers, np.arange(len(visits) + 1))
    firsts = np.append(deliveries.firsts, np.nan)[bounds[:-1]].tolist()
    lasts = np.append(np.nan, deliveries.lasts)[bounds[1:]].tolist()
    records = []
    for visit, begin, end, first, last in zip(visits, bounds[:-1], bounds[1:], firsts, lasts, strict=True):
        if visit.record is None:
            continue
        tokens = Tokens(visit.record.num_output_tokens, first, last) if begin < end else Tokens()
        if visit.left_time is not None:
            tokens = _until(visit.left_time, deliveries.times(slice(begin, end)))
        records.append(client_record(visit, placed(visit.replica or 0, visit.record), tokens))
    return records


def _until(left: float, times: Floats) -> Tokens:
    """Tokens that came after their client had left went nowhere."""
    num = int(np.searchsorted(times, left, side="right"))
    return Tokens(num, float(times[0]), float(times[num - 1])) if num else Tokens()


def abandoned(request: Request, now: float) -> RequestRecord:
    """The record of a request whose client left before an engine had it."""
    return replace(rejection(request, "its client left", now), reason=FinishReason.ABORT)

"""What a run came to, as folds over records and samples. Latencies count from the intended arrival, by vLLM's names.

TTFT: first token - arrival. TPOT: (last - first token) / (tokens - 1), for answers of two tokens and more. ITL: gaps
between tokens, pooled. E2E: finish - arrival. Latencies are those of completed requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.types import FinishReason, RequestRecord
from sim.replica import Sample

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a latency in seconds; nan where nothing was measured."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Floats) -> Distribution:
        if not len(values):
            return cls(0, *[float("nan")] * 5)
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return cls(len(values), float(values.mean()), float(p50), float(p90), float(p99), float(values.max()))


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies in seconds, rates a second, shares from 0 to 1. Rejections are results, kept apart from errors."""

    num_requests: int
    num_completed: int
    num_rejected: int
    num_aborted: int
    num_failed: int
    num_unfinished: int
    duration: float  # first arrival to last completion
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    queue_delay: Distribution
    request_throughput: float
    input_throughput: float  # prompt tokens of completed requests, cached ones included
    output_throughput: float
    token_hit_rate: float
    request_hit_rate: float
    num_prompt_tokens: int
    num_cached_tokens: int
    mean_kv_held: float  # share of the pool held by requests, over busy time
    max_kv_held: float
    mean_kv_cached: float  # share that is free but still findable
    mean_running: float
    mean_waiting: float
    num_steps: int
    busy_time: float
    num_preemptions: int
    num_recomputed_tokens: int
    num_padding_tokens: int
    num_evicted_blocks: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    records: Sequence[RequestRecord],
    samples: Sequence[Sample],
    step_ends: Sequence[float],
    num_evicted_blocks: int = 0,
    num_unfinished: int = 0,
) -> Summary:
    completed = [record for record in records if record.reason in COMPLETED]
    entered = [record for record in records if record.first_scheduled_time is not None]
    ends = np.asarray(step_ends, dtype=np.float64)
    duration = _duration(records, completed)
    prompt, cached = sum(r.num_prompt_tokens for r in entered), sum(r.num_cached_tokens for r in entered)
    pool = _PoolShares.of(samples, ends)
    return Summary(
        num_requests=len(records) + num_unfinished,
        num_completed=len(completed),
        num_rejected=_count(records, FinishReason.REJECTED),
        num_aborted=_count(records, FinishReason.ABORT),
        num_failed=_count(records, FinishReason.ERROR),
        num_unfinished=num_unfinished,
        duration=duration,
        ttft=Distribution.of(_floats([(r.first_token_time or 0.0) - r.arrival_time for r in completed])),
        tpot=Distribution.of(_floats([_tpot(r) for r in completed if r.num_output_tokens > 1])),
        itl=Distribution.of(inter_token_latencies(completed, ends)),
        e2e=Distribution.of(_floats([r.finish_time - r.arrival_time for r in completed])),
        queue_delay=Distribution.of(_floats([r.queue_time for r in completed])),
        request_throughput=_rate(len(completed), duration),
        input_throughput=_rate(sum(r.num_prompt_tokens for r in completed), duration),
        output_throughput=_rate(sum(r.num_output_tokens for r in completed), duration),
        token_hit_rate=_rate(cached, prompt),
        request_hit_rate=_rate(sum(r.num_cached_tokens > 0 for r in entered), len(entered)),
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        mean_kv_held=pool.mean_held,
        max_kv_held=pool.max_held,
        mean_kv_cached=pool.mean_cached,
        mean_running=pool.mean_running,
        mean_waiting=pool.mean_waiting,
        num_steps=len(ends),
        busy_time=pool.busy_time,
        num_preemptions=sum(r.num_preemptions for r in records),
        num_recomputed_tokens=sum(r.num_recomputed_tokens for r in records),
        num_padding_tokens=sum(s.num_padding_tokens * s.num_steps for s in samples),
        num_evicted_blocks=num_evicted_blocks,
    )


def inter_token_latencies(records: Sequence[RequestRecord], step_ends: Floats) -> Floats:
    """Gaps between consecutive tokens of a request, all requests pooled."""
    gaps = [np.diff(_token_times(record, step_ends)) for record in records if record.num_output_tokens > 1]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _token_times(record: RequestRecord, step_ends: Floats) -> Floats:
    if len(record.token_spans) == 1:
        first, num = record.token_spans[0]
        return step_ends[first : first + num]
    return np.concatenate([step_ends[first : first + num] for first, num in record.token_spans] or [np.empty(0)])


def _tpot(record: RequestRecord) -> float:
    return (record.finish_time - (record.first_token_time or 0.0)) / (record.num_output_tokens - 1)


def _count(records: Sequence[RequestRecord], reason: FinishReason) -> int:
    return sum(record.reason is reason for record in records)


def _floats(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _rate(amount: float, over: float) -> float:
    return amount / over if over else 0.0


def _duration(records: Sequence[RequestRecord], completed: Sequence[RequestRecord]) -> float:
    if not completed:
        return 0.0
    return max(r.finish_time for r in completed) - min(r.arrival_time for r in records)


@dataclass(frozen=True, slots=True)
class _PoolShares:
    """Means over the time in which steps ran."""

    busy_time: float = 0.0
    mean_held: float = 0.0
    max_held: float = 0.0
    mean_cached: float = 0.0
    mean_running: float = 0.0
    mean_waiting: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[Sample], step_ends: Floats) -> _PoolShares:
        if not samples or not len(step_ends):
            return cls()
        table = np.array(samples, dtype=np.float64)
        last_steps = np.cumsum(table[:, 1]).astype(int) - 1
        weights = step_ends[last_steps] - table[:, 0]
        total = float(weights.sum())
        if total == 0.0:
            return cls()
        held, cached, free = table[:, 6], table[:, 7], table[:, 8]
        size = held + cached + free
        mean = [
            float((column * weights).sum() / total) for column in (held / size, cached / size, table[:, 2], table[:, 3])
        ]
        return cls(total, mean[0], float((held / size).max()), *mean[1:])

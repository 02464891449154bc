"""What a run came to, as folds over its requests and steps. Latencies count from the intended arrival.

TTFT: first token - arrival. E2E: finish - arrival. Queue delay: arrival to first scheduled. TPOT and ITL mean what the
named convention means by them (conventions.py). Latencies are those of completed requests; attainment is over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.types import FinishReason, RequestRecord, Sample
from sim.conventions import check_convention, itl, tpot
from sim.saturation import Backlog, backlog
from sim.slo import Kept, Objective, attainment, judge
from sim.timings import COMPLETED, Timings, class_gaps, inter_token_latencies, timings

if TYPE_CHECKING:
    from sim.simulate import Run

Floats = NDArray[np.float64]
MAX_CLASSES = 16  # the rest are pooled: labels stay few whatever the workload calls its classes
HIT_BINS = (1, 128, 512, 2048, 8192)  # tokens found in the cache, lower ends
__all__ = ["COMPLETED", "ClassSummary", "Distribution", "Summary", "inter_token_latencies", "summarise"]


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
        values = values[~np.isnan(values)]
        if not len(values):
            return cls(0, *[float("nan")] * 5)
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return cls(len(values), float(values.mean()), float(p50), float(p90), float(p99), float(values.max()))


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One class of requests, judged on its own."""

    num_requests: int
    num_completed: int
    num_rejected: int
    request_throughput: float
    output_throughput: float
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    queue_delay: Distribution
    attainment: float


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
    stall: Distribution  # running but not served
    cancel_latency: Distribution  # from a client's giving up to its blocks freed, where the engine had it
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
    num_wasted_tokens: int  # of answers nobody got whole, and of those whose client had left
    num_padding_tokens: int
    num_evicted_blocks: int
    num_blocks_left: int  # held at the end, by nobody if all was answered: more than 0 is a leak
    prefix_caching: bool  # switched on, whatever it came to
    binding: str  # what kept requests waiting
    convention: str
    saturation: Backlog
    goodput: float  # requests a second that met every objective; nan without objectives
    attainment: float  # share of all arrivals that met every objective
    objectives: tuple[Kept, ...] = ()
    prefill_by_cache: dict[str, Distribution] = field(default_factory=dict)  # cold, partial, full hit
    hit_lengths: dict[str, int] = field(default_factory=dict)  # requests by cached tokens
    classes: dict[str, ClassSummary] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(run: Run, convention: str = "vllm", objectives: Sequence[Objective] = ()) -> Summary:
    """Raises ValueError for an unknown convention."""
    check_convention(convention)
    found = timings(run)
    records = found.records
    completed = [record for record, is_in in zip(records, found.completed, strict=True) if is_in]
    entered = [record for record in records if record.first_scheduled_time is not None]
    duration, values = _duration(found), _values(found, convention)
    num_requests = len(records) + len(run.unfinished)
    prompt, cached = sum(r.num_prompt_tokens for r in entered), sum(r.num_cached_tokens for r in entered)
    pool = _PoolShares.of(run.samples, np.asarray(run.step_ends, dtype=np.float64))
    share = attainment(objectives, values, num_requests)
    block_size = run.engine.config.block_size
    return Summary(
        num_requests=num_requests,
        num_completed=len(completed),
        num_rejected=_count(records, FinishReason.REJECTED),
        num_aborted=_count(records, FinishReason.ABORT),
        num_failed=_count(records, FinishReason.ERROR),
        num_unfinished=len(run.unfinished),
        duration=duration,
        **_latencies(values),
        stall=Distribution.of(_floats([record.stall_time for record in completed])),
        cancel_latency=Distribution.of(_floats([each for c in run.clients if (each := c.cancel_latency) is not None])),
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
        num_steps=len(run.step_ends),
        busy_time=pool.busy_time,
        num_preemptions=sum(r.num_preemptions for r in records),
        num_recomputed_tokens=sum(r.num_recomputed_tokens for r in records),
        num_wasted_tokens=_wasted(found),
        num_padding_tokens=sum(s.num_padding_tokens * s.num_steps for s in run.samples),
        num_evicted_blocks=run.num_evicted_blocks,
        num_blocks_left=sum(each.kv.num_blocks - each.kv.num_free for each in run.engines or (run.engine,)),
        prefix_caching=run.engine.config.enable_prefix_caching,
        binding=_binding(run),
        convention=convention,
        saturation=backlog(records, len(run.unfinished)),
        goodput=_rate(share * num_requests, duration) if objectives else float("nan"),
        attainment=share,
        objectives=tuple(judge(objectives, values, num_requests)),
        prefill_by_cache=_prefill_by_cache(entered, block_size),
        hit_lengths=_hit_lengths(entered),
        classes=_by_class(run, found, convention, objectives, duration),
    )


def _values(found: Timings, convention: str) -> dict[str, Floats]:
    """Latencies by metric: of each completed request, in order; of gaps, all of them."""
    done = found.completed
    arrivals, firsts, lasts, nums = found.arrivals[done], found.firsts[done], found.lasts[done], found.nums[done]
    return {
        "ttft": firsts - arrivals,
        "tpot": tpot(convention, arrivals, firsts, lasts, nums),
        "itl": itl(convention, found.gaps, firsts, lasts, nums),
        "e2e": lasts - arrivals,
        "queue_delay": found.queue[done],
    }


def _latencies(values: dict[str, Floats]) -> dict[str, Distribution]:
    return {name: Distribution.of(each) for name, each in values.items()}


def _binding(run: Run) -> str:
    """What stood in the way while requests waited: by the time in which all slots, or nearly all memory, were taken."""
    config, waited = run.engine.config, [sample for sample in run.samples if sample.num_waiting]
    if sum(s.num_steps for s in waited) < 0.02 * sum(s.num_steps for s in run.samples):
        return "nothing: hardly anybody waited"
    slots = sum(s.num_steps for s in waited if s.num_running >= config.max_num_seqs)
    memory = sum(s.num_steps for s in waited if s.num_held_blocks >= 0.95 * config.num_blocks)
    budget = sum(s.num_steps for s in waited) - max(slots, memory)
    most = max(slots, memory, budget)
    if most == memory:
        return f"KV memory ({config.num_blocks:,} blocks of {config.block_size})"
    if most == slots:
        return f"slots (max_num_seqs {config.max_num_seqs})"
    return f"tokens a step (max_num_batched_tokens {config.max_num_batched_tokens:,})"


def _by_class(
    run: Run, found: Timings, convention: str, objectives: Sequence[Objective], duration: float
) -> dict[str, ClassSummary]:
    """Nothing where there is but one class: it would say the same again."""
    names = _class_names(found.records)
    kept = sorted(set(names))
    if len(kept) < 2:
        return {}
    labels = np.array(names)
    return {
        name: _class_summary(
            found.only(labels == name, class_gaps(run, found, labels == name)), convention, objectives, duration
        )
        for name in kept
    }


def _class_names(records: Sequence[RequestRecord]) -> list[str]:
    counts: dict[str, int] = {}
    for record in records:
        counts[record.class_name] = counts.get(record.class_name, 0) + 1
    largest = sorted(counts, key=lambda name: (-counts[name], name))[:MAX_CLASSES]
    return [record.class_name if record.class_name in largest else "(others)" for record in records]


def _class_summary(part: Timings, convention: str, objectives: Sequence[Objective], duration: float) -> ClassSummary:
    values = _values(part, convention)
    return ClassSummary(
        num_requests=len(part.records),
        num_completed=int(part.completed.sum()),
        num_rejected=_count(part.records, FinishReason.REJECTED),
        request_throughput=_rate(int(part.completed.sum()), duration),
        output_throughput=_rate(int(part.nums[part.completed].sum()), duration),
        **_latencies(values),
        attainment=attainment(objectives, values, len(part.records)),
    )


def _wasted(found: Timings) -> int:
    """Output tokens computed for nobody."""
    lost = [r.num_output_tokens for r, is_in in zip(found.records, found.completed, strict=True) if not is_in]
    return max(sum(lost), found.num_zombie_tokens)


def _prefill_by_cache(entered: Sequence[RequestRecord], block_size: int) -> dict[str, Distribution]:
    """Time from first scheduled to first token, by how much of the prompt was found: none, some, all that could be."""
    times: dict[str, list[float]] = {"cold": [], "partial": [], "full": []}
    for record in entered:
        if record.first_token_time is not None:
            most = (record.num_prompt_tokens - 1) // block_size * block_size
            state = (
                "cold" if not record.num_cached_tokens else "full" if record.num_cached_tokens >= most else "partial"
            )
            times[state].append(record.prefill_time)
    return {state: Distribution.of(_floats(values)) for state, values in times.items()}


def _hit_lengths(entered: Sequence[RequestRecord]) -> dict[str, int]:
    counts = np.bincount(
        np.digitize([record.num_cached_tokens for record in entered], HIT_BINS), minlength=len(HIT_BINS) + 1
    )
    ends = ["0", *(f"{low}-{high - 1}" for low, high in pairwise(HIT_BINS)), f"{HIT_BINS[-1]}+"]
    return {name: int(count) for name, count in zip(ends, counts, strict=True)}


def _count(records: Sequence[RequestRecord], reason: FinishReason) -> int:
    return sum(record.reason is reason for record in records)


def _floats(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _rate(amount: float, over: float) -> float:
    return amount / over if over else 0.0


def _duration(found: Timings) -> float:
    if not found.completed.any():
        return 0.0
    return float(found.lasts[found.completed].max() - found.arrivals.min())


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
        shares = (held / size, cached / size, table[:, 2], table[:, 3])
        mean = [float((column * weights).sum() / total) for column in shares]
        return cls(total, mean[0], float((held / size).max()), *mean[1:])

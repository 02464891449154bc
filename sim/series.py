"""How a run went over time, as plain arrays to draw: who ran and waited, where the KV pool went, what steps took.

Long series are thinned to points that really occurred, and keep their extremes; means are called means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.types import RequestRecord, Sample
from sim.simulate import Run
from sim.timings import COMPLETED

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_POINTS = 2000  # a trace
PAUSE = 1e-3  # seconds without a step from which on the engine counts as idle; less is the host between two steps
MAX_BINS = 200
REQUESTS_A_BIN = 10


def thin(x: Floats, y: Floats, most: int = MAX_POINTS) -> Ints:
    """Indices of at most `most` points: the least, the greatest and the last y of equal spans of ascending x."""
    if len(x) <= most:
        return np.arange(len(x))
    edges = np.linspace(x[0], x[-1], most // 3 + 1)[1:-1]
    span = np.searchsorted(edges, x, "right")
    begins = np.flatnonzero(np.diff(span, prepend=-1))
    ends = np.append(begins[1:], len(x)) - 1
    by_height = np.lexsort((y, span))
    return np.unique(np.concatenate([by_height[begins], by_height[ends], ends]))


# -- over time ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timeline:
    """How things stood from each time on, until the next. Shares of the KV pool add up to 1.

    While no step runs, what the last request gave back counts as free until the next step shows what is cached.
    """

    time: Floats
    running: Floats
    waiting: Floats
    held: Floats
    cached: Floats
    free: Floats


_STATE = ("num_running", "num_waiting", "num_held_blocks", "num_cached_blocks", "num_free_blocks")


def timeline(run: Run) -> Timeline:
    """Of all replicas together."""
    parts = [_states(part, not run.unfinished) for part in _replicas(run) if len(part.samples)]
    if not parts:
        return Timeline(*[np.empty(0)] * 6)
    time, *state = (parts[0] if len(parts) == 1 else _added(parts)).T
    running, waiting, *blocks = state
    pool = sum(blocks, np.zeros(len(time)))
    return Timeline(time, running, waiting, *[each / pool for each in blocks])


class _Replica(NamedTuple):
    samples: Sequence[Sample]
    ends: Floats

    def column(self, name: str) -> Floats:
        return np.array([getattr(sample, name) for sample in self.samples], dtype=np.float64)

    @property
    def last_steps(self) -> Ints:
        """Of each sample, among the replica's."""
        return np.cumsum(self.column("num_steps")).astype(int) - 1


def _replicas(run: Run) -> list[_Replica]:
    """A run's samples and step ends stand replica after replica."""
    ends = np.asarray(run.step_ends, dtype=np.float64)
    sizes = [engine.next_step_id for engine in run.engines] or [len(ends)]
    after = np.cumsum([sample.num_steps for sample in run.samples])
    parts: list[_Replica] = []
    first = 0
    for end in np.cumsum(sizes):
        last = int(np.searchsorted(after, end, "right"))
        parts.append(_Replica(run.samples[first:last], ends[end - sizes[len(parts)] : end]))
        first = last
    return parts


def _states(part: _Replica, ends_idle: bool) -> Floats:
    """[time, *_STATE] a row: as each plan's steps began, and as the engine fell idle."""
    rows = np.stack([part.column(name) for name in ("time", *_STATE)], axis=1)
    ended = part.ends[part.last_steps]
    following = np.append(rows[1:, 0], np.inf if ends_idle else -np.inf)
    idle = following > ended + PAUSE
    rests = rows[idle]
    rests[:, 0] = ended[idle]
    rests[:, 5] += rests[:, 3]
    rests[:, 1:4] = 0.0
    every = np.concatenate([rows, rests])
    return every[np.argsort(every[:, 0], kind="stable")]


def _added(parts: Sequence[Floats]) -> Floats:
    """Rows of several replicas as rows of all; before its first step a replica's blocks are free."""
    times = np.unique(np.concatenate([part[:, 0] for part in parts]))
    total = np.zeros((len(times), parts[0].shape[1]))
    for part in parts:
        before = np.array([[0.0, 0.0, 0.0, 0.0, 0.0, part[0, 3:].sum()]])
        total += np.concatenate([before, part])[np.searchsorted(part[:, 0], times, "right")]
    total[:, 0] = times
    return total


@dataclass(frozen=True, slots=True)
class Steps:
    """An entry a step, in order of beginning; durations in seconds.

    `decode_tokens` each gave an answer's second or later token. All others are `prefill_tokens`: prompts, what is
    computed again after a preemption, and tokens scheduled ahead that came to nothing. Padding is in neither.
    """

    begin: Floats
    duration: Floats
    prefill_tokens: Floats
    decode_tokens: Floats
    padding_tokens: Floats

    @property
    def num_tokens(self) -> Floats:
        return self.prefill_tokens + self.decode_tokens + self.padding_tokens


def steps(run: Run) -> Steps:
    tables = [_step_table(part) for part in _replicas(run)]
    begin, duration, num_tokens, padding = np.concatenate(tables, axis=1)
    decode = np.minimum(_later_tokens(run.records, len(begin)), num_tokens)
    order = np.argsort(begin, kind="stable")
    return Steps(*[each[order] for each in (begin, duration, num_tokens - decode, decode, padding)])


def _step_table(part: _Replica) -> Floats:
    """[begin, duration, tokens, padding] by step. A step scheduled ahead begins when the one before it ends."""
    repeats = part.column("num_steps").astype(int)
    begin = np.append(-np.inf, part.ends[:-1])[: len(part.ends)]
    first = part.last_steps - repeats + 1
    begin[first] = np.maximum(begin[first], part.column("time"))
    tokens, padding = (np.repeat(part.column(name), repeats) for name in ("num_tokens", "num_padding_tokens"))
    return np.stack([begin, part.ends - begin, tokens, padding])


def _tokens(records: Sequence[RequestRecord], num_steps: int) -> Floats:
    """Output tokens by step."""
    spans = np.array([span for record in records for span in record.token_spans], dtype=int).reshape(-1, 2)
    begun = np.bincount(spans[:, 0], minlength=num_steps + 1)
    ended = np.bincount(spans.sum(axis=1), minlength=num_steps + 1)
    return np.cumsum(begun - ended)[:num_steps].astype(np.float64)


def _later_tokens(records: Sequence[RequestRecord], num_steps: int) -> Floats:
    """Output tokens by step, the first of each answer left out."""
    firsts = [record.token_spans[0][0] for record in records if record.token_spans]
    return _tokens(records, num_steps) - np.bincount(np.array(firsts, dtype=int), minlength=num_steps)


# -- in bins of time ----------------------------------------------------------------------------------------------


def bins(begins: Floats, ends: Floats, num: int) -> Floats:
    """Edges of equal bins from the first beginning to the last end; none if that is no time at all."""
    if not len(begins) or ends.max() <= begins.min():
        return np.empty(0)
    return np.linspace(begins.min(), ends.max(), num + 1)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Means over each bin, a second. `edges` in seconds, one more than bins; tokens count when their step ends."""

    edges: Floats
    prefill_tokens: Floats  # computed: prompt tokens found in the cache are not
    output_tokens: Floats
    arrived: Floats
    completed: Floats


def throughput(run: Run) -> Throughput:
    arrivals = np.array([record.arrival_time for record in run.records])
    finishes = np.array([record.finish_time for record in run.records])
    edges = bins(arrivals, finishes, min(MAX_BINS, max(10, len(arrivals) // REQUESTS_A_BIN)))
    if not len(edges):
        return Throughput(edges, *[np.empty(0)] * 4)
    completed = np.array([record.reason in COMPLETED for record in run.records])
    of, step_ends = steps(run), np.asarray(run.step_ends, dtype=np.float64)
    return Throughput(
        edges,
        _rate(of.begin + of.duration, edges, of.prefill_tokens),
        _rate(step_ends, edges, _tokens(run.records, len(step_ends))),
        _rate(arrivals, edges),
        _rate(finishes[completed], edges),
    )


def _rate(times: Floats, edges: Floats, amounts: Floats | None = None) -> Floats:
    counts, _ = np.histogram(times, edges, weights=amounts)
    return np.asarray(counts, dtype=np.float64) / np.diff(edges)

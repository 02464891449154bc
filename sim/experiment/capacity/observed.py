"""One run as a search for a rate sees it: request by request, so that any objective can be asked of any part of it.

Runs are played here or in processes that stay for the whole search: each reads the workload and the costs once.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from policies.config import EngineConfig
from policies.types import FinishReason
from sim.commands import Prepared
from sim.conventions import tpot
from sim.cost.best import Cost
from sim.experiment.capacity.replications import Source, part, source_of, surged
from sim.metrics import Summary, summarise
from sim.setup import Setup
from sim.simulate import Run
from sim.timings import Timings, timings
from sim.workload.workload import Workload

Floats = NDArray[np.float64]

Kept = TypeVar("Kept")

METRICS = ("ttft", "tpot", "e2e", "queue_delay")


# -- what is to be played ---------------------------------------------------------------------------------------------


class Replication(NamedTuple):
    rate: float
    number: int
    length: int

    def of(self, source: Source) -> Workload:
        return source.draw(self.rate, self.number, self.length)


class Surge(NamedTuple):
    """A replication of which `num` requests from the `first` on come `factor` times as fast."""

    rate: float
    number: int
    length: int
    first: int
    num: int
    factor: float

    def of(self, source: Source) -> Workload:
        return surged(source.draw(self.rate, self.number, self.length), self.first, self.num, self.factor)


class Part(NamedTuple):
    """Of the load as it came, `factor` times as fast."""

    rate: float
    first: int
    num: int
    factor: float

    def of(self, source: Source) -> Workload:
        return part(source.whole, self.first, self.num, self.factor)


Load = Replication | Surge | Part


class Task(NamedTuple):
    setup: Setup
    load: Load


# -- what was seen ----------------------------------------------------------------------------------------------------


class Usage(NamedTuple):
    """Of one run: means over its busy time, and what requests waited for."""

    running: float
    kv_held: float
    busy: float  # share of the time
    tokens_a_step: float
    tpot: float  # median
    waits_for: str


@dataclass(frozen=True, slots=True)
class Observed:
    """Entries by arrival. `values`: seconds by metric; infinite where a request was refused or never answered, nan
    where it has none or its client left. `present`: requests in the system when each arrived."""

    rate: float
    arrivals: Floats
    values: Mapping[str, Floats]
    classes: tuple[str, ...]
    class_of: NDArray[np.int64]
    present: Floats
    is_saturated: bool
    usage: Usage


def observe(task: Task) -> Observed:
    world = here(task.setup)
    with _uncollected():
        run = world.play(task.load.of(world.source))
    summary = summarise(run, task.setup.convention)
    return observed(run, summary, task.load.rate, task.setup.convention)


@contextmanager
def _uncollected() -> Iterator[None]:
    """A run makes much and no rubbish in circles; looking for it takes a tenth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def observed(run: Run, summary: Summary, rate: float, convention: str) -> Observed:
    found = timings(run)
    order = np.argsort(found.arrivals, kind="stable")
    arrivals, gone = found.arrivals[order], np.sort(found.lasts)
    names = [record.class_name for record in found.records]
    classes = tuple(sorted(set(names)))
    return Observed(
        rate,
        arrivals,
        {name: each[order] for name, each in _values(found, convention).items()},
        classes,
        np.array([classes.index(name) for name in names], dtype=np.int64)[order],
        np.arange(1.0, len(arrivals) + 1.0) - np.searchsorted(gone, arrivals, "right"),
        summary.saturation.is_saturated or bool(run.unfinished),
        _usage(summary),
    )


def _values(found: Timings, convention: str) -> dict[str, Floats]:
    """As sim.metrics has them of answered requests, here with an entry for all."""
    each_tpot, done = np.full(len(found.records), np.nan), found.completed
    if done.any():
        times = (found.arrivals[done], found.firsts[done], found.lasts[done])
        each_tpot[done] = tpot(convention, *times, found.nums[done])
    left = np.array([record.reason is FinishReason.ABORT for record in found.records], dtype=bool)
    values = {
        "ttft": found.firsts - found.arrivals,
        "tpot": each_tpot,
        "e2e": found.lasts - found.arrivals,
        "queue_delay": found.queue,
    }
    return {name: np.where(done, each, np.where(left, np.nan, np.inf)) for name, each in values.items()}


def _usage(s: Summary) -> Usage:
    span = s.duration or 1.0
    computed = s.num_prompt_tokens - s.num_cached_tokens + s.output_throughput * span
    return Usage(
        running=s.mean_running,
        kv_held=s.mean_kv_held,
        busy=min(1.0, s.busy_time / span),
        tokens_a_step=computed / max(1, s.num_steps),
        tpot=s.tpot.p50,
        waits_for=s.binding,
    )


# -- where it is played -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """What all runs of a setup have in common; `prepared` with the load as it came."""

    prepared: Prepared
    source: Source

    @classmethod
    def of(cls, setup: Setup) -> World:
        source = _source(replace(setup, engine={}))
        return cls(Prepared.of(setup, workload=source.whole), source)

    @property
    def setup(self) -> Setup:
        return self.prepared.setup

    @property
    def config(self) -> EngineConfig:
        return self.prepared.config

    @property
    def cost(self) -> Cost:
        return self.prepared.cost

    def play(self, workload: Workload) -> Run:
        return replace(self.prepared, workload=workload).run()


_WORLDS: dict[str, World] = {}  # of this process, the latest few
_SOURCES: dict[str, Source] = {}  # the same; engines of other settings meet the same load
MOST_KEPT = 4


def _source(setup: Setup) -> Source:
    return _kept(_SOURCES, setup, source_of)


def _kept(kept: dict[str, Kept], setup: Setup, make: Callable[[Setup], Kept]) -> Kept:
    key = json.dumps(setup.to_dict(), sort_keys=True)
    if key not in kept:
        while len(kept) >= MOST_KEPT:
            kept.pop(next(iter(kept)))
        kept[key] = make(setup)
    return kept[key]


def here(setup: Setup) -> World:
    """Of this process: read and built once."""
    return _kept(_WORLDS, setup, World.of)


class Player(Protocol):
    """Plays tasks; what was seen comes in their order."""

    def play(self, tasks: Sequence[Task]) -> list[Observed]: ...


class Here:
    """In this process."""

    def play(self, tasks: Sequence[Task]) -> list[Observed]:
        return [observe(task) for task in tasks]


class Processes:
    """In processes that stay until the block is left, as many as there are cores unless said otherwise."""

    def __init__(self, setup: Setup, num: int = 0) -> None:
        self._num = num or os.cpu_count() or 1
        self._setup = setup
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Player:
        if self._num == 1:
            return Here()
        self._pool = ProcessPoolExecutor(self._num, multiprocessing.get_context("spawn"), _prepare, (self._setup,))
        for _ in range(self._num):  # so that they read and build while this process does
            self._pool.submit(os.getpid)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def play(self, tasks: Sequence[Task]) -> list[Observed]:
        assert self._pool is not None, "outside of its block"
        futures: list[Future[Observed]] = [self._pool.submit(observe, task) for task in tasks]
        return [each.result() for each in futures]


def _prepare(setup: Setup) -> None:
    """What is wrong with a setup is told by the process that asked."""
    ask: Callable[[Setup], object] = here
    try:
        ask(setup)
    except (ValueError, OSError):
        return

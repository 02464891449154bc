"""Where the runs of a sweep are played: here, in processes of this machine, on Ray, or wherever joblib sends them.

One call a run, and results as they end: nothing else is asked of a place, so that clusters serve unchanged (extra
`scale`). Ray has a pool of its own, as its backend of joblib gives no result before all are there.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Task = TypeVar("Task")
Given = TypeVar("Given", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Work(Protocol[Given, Result]):
    """What is done with a task. `lost`: what is said of one whose process was killed."""

    def __call__(self, task: Given, /) -> Result: ...
    def lost(self, task: Given, /) -> Result: ...


class Workers(Protocol):
    """Calls work once a task. Results come in any order; what it raises goes to the caller."""

    def run(self, work: Work[Task, Result], tasks: Sequence[Task]) -> Iterator[Result]: ...


@dataclass(frozen=True, slots=True)
class Here:
    """In this process, one after another."""

    def run(self, work: Work[Task, Result], tasks: Sequence[Task]) -> Iterator[Result]:
        yield from map(work, tasks)


@dataclass(frozen=True, slots=True)
class Processes:
    """On this machine, a process a core unless said otherwise. They end with the one that started them."""

    num: int = 0

    def run(self, work: Work[Task, Result], tasks: Sequence[Task]) -> Iterator[Result]:
        num = min(self.num or os.cpu_count() or 1, len(tasks))
        if num <= 1:
            yield from map(work, tasks)
            return
        left = deque(tasks)
        while left:
            suspects = yield from _until_broken(num, work, left)
            for task in suspects:  # one of them killed its process; alone it shows
                yield from _alone(work, task)


def _until_broken(num: int, work: Work[Task, Result], left: deque[Task]) -> Generator[Result, None, list[Task]]:
    """Results of a pool; returns what was in it when one of its processes was killed, or nothing."""
    pending: dict[Future[Result], Task] = {}
    with _pool(num) as pool:
        try:
            while left or pending:
                while left and len(pending) < 2 * num:
                    pending[pool.submit(work, left[0])] = left[0]
                    left.popleft()
                for each in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield each.result()
                    del pending[each]
        except BrokenProcessPool:
            return list(pending.values())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return []


def _alone(work: Work[Task, Result], task: Task) -> Iterator[Result]:
    with _pool(1) as pool:
        try:
            yield pool.submit(work, task).result()
        except BrokenProcessPool:
            yield work.lost(task)


def _pool(num: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(num, multiprocessing.get_context("spawn"), initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A killed parent says no goodbye: without this its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True, slots=True)
class Ray:
    """On a Ray cluster: the one that RAY_ADDRESS names, or one of this machine's own."""

    num: int = 0

    def run(self, work: Work[Task, Result], tasks: Sequence[Task]) -> Iterator[Result]:
        pools = _needed("ray.util.multiprocessing", "ray")
        if tasks:
            with pools.Pool(self.num or None) as pool:
                yield from pool.imap_unordered(work, tasks, chunksize=1)


@dataclass(frozen=True, slots=True)
class Joblib:
    """By a backend of joblib: loky, threading, dask, or one that somebody registered."""

    backend: str
    num: int = 0

    def run(self, work: Work[Task, Result], tasks: Sequence[Task]) -> Iterator[Result]:
        joblib = _needed("joblib", self.backend)
        if self.backend == "dask":
            _needed("distributed", self.backend)
        with joblib.parallel_config(backend=self.backend, n_jobs=self.num or -1):
            yield from joblib.Parallel(return_as="generator_unordered")(joblib.delayed(work)(task) for task in tasks)


def _needed(module: str, workers: str) -> Any:
    """Raises ValueError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise ValueError(f"--workers {workers} needs {name}: pip install 'servetwin[scale]' {name}") from None


def workers_named(name: str, num: int = 0) -> Workers:
    """`processes` of this machine, `ray`, or a backend of joblib."""
    return Processes(num) if name == "processes" else Ray(num) if name == "ray" else Joblib(name, num)

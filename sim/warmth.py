"""What the prefix cache holds when a run begins to count, and how it got there: cold, warm or primed.

A protocol says what is played, and how many of the first requests are left out of every figure. The manifest names it,
and results of different protocols are not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from policies.types import RequestRecord
from sim.simulate import Run
from sim.workload.primed import primed
from sim.workload.spec import parse
from sim.workload.workload import Workload


class CacheState(Protocol):
    def played(self, workload: Workload) -> Workload:
        """What the body is given."""

    def num_left_out(self, played: Workload) -> int:
        """How many of the first requests only prepare."""

    def __str__(self) -> str:
        """For the manifest."""


@dataclass(frozen=True, slots=True)
class Cold:
    def played(self, workload: Workload) -> Workload:
        return workload

    def num_left_out(self, played: Workload) -> int:
        return 0

    def __str__(self) -> str:
        return "cold"


@dataclass(frozen=True, slots=True)
class Warm:
    share: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"share ({self.share:g}) of warm must be between 0 and 1: of the requests, played first")

    def played(self, workload: Workload) -> Workload:
        return workload

    def num_left_out(self, played: Workload) -> int:
        return max(1, round(self.share * played.num_requests))

    def __str__(self) -> str:
        return f"warm: the first {100 * self.share:g} % of requests are played and not counted"


@dataclass(frozen=True, slots=True)
class Primed:
    def played(self, workload: Workload) -> Workload:
        return primed(workload)

    def num_left_out(self, played: Workload) -> int:
        return len(played.items)

    def __str__(self) -> str:
        return "primed: each caller's shared prefixes are played once, one by one, before the clock starts"


STATES: dict[str, Callable[..., CacheState]] = {"cold": Cold, "primed": Primed, "warm": Warm}


def parse_cache_state(text: str) -> CacheState:
    """`cold`, `warm`, `warm=0.3` (a share of the requests), `primed`. Raises ValueError of one line."""
    return parse("cache state", text, STATES, num_given=0)()


def counted(run: Run, num: int) -> Run:
    """The run of one replica without its first `num` requests, and without the steps decided before the next one came.

    Raises ValueError where the others came at the same time.
    """
    if not num:
        return run
    arrivals = sorted(record.arrival_time for record in run.records)
    if num >= len(arrivals) or arrivals[num] == arrivals[0]:
        raise ValueError(f"{num} of {len(arrivals)} requests prepare the cache: none comes after them to be counted")
    begin = arrivals[num]
    is_kept = np.array([sample.time >= begin for sample in run.samples], dtype=bool)
    steps = np.repeat(is_kept, [sample.num_steps for sample in run.samples])
    places = np.cumsum(steps) - 1
    clients = [
        replace(client, record=_placed(client.record, places)) for client in run.clients if client.arrival_time >= begin
    ]
    return replace(
        run,
        records=[_placed(record, places) for record in run.records if record.arrival_time >= begin],
        samples=[sample for sample, is_in in zip(run.samples, is_kept, strict=True) if is_in],
        num_evicted_blocks=run.num_evicted_blocks - _evicted_before(run, begin),
        step_ends=type(run.step_ends)("d", np.asarray(run.step_ends)[steps]),
        num_plans=int(is_kept.sum()),
        clients=clients,
        deliveries=run.deliveries and run.deliveries.only(_answers(run, begin)),
    )


def _evicted_before(run: Run, begin: float) -> int:
    return max((sample.num_evicted_blocks for sample in run.samples if sample.time < begin), default=0)


def _placed(record: RequestRecord, places: np.typing.NDArray[np.int64]) -> RequestRecord:
    """Its steps counted among those that are left."""
    return replace(record, token_spans=tuple((int(places[first]), num) for first, num in record.token_spans))


def _answers(run: Run, begin: float) -> np.typing.NDArray[np.bool_]:
    """By the client's number."""
    chosen = np.zeros(max((client.number for client in run.clients), default=-1) + 1, dtype=bool)
    chosen[[client.number for client in run.clients if client.arrival_time >= begin]] = True
    return chosen

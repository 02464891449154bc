"""What it costs to keep tenants apart: the same load through every scope of sharing, and what each leaves undone.

Hits, the device's time for prompts, latency, the largest rate at the objectives, and blocks whose content lies in the
pool more than once because its readers may not share it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sim.experiment.isolation.price import Price, prepared, price
from sim.experiment.isolation.scopes import Scope, scopes_of
from sim.experiment.statistics import Interval, mean_interval
from sim.setup import Setup
from sim.workload.every import every_item
from sim.workload.workload import Workload

DEFAULT_SLO = "ttft_p99<1s,tpot_p99<50ms"


# -- the largest rate -------------------------------------------------------------------------------------------------

Meets = Callable[[float], bool]  # whether the objectives are met at this rate
LargestRate = Callable[[float, Meets], float]


def largest_rate(first: float, is_met: Meets, within: float = 0.02, doublings: int = 10) -> float:
    """By doubling or halving the first rate, then between, to a share `within`.

    0 where not even a thousandth of it is met; infinite where a thousand times it is: then nothing is bounded.
    """
    low, high = _bracket(first, is_met, doublings)
    while math.isfinite(high) and high > low * (1.0 + within) > 0.0:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low if math.isfinite(high) else math.inf


def _bracket(first: float, is_met: Meets, doublings: int) -> tuple[float, float]:
    """The largest rate known to be met, and the smallest known not to be."""
    rates = [first * 2.0**power for power in range(doublings + 1)]
    if is_met(first):
        failed = next((rate for rate in rates[1:] if not is_met(rate)), math.inf)
        return failed / 2, failed
    met = next((first * first / rate for rate in rates[1:] if is_met(first * first / rate)), 0.0)
    return met, 2 * met


def meets(setup: Setup) -> bool:
    """Whether a run keeps every objective, keeps up, and answers all but one in a hundred."""
    what = prepared(setup)
    found = what.summary(what.run())
    is_kept = all(each.is_met for each in found.objectives)
    return is_kept and not found.saturation.is_saturated and found.num_completed >= 0.99 * found.num_requests


# -- all scopes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Priced:
    """A scope over several seeds: of each, a run. `largest_rate`: at the objectives, on the first seed; nan unasked."""

    scope: str
    isolation: str
    num_gpus: int
    runs: tuple[Price, ...]
    largest_rate: float

    def mean(self, name: str) -> float:
        """Nan if any run has none."""
        return float(sum(getattr(run, name) for run in self.runs)) / len(self.runs)

    def interval(self, name: str) -> Interval | None:
        """None for a single run, and where a run has no such figure."""
        values = [float(getattr(run, name)) for run in self.runs]
        return mean_interval(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


@dataclass(frozen=True, slots=True)
class Prices:
    """Every scope under one load."""

    workload: str
    num_tenants: int
    num_requests: int
    rate: float
    slo: str
    threat_decision: str
    seeds: tuple[int, ...]
    scopes: tuple[Priced, ...]


def prices(
    setup: Setup,
    *,
    scopes: Sequence[Scope] = (),
    num: int = 3,
    num_workers: int = 0,
    find_rates: bool = True,
    find: LargestRate = largest_rate,
    tick: Callable[[], object] = lambda: None,
) -> Prices:
    """The same requests in every scope, all of them unless some are named, over `num` seeds; a recording has one.

    `find`: how the largest rate is sought, from one that is about right. Raises ValueError for a load of one tenant.
    """
    if num < 1:
        raise ValueError(f"{num} seeds are no run: 1 or more, better 5")
    setup = replace(setup, slo=setup.slo or DEFAULT_SLO)
    seeds = (setup.seed,) if setup.trace else tuple(setup.seed + i for i in range(num))
    load, num_tenants = setup.load(), max(_num_tenants(replace(setup, seed=seed).load()) for seed in seeds)
    if num_tenants < 2:
        raise ValueError(
            f"workload {load.name!r} has one tenant, and isolation costs it nothing: take shared-prefix, or add "
            f"--transform tenants=8"
        )
    scopes = scopes or scopes_of(setup)
    at = [scope.of(setup, num_tenants) for scope in scopes]
    runs = [replace(each, seed=seed) for each in at for seed in seeds]
    rates = partial(_largest, rate=setup.rate or load.rate, find=find)
    with _pool(num_workers, len(runs)) as over:
        played = list(_each(over(price, runs), tick))
        found = list(_each(over(rates, at), tick)) if find_rates and _has_rate(setup) else [math.nan] * len(at)
    return Prices(
        load.name, num_tenants, load.num_requests, setup.rate or load.rate, setup.slo or "",
        at[0].engine["threat_decision"], seeds,
        tuple(
            Priced(
                scope.name, each.engine["isolation"], each.num_replicas * each.tensor_parallel,
                tuple(played[len(seeds) * index : len(seeds) * (index + 1)]), largest,
            )
            for index, (scope, each, largest) in enumerate(zip(scopes, at, found, strict=True))
        ),
    )  # fmt: skip


def _num_tenants(load: Workload) -> int:
    return len({item.request.context.tenant for item in every_item(load)})


def _has_rate(setup: Setup) -> bool:
    """A closed loop comes at the rate that the server allows."""
    return not (setup.arrivals or "").startswith("closed")


def _largest(setup: Setup, rate: float, find: LargestRate) -> float:
    return find(rate, lambda rate: meets(replace(setup, rate=rate)))


def _each(results: Iterable[Any], tick: Callable[[], object]) -> Iterator[Any]:
    for result in results:
        yield result
        tick()


Over = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@contextmanager
def _pool(num_workers: int, num_tasks: int) -> Iterator[Over]:
    """A map over processes, as many as there are cores unless said otherwise."""
    num = min(num_workers or os.cpu_count() or 1, num_tasks)
    if num <= 1:
        yield map
        return
    with ProcessPoolExecutor(num, multiprocessing.get_context("spawn")) as pool:
        yield pool.map

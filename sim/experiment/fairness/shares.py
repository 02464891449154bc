"""Who gets what share of a server, and at whose cost: service, waits, memory, and each group beside itself alone.

Everything is held against a counterfactual that only a simulator has: the same requests at the same times with the same
costs, of one group alone (slowdown, normalised service) or without the loudest (noisy neighbour). What a seed gives is
one replication; intervals are over seeds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from policies.types import FinishReason
from sim.commands import Prepared
from sim.experiment.fairness.accounts import Accounts, Member, Prices
from sim.experiment.fairness.bounds import Bound, bound_of, prices_of
from sim.experiment.fairness.groups import BY, OTHERS, groups_of, kind_of_groups, names_of, only
from sim.experiment.runner import seeded
from sim.experiment.statistics import Interval, mean_interval
from sim.saturation import backlog
from sim.setup import Setup
from sim.simulate import Run
from sim.timings import Bools, Floats, timings
from sim.workload.every import every_item


@dataclass(frozen=True, slots=True)
class Share:
    """One group in one run. Shares are from 0 to 1, times in seconds; nan where nobody of it was answered.

    `normalised`: service by the last arrival, in parts of what it gets alone by then. `slowdown`: of a request, its
    time to the last token over that when its group is alone. `amplification`: the p99 of TTFT over that without the
    loudest other group.
    """

    num_requests: int
    num_refused: int
    service: float
    block_seconds: float  # of all that were held
    normalised: float
    wait_mean: float
    wait_p99: float
    wait_max: float
    slowdown_mean: float
    slowdown_p99: float
    ttft_p99: float
    amplification: float


@dataclass(frozen=True, slots=True)
class FairRun:
    """Of one seed. `gap` and `bound` are charged tokens; `gap` is nan where no two groups ever waited together."""

    shares: Mapping[str, Share]
    loudest: str
    gap: float
    bound: Bound | None
    jain_service: float
    jain_waits: float
    is_saturated: bool  # waits, and what follows from them, then grow with the length of the run

    @property
    def min_share(self) -> float:
        """The least normalised service over the largest."""
        known = [each.normalised for each in self.shares.values()]
        return min(known) / max(known) if max(known) else math.nan


@dataclass(frozen=True, slots=True)
class Fairness:
    """Over seeds; groups are the same in all runs. `kind`: class or client."""

    kind: str
    scheduling: str
    groups: tuple[str, ...]
    runs: tuple[FairRun, ...]

    @property
    def num_saturated(self) -> int:
        return sum(run.is_saturated for run in self.runs)

    def of_group(self, name: str, pick: Callable[[Share], float]) -> Interval:
        return _interval([pick(run.shares[name]) for run in self.runs if name in run.shares])

    def of_run(self, pick: Callable[[FairRun], float]) -> Interval:
        return _interval([pick(run) for run in self.runs])


def _interval(values: Sequence[float]) -> Interval:
    """Of one run, or where some run has no figure, the mean without an interval."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2 or len(known) < len(values):
        mean = sum(known) / len(known) if known else math.nan
        return Interval(mean, math.nan, math.nan, len(known))
    return mean_interval(known)


def fairness(setup: Setup, num: int = 5, by: str | None = None) -> Fairness:
    """Over `num` seeds, by class or by client; of a recorded trace over its one. Raises ValueError for one group."""
    if num < 1:
        raise ValueError(f"{num} seeds play nothing: ask for 1 or more")
    kind = kind_of_groups(setup.load(), by)
    is_recorded = setup.trace is not None and setup.rate is None and not setup.transforms
    runs = tuple(Played(each, kind).judged() for each in seeded(setup, 1 if is_recorded else num))
    groups = names_of([name for run in runs for name in run.shares])
    return Fairness(kind, setup.config().scheduling, tuple(groups), runs)


class Watched(NamedTuple):
    """A run and what came to light of it, by request and by group."""

    run: Run
    accounts: tuple[Accounts, ...]  # one a replica
    service_at_last_arrival: Mapping[str, int]
    firsts: Mapping[str, float]  # time to first token, of the answered
    wholes: Mapping[str, float]  # time to the last one
    waits: Mapping[str, float]  # arrival to first scheduled, of all


class Played:
    """One seed: all together, each group alone, and all without the loudest."""

    def __init__(self, setup: Setup, kind: str) -> None:
        self._prepared = Prepared.of(setup)
        workload = self._prepared.workload
        self._kind, self._group_of = kind, groups_of(workload, kind)
        self._last_arrival = max(item.request.arrival_time for item in workload.items)
        self._prices = self._by_group(prices_of(self._prepared.config))
        self.groups = names_of(list(self._group_of.values()))
        self.together = self._play(self.groups)
        self.alone = {name: self._play([name]) for name in self.groups}

    def _by_group(self, prices: Prices) -> Prices:
        """Weights are given by name; here a client has a number."""
        items = every_item(self._prepared.workload)
        weights = {
            self._group_of[item.request.request_id]: prices.weights.get(BY[self._kind](item.request), 1)
            for item in items
        }
        return replace(prices, weights=weights)

    def _play(self, groups: Sequence[str]) -> Watched:
        workload = only(self._prepared.workload, lambda name: self._group_of[name] in groups)
        journals: list[list[str]] = [[] for _ in range(self._prepared.setup.num_replicas)]
        run = replace(self._prepared, workload=workload).run(journal=[lines.append for lines in journals])
        outputs = {record.request_id: record.num_output_tokens for record in run.records}
        members = {name: Member(group, outputs.get(name, 0)) for name, group in self._group_of.items()}
        service, accounts = Counter[str](), tuple(Accounts(members, self._prices, OTHERS) for _ in journals)
        for account, lines in zip(accounts, journals, strict=True):
            service.update(_heard(account, lines, self._last_arrival))
        found = timings(run)
        names, done = [record.request_id for record in found.records], found.completed
        return Watched(
            run,
            accounts,
            service,
            _by_name(names, found.firsts - found.arrivals, done),
            _by_name(names, found.lasts - found.arrivals, done),
            _by_name(names, found.queue, np.ones(len(names), dtype=bool)),
        )

    def judged(self) -> FairRun:
        service = self._service(self.together)
        loudness = sorted(self.groups, key=lambda name: (name == OTHERS, -service.get(name, 0.0)))  # one to be named
        quieter = {name: self._without(name) for name in loudness[:2]}  # the loudest hears the second
        shares = {
            name: self._share(name, quieter[loudness[0] if name != loudness[0] else loudness[1]])
            for name in self.groups
        }
        gap = max(each.farthest_apart for each in self.together.accounts)
        return FairRun(
            shares,
            loudest=loudness[0],
            gap=gap,
            bound=bound_of(self._prepared.config, self._kind, self.together.accounts),
            jain_service=jain([each.normalised for each in shares.values()]),
            jain_waits=jain([each.wait_mean for each in shares.values()]),
            is_saturated=backlog(self.together.run.records, len(self.together.run.unfinished)).is_saturated,
        )

    def _without(self, name: str) -> Watched:
        rest = [each for each in self.groups if each != name]
        return self.alone[rest[0]] if len(rest) == 1 else self._play(rest)

    def _share(self, name: str, quieter: Watched) -> Share:
        together, alone = self.together, self.alone[name]
        own = [each for each, group in self._group_of.items() if group == name]
        waits = _of(together.waits, own)
        slowed = np.array([together.wholes[each] / alone.wholes[each] for each in own
                           if each in together.wholes and each in alone.wholes])  # fmt: skip
        firsts = _of(together.firsts, own)
        blocks = _summed(each.block_seconds for each in together.accounts)
        return Share(
            num_requests=len(own),
            num_refused=sum(
                record.reason is FinishReason.REJECTED
                for record in together.run.records
                if self._group_of[record.request_id] == name
            ),
            service=_part(self._service(together), name),
            block_seconds=_part(blocks, name),
            normalised=_over(together.service_at_last_arrival.get(name, 0), alone.service_at_last_arrival.get(name, 0)),
            wait_mean=_mean(waits),
            wait_p99=_p99(waits),
            wait_max=float(waits.max()) if len(waits) else math.nan,
            slowdown_mean=_mean(slowed),
            slowdown_p99=_p99(slowed),
            ttft_p99=_p99(firsts),
            amplification=_over(_p99(firsts), _p99(_of(quieter.firsts, own))),
        )

    def _service(self, watched: Watched) -> dict[str, float]:
        return _summed(each.service for each in watched.accounts)


def _heard(accounts: Accounts, lines: Iterable[str], until: float) -> dict[str, int]:
    """Tell all lines; returns the service up to a time."""
    then: dict[str, int] | None = None
    for line in map(json.loads, lines):
        if then is None and line.get("now", 0.0) > until:
            then = dict(accounts.service)
        accounts.hear(line)
    return dict(accounts.service) if then is None else then


def jain(values: Sequence[float]) -> float:
    """From one over how many there are, where one has all, to 1, where all have the same (Jain et al., 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _by_name(names: Sequence[str], values: Floats, chosen: Bools) -> dict[str, float]:
    return {name: value for name, value, is_in in zip(names, values.tolist(), chosen.tolist(), strict=True) if is_in}


def _of(values: Mapping[str, float], names: Iterable[str]) -> Floats:
    return np.array([values[name] for name in names if name in values], dtype=np.float64)


def _summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _part(amounts: Mapping[str, float], name: str) -> float:
    return _over(amounts.get(name, 0.0), sum(amounts.values()))


def _over(amount: float, whole: float) -> float:
    return amount / whole if whole else math.nan


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan


def _p99(values: Floats) -> float:
    return float(np.percentile(values, 99)) if len(values) else math.nan

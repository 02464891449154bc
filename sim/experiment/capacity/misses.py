"""Who misses what at which rate: objectives as counts of misses, added up over replications, on a ladder of rates.

`ttft_p99<1s` holds where fewer than 1 % of requests miss 1 s; so all that is asked of a run is how many missed, of each
objective, in each class. Replications meet every rate with the same luck, and their counts add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.experiment.capacity.observed import METRICS, Observed, Player, Replication, Task
from sim.setup import Setup
from sim.slo import Objective

RATIO = 1.12  # between the rates of the ladder
ALONE = -1000  # the step of the ladder that stands for a rate at which requests hardly meet
NOTHING = 0.02  # of the rate that the search begins with


# -- what must hold ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Term:
    """All of `objectives`, in one class (None: all requests), for all but a share `allowed` of requests."""

    class_name: str | None
    objectives: tuple[Objective, ...]
    allowed: float

    def __str__(self) -> str:
        bounds = " and ".join(str(each) for each in self.objectives)
        share = "" if self.objectives[0].percentile is not None else f" by {100 * (1 - self.allowed):g} %"
        return f"{bounds}{share}{f' in {self.class_name}' if self.class_name else ''}"

    def count(self, run: Observed, chosen: NDArray[np.bool_], scale: float) -> tuple[int, int]:
        """Requests that have what is bounded, and those of them that missed `limit * scale`."""
        if self.class_name is not None:
            if self.class_name not in run.classes:
                return 0, 0
            chosen = chosen & (run.class_of == run.classes.index(self.class_name))
        known, missed = np.zeros(len(chosen), dtype=bool), np.zeros(len(chosen), dtype=bool)
        for each in self.objectives:
            values = run.values[each.metric]
            known |= ~np.isnan(values)
            missed |= values >= each.limit * scale
        return int((known & chosen).sum()), int((missed & chosen).sum())


def terms_of(objectives: Sequence[Objective], classes: Sequence[str], attainment: float) -> tuple[Term, ...]:
    """Percentiles each, bounds on every request together; of each class on its own where there are several.

    Raises ValueError for what a search cannot hold to.
    """
    if not objectives:
        raise ValueError("a capacity is one at objectives: give them with --slo 'ttft_p99<1s,tpot_p99<50ms'")
    if not 0.5 <= attainment < 1.0:
        raise ValueError(f"attainment ({attainment}) must be 0.5 to below 1: nobody keeps a bound for all and ever")
    for each in objectives:
        if each.metric not in METRICS:
            raise ValueError(f"{str(each)!r} pools the gaps of all requests: bound tpot in its place")
    groups: list[tuple[tuple[Objective, ...], float]] = [
        ((each,), 1.0 - each.percentile / 100.0) for each in objectives if each.percentile is not None
    ]
    if every := tuple(each for each in objectives if each.percentile is None):
        groups.append((every, 1.0 - attainment))
    names: Sequence[str | None] = classes if len(classes) > 1 else (None,)
    return tuple(Term(name, bounds, allowed) for name in names for bounds, allowed in groups)


# -- runs by rate -----------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """One rate, its replications added up. `settled`: requests left out at the start."""

    rate: float
    runs: tuple[Observed, ...]
    settled: int
    is_saturated: bool


class Curve:
    """What is known of a setup's misses, rate by rate, on a ladder of rates from `start` up and down.

    `ceiling`: a rate that no run reaches.
    """

    def __init__(
        self, setup: Setup, terms: Sequence[Term], player: Player, length: int, start: float, ceiling: float
    ) -> None:
        self.terms, self.length, self.ceiling = tuple(terms), length, ceiling
        highest = 0.995 * ceiling
        self._start = min(start, highest / RATIO)
        self.top = math.ceil(math.log(highest / self._start) / math.log(RATIO) - 1e-9)  # the last step
        self._setup, self._player = setup, player
        self._seen: dict[float, Seen] = {}
        self._shortest = max(400, math.ceil(2.0 / min(term.allowed for term in terms)))  # to see what is allowed
        self._counts: dict[tuple[float, float], NDArray[np.int64]] = {}  # by rate and scale: [run, term, 2]

    def rate(self, step: int) -> float:
        """Of a step of the ladder; the last one is just below the ceiling."""
        if step == ALONE:
            return NOTHING * self._start
        return min(self._start * RATIO**step, 0.995 * self.ceiling)

    def step_of(self, rate: float) -> int:
        return min(self.top, round(math.log(rate / self._start) / math.log(RATIO)))

    def alone(self) -> float:
        """A rate at which requests hardly meet, played once."""
        rate = self.rate(ALONE)
        if rate not in self._seen:
            length = min(self.length, max(200, self._shortest // 2))
            self._add(rate, self._player.play([Task(self._setup, Replication(rate, 0, length))]))
        return rate

    @property
    def seen(self) -> list[Seen]:
        return [self._seen[rate] for rate in sorted(self._seen)]

    @property
    def num_runs(self) -> int:
        return sum(len(each.runs) for each in self._seen.values())

    def grow(self, rates: Sequence[float], num: int) -> None:
        """Play what is missing of the first `num` replications at each of these rates, all at once."""
        have = {rate: len(self._seen[rate].runs) if rate in self._seen else 0 for rate in rates}
        wanted = [(rate, index) for index in range(num) for rate in rates if index >= have[rate]]
        runs = self._player.play([Task(self._setup, self.load(*each)) for each in wanted])
        for rate in {rate for rate, _ in wanted}:
            new = [run for (of, _), run in zip(wanted, runs, strict=True) if of == rate]
            self._add(rate, new)

    def load(self, rate: float, number: int) -> Replication:
        """With fewer requests where few are in the system at once: it settles sooner."""
        length = max(self._shortest, round(self.length * (rate / self._start) ** 2))
        return Replication(rate, number, min(self.length, length))

    def _add(self, rate: float, new: Sequence[Observed]) -> None:
        before = self._seen[rate].runs if rate in self._seen else ()
        runs = (*before, *new)
        self._counts = {key: each for key, each in self._counts.items() if key[0] != rate}
        num_saturated = sum(run.is_saturated for run in runs)
        self._seen[rate] = Seen(rate, runs, settled(runs), 2 * num_saturated > len(runs))

    def at(self, rate: float) -> Seen:
        return self._seen[rate]

    def is_saturated(self, rate: float) -> bool:
        return self._seen[rate].is_saturated

    def counts(self, rate: float, scale: float = 1.0) -> NDArray[np.int64]:
        """[run, term, (known, missed)] of the requests that met a steady state."""
        key = (rate, scale)
        if key not in self._counts:
            seen = self._seen[rate]
            chosen = [steady(run, seen.settled) for run in seen.runs]
            rows = [
                [term.count(run, mask, scale) for term in self.terms]
                for run, mask in zip(seen.runs, chosen, strict=True)
            ]
            self._counts[key] = np.array(rows, dtype=np.int64)
        return self._counts[key]

    def excess(self, rate: float, scale: float = 1.0, without: int | None = None, num: int | None = None) -> float:
        """Log odds of a miss above those allowed, of the term worst off; above 0: not kept."""
        counts = self.counts(rate, scale)[:num]
        if without is not None:
            counts = np.delete(counts, without, axis=0)
        return max(_excess(counts[:, i].sum(axis=0), term.allowed) for i, term in enumerate(self.terms))

    def keeps(self, rate: float, scale: float = 1.0, num: int | None = None) -> bool:
        """Whether no more missed than are allowed, of each term."""
        known, missed = self.counts(rate, scale)[:num].sum(axis=0).T
        return bool(np.all(missed <= known * [term.allowed for term in self.terms]))

    def excess_of(self, rate: float, term: int) -> float:
        return _excess(self.counts(rate)[:, term].sum(axis=0), self.terms[term].allowed)


def excess_of_run(terms: Sequence[Term], run: Observed, num_settled: int) -> float:
    """Log odds of a miss in one run above those allowed, of the term worst off."""
    chosen = steady(run, num_settled)
    return max(_excess(np.array(term.count(run, chosen, 1.0)), term.allowed) for term in terms)


def _excess(counts: NDArray[np.int64], allowed: float) -> float:
    """Half a request is added to either side, as is usual for odds: none of few is not never."""
    known, missed = int(counts[0]), int(counts[1])
    return math.log((missed + 0.5) / (known - missed + 0.5)) - math.log(allowed / (1.0 - allowed))


def settled(runs: Sequence[Observed]) -> int:
    """Requests until as many are in the system as later in the mean; half of all if that never happens.

    Replications are averaged (Welch, 1983). MSER-5 finds no cut where the number wanders as long as the run lasts.
    """
    length = min(len(run.present) for run in runs)
    mean = np.mean([run.present[:length] for run in runs], axis=0)
    reached = np.flatnonzero(mean >= mean[length // 2 :].mean())
    return min(int(reached[0]) if len(reached) else length, length // 2)


def steady(run: Observed, num_settled: int) -> NDArray[np.bool_]:
    """Neither of the beginning, nor so late that its answer was written while nobody came any more."""
    ended = run.values["e2e"][np.isfinite(run.values["e2e"])]
    length = len(run.arrivals)
    residence = float(ended.mean()) if len(ended) else 0.0
    chosen = np.zeros(length, dtype=bool)
    chosen[num_settled:] = run.arrivals[num_settled:] <= run.arrivals[-1] - residence
    chosen[num_settled : max(num_settled + 1, length // 2)] = True  # answers as long as the run: half of it, if any
    return chosen

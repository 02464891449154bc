"""Would other engine flags serve more? A few that are turned most, each beside the setup as it is, under the same luck.

All are played at the rate where the objectives just give way. What a flag changes in the log odds of a miss, over how
steeply those grow with the rate, is what it is worth in rate; it pays if that is surely above 0, Holm's way over all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sim.experiment.capacity.misses import Curve, excess_of_run
from sim.experiment.capacity.observed import Player, Task
from sim.experiment.capacity.slo_rate import SloRate
from sim.experiment.statistics import Effect, Interval, holm, paired_effect
from sim.setup import Setup, recommended_flags

Candidate = tuple[str, int, Setup]

NUM = 4  # replications a candidate
LEVEL = 0.05  # of all candidates together
FACTORS = {"max_num_batched_tokens": (0.25, 0.5, 2.0), "max_num_seqs": (0.5, 2.0)}


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting; `gain`: of a replica's rate, as a share, near the crossing; `flags`: of the whole engine."""

    setting: str
    value: int
    gain: Interval
    p_value: float
    flags: str

    @property
    def pays(self) -> bool:
        return self.gain.mean > 0.0 and self.p_value < LEVEL


def tune(setup: Setup, player: Player, curve: Curve, found: SloRate, residents: float) -> list[Tried]:
    """Best first. `residents`: requests that run at once, about which max_num_seqs is tried too.

    Empty where no objective gives way: then there is nothing to be gained by the share of misses.
    """
    if found.by != "objective" or found.high is None:
        return []
    curve.grow([found.high], NUM)
    here, candidates = curve.at(found.high), _candidates(setup, residents)
    loads = [curve.load(here.rate, number) for number in range(NUM)]
    runs = player.play([Task(each, load) for _, _, each in candidates for load in loads])
    base = [excess_of_run(curve.terms, run, here.settled) for run in here.runs[:NUM]]
    steepness = (curve.excess(found.high) - curve.excess(found.low)) / math.log(found.high / found.low)
    tried = []
    for index, candidate in enumerate(candidates):
        mine = runs[NUM * index : NUM * (index + 1)]
        if not any(run.is_saturated for run in mine):  # which would lend no number
            odds = [excess_of_run(curve.terms, run, here.settled) for run in mine]
            tried.append(_tried(candidate, paired_effect(base, odds), max(1.0, steepness)))
    adjusted = holm({str(number): each.p_value for number, each in enumerate(tried)})
    told = [replace(each, p_value=adjusted[str(number)]) for number, each in enumerate(tried)]
    return sorted(told, key=lambda each: -each.gain.mean)


def _tried(candidate: Candidate, effect: Effect, steepness: float) -> Tried:
    (name, value, setup), d = candidate, effect.difference
    gain = Interval(-d.mean / steepness, -d.high / steepness, -d.low / steepness, d.num, d.level)
    return Tried(name, value, gain, effect.p_value, recommended_flags(setup.config(), setup))


def _candidates(setup: Setup, residents: float) -> list[Candidate]:
    """Those that can be, other than what is."""
    config = setup.config()
    wanted = [(name, round(by * getattr(config, name))) for name, factors in FACTORS.items() for by in factors]
    wanted.append(("max_num_seqs", max(1, 2 ** math.ceil(math.log2(max(1.0, residents))))))
    found: dict[tuple[str, int], Setup] = {}
    for name, value in wanted:
        if value < 1 or value == getattr(config, name):
            continue
        each = replace(setup, engine={**setup.engine, name: value})
        try:
            each.config()
        except ValueError:  # fewer tokens than slots, or no memory left
            continue
        found[name, value] = each
    return [(name, value, each) for (name, value), each in found.items()]

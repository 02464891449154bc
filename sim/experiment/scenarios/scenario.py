"""What a scenario is: arms that differ in one factor, and what must be true of them, at the scale of a body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sim.diff import check_comparable
from sim.experiment.ab.compare import value
from sim.experiment.runner import Outcome, Runner, seeded
from sim.setup import Setup

BLOCK_SIZE = 16  # tokens


@dataclass(frozen=True, slots=True)
class Scale:
    """What a body can play while somebody waits: tokens of prompts and answers, requests, slots.

    `giant`: a prompt whose step is felt by all. `pace`: seconds that an answer takes about, for what must happen
    meanwhile. Pools hold all unless a case says else.
    """

    body: str
    model: str
    short: int
    long: int
    giant: int
    answer: int
    num_requests: int
    num_slots: int
    pace: float
    num_seeds: int

    def users(self, num: int) -> str:
        """So many, each with one request at a time: the same load for bodies of any speed."""
        return f"closed,users={num},think={self.pace / 10:g}"

    def setup(self, workload: str, arrivals: str, num_requests: int | None = None, **engine: Any) -> Setup:
        settings = {"block_size": BLOCK_SIZE, "num_blocks": 8192, "max_num_seqs": self.num_slots, **engine}
        return Setup(
            workload=workload,
            arrivals=arrivals,
            num_requests=num_requests or self.num_requests,
            model=self.model,
            engine=settings,
        )


SIMULATED = Scale("simulator", "llama-3-8b", 128, 4096, 4096, 64, num_requests=192, num_slots=16, pace=0.5, num_seeds=3)
LIVE = Scale("live", "tiny", 16, 512, 2048, 16, num_requests=32, num_slots=4, pace=0.015, num_seeds=5)


class Check(NamedTuple):
    """A rule in words, what was measured, and whether it was kept. `is_timed`: on a busy machine it may not be."""

    rule: str
    measured: str
    is_kept: bool
    is_timed: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """The same setup under several seeds."""

    name: str
    outcomes: tuple[Outcome, ...]

    def values(self, metric: str) -> list[float]:
        """By its dotted name, one a seed."""
        return [value(each, metric) for each in self.outcomes]

    def mean(self, metric: str) -> float:
        values = self.values(metric)
        return sum(values) / len(values)


Arms = Mapping[str, Arm]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`factor`: all that may differ between arms, by its name in the manifest. `arms` by name, `checks` of them played.

    `requirement` is the article's, as docs/requirements.md numbers it. `is_counted`: nothing in it is a matter of time
    or chance, so one run an arm says all.
    """

    name: str
    requirement: str
    question: str
    factor: str
    arms: Callable[[Scale], Mapping[str, Setup]]
    checks: Callable[[Arms, Scale], Sequence[Check]]
    is_counted: bool = False

    def num_seeds(self, scale: Scale) -> int:
        return 1 if self.is_counted else scale.num_seeds


@dataclass(frozen=True, slots=True)
class Verdict:
    """`factor`: what differed, of every arm but the first against it."""

    scenario: Scenario
    scale: Scale
    factor: Mapping[str, Mapping[str, tuple[Any, Any]]]
    arms: Arms
    checks: tuple[Check, ...]

    @property
    def passes(self) -> bool:
        return all(check.is_kept for check in self.checks)


def play(scenario: Scenario, runner: Runner, scale: Scale = SIMULATED) -> Verdict:
    """All arms under the same seeds, by turns: a machine that gets slower does so for all of them.

    Raises ValueError where more than the factor differs, cold against warm too.
    """
    setups = scenario.arms(scale)
    rounds = zip(*(seeded(setup, scenario.num_seeds(scale)) for setup in setups.values()), strict=True)
    outcomes = tuple(runner.run([each for turn in rounds for each in turn]))
    arms = {name: Arm(name, outcomes[index :: len(setups)]) for index, name in enumerate(setups)}
    first, *others = arms.values()
    factor = {arm.name: _differing(first, arm, scenario.factor) for arm in others}
    return Verdict(scenario, scale, factor, arms, tuple(scenario.checks(arms, scale)))


def _differing(first: Arm, other: Arm, factor: str) -> Mapping[str, tuple[Any, Any]]:
    pairs = zip(first.outcomes, other.outcomes, strict=True)
    found = [check_comparable(a.manifest, b.manifest, factor) for a, b in pairs]
    return found[0]

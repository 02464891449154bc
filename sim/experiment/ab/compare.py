"""A/B: two setups over the same seeds, so that both arms meet the same requests at the same times.

The effect is the mean of paired differences with its interval; several metrics share one error (Holm); with a margin,
equivalence is tested too. An overloaded arm has no steady state: its latencies are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.diff import check_comparable, differences, flat
from sim.experiment.ab.winner import OVERLOADED, Winner, winner
from sim.experiment.runner import Outcome, Runner, seeded
from sim.experiment.statistics import Effect, Equivalence, Looks, equivalence, holm, paired_effect, replications_needed
from sim.setup import Setup

METRICS = (
    "ttft.mean", "ttft.p50", "ttft.p99", "tpot.mean", "tpot.p99", "e2e.mean", "e2e.p99",
    "request_throughput", "output_throughput", "goodput", "token_hit_rate",
)  # fmt: skip
OF_STEADY_STATE = ("ttft.", "tpot.", "itl.", "e2e.", "queue_delay.", "stall.")
PER_SEED = ("seed", "workload.source", "workload.findings")  # manifests differ in these from one seed to the next


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric. `p_adjusted`: among all metrics compared. `needed`: replications for the precision asked for."""

    metric: str
    a: float
    b: float
    effect: Effect
    p_adjusted: float
    equivalence: Equivalence | None
    needed: int | None

    @property
    def verdict(self) -> str:
        if self.effect.is_exactly_zero:
            return "exactly equal"
        if self.p_adjusted < 1.0 - self.effect.difference.level:
            return "B is higher" if self.effect.difference.mean > 0 else "B is lower"
        if self.equivalence is not None and self.equivalence.verdict == "equivalent":
            return "equivalent"
        return "none shown"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`factor`: what differs between the arms. `saturated`: arms that were overloaded, with how often."""

    factor: Mapping[str, tuple[Any, Any]]
    num: int
    compared: tuple[Compared, ...]
    saturated: Mapping[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # metrics left out because of that
    notes: tuple[str, ...] = ()
    winner: Winner = OVERLOADED
    scopes: tuple[str, str] = ("", "")  # within which prefixes are shared, of A and of B
    cache_states: tuple[str, str] = ("cold", "cold")


def compare(
    a: Setup,
    b: Setup,
    runner: Runner,
    *,
    num: int = 20,
    metrics: Sequence[str] = METRICS,
    precision: float | None = None,
    primary: str = "ttft.mean",
    most: int = 320,
    margin: float | None = None,
    factor: str | None = None,
    independent: bool = False,
) -> Comparison:
    """Over `num` seeds, or until the primary metric's difference is known to `precision`, a share of A's mean.

    `margin`: a share of A's mean beneath which a difference does not matter. `factor`: what may differ, by its name in
    the manifest; by default whatever does, workload and seed excepted. `independent`: other seeds for B, to test the
    test. Raises ValueError for arms that cannot be compared.
    """
    if num < 2:
        raise ValueError(f"{num} replications give no interval: ask for 2 or more, better 20")
    arms = Arms(a, b, runner, independent)
    notes: list[str] = []
    if precision is None:
        arms.grow(num)
    elif not _until(arms, primary, precision, num, most):
        notes.append(f"{primary} is not known to {100 * precision:g} % of A after {most} replications")
    found = arms.factor(factor)
    if a.trace is not None and a.rate is None and not a.transforms:
        notes.append("a recorded trace: seeds change nothing in it, and replications are the same run")
    return _judged(arms, found, metrics, margin, precision, notes)


class Arms:
    """The outcomes so far, pair by pair."""

    def __init__(self, a: Setup, b: Setup, runner: Runner, independent: bool) -> None:
        self._setups, self._runner = (a, b), runner
        self._apart = 1_000_003 if independent else 0
        self.a: list[Outcome] = []
        self.b: list[Outcome] = []

    def grow(self, num: int) -> None:
        have, (a, b) = len(self.a), self._setups
        more = num - have
        pairs = zip(seeded(a, more, have), seeded(b, more, have + self._apart), strict=True)
        outcomes = list(self._runner.run([each for pair in pairs for each in pair]))  # by turns: a machine may drift
        self.a += outcomes[::2]
        self.b += outcomes[1::2]

    def factor(self, name: str | None) -> Mapping[str, tuple[Any, Any]]:
        """What differs between the arms. Raises ValueError where the load does, or more than the named factor."""
        left, right = (_without(outcomes[0].manifest, PER_SEED) for outcomes in (self.a, self.b))
        if name is not None:
            return check_comparable(left, right, name)
        found = differences(left, right)
        if loads := [each for each in found if each.startswith("workload.")]:
            raise ValueError(f"the arms have different loads ({', '.join(loads)}): give both the same workload")
        if states := found.get("cache_state"):
            raise ValueError(f"the arms' caches are {' and '.join(map(repr, states))} at the start: begin both alike")
        return found

    def values(self, metric: str) -> tuple[list[float], list[float]]:
        return [value(each, metric) for each in self.a], [value(each, metric) for each in self.b]


def value(outcome: Outcome, metric: str) -> float:
    """By its dotted name; nan where it was not measured. Raises ValueError for a name there is not."""
    found: Any = outcome.metrics
    for part in metric.split("."):
        if not isinstance(found, Mapping) or part not in found:
            known = ", ".join(name for name, each in flat(outcome.metrics).items() if isinstance(each, (int, float)))
            raise ValueError(f"unknown metric {metric!r}; known: {known}")
        found = found[part]
    return math.nan if found is None else float(found)


def _without(manifest: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: each for name, each in flat(manifest).items() if name not in names}


def _until(arms: Arms, primary: str, precision: float, first: int, most: int) -> bool:
    """Grow until the interval, with all earlier looks paid for, is narrow enough."""
    looks = Looks(precision, first, is_relative=False)  # of differences that are shares already
    while True:
        arms.grow(min(looks.next_num, most))
        a, b = arms.values(primary)
        base = sum(a) / len(a)
        if looks.look([(y - x) / base for x, y in zip(a, b, strict=True)]).is_enough:
            return True
        if looks.next_num > most:
            return False


def _judged(
    arms: Arms,
    found: Mapping[str, tuple[Any, Any]],
    metrics: Sequence[str],
    margin: float | None,
    precision: float | None,
    notes: Sequence[str],
) -> Comparison:
    saturated = {name: num for name, outcomes in (("A", arms.a), ("B", arms.b)) if (num := _num_saturated(outcomes))}
    refused = tuple(each for each in metrics if saturated and each.startswith(OF_STEADY_STATE))
    pairs = {each: arms.values(each) for each in metrics if each not in refused}
    effects = {
        name: paired_effect(a, b) for name, (a, b) in pairs.items() if all(map(math.isfinite, (*a, *b)))
    }  # what was not measured (goodput without objectives) is no metric
    adjusted = holm({name: effect.p_value for name, effect in effects.items()})
    compared = tuple(
        Compared(
            name,
            effect.baseline,
            effect.baseline + effect.difference.mean,
            effect,
            adjusted[name],
            equivalence(effect, margin * abs(effect.baseline)) if margin and effect.baseline else None,
            _needed(*pairs[name], precision) if precision else None,
        )
        for name, effect in effects.items()
    )
    best = OVERLOADED if saturated else winner(arms.a, arms.b)
    a, b = arms.a[0].manifest, arms.b[0].manifest
    states = (str(a.get("cache_state", "cold")), str(b.get("cache_state", "cold")))
    return Comparison(
        found, len(arms.a), compared, saturated, refused, tuple(notes), best, (scope(a), scope(b)), states
    )


def scope(manifest: Mapping[str, Any]) -> str:
    """Who may find whose prefixes, in words."""
    engine = manifest.get("engine", {})
    if not engine.get("enable_prefix_caching", True):
        return "nobody: prefix caching is off"
    decided = f", as decided: {why}" if (why := engine.get("threat_decision")) else ""
    return f"{engine.get('isolation', 'global')}{decided}"


def _num_saturated(outcomes: Sequence[Outcome]) -> int:
    return sum(bool(each.metrics["saturation"]["is_saturated"]) for each in outcomes)


def _needed(a: Sequence[float], b: Sequence[float], precision: float) -> int | None:
    base = abs(sum(a) / len(a))
    differences_found = [y - x for x, y in zip(a, b, strict=True)]
    return replications_needed(differences_found, precision * base) if base else None

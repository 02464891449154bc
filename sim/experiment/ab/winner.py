"""Which of two setups is better: more throughput counts only where no tail, and no class's tail, pays for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sim.experiment.runner import Outcome
from sim.experiment.statistics import Effect, holm, paired_effect

GAINS = (("goodput",), ("output_throughput",))  # the first that was measured: goodput needs objectives
TAILS = (("ttft", "p99"), ("tpot", "p99"), ("e2e", "p99"))
LEVEL = 0.05  # of all rows together

Path = tuple[str, ...]


class Winner(NamedTuple):
    """`arm`: A, B, or none; and why."""

    arm: str | None
    reason: str


OVERLOADED = Winner(None, "an overloaded arm has no steady state to be judged by")


def winner(a: Sequence[Outcome], b: Sequence[Outcome]) -> Winner:
    """Of paired outcomes, none of them overloaded. What is a gain in one total and a loss in a tail has no winner."""
    gain = next((path for path in GAINS if _effect(a, b, path) is not None), None)
    paths = [path for path in (gain, *TAILS, *_class_tails(a[0].metrics)) if path is not None]
    effects = {path: effect for path in paths if (effect := _effect(a, b, path)) is not None}
    p_values = holm({".".join(path): effect.p_value for path, effect in effects.items()})
    sure = {path: effect.difference.mean for path, effect in effects.items() if p_values[".".join(path)] < LEVEL}
    better = {arm: [path for path, d in sure.items() if _is_better(path, d, arm, gain)] for arm in "AB"}
    if better["A"] and better["B"]:
        told = "; ".join(f"{arm} by {', '.join(map(_named, better[arm]))}" for arm in "AB")
        return Winner(None, f"each is better at something: {told}")
    for arm in "AB":
        if better[arm]:
            return Winner(arm, f"by {', '.join(map(_named, better[arm]))}, and no tail of any class is longer")
    return Winner(None, "no difference shown in throughput or in any tail")


def _class_tails(metrics: Mapping[str, Any]) -> list[Path]:
    return [("classes", name, *tail) for name in metrics.get("classes") or {} for tail in TAILS]


def _is_better(path: Path, difference: float, arm: str, gain: Path | None) -> bool:
    b_is_higher = difference > 0.0
    return (arm == "B") == (b_is_higher if path == gain else not b_is_higher)


def _effect(a: Sequence[Outcome], b: Sequence[Outcome], path: Path) -> Effect | None:
    """None where some run has no such figure."""
    left, right = [_value(each, path) for each in a], [_value(each, path) for each in b]
    return paired_effect(left, right) if all(map(math.isfinite, (*left, *right))) else None


def _value(outcome: Outcome, path: Path) -> float:
    found: Any = outcome.metrics
    for part in path:
        if not isinstance(found, Mapping) or found.get(part) is None:
            return math.nan
        found = found[part]
    return float(found)


def _named(path: Path) -> str:
    words = " ".join(path[2:] if path[0] == "classes" else path).replace("_", " ")
    return f"{words} of {path[1]}" if path[0] == "classes" else words

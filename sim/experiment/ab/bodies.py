"""The same A/B in both bodies: does the simulator find the effects that the live one shows, by sign and by size?

Levels are another question (calibration/twin.py); a choice between two setups needs only their difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from sim.experiment.ab.compare import METRICS, Comparison, compare
from sim.experiment.runner import Runner
from sim.experiment.statistics import Interval
from sim.setup import Setup

UNPRICED = "steps are priced as the setups say, not as this body takes them: sizes have no reason to agree"
MARGIN = 0.10  # of A: effects closer than this are of one size


@dataclass(frozen=True, slots=True)
class Agreement:
    """B - A of one metric in shares of A, in each body. `apart`: live less simulated, with 90 % (two tests at 5 %)."""

    metric: str
    simulated: Interval
    live: Interval
    apart: Interval
    margin: float

    @property
    def sign(self) -> str:
        """agree | disagree | undecided: where an interval holds 0, unless both are surely within the margin."""
        sides = {_side(self.simulated), _side(self.live)}
        if sides in ({1}, {-1}) or all(_within(each, self.margin) for each in (self.simulated, self.live)):
            return "agree"
        return "disagree" if sides == {1, -1} else "undecided"

    @property
    def size(self) -> str:
        """agree | disagree | undecided, by two one-sided tests of the distance between the effects."""
        if _within(self.apart, self.margin):
            return "agree"
        is_outside = self.apart.low > self.margin or self.apart.high < -self.margin
        return "disagree" if is_outside else "undecided"


@dataclass(frozen=True, slots=True)
class Bodies:
    simulated: Comparison
    live: Comparison
    agreements: tuple[Agreement, ...]


def compare_bodies(
    a: Setup,
    b: Setup,
    simulated: Runner,
    live: Runner,
    settle: Callable[[Setup], Setup],
    *,
    costs: str | None,
    num: int = 20,
    num_live: int = 5,
    metrics: Sequence[str] = METRICS,
    margin: float = MARGIN,
    factor: str | None = None,
) -> Bodies:
    """`settle` gives the setup as the live body runs it, its memory counted; `costs` are those of that body.

    Raises ValueError for arms that cannot be compared, or that the live body cannot run.
    """
    a, b = settle(a), settle(b)
    c, d = (each if costs is None else replace(each, costs=costs) for each in (a, b))
    there = compare(c, d, simulated, num=num, metrics=metrics, margin=margin, factor=factor)
    if costs is None:
        there = replace(there, notes=(*there.notes, UNPRICED))
    here = compare(a, b, live, num=num_live, metrics=metrics, margin=margin, factor=factor)
    return Bodies(there, here, agreements(there, here, margin))


def agreements(simulated: Comparison, live: Comparison, margin: float = MARGIN) -> tuple[Agreement, ...]:
    """Of the metrics that both have, and whose A is not 0."""
    effects = {each.metric: each.effect.relative for each in live.compared}
    return tuple(
        Agreement(each.metric, there, here, _apart(there, here), margin)
        for each in simulated.compared
        if (here := effects.get(each.metric)) is not None
        and all(map(math.isfinite, ((there := each.effect.relative).mean, here.mean)))
    )


def _apart(there: Interval, here: Interval) -> Interval:
    """Of two independent means: Welch's interval."""
    variances = [_error(each) ** 2 for each in (there, here)]
    total = sum(variances)
    middle = here.mean - there.mean
    if not total:
        return Interval(middle, middle, middle, here.num, 0.9)
    freedom = total**2 / sum(v**2 / (each.num - 1) for v, each in zip(variances, (there, here), strict=True))
    reach = float(stdtrit(freedom, 0.95)) * math.sqrt(total)
    return Interval(middle, middle - reach, middle + reach, min(there.num, here.num), 0.9)


def _error(each: Interval) -> float:
    return each.half_width / float(stdtrit(each.num - 1, 0.5 + each.level / 2))


def _side(each: Interval) -> int:
    return 1 if each.low > 0.0 else -1 if each.high < 0.0 else 0


def _within(each: Interval, margin: float) -> bool:
    return -margin < each.low and each.high < margin

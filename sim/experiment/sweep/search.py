"""A search by Optuna (extra `search`): each round of points is proposed by what the rounds before it found.

The rounds are as large on one process as on many, and the sampler's seed is the setup's: so a search that was killed
proposes the same again, and finds its rows. Limits are Optuna's constraints; what broke one guides the search away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sim.experiment.sweep.judged import Goal, Limit, Measured
from sim.experiment.sweep.space import Choices, Knob, Point

if TYPE_CHECKING:
    from sim.experiment.sweep.play import Sweep

ROUND = 8  # points that are proposed without knowing of each other


def search(what: Sweep, played: Callable[[Sequence[Point]], list[Measured]]) -> list[Measured]:
    """Distinct points, `num_points` proposals in all. Raises ValueError where Optuna is not installed."""
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler(seed=what.base.seed)
    study = optuna.create_study(direction="maximize" if what.goal.is_gain else "minimize", sampler=sampler)
    spaces = {knob.name: _distribution(optuna, knob) for knob in what.knobs}
    known: dict[tuple[Any, ...], Measured] = {}
    for first in range(0, what.num_points, ROUND):
        trials = [study.ask(spaces) for _ in range(min(ROUND, what.num_points - first))]
        points = [{knob.name: trial.params[knob.name] for knob in what.knobs} for trial in trials]
        new = {_key(point): point for point in points if _key(point) not in known}
        known |= zip(new, played(list(new.values())), strict=True)
        for trial, point in zip(trials, points, strict=True):
            _tell(optuna, study, trial, known[_key(point)], what.goal)
    return list(known.values())


def _key(point: Point) -> tuple[Any, ...]:
    return tuple(point.values())


def _tell(optuna: Any, study: Any, trial: Any, point: Measured, goal: Goal) -> None:
    """An overloaded point breaks a limit by one whole; what failed tells nothing."""
    value = point.mean(goal.objective or "")
    if point.errors or not math.isfinite(value):
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return
    trial.set_constraint("load", 1.0 if point.is_saturated else -1.0)
    for limit in goal.limits:
        trial.set_constraint(str(limit), _excess(point, limit))
    study.tell(trial, value)


def _excess(point: Measured, limit: Limit) -> float:
    """How far beyond the limit the worst class is, in shares of it; at most 0 where it is kept."""
    worst = [max(limit.values(each).values()) for each in point.metrics]
    mean = sum(worst) / len(worst)
    return mean / limit.objective.limit - 1.0 if math.isfinite(mean) else 1.0


def _distribution(optuna: Any, knob: Knob) -> Any:
    if isinstance(knob, Choices):
        return optuna.distributions.CategoricalDistribution(knob.values)
    kind = optuna.distributions.IntDistribution if knob.is_whole else optuna.distributions.FloatDistribution
    low, high = (int(knob.low), int(knob.high)) if knob.is_whole else (knob.low, knob.high)
    return kind(low, high, log=knob.is_log)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError("method optuna needs Optuna: pip install 'servetwin[search]', or take method lhs") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

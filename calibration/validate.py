"""Predicted against recorded: what a cost says of runs that it was not fitted to.

Every run is played again with its own arrivals, lengths and engine, and each figure stands beside the recorded one.
Runs of the same load are repeats: how far they lie apart is what no prediction can better, and is shown beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.figures import Figure, Latencies, compare, measured, simulated
from calibration.records import MeasuredRun
from calibration.replayed import config_of, replay
from calibration.step_log import with_hits
from sim.cost import LinearCost, StepCost
from sim.frontend import FrontEndTimes
from sim.series import timeline
from sim.simulate import Run

SAME_RATE = 0.01  # of each other: one load


@dataclass(frozen=True, slots=True)
class Validation:
    """One run. `repeats`: by figure, what runs of this load recorded; empty where it was measured once. `draws`: by
    figure, the predictions of other prices that the fit allows."""

    run: MeasuredRun
    recorded: Latencies
    predicted: Latencies
    played: Run
    figures: tuple[Figure, ...]
    repeats: Mapping[str, tuple[float, ...]]
    draws: Mapping[str, tuple[float, ...]]

    def within(self, figure: Figure, goal: float) -> bool:
        """Whether the prediction is within the goal of the repeats' mean, or among them."""
        recorded = self.repeats.get(figure.name) or (figure.recorded,)
        is_among = min(recorded) <= figure.predicted <= max(recorded)
        return is_among or abs(figure.predicted / float(np.mean(recorded)) - 1.0) <= goal


def validate(
    runs: Sequence[MeasuredRun],
    cost: StepCost,
    front_end: FrontEndTimes | None,
    given: Mapping[str, Any],
    *,
    preset: str = "vllm-v1",
    draws: Sequence[LinearCost] = (),
) -> list[Validation]:
    """Raises ValueError where a run does not tell its engine's limits and `given` does not either."""
    recorded = [measured(run) for run in runs]
    found = []
    for run, each in zip(runs, recorded, strict=True):
        config = config_of(run, given, preset)
        load = with_hits(run, config)
        played = replay(load, config, cost, front_end)
        predicted = simulated(played)
        same = [other for other, theirs in zip(runs, recorded, strict=True) if _is_repeat(run, other)]
        others = [simulated(replay(load, config, draw, front_end)) for draw in draws]
        found.append(
            Validation(
                run,
                each,
                predicted,
                played,
                (*compare(each, predicted), *_levels(run, played)),
                _by_figure([measured(other) for other in same]) if len(same) > 1 else {},
                _by_figure(others),
            )
        )
    return found


def _is_repeat(run: MeasuredRun, other: MeasuredRun) -> bool:
    return len(run.requests) == len(other.requests) and abs(other.rate / run.rate - 1.0) <= SAME_RATE


def _by_figure(many: Sequence[Latencies]) -> dict[str, tuple[float, ...]]:
    values: dict[str, list[float]] = {}
    for each in many:
        for figure in compare(each, each):
            values.setdefault(figure.name, []).append(figure.recorded)
    return {name: tuple(each) for name, each in values.items()}


# -- levels over time ---------------------------------------------------------------------------------------------


def _levels(run: MeasuredRun, played: Run) -> list[Figure]:
    """Means over time of who runs and waits and of the pool's share in use, where they were recorded."""
    found = []
    if run.steps:
        sizes = [step.num_prefills + step.num_decodes for step in run.steps]
        weights = np.array([step.duration for step in run.steps])
        found.append(Figure("batch mean", float(np.average(sizes, weights=weights)), played.summary.mean_running))
        if all(step.kv_usage is not None for step in run.steps):
            usage = [step.kv_usage or 0.0 for step in run.steps]
            found.append(Figure("kv mean", float(np.average(usage, weights=weights)), played.summary.mean_kv_held))
        found.append(Figure("steps", float(len(run.steps)), float(len(played.step_ends))))
    series, line = run.series, timeline(played)
    for name, theirs, ours in (
        ("running mean", series.running, line.running),
        ("waiting mean", series.waiting, line.waiting),
        ("kv mean", series.kv_usage, line.held),
    ):
        if theirs:
            places = np.clip(np.searchsorted(line.time, series.times, "right") - 1, 0, len(line.time) - 1)
            found.append(Figure(name, float(np.mean(theirs)), float(np.mean(ours[places]))))
    return found

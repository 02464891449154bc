"""Prices of a step from steps that were seen: non-negative least squares, robust, with what the data can tell of each.

Rows are weighted so that relative errors count by the time they stand for: what is fitted is where a server's time
goes. Steps far off are held down (Huber), and the level is then set so that all steps together last as long as they
did. How many tokens are free is found by trying.

A machine has moods: the same load takes 10 % longer an hour later. So each run has a speed of its own, or loads that
were measured in different moods would bend the prices. The prices are those of the geometric mean of all runs, and the
spread of the speeds is the band: a new run will have a mood too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from calibration.forced import ObservedSteps
from calibration.step_table import NUM_BLOCKS, PRICES, Floats, Table, hull_of
from sim.cost import LinearCost, StepCost, StepWork

FREE_TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
HUBER = 0.15  # relative error beyond which a step counts less
NUM_ROUNDS = 15
SAME = 1e-4  # relative: prices that no longer move
NUM_SPEED_ROUNDS = 6
NUM_DRAWS = 32
MOST_UNSURE = 0.5  # relative standard deviation of a price that is still told
GROSS = 5.0  # times longer or shorter than priced: something else happened


@dataclass(frozen=True, slots=True)
class StepFit:
    """Prices with their draws. `refused`: prices that the steps do not determine, and why; they are 0 in `cost`.

    `unsure`: by price, its relative standard deviation. `speeds`: by run, how much longer its steps took than priced.
    `errors`: of each step, relative. `hull`: least and most of each count in a step.
    """

    cost: LinearCost
    draws: tuple[LinearCost, ...]
    unsure: dict[str, float]
    refused: dict[str, str]
    speeds: tuple[float, ...]
    errors: Floats
    num_steps: int
    hull: dict[str, tuple[float, float]]


def fit_steps(runs: Sequence[Sequence[ObservedSteps]]) -> StepFit:
    """Raises ValueError where there are too few steps."""
    table = Table.of(runs)
    free_tokens = _best_free_tokens(table)
    table, speeds = _at_one_speed(table, free_tokens)
    features, kept, refused = table.features(free_tokens), list(range(len(PRICES))), dict[str, str]()
    if copied := _copied(features):
        kept = [index for index in kept if PRICES[index] not in copied]
        refused |= dict.fromkeys(
            copied, "grows with the other counts in every step seen, so it cannot be told from them"
        )
    while True:
        prices = _solve(features, table.durations, kept)
        draws = [_drawn(table, features, kept, speeds, chosen) for chosen in _resampled(table)]
        unsure = _unsure(prices, np.array(draws))
        worst = max((name for name in unsure), key=lambda name: unsure[name])
        if unsure[worst] <= MOST_UNSURE or worst == PRICES[0]:
            break
        refused[worst] = _reason(worst, unsure[worst], features, prices, table.durations)
        kept.remove(PRICES.index(worst))
    band = float(np.exp(np.std(np.log(speeds), ddof=1))) if len(speeds) > 1 else 1.0
    return StepFit(
        cost=cost_of(prices, free_tokens, band),
        draws=tuple(cost_of(each, free_tokens, band) for each in draws),
        unsure=unsure,
        refused=refused,
        speeds=tuple(float(speed) for speed in speeds),
        errors=(features @ prices) / table.durations - 1.0,
        num_steps=len(table.durations),
        hull=hull_of([work for works in table.works for work in works]),
    )


def cost_of(prices: Floats, free_tokens: float, band: float = 1.0) -> LinearCost:
    named = dict(zip(PRICES, (float(price) for price in prices), strict=True))
    named["per_prompt"] = named.pop("per_completion") + named.pop("per_arrival")
    return LinearCost(**named, free_tokens=float(free_tokens), band=band)


def scaled(cost: LinearCost, by: float) -> LinearCost:
    return replace(cost, scale=cost.scale * by)


def priced_alike(cost: StepCost, works: Sequence[StepWork]) -> LinearCost:
    """The straight line nearest to another cost over these steps, each of equal weight."""
    durations = np.array([cost.host_time(work) + cost.device_time(work) for work in works])
    places = np.arange(len(works))
    table = Table(tuple((w,) for w in works), durations, np.zeros(len(works)), np.zeros_like(places), places)
    free_tokens = _best_free_tokens(table)
    return cost_of(_solve(table.features(free_tokens), durations, range(len(PRICES) - 1)), free_tokens)


# -- least squares ------------------------------------------------------------------------------------------------


def _solve(features: Floats, durations: Floats, kept: Sequence[int]) -> Floats:
    """Prices by columns kept, 0 for the others."""
    columns = features[:, list(kept)]
    most = columns.max(axis=0)
    sizes = np.where(most > 0.0, most, 1.0)
    scaled_columns = columns / sizes
    weights = 1.0 / durations
    trust = np.ones(len(durations))
    found = np.zeros(len(kept))
    for _ in range(NUM_ROUNDS):
        before = found
        found = _nonnegative(scaled_columns, durations, weights * trust)
        if np.allclose(found, before, rtol=SAME, atol=0.0):
            break
        errors = np.abs(scaled_columns @ found / durations - 1.0)
        trust = np.minimum(1.0, HUBER / np.maximum(errors, 1e-12))
    found *= _level(scaled_columns @ found, durations)
    prices = np.zeros(features.shape[1])
    prices[list(kept)] = found / sizes
    return prices


def _nonnegative(columns: Floats, values: Floats, weights: Floats) -> Floats:
    """Weighted least squares, no price below 0: on the triangle of the normal equations, as small as the prices."""
    weighted = columns * weights[:, None]
    squares = weighted.T @ columns
    triangle = np.linalg.cholesky(squares + 1e-12 * np.trace(squares) * np.eye(len(squares)))
    found, _ = nnls(triangle.T, np.linalg.solve(triangle, weighted.T @ values))
    return np.asarray(found, dtype=np.float64)


def _level(priced: Floats, durations: Floats) -> float:
    """What makes the sum right, steps left out in which something else happened."""
    usual = (priced > durations / GROSS) & (priced < durations * GROSS)
    return float(durations[usual].sum() / priced[usual].sum()) if usual.any() else 1.0


def _best_free_tokens(table: Table) -> float:
    """By the errors on blocks that were held out, each fifth of them in turn."""
    most = max(work.num_tokens for works in table.works for work in works)
    choices = [free for free in FREE_TOKENS if free < most]
    scores = [_held_out(table.features(free), table.durations, table.blocks % 5) for free in choices]
    return float(choices[int(np.argmin(scores))])


def _held_out(features: Floats, durations: Floats, folds: NDArray[np.int64]) -> float:
    kept, total = range(features.shape[1]), 0.0
    for fold in range(5):
        rest = folds != fold
        errors = np.abs(features[~rest] @ _solve(features[rest], durations[rest], kept) / durations[~rest] - 1.0)
        total += float((np.minimum(errors, HUBER) * np.minimum(errors, GROSS) * durations[~rest]).sum())
    return total


# -- speeds of runs -----------------------------------------------------------------------------------------------


def _at_one_speed(table: Table, free_tokens: float) -> tuple[Table, Floats]:
    """The table as if all runs had been equally fast, and how much slower each was."""
    features, kept = table.features(free_tokens), range(len(PRICES))
    speeds, even = np.ones(int(table.runs.max()) + 1), table
    for _ in range(NUM_SPEED_ROUNDS):
        found = _speeds(features @ _solve(features, even.durations, kept), even)
        speeds *= found / np.exp(np.log(found).mean())
        even = replace(table, durations=table.durations / speeds[table.runs])
    return even, speeds


def _speeds(priced: Floats, table: Table) -> Floats:
    runs = range(int(table.runs.max()) + 1)
    return np.array([_level(priced[table.runs == run], table.durations[table.runs == run]) for run in runs])


# -- what the data can tell ---------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    runs: NDArray[np.int64]
    rows: NDArray[np.int64]


def _resampled(table: Table) -> list[Chosen]:
    """Of each draw: runs drawn with replacement, and blocks of each; the same in every call."""
    generator = np.random.default_rng(0)
    num_runs = int(table.runs.max()) + 1
    places = {
        (run, block): np.flatnonzero((table.runs == run) & (table.blocks == block))
        for run in range(num_runs)
        for block in range(NUM_BLOCKS)
    }
    draws = []
    for _ in range(NUM_DRAWS):
        chosen = generator.integers(num_runs, size=num_runs)
        rows = [places[run, block] for run in chosen for block in generator.integers(NUM_BLOCKS, size=NUM_BLOCKS)]
        draws.append(Chosen(chosen, np.concatenate(rows)))
    return draws


def _drawn(table: Table, features: Floats, kept: Sequence[int], speeds: Floats, chosen: Chosen) -> Floats:
    """Prices from rows drawn, at the mean speed of the runs drawn."""
    level = float(np.exp(np.log(speeds[chosen.runs]).mean()))
    return level * _solve(features[chosen.rows], table.durations[chosen.rows], kept)


def _copied(features: Floats) -> list[str]:
    """Prices whose counts are a sum of others' in every row, the last of each such set first."""
    kept, found = list(range(features.shape[1])), []
    for index in reversed(range(1, features.shape[1])):
        others = [each for each in kept if each != index]
        columns = features / np.maximum(features.max(axis=0), 1.0)
        weights = np.linalg.lstsq(columns[:, others], columns[:, index], rcond=None)[0]
        rest = columns[:, index] - columns[:, others] @ weights
        if columns[:, index].any() and np.abs(rest).max() <= 1e-6:
            found.append(PRICES[index])
            kept = others
    return found


def _unsure(prices: Floats, draws: Floats) -> dict[str, float]:
    """Relative standard deviation of each price that is not 0."""
    spread = draws.std(axis=0)
    return {name: float(spread[i] / prices[i]) for i, name in enumerate(PRICES) if prices[i] > 0.0}


def _reason(name: str, unsure: float, features: Floats, prices: Floats, durations: Floats) -> str:
    index = PRICES.index(name)
    share = prices[index] * features[:, index].sum() / durations.sum()
    return f"unsure by {unsure:.0%}: {share:.1%} of the time, and other counts tell the same; left out"

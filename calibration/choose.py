"""An operation from samples to a fit with its evidence: form by cross-validation, errors on points held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.fit import NUM_DRAWS, Form, fit, predicted
from calibration.samples import FEWEST, Floats, Mask, Samples
from sim.cost.op_model import Grid, OpModel
from sim.cost.profile import FittedOp

NUM_FOLDS = 5
HELD_OUT = 0.3
MOST_VALIDATED = 8000  # rows that cross-validation uses of many
FRONTIER = 4.0  # a fit to the lower quarter of a count's range is asked about the rest
FRONTIER_WEIGHT = 0.25  # of errors beyond the range, against those within, in the choice of a form
COVERED = 0.68


@dataclass(frozen=True, slots=True)
class Errors:
    """Of predictions over measurements, in percent; bias is the median's sign."""

    num: int
    median: float
    p95: float
    bias: float

    @classmethod
    def of(cls, predictions: Floats, times: Floats) -> Errors:
        ratios = predictions / times - 1.0
        missed = np.abs(ratios)
        figures = (float(np.median(missed)), float(np.quantile(missed, 0.95)), float(np.median(ratios)))
        return cls(len(times), *(round(100.0 * each, 2) for each in figures))

    def to_dict(self) -> dict[str, float]:
        return {"num": self.num, "median": self.median, "p95": self.p95, "bias": self.bias}


def calibrated(
    samples: Samples, forms: Sequence[Form], frontier: str, serves: Mapping[str, Any], seed: int = 0
) -> FittedOp:
    """The best form, fitted to all samples; `frontier` is the count beyond whose range predictions matter."""
    held = np.random.default_rng(seed).random(len(samples.times)) < HELD_OUT
    inside, beyond = frontier_split(samples, frontier)
    form, scores = best_form(samples.where(~held), forms, frontier, seed)
    kept = samples.where(held)
    tried = fit(samples.where(~held), form)
    predictions = predicted(tried, kept)
    far = _tried(samples, form, inside, beyond)
    evidence = {
        "form": form.name,
        "num_points": len(samples.times),
        "cross_validation": scores,
        "held_out": Errors.of(predictions, kept.times).to_dict(),
        "frontier": {"count": frontier, "times": FRONTIER, **(far[1].to_dict() if far else {})},
        "regimes": regimes(tried, kept, predictions),
    }
    spread = _spread(predictions, kept.times)
    model = replace(fit(samples, form, NUM_DRAWS, seed), spread=spread, far_spread=far[0] if far else 2.0 * spread)
    return FittedOp(rounded(model), serves, evidence)


def refitted(samples: Samples, form: Form, known: FittedOp, seed: int = 0) -> FittedOp:
    """In a form that was chosen before; spreads and evidence are those of then."""
    model = fit(samples, form, NUM_DRAWS, seed)
    spreads = (known.model.spread, known.model.far_spread)
    return FittedOp(rounded(replace(model, spread=spreads[0], far_spread=spreads[1])), known.serves, known.evidence)


def best_form(
    samples: Samples, forms: Sequence[Form], frontier: str, seed: int
) -> tuple[Form, dict[str, dict[str, float]]]:
    """That whose mean log error is least: in five folds and, with a quarter of the weight, beyond the range."""
    rng = np.random.default_rng(seed + 1)
    chosen = samples
    if len(samples.times) > MOST_VALIDATED:
        picked = np.zeros(len(samples.times), dtype=bool)
        picked[rng.permutation(len(samples.times))[:MOST_VALIDATED]] = True
        chosen = samples.where(picked)
    folds = rng.permutation(len(chosen.times)) % NUM_FOLDS
    inside, beyond = frontier_split(chosen, frontier)
    scores = {form.name: _score(chosen, form, folds, inside, beyond) for form in forms}
    return min(forms, key=lambda form: scores[form.name]["score"]), scores


def _score(samples: Samples, form: Form, folds: NDArray[np.int64], inside: Mask, beyond: Mask) -> dict[str, float]:
    predictions = np.empty(len(samples.times))
    for fold in range(NUM_FOLDS):
        predictions[folds == fold] = predicted(fit(samples.where(folds != fold), form), samples.where(folds == fold))
    errors = Errors.of(predictions, samples.times)
    score = _mean_miss(predictions, samples.times)
    if enough(inside, beyond):
        far = samples.where(beyond)
        score += FRONTIER_WEIGHT * _mean_miss(predicted(fit(samples.where(inside), form), far), far.times)
    return {"median": errors.median, "p95": errors.p95, "score": round(score, 5)}


def frontier_split(samples: Samples, count: str) -> tuple[Mask, Mask]:
    """Samples in the lower part of a count's range, and those more than four times beyond it."""
    column = samples.column(count)
    bound = float(np.max(column)) / FRONTIER**2
    return column <= bound, column > bound * FRONTIER


def enough(inside: Mask, beyond: Mask) -> bool:
    return bool(inside.sum() >= 4 * FEWEST and beyond.sum() >= FEWEST)


def _tried(samples: Samples, form: Form, inside: Mask, beyond: Mask) -> tuple[float, Errors] | None:
    if not enough(inside, beyond):
        return None
    far = samples.where(beyond)
    predictions = predicted(fit(samples.where(inside), form), far)
    return _spread(predictions, far.times), Errors.of(predictions, far.times)


def regimes(model: OpModel, samples: Samples, predictions: Floats) -> dict[str, dict[str, float]]:
    """Conformal quantiles of absolute log errors, by the term that costs most."""
    priced = samples.terms() * np.array(model.prices)
    largest = np.array(model.kind.names)[priced.argmax(axis=1)]
    missed = np.abs(np.log(predictions / samples.times))
    return {
        name: {
            "num": int((largest == name).sum()),
            "q68": round(float(np.quantile(missed[largest == name], COVERED)), 4),
            "q90": round(float(np.quantile(missed[largest == name], 0.9)), 4),
        }
        for name in model.kind.names
        if (largest == name).sum() >= FEWEST
    }


def _spread(predictions: Floats, times: Floats) -> float:
    return float(np.quantile(np.abs(np.log(predictions / times)), COVERED))


def _mean_miss(predictions: Floats, times: Floats) -> float:
    return float(np.mean(np.abs(np.log(predictions / times))))


def rounded(model: OpModel) -> OpModel:
    """To the digits that a profile keeps: what is written is what was fitted."""
    return replace(
        model,
        prices=tuple(_digits(price, 7) for price in model.prices),
        grids=tuple(Grid(grid.axes, tuple(_digits(factor, 4) for factor in grid.factors)) for grid in model.grids),
        spread=_digits(model.spread, 4),
        far_spread=_digits(model.far_spread, 4),
        draws=tuple(tuple(_digits(price, 5) for price in draw) for draw in model.draws),
    )


def _digits(value: float, num: int) -> float:
    return float(f"{value:.{num - 1}e}")

"""What becomes of parts in service: factors and an overhead, fitted to steps of a running server beside their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from calibration.journalled import TimedStep
from calibration.samples import Floats
from sim.cost.body import BodyCost, InService
from sim.cost.work import StepWork

FACTORS = ("layers", "head", "decode", "prefill")
PRICES = ("per_step", "per_prefill", "per_request", "per_token", "per_context")
PRIOR = 30.0  # steps that a factor of 1 weighs as much as
ROUNDS = 4
HICCUP = 4.0  # times what was expected: the machine was away, which is no price of a step


class Fitted(NamedTuple):
    in_service: InService
    num_hiccups: int


def in_service(cost: BodyCost, steps: Sequence[TimedStep]) -> Fitted:
    """By least squares of what steps are off in shares of what is expected, so that sums of steps come out right.

    (In shares of what was measured, slow steps would count for less than quick ones, and all would be priced too low.)
    """
    terms = np.array([[*cost.parts(work), *_counts(work)] for work, *_ in steps])
    times = np.array([max(1e-7, duration - cost.host_time(work)) for work, duration, _ in steps])
    expected = np.maximum(terms[:, : len(FACTORS)].sum(axis=1), 1e-7)
    usual = np.ones(len(times), dtype=bool)
    for _ in range(ROUNDS):
        prices = _least(terms[usual] / expected[usual, None], times[usual] / expected[usual])
        expected = np.maximum(terms @ prices, 1e-7)
        usual = times < HICCUP * expected
    values = {name: float(f"{price:.6g}") for name, price in zip((*FACTORS, *PRICES), prices, strict=True)}
    return Fitted(InService(**values), int((~usual).sum()))


def _counts(work: StepWork) -> tuple[float, ...]:
    chunks = work.num_decodes + work.num_prefills
    return 1.0, work.num_prefills, chunks, work.num_tokens, work.decode_context


def _least(terms: Floats, shares: Floats) -> Floats:
    """Of 0 or more; a factor of a part that hardly came up stays near 1."""
    scale = terms.max(axis=0)
    scale[scale == 0.0] = 1.0
    prior = np.sqrt(PRIOR) * np.eye(len(FACTORS), terms.shape[1]) * np.minimum(scale, 1.0)
    wanted = prior[:, : len(FACTORS)].sum(axis=1)
    rows, targets = np.vstack((terms, prior)), np.concatenate((shares, wanted))
    prices: Floats = nnls(rows / scale, targets)[0] / scale
    return prices

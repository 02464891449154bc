"""Prices of a step from first and last tokens alone: our own core replays the run inside least squares.

Such records tell steps only through sums of many, so there is a prior (a datasheet's prices, or another fit's), in
which each price is off by a factor e**0.7 at 68 %, and what comes out says how much of each is the records' word.
Requests that are served together share their steps, hence their errors: they count as one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibration.figures import Latencies, measured, simulated
from calibration.records import MeasuredRun
from calibration.replayed import replay
from policies.config import EngineConfig
from sim.cost import LinearCost, StepCost, StepWork
from sim.frontend import FrontEndTimes

Floats = NDArray[np.float64]

FITTED = ("per_step", "per_token", "free_tokens", "per_decode", "per_prompt", "per_kv_token", "per_pair")
PRIOR_SIGMA = 0.7
NOISE = {"ttft": 0.3, "tpot": 0.1, "e2e": 0.1}  # of one request's logarithm
SLOWEST_FACTOR = 20.0  # from the prior, either way
DIFFERENCE = 0.03  # of a price, to see what it does: a replay moves by whole steps
MAX_ROUNDS = 20
NUM_DRAWS = 32
TOLD = 0.8  # of the prior's width: a price surer than this is the records' word


@dataclass(frozen=True, slots=True)
class RequestFit:
    """`unsure`: standard deviation of each price's logarithm; `from_prior`: prices of which the records say little."""

    cost: LinearCost
    front_end: FrontEndTimes | None
    draws: tuple[LinearCost, ...]
    unsure: dict[str, float]
    from_prior: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One run, as it is replayed. `chosen`: requests that are fitted to."""

    run: MeasuredRun
    config: EngineConfig
    chosen: Collection[str] | None = None

    def recorded(self) -> Latencies:
        return self._kept(measured(self.run))

    def predicted(self, cost: StepCost, front_end: FrontEndTimes | None) -> Latencies:
        return self._kept(simulated(replay(self.run, self.config, cost, front_end)))

    def _kept(self, found: Latencies) -> Latencies:
        return found if self.chosen is None else found.only(self.chosen)


def fit_requests(cases: Sequence[Case], prior: LinearCost, front_end: FrontEndTimes | None) -> RequestFit:
    """From the prior on; `front_end` is kept. Raises ValueError where a run ends in no answer."""
    names = [name for name in FITTED if getattr(prior, name) > 0.0]
    begin = np.log([getattr(prior, name) for name in names])
    recorded = [case.recorded() for case in cases]
    together = [_served_together(each) for each in recorded]

    def misses(x: Floats) -> Floats:
        cost = _cost(prior, names, x)
        parts = [
            _misses(case.predicted(cost, front_end), each) / math.sqrt(num)
            for case, each, num in zip(cases, recorded, together, strict=True)
        ]
        return np.concatenate([*parts, (x - begin) / PRIOR_SIGMA])

    width = math.log(SLOWEST_FACTOR)
    found = least_squares(
        misses,
        begin,
        bounds=(begin - width, begin + width),
        diff_step=np.full(len(names), DIFFERENCE),
        loss="soft_l1",
        max_nfev=MAX_ROUNDS,
    )
    slopes = np.asarray(found.jac, dtype=np.float64)
    covariance = np.asarray(np.linalg.inv(slopes.T @ slopes), dtype=np.float64)
    unsure = dict(zip(names, np.sqrt(np.diag(covariance)).tolist(), strict=True))
    return RequestFit(
        cost=_cost(prior, names, found.x),
        front_end=front_end,
        draws=tuple(_cost(prior, names, x) for x in _draws(found.x, covariance)),
        unsure=unsure,
        from_prior=tuple(name for name in names if unsure[name] > TOLD * PRIOR_SIGMA),
    )


def _cost(prior: LinearCost, names: Sequence[str], x: Floats) -> LinearCost:
    return replace(prior, **{name: math.exp(value) for name, value in zip(names, x.tolist(), strict=True)})


def _misses(predicted: Latencies, recorded: Latencies) -> Floats:
    """Logarithms of ratios, in standard deviations; 0 where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [np.log(getattr(predicted, name) / getattr(recorded, name)) / noise for name, noise in NOISE.items()]
    found: Floats = np.nan_to_num(np.concatenate(parts), nan=0.0, posinf=10.0, neginf=-10.0)
    return found


def _served_together(recorded: Latencies) -> float:
    """Requests at a time, on average: as many as share each error."""
    span = float((recorded.arrivals + recorded.e2e).max() - recorded.arrivals.min())
    return max(1.0, float((recorded.e2e - recorded.ttft).sum()) / span)


def _draws(x: Floats, covariance: Floats) -> Floats:
    generator = np.random.default_rng(0)
    root = np.linalg.cholesky(covariance + 1e-12 * np.eye(len(x)))
    drawn: Floats = x + generator.standard_normal((NUM_DRAWS, len(x))) @ root.T
    return drawn


# -- the prior ----------------------------------------------------------------------------------------------------


def straightened(cost: StepCost, run: MeasuredRun, config: EngineConfig) -> LinearCost:
    """The straight line nearest to another cost, over steps such as this run's engine takes."""
    from calibration.step_fit import priced_alike

    return priced_alike(cost, _typical_works(run, config))


def _typical_works(run: MeasuredRun, config: EngineConfig) -> list[StepWork]:
    prompt = int(np.mean([each.num_prompt_tokens for each in run.completed]))
    context = prompt + int(np.mean([each.num_output_tokens for each in run.completed])) // 2
    budget = config.max_num_batched_tokens
    decodes = sorted({0, *_doubled(config.max_num_seqs)})
    prefills = sorted({0, *_doubled(budget)})
    works = []
    for num in decodes:
        for tokens in prefills:
            if 0 < num + tokens <= budget:
                for longer in (0.5, 1.0, 2.0):
                    works.append(_work(num, int(context * longer), tokens, max(1, int(prompt * longer))))
    return works


def _doubled(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power < most] + [most]


def _work(num_decodes: int, context: int, tokens: int, prompt: int) -> StepWork:
    """A step of decodes and of whole prompts that together have so many tokens."""
    num = -(-tokens // prompt)
    return StepWork(
        num_tokens=num_decodes + tokens,
        num_requests=num_decodes + num,
        num_sampled=num_decodes + num,
        num_decodes=num_decodes,
        decode_context=num_decodes * context,
        num_prefills=num,
        prefill_pairs=tokens * (min(tokens, prompt) + 1),
        prefill_context=tokens,
    )

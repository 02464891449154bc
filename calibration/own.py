"""From measurements of our own body to its costs: tables of medians, and what whole steps take beside their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from calibration.choose import COVERED, Errors
from calibration.fit import additive_prices
from calibration.measure import Measurement
from calibration.points import PARTS
from calibration.samples import Floats
from sim.cost.body import BodyCost, BodyCosts, Overhead, Table
from sim.cost.surface import Surface, monotone
from sim.cost.work import StepWork

NOTHING = Overhead(0.0, 0.0, 0.0, 0.0)


def body_costs(name: str, measured: Measurement, seed: int = 0) -> BodyCosts:
    """Fitted to all parts and to the overhead of whole steps; every third step is kept to judge by.

    Raises ValueError for measurements that lack a part.
    """
    if missing := [part for part in PARTS if part not in {each.point.part for each in measured.taken}]:
        raise ValueError(f"nothing was measured of {', '.join(missing)}: let the measurement go on to its end")
    parts = BodyCosts(
        name=name,
        layers=table(measured.times("layers")),
        head=table(measured.times("head")),
        decode=table(measured.times("decode")),
        prefill=table(measured.times("prefill")),
        loop=table(measured.times("loop")),
        overhead=NOTHING,
        per_hashed_block=median(
            seconds / point[0] for point, times in measured.times("hash").items() for seconds in times
        ),
        band=1.0,
    )
    steps = [(work_of(*counts), median(times)) for counts, times in measured.times("step").items()]
    kept = np.arange(len(steps)) % 3 == 2
    fitted = _with_overhead(parts, [step for step, is_kept in zip(steps, kept, strict=True) if not is_kept])
    prices, times = _priced(fitted, [step for step, is_kept in zip(steps, kept, strict=True) if is_kept])
    spread = float(np.quantile(np.abs(np.log(prices / times)), COVERED))
    about = {**measured.about, **_quality(measured), "held_out_steps": Errors.of(prices, times).to_dict()}
    about["sum_of_parts"] = Errors.of(*_priced(parts, steps)).to_dict()
    return replace(_with_overhead(parts, steps), band=round(float(np.exp(spread)), 4), about=about)


def work_of(decodes: int, context: int, chunk: int, start: int) -> StepWork:
    """Of a measured step: `decodes` requests of this context and one chunk, if there is any."""
    prefills, requests = int(chunk > 1), decodes + (chunk > 0)
    alone = int(chunk == 1)  # a chunk of one token is attended as a decode
    return StepWork(
        num_tokens=decodes + chunk,
        num_requests=requests,
        num_sampled=requests,
        num_decodes=decodes + alone,
        decode_context=decodes * context + alone * (start + 1),
        num_prefills=prefills,
        prefill_pairs=prefills * chunk * (2 * start + chunk + 1),
        prefill_context=prefills * (start + chunk),
    )


def table(times: Mapping[tuple[int, ...], Sequence[float]]) -> Table:
    """Medians at the nodes, made to rise with every count; corners that were left out follow the plane of the rest."""
    medians = {tuple(map(float, point)): median(each) for point, each in times.items()}
    nodes = tuple(tuple(sorted({point[axis] for point in medians})) for axis in range(len(next(iter(medians)))))
    surface = Surface(nodes, ())
    missing = [point for point in surface.points() if point not in medians]
    if missing:
        medians |= _extended(medians, missing)
    values = tuple(medians[point] for point in surface.points())
    return Table(nodes, tuple(float(f"{value:.6g}") for value in monotone(Surface(nodes, values)).values))


def _extended(
    known: Mapping[tuple[float, ...], float], missing: Sequence[tuple[float, ...]]
) -> dict[tuple[float, ...], float]:
    """By 1, each count and their product, at prices of 0 or more."""
    points, times = np.array(list(known)), np.array(list(known.values()))
    prices, _ = additive_prices(_terms(points), times)
    return {point: float(_terms(np.array([point]))[0] @ prices) for point in missing}


def _terms(points: Floats) -> Floats:
    return np.column_stack((np.ones(len(points)), points, points.prod(axis=1)))


def _with_overhead(parts: BodyCosts, steps: Sequence[tuple[StepWork, float]]) -> BodyCosts:
    """What the steps took beyond the sum of their parts; where parts alone are too much, nothing is added."""
    prices, times = _priced(parts, steps)
    rest = np.maximum(times - prices, 1e-7)
    terms = np.array(
        [(1.0, work.num_decodes + work.num_prefills, work.num_tokens, work.decode_context) for work, _ in steps]
    )
    # Weighed by the whole step, not by its rest: a small rest of a long step matters little.
    prices = _least(terms / times[:, None], rest / times)
    return replace(parts, overhead=Overhead(*(float(f"{price:.6g}") for price in prices)))


def _least(terms: Floats, rest: Floats) -> Floats:
    scale = terms.max(axis=0)
    scale[scale == 0.0] = 1.0
    prices: Floats = nnls(terms / scale, rest)[0] / scale
    return prices


def _priced(costs: BodyCosts, steps: Sequence[tuple[StepWork, float]]) -> tuple[Floats, Floats]:
    cost = BodyCost(costs, None)  # type: ignore[arg-type]
    return np.array([cost.device_time(work) for work, _ in steps]), np.array([time for _, time in steps])


def _quality(measured: Measurement) -> dict[str, Any]:
    spreads = [
        (max(times) - min(times)) / median(times)
        for part in PARTS
        for times in measured.times(part).values()
        if len(times) > 1
    ]
    return {
        "ceilings": [dict(each) for each in measured.ceilings],
        "drift": round(measured.drift, 4),
        "waited": round(measured.waited, 4),
        "is_noisy": measured.is_noisy,
        "spread_of_repeats": round(float(np.median(spreads)), 4),
        "load": round(max(each.load for each in measured.taken), 2),
    }

"""From measurements of our own body to its costs: tables of medians, and what whole steps take beside their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from calibration.choose import COVERED, Errors
from calibration.fit import additive_prices
from calibration.in_service import HICCUP, in_service
from calibration.journalled import TimedStep
from calibration.measure import Measurement
from calibration.points import PARTS
from calibration.samples import Floats
from sim.cost.body import BodyCost, BodyCosts, InService, Table
from sim.cost.surface import Surface, monotone
from sim.cost.work import StepWork

FEWEST_SERVICES = 8  # to tell by
RUN = 20  # steps one after another that are kept to judge by, or not, together
FRONT_END = "api_time_per_request", "engine_link_time"


def body_costs(name: str, measured: Measurement) -> BodyCosts:
    """Fitted to all parts, and to steps in service; every third run of steps is kept to judge by, then fitted too.

    Raises ValueError for measurements that lack a part, or service.
    """
    have = {each.point.part for each in measured.taken} | ({"service"} if measured.services else set())
    if missing := [part for part in (*PARTS, "service") if part not in have]:
        raise ValueError(f"nothing was measured of {', '.join(missing)}: let the measurement go on to its end")
    parts = BodyCosts(
        name=name,
        layers=table(measured.times("layers")),
        head=table(measured.times("head")),
        decode=table(measured.times("decode")),
        prefill=table(measured.times("prefill")),
        loop=table(measured.times("loop")),
        in_service=InService(),
        per_hashed_block=median(
            seconds / point[0] for point, times in measured.times("hash").items() for seconds in times
        ),
        band=1.0,
        front_end=_front_end(measured),
    )
    sensitivity = _sensitivity(parts, measured)
    runs = [run for steps in measured.served(sensitivity) for run in _runs(steps)]
    fitted, num_hiccups = in_service(
        BodyCost(parts), [step for i, run in enumerate(runs) if i % 3 != 2 for step in run]
    )
    errors, band = _judged(replace(parts, in_service=fitted), runs[2::3])
    whole, _ = in_service(BodyCost(parts), [step for run in runs for step in run])
    about = {
        **measured.about,
        **_quality(measured),
        "held_out_steps": errors.to_dict(),
        "num_hiccups": num_hiccups,
        "sensitivity": sensitivity,
        "sum_of_parts": additivity(parts, measured),
    }
    return replace(parts, in_service=whole, band=band, about=about)


def _sensitivity(parts: BodyCosts, measured: Measurement) -> float:
    """By what power of the probe's time those of steps grow, from one load served to another; from 0 to 1."""
    steps = [step for service in measured.services for step in service.steps]
    cost = BodyCost(replace(parts, in_service=in_service(BodyCost(parts), steps)[0]))
    probes = np.log([service.probe for service in measured.services])
    if len(probes) < FEWEST_SERVICES or np.ptp(probes) == 0.0:
        return 1.0
    shares = np.log([_usual_share(cost, service.steps) for service in measured.services])
    return round(float(np.clip(np.polyfit(probes, shares, 1)[0], 0.0, 1.0)), 3)


def _usual_share(cost: BodyCost, steps: Sequence[TimedStep]) -> float:
    """Times over prices, in sum, but for steps during which the machine was away."""
    prices = np.array([cost.host_time(step.work) + cost.device_time(step.work) for step in steps])
    times = np.array([step.duration for step in steps])
    usual = times < HICCUP * prices
    return float(times[usual].sum() / prices[usual].sum())


def _runs(steps: Sequence[TimedStep]) -> list[Sequence[TimedStep]]:
    return [steps[at : at + RUN] for at in range(0, len(steps), RUN)]


def _judged(costs: BodyCosts, runs: Sequence[Sequence[TimedStep]]) -> tuple[Errors, float]:
    """Errors of single steps, and what covers runs of them."""
    cost = BodyCost(costs)
    prices = [np.array([cost.host_time(work) + cost.device_time(work) for work, *_ in run]) for run in runs]
    times = [np.array([step.duration for step in run]) for run in runs]
    sums = np.array([p.sum() / t.sum() for p, t in zip(prices, times, strict=True)])
    spread = float(np.quantile(np.abs(np.log(sums)), COVERED))
    return Errors.of(np.concatenate(prices), np.concatenate(times)), round(float(np.exp(spread)), 4)


def additivity(parts: BodyCosts, measured: Measurement) -> dict[str, dict[str, Any]]:
    """Whole steps, out of service, beside the sum of their parts: of decodes alone, of chunks alone, of both."""
    cost = BodyCost(parts)
    prepared = measured.times("prepare")
    found: dict[str, list[tuple[float, float]]] = {}
    for counts, times in measured.times("step").items():
        kind = "mixed" if counts[0] and counts[2] else "decodes" if counts[0] else "chunks"
        price = cost.device_time(work_of(*counts)) + median(prepared[counts])
        found.setdefault(kind, []).append((price, median(times)))
    return {kind: Errors.of(*np.array(pairs).T).to_dict() for kind, pairs in found.items()}


def _front_end(measured: Measurement) -> dict[str, float]:
    """Into the engine and out of it: one link each way, and what a request takes beside it."""
    link = fmean(service.deliver for service in measured.services)
    asks = [service.ask for service in measured.services if service.ask is not None]
    return dict(zip(FRONT_END, (max(0.0, fmean(asks) - link) if asks else 0.0, link), strict=True))


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
        "others": round(measured.others, 3),
        "probe": measured.probe,
        "is_noisy": measured.is_noisy,
        "spread_of_repeats": round(float(np.median(spreads)), 4),
    }

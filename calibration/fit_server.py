"""What a running server's steps cost, from records of its requests: `servetwin fit-server`.

Where each token's time is recorded, a teacher-forced replay turns the records into a log of steps, and prices come
from that by least squares (step_fit). Where only first and last tokens are, the replay runs inside least squares, from
a prior (request_fit). Either way the front end's time is what is left of the TTFT, and then the whole is played freely
and held against the records: what the fit cannot explain is said, what speaks against an engine limit is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from calibration.forced import Forced, forced_steps, has_token_times
from calibration.limits import check_log, check_replay
from calibration.records import MeasuredRun
from calibration.replayed import config_of
from calibration.request_fit import Case, fit_requests, straightened
from calibration.step_fit import StepFit, fit_steps, scaled
from calibration.step_log import with_hits
from policies.config import EngineConfig
from sim.cost import LinearCost, StepCost
from sim.frontend import FrontEndTimes

LONGEST_INGRESS = 0.5  # of the quickest run's typical TTFT
NUM_TRIALS = 10
NUM_ROUNDS = 2
MOST_OFF = 0.05  # of the throughput: beyond, something limits the server that is not modelled
NUM_LOADS = 3


@dataclass(frozen=True, slots=True)
class ServerFit:
    """What was found. `unsure`: by price, relative standard deviation; `refused`: prices that the records do not
    determine, and why; `from_prior`: prices that are the prior's. `speeds`: by run, how much slower than the fit."""

    cost: LinearCost
    draws: tuple[LinearCost, ...]
    front_end: FrontEndTimes | None
    configs: tuple[EngineConfig, ...]
    method: str
    unsure: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)
    from_prior: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()
    typical_error: float = math.nan  # of a step, median
    hull: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    findings: tuple[str, ...] = ()


def fit_server(
    runs: Sequence[MeasuredRun],
    given: Mapping[str, Any],
    *,
    preset: str = "vllm-v1",
    prior: StepCost | None = None,
    chosen: Collection[str] | None = None,
) -> ServerFit:
    """`given`: engine settings that the records do not tell. `chosen`: requests whose times may be looked at.

    Raises ValueError, of one line, where limits are missing or contradicted, and where records do not determine a cost.
    """
    if not runs:
        raise ValueError("no records: give at least one run, better three at different loads")
    configs = tuple(config_of(run, given, preset) for run in runs)
    for run, config in zip(runs, configs, strict=True):
        check_log(run, config)
    runs = [with_hits(run, config) for run, config in zip(runs, configs, strict=True)]
    if all(has_token_times(run) for run in runs):
        fit = _from_steps(runs, configs, chosen)
    else:
        fit = _from_requests(runs, configs, prior, chosen)
    findings = (*fit.findings, *_loads(runs), *unexplained(runs, fit, chosen))
    return replace(fit, findings=findings)


def _loads(runs: Sequence[MeasuredRun]) -> list[str]:
    """Loads within a tenth of each other are one."""
    rates = sorted(run.rate for run in runs)
    num = 1 + sum(later > 1.1 * earlier for earlier, later in pairwise(rates))
    if num >= NUM_LOADS:
        return []
    loads = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
    return [f"{num} load level(s) ({loads} requests/s): {NUM_LOADS} are wanted, one of them near saturation"]


# -- token times --------------------------------------------------------------------------------------------------


def _from_steps(
    runs: Sequence[MeasuredRun], configs: Sequence[EngineConfig], chosen: Collection[str] | None
) -> ServerFit:
    """Twice: who was in a step depends on when requests came to the engine, which is known only after a first fit."""
    cases = _cases(runs, configs, chosen)
    front_end: FrontEndTimes | None = front_end_of(0.0)
    cost: LinearCost | None = None
    for _ in range(NUM_ROUNDS):
        forced = [forced_steps(each.run, each.config, _ingress(front_end), chosen, cost) for each in cases]
        fit = fit_steps([each.steps for each in forced])
        front_end, cost = fit_front_end(cases, [scaled(fit.cost, by) for by in fit.speeds]), fit.cost
    if chosen is None:  # who may not be looked at cannot contradict
        for case, each in zip(cases, forced, strict=True):
            check_replay(case.run, case.config, each)
    return _server_fit(fit, front_end, configs, forced, has_log=any(run.steps for run in runs))


def _server_fit(
    fit: StepFit,
    front_end: FrontEndTimes | None,
    configs: Sequence[EngineConfig],
    forced: Sequence[Forced],
    has_log: bool,
) -> ServerFit:
    findings = [f"{fit.num_steps:,} steps seen in the times of tokens"]
    if sum(each.num_preemptions for each in forced):
        findings.append(f"{sum(each.num_preemptions for each in forced):,} preemptions in the replay")
    return ServerFit(
        cost=fit.cost,
        draws=fit.draws,
        front_end=front_end,
        configs=tuple(configs),
        method="steps seen in token times" + (", hits as logged by the engine" if has_log else ""),
        unsure=fit.unsure,
        refused=fit.refused,
        speeds=fit.speeds,
        typical_error=float(np.median(np.abs(fit.errors))),
        hull=fit.hull,
        findings=tuple(findings),
    )


# -- first and last tokens ----------------------------------------------------------------------------------------


def _from_requests(
    runs: Sequence[MeasuredRun],
    configs: Sequence[EngineConfig],
    prior: StepCost | None,
    chosen: Collection[str] | None,
) -> ServerFit:
    if prior is None:
        raise ValueError(
            "the records have first and last tokens only, which do not tell one price from another: give --model and "
            "--gpu, whose datasheet is the prior (a GPU of its kind will do), or records with inter-token latencies"
        )
    cases = _cases(runs, configs, chosen)
    straight = prior if isinstance(prior, LinearCost) else straightened(prior, runs[0], configs[0])
    fit = fit_requests(cases, straight, None)
    front_end = fit_front_end(cases, [fit.cost] * len(cases))
    return ServerFit(
        cost=fit.cost,
        draws=fit.draws,
        front_end=front_end,
        configs=tuple(configs),
        method="first and last tokens, with a prior",
        unsure=fit.unsure,
        from_prior=fit.from_prior,
        speeds=(1.0,) * len(runs),
    )


# -- the front end ------------------------------------------------------------------------------------------------


def _cases(runs: Sequence[MeasuredRun], configs: Sequence[EngineConfig], chosen: Collection[str] | None) -> list[Case]:
    return [Case(run, config, chosen) for run, config in zip(runs, configs, strict=True)]


def fit_front_end(cases: Sequence[Case], costs: Sequence[StepCost]) -> FrontEndTimes | None:
    """One time a request before the engine has it, by the TTFTs; None where times were taken at the engine."""
    if all(each.queued_time == each.arrival_time for case in cases for each in case.run.completed):
        return None
    recorded = [case.recorded().ttft for case in cases]

    def miss(time: float) -> float:
        times = front_end_of(time)
        ratios = [
            np.log(case.predicted(cost, times).ttft / ttft)
            for case, cost, ttft in zip(cases, costs, recorded, strict=True)
        ]
        return float(np.mean([np.abs(each).mean() for each in ratios]))

    longest = LONGEST_INGRESS * min(float(np.median(each)) for each in recorded)
    found = minimize_scalar(miss, bounds=(0.0, longest), method="bounded", options={"maxiter": NUM_TRIALS})
    return front_end_of(float(found.x))


def front_end_of(ingress: float) -> FrontEndTimes:
    """The API server takes requests in one after the other; what it does for tokens is in the steps' prices."""
    return FrontEndTimes.off(api_time_per_request=ingress)


def _ingress(front_end: FrontEndTimes | None) -> float:
    return 0.0 if front_end is None else front_end.api_time_per_request


# -- what is left -------------------------------------------------------------------------------------------------


def unexplained(runs: Sequence[MeasuredRun], fit: ServerFit, chosen: Collection[str] | None = None) -> list[str]:
    """Play every run freely at its own speed. Raises ValueError where the throughput does not come out."""
    found = []
    for case, speed in zip(_cases(runs, fit.configs, None), fit.speeds, strict=True):
        predicted, recorded = case.predicted(scaled(fit.cost, speed), fit.front_end), case.recorded()
        off = predicted.throughput / recorded.throughput - 1.0
        if abs(off) > MOST_OFF:
            raise ValueError(
                f"run {case.run.name!r}: the replay serves {predicted.throughput:.3g} requests/s, the server served "
                f"{recorded.throughput:.3g} ({off:+.1%}): something limits it that is not in the records. Check its "
                f"engine limits ({_shown(case.config)}), and what else ran there"
            )
        for name in ("ttft", "e2e"):
            ratio = predicted.distribution(name).mean / recorded.distribution(name).mean - 1.0
            if abs(ratio) > 0.1:
                found.append(f"run {case.run.name!r}: {name.upper()} mean {ratio:+.1%} in the replay, unexplained")
    return found


def _shown(config: EngineConfig) -> str:
    return (
        f"max_num_seqs {config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens}, "
        f"{config.num_blocks} blocks of {config.block_size}"
    )

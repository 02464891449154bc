"""Servers whose costs are known, because they are simulated; their records, as a benchmark tool would take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from calibration.records import MeasuredRequest, MeasuredRun
from policies.config import EngineConfig
from sim.cost import StepCost
from sim.frontend import FrontEndTimes
from sim.simulate import Run, simulate
from sim.workload.generate import from_lengths
from sim.workload.streams import poisson_arrivals, stream
from sim.workload.workload import Workload

LIMITS = {"num_blocks": 600, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 256}
LIMITS["enable_prefix_caching"] = True
FRONT_END = FrontEndTimes.off(api_time_per_request=3e-3)


def load(rate: float, num: int, seed: int = 0) -> Workload:
    """Prompts of 40 to 400 tokens, answers of 10 to 90."""
    draw = stream(seed, "lengths")
    prompts = [40 + int(360 * draw.random()) for _ in range(num)]
    outputs = [10 + int(80 * draw.random()) for _ in range(num)]
    return from_lengths(poisson_arrivals(rate, num, seed), prompts, outputs)


def serve(
    workload: Workload, cost: StepCost, limits: Mapping[str, Any] = LIMITS, front_end: FrontEndTimes | None = FRONT_END
) -> Run:
    config = EngineConfig.from_dict({**limits, "max_model_len": 1024})
    return simulate(config, workload, cost, front_end=front_end)


def records(
    name: str, workload: Workload, run: Run, tokens: bool = True, limits: Mapping[str, Any] = LIMITS
) -> MeasuredRun:
    """What clients saw; `tokens`: with the time of each, or of the first and last alone."""
    assert run.deliveries is not None
    found = run.deliveries
    bounds = np.searchsorted(found.answers, np.arange(len(run.clients) + 1))
    requests = []
    for client in run.clients:
        times = tuple(found.times(slice(bounds[client.number], bounds[client.number + 1])).tolist())
        requests.append(
            MeasuredRequest(
                client.request_id,
                client.arrival_time,
                client.record.num_prompt_tokens,
                client.num_tokens,
                times[0],
                times[-1],
                times if tokens else (),
            )
        )
    return MeasuredRun(name, requests, engine=dict(limits))


def measure(
    rate: float,
    cost: StepCost,
    *,
    num: int = 90,
    seed: int = 0,
    tokens: bool = True,
    limits: Mapping[str, Any] = LIMITS,
    told: Mapping[str, Any] | None = None,
) -> MeasuredRun:
    """`told`: limits that the records say the server had, if not the true ones."""
    workload = load(rate, num, seed)
    return records(f"rate {rate:g}", workload, serve(workload, cost, limits), tokens, told or limits)

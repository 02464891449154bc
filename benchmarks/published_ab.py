"""A published A/B on one H100, played again: prefix caching with chunked prefill, and more requests at once.

    .venv/bin/python -m benchmarks.published_ab

Source: kubernetes-sigs/inference-perf at KubeCon 2025, vLLM 0.11.0, Llama-3-8B, one H100: prompts of 204 tokens, 100 of
them that recur, answers of about 62. A load that saturates the server stands in the queue, 427 requests in all. Costs
are the shipped ones (public tables, none of this server); host and front end are the defaults. Nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.prompt import ContentPrompt
from sim.commands import Prepared
from sim.cost.work import StepCost, StepWork
from sim.metrics import Summary
from sim.setup import Setup
from sim.workload.loops import assemble
from sim.workload.recipe import Draw
from sim.workload.users import Users
from sim.workload.workload import Workload

PROMPT, ANSWER, NUM_PROMPTS, IN_SYSTEM = 204, 62, 100, 427
CHUNK = 16  # tokens a content id
PLAIN: Mapping[str, Any] = {"enable_prefix_caching": False, "enable_chunked_prefill": False}


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration, and what was published of it: requests a second, seconds a token, seconds to the first."""

    name: str
    engine: Mapping[str, Any]
    rate: float
    tpot: float | None = None
    ttft: float | None = None


ARMS = (
    Arm("128 at once, no caching, whole prompts", PLAIN, 106.0, 0.0197, 2.94),
    Arm("prefix caching, chunked prefill", {}, 176.0, 0.0119),
    Arm("192 at once, no caching, whole prompts", {**PLAIN, "max_num_seqs": 192}, 117.0, None, 2.1),
)


def workload(num_requests: int, seed: int = 0) -> Workload:
    """A closed loop: as many users as were in the system, each of whom asks again at once."""
    which = np.random.default_rng(seed).integers(NUM_PROMPTS, size=num_requests)
    per_prompt = -(-PROMPT // CHUNK)
    prompts = [ContentPrompt(PROMPT, tuple(range(per_prompt * i, per_prompt * (i + 1))), CHUNK) for i in which.tolist()]
    draw = Draw(prompts, [ANSWER] * num_requests)
    return assemble("recurring", draw, Users(IN_SYSTEM), ANSWER, seed, (), f"recurring,seed={seed}")


@dataclass(frozen=True, slots=True)
class Part:
    """The costs with a part of them changed: host and device times are multiplied."""

    name: str
    host: float = 1.0
    device: float = 1.0
    front_end: str = "default"

    def of(self, cost: StepCost) -> StepCost:
        return cost if self.host == self.device == 1.0 else Changed(cost, self.host, self.device)


@dataclass(frozen=True, slots=True)
class Changed:
    """A cost, host and device times multiplied apart."""

    cost: StepCost
    host: float
    device: float

    @property
    def provenance(self) -> str:
        return self.cost.provenance

    @property
    def band(self) -> float:
        return self.cost.band

    def host_time(self, work: StepWork) -> float:
        return self.host * self.cost.host_time(work)

    def device_time(self, work: StepWork) -> float:
        return self.device * self.cost.device_time(work)


AS_SHIPPED = Part("as shipped")
ABLATION = (
    Part("front end off", front_end="off"),
    Part("half the host's time", host=0.5),
    Part("twice the host's time", host=2.0),
    Part("device / 1.15 (band)", device=1 / 1.15),
    Part("device x 1.15 (band)", device=1.15),
)


def play(arm: Arm, load: Workload, part: Part = AS_SHIPPED) -> Summary:
    engine = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 128, **arm.engine}
    prepared = Prepared.of(Setup(gpu="h100", engine=engine, front_end=part.front_end), arm.name, load)
    return prepared.summary(prepared.run(part.of(prepared.cost)))


def gains(rates: Sequence[float]) -> tuple[float, float]:
    """Of caching and chunks, and of more at once, over the first arm."""
    plain, cached, wider = rates
    return cached / plain - 1.0, wider / plain - 1.0


HEADS = ("", "requests/s", "published", "off by", "TPOT, ms", "published", "TTFT, s", "published")


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(value: float | None, unit: float = 1.0, digits: int = 1) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def main(num_requests: int = 8000) -> None:
    load = workload(num_requests)
    found = [play(arm, load) for arm in ARMS]
    print(row(HEADS), row(["---"] * len(HEADS)), sep="\n")
    for arm, s in zip(ARMS, found, strict=True):
        rate = (f"{s.request_throughput:.1f}", f"{arm.rate:.0f}", f"{s.request_throughput / arm.rate - 1:+.1%}")
        tpot, ttft = shown(s.tpot.mean, 1e-3), shown(s.ttft.mean, digits=2)
        print(row([arm.name, *rate, tpot, shown(arm.tpot, 1e-3), ttft, shown(arm.ttft, digits=2)]))
    published = gains([arm.rate for arm in ARMS])
    print(
        "", row(["costs", "requests/s of the three", "gain of caching", "of 192 at once"]), row(["---"] * 4), sep="\n"
    )
    print(row(["published", ", ".join(f"{arm.rate:.0f}" for arm in ARMS), *(f"{gain:+.1%}" for gain in published)]))
    for part in (AS_SHIPPED, *ABLATION):
        rates = [play(arm, load, part).request_throughput for arm in ARMS]
        told = ", ".join(f"{rate:.0f}" for rate in rates)
        print(row([part.name, told, *(f"{gain:+.1%}" for gain in gains(rates))]), flush=True)


if __name__ == "__main__":
    main()

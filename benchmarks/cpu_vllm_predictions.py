"""What a vLLM 0.32.0 server on a CPU will do under flags and loads that nobody here has seen: docs/fidelity.md's table.

    .venv/bin/python benchmarks/cpu_vllm_predictions.py            # all
    .venv/bin/python benchmarks/cpu_vllm_predictions.py seqs8-r4   # one

Costs are those fitted to its four recorded loads (examples/cpu-vllm-0.32.json). The load is drawn as `vllm bench serve`
draws it, so that a seed means the same requests at the same times. A figure is the prediction at the costs' mean; its
range covers 68 %: other prices that the records allow, the machine's mood (its speed differs from run to run), and,
where the seed is not known, the seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from policies.config import EngineConfig
from sim.cost import LinearCost
from sim.cost.server import ServerCosts, read_server_costs
from sim.frontend import FrontEndTimes
from sim.metrics import Summary
from sim.simulate import simulate
from sim.workload.vllm_random import VllmRandom

COSTS = Path(__file__).resolve().parents[1] / "examples" / "cpu-vllm-0.32.json"

# Prompts of the recorded runs were found in the cache for 2.1 % of their tokens: as if they had so many beginnings.
NUM_BEGINNINGS = 2800
VOCAB_SIZE = 4096
BLOCK_SIZE = 32
SEEDS = range(2, 18)  # where the seed is not known


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and what the server is told beside what the recorded one was told.

    `mood`: by how much its steps take longer than the costs say, where that can be guessed.
    """

    rate: float
    num_requests: int
    prompt_tokens: int = 200
    prefix_tokens: int = 0
    seed: int | None = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    mood: float = 1.0

    def load(self, seed: int) -> VllmRandom:
        return VllmRandom(
            self.num_requests, self.rate, seed, self.prompt_tokens, 60, 0.6, self.prefix_tokens, VOCAB_SIZE,
            NUM_BEGINNINGS, BLOCK_SIZE,
        )  # fmt: skip

    @property
    def seeds(self) -> Sequence[int]:
        return SEEDS if self.seed is None else (self.seed,)


# As many requests as in the recorded runs of the same rate. The dates of those leave room for two more on the same
# server: one of 37 s before the overload, which is 260 requests at 7.5 a second, and one of 42 s after it, which is 240
# at 6. The machine's mood moves over minutes, so theirs is taken half way between their neighbours'.
CASES = {
    "r7.5": Case(7.5, 260, mood=(0.955 * 0.973) ** 0.5),
    "r6-another-seed": Case(6.0, 240, seed=None, mood=(0.973 * 1.006) ** 0.5),
    "r6-seed2": Case(6.0, 240, seed=2, mood=(0.973 * 1.006) ** 0.5),
    "seqs8-r4": Case(4.0, 180, engine={"max_num_seqs": 8}),
    "seqs8-r6": Case(6.0, 240, engine={"max_num_seqs": 8}),
    "tokens128-r4": Case(4.0, 180, engine={"max_num_batched_tokens": 128}),
    "tokens128-r6": Case(6.0, 240, engine={"max_num_batched_tokens": 128}),
    "prefix128-cached-r6": Case(6.0, 240, 120, 128),
    "prefix128-uncached-r6": Case(6.0, 240, 120, 128, engine={"enable_prefix_caching": False}),
    "blocks120-r6": Case(6.0, 240, engine={"num_blocks": 119}),  # one of vLLM's blocks is its null block
}
FIGURES: dict[str, Callable[[Summary], float]] = {
    "req/s": lambda s: s.request_throughput,
    "TTFT mean": lambda s: s.ttft.mean,
    "TTFT p99": lambda s: s.ttft.p99,
    "TPOT mean": lambda s: s.tpot.mean,
    "TPOT p99": lambda s: s.tpot.p99,
    "E2E mean": lambda s: s.e2e.mean,
    "E2E p99": lambda s: s.e2e.p99,
    "running": lambda s: s.mean_running,
    "hits": lambda s: s.token_hit_rate,
    "preemptions": lambda s: s.num_preemptions,
}


def play(case: Case, server: ServerCosts, cost: LinearCost, seed: int) -> Summary:
    config = EngineConfig.from_dict({**server.engine, **case.engine})
    front_end = FrontEndTimes(**(server.front_end or {}))
    return simulate(config, case.load(seed).workload(), cost, front_end=front_end).summary


def predict(case: Case, server: ServerCosts) -> Iterator[tuple[str, float, float, float]]:
    """By figure: the prediction, and the ends of its range."""
    central = [play(case, server, replace(server.cost, scale=case.mood), seed) for seed in case.seeds]
    moods = np.random.default_rng(0).standard_normal(len(server.draws)).tolist()
    drawn = [
        play(case, server, replace(draw, scale=case.mood * server.cost.band**mood), case.seeds[index % len(case.seeds)])
        for index, (draw, mood) in enumerate(zip(server.draws, moods, strict=True))
    ]
    for name, of in FIGURES.items():
        low, high = np.percentile([of(each) for each in drawn], (16, 84))
        yield name, float(np.median([of(each) for each in central])), float(low), float(high)


def shown(name: str, value: float) -> str:
    if name.split()[0] in ("TTFT", "TPOT", "E2E"):
        return f"{value * 1e3:.4g}" if value < 0.1 else f"{value * 1e3:.0f}"
    return f"{value:.1%}" if name == "hits" else f"{value:.0f}" if name == "preemptions" else f"{value:.3g}"


def main(names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    server = read_server_costs(COSTS)
    print(f"| case | {' | '.join(FIGURES)} |\n|---|{'---|' * len(FIGURES)}")
    for name in names or CASES:
        cells = [f"{shown(n, v)} ({shown(n, a)}–{shown(n, b)})" for n, v, a, b in predict(CASES[name], server)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

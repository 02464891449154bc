"""How well a server's records predict what they were not fitted to: the tables of docs/fidelity.md.

.venv/bin/python -m benchmarks.fit_server_fidelity ../shared/data/vllm-runs loads    # two loads predict the others
    .venv/bin/python -m benchmarks.fit_server_fidelity ../shared/data/vllm-runs records  # the log left unread
.venv/bin/python -m benchmarks.fit_server_fidelity ../shared/data/vllm-runs halves   # half of the requests, the rest
.venv/bin/python -m benchmarks.fit_server_fidelity ../shared/data/vllm-runs gpus     # the same for two GPUs (minutes)
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from calibration.figures import Figure, compare, measured
from calibration.fit_server import ServerFit, fit_server
from calibration.importers.llmservingsim import read_llmservingsim
from calibration.importers.vllm_bench import read_vllm_bench
from calibration.records import MeasuredRun
from calibration.request_fit import Case
from calibration.step_log import with_hits
from sim.cost import DatasheetCost
from sim.hardware import device
from sim.models import model

CPU_LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 2048}
# Not in the records of the RTX PRO 6000: 96 GB hold far more than 128 requests ever want.
AMPLE = {"num_blocks": 30000, "block_size": 16, "enable_prefix_caching": True}
GPUS: tuple[tuple[str, Mapping[str, Any]], ...] = (("RTX4090-Llama-3.1-8B", {}), ("RTXPRO6000-Llama-3.1-8B", AMPLE))
SHOWN = ("throughput", "ttft mean", "tpot mean", "e2e mean", "e2e p99")


def cpu_loads(folder: Path) -> dict[str, list[MeasuredRun]]:
    """Runs by rate: one has repeats."""
    runs = [read_vllm_bench(path) for path in sorted((folder / "cpu-vllm-0.32").glob("base_*.json.gz"))]
    rates = sorted({round(run.rate) for run in runs})
    return {f"{rate}/s": [run for run in runs if round(run.rate) == rate] for rate in rates}


def errors(runs: Sequence[MeasuredRun], fit: ServerFit, chosen: Collection[str] | None = None) -> list[Figure]:
    """Of repeats, the mean of the recorded figures against the mean of the predicted ones."""
    cases = [Case(with_hits(run, fit.configs[0]), fit.configs[0], chosen) for run in runs]
    found = [compare(case.recorded(), case.predicted(fit.cost, fit.front_end)) for case in cases]
    return [
        Figure(same[0].name, float(np.mean([f.recorded for f in same])), float(np.mean([f.predicted for f in same])))
        for same in zip(*found, strict=True)
    ]


def row(name: str, figures: Sequence[Figure]) -> str:
    by_name = {figure.name: figure.error for figure in figures}
    return f"| {name} | {' | '.join(f'{by_name[each]:+.1%}' for each in SHOWN)} |"


def repeats(runs: Sequence[MeasuredRun]) -> list[Figure]:
    """How far single runs lie from their mean, at most."""
    each = [compare(found, found) for found in map(measured, runs)]
    spread = []
    for same in zip(*each, strict=True):
        values = np.array([figure.recorded for figure in same])
        spread.append(
            Figure(same[0].name, float(values.mean()), float(values[np.argmax(np.abs(values - values.mean()))]))
        )
    return spread


def records(folder: Path) -> Iterator[str]:
    """From the records of requests alone, of the two lightest loads."""
    blind = {rate: [replace(run, steps=()) for run in runs] for rate, runs in cpu_loads(folder).items()}
    yield from _loads(blind, [("2/s", "4/s")])


def loads(folder: Path) -> Iterator[str]:
    by_rate = cpu_loads(folder)
    yield from _loads(by_rate, list(combinations(by_rate, 2)))


def _loads(by_rate: Mapping[str, Sequence[MeasuredRun]], pairs: Sequence[tuple[str, ...]]) -> Iterator[str]:
    for pair in pairs:
        fit = fit_server([run for rate in pair for run in by_rate[rate]], CPU_LIMITS)
        for rate, runs in by_rate.items():
            if rate not in pair:
                yield row(f"{' and '.join(pair)} → {rate}", errors(runs, fit))
    yield row("repeats at 6/s, from their mean", repeats(by_rate["6/s"]))


def halves(folder: Path) -> Iterator[str]:
    for rate, runs in cpu_loads(folder).items():
        yield from _halves(runs[:1], rate, CPU_LIMITS, None)


def gpus(folder: Path) -> Iterator[str]:
    prior = DatasheetCost(model("llama-3-8b"), device("l40s"))  # neither GPU's own: of the same kind
    for name, given in GPUS:
        yield from _halves([read_llmservingsim(folder / name)], name, given, prior)


def _halves(
    runs: Sequence[MeasuredRun], name: str, given: Mapping[str, Any], prior: DatasheetCost | None
) -> Iterator[str]:
    ids = [request.request_id for request in runs[0].completed]
    half = len(ids) // 2
    for split, seen, rest in (("even → odd", ids[::2], ids[1::2]), ("first half → second", ids[:half], ids[half:])):
        fit = fit_server(runs, given, prior=prior, chosen=set(seen))
        yield row(f"{name}, {split}", errors(runs, fit, set(rest)))


def main(folder: str, which: str) -> None:
    print(f"| fitted → predicted | {' | '.join(SHOWN)} |\n|---|{'---|' * len(SHOWN)}")
    for line in {"loads": loads, "records": records, "halves": halves, "gpus": gpus}[which](Path(folder)):
        print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

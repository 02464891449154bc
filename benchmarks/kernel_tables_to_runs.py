"""From kernel tables of a GPU to a real vLLM run of the same GPU: nothing of the kernels is fitted to the run.

    python -m benchmarks.kernel_tables_to_runs --shared ../shared
    python -m benchmarks.kernel_tables_to_runs --tables DIR --run DIR [--per-step S] [--num-blocks N]

Folders are LLMServingSim's: tables as .../bf16/tp1, runs with requests.jsonl and meta.json; a peer-error-summary.txt in
the run's folder stands beside. The one constant, seconds a step that no kernel explains, is fitted to one GPU's run and
used on the other; the first table is without it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from calibration.figures import Figure
from calibration.tabled_run import TabledRun, tabled_run

GPUS = ("RTX4090", "RTXPRO6000")
MODEL = "Llama-3.1-8B"
THEIRS = {"TTFT": "ttft", "TPOT": "tpot", "Latency": "e2e", "Mean": "mean", "Median": "p50", "P90": "p90", "P99": "p99"}


def folders(shared: Path, gpu: str) -> tuple[Path, Path]:
    tables = shared / "data/kernel-tables/llmservingsim" / gpu / "meta-llama" / MODEL / "bf16/tp1"
    return tables, shared / "data/vllm-runs" / f"{gpu}-{MODEL}"


def peer_errors(run: Path) -> dict[str, str]:
    """By figure, in percent, as that project's own simulator reports them."""
    path = run / "peer-error-summary.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    found = (re.match(r"(\w+) (Mean|Median|P90|P99) .*?([-+][\d.]+)%", line) for line in lines)
    return {f"{THEIRS[each[1]]} {THEIRS[each[2]]}": f"{each[3]}%" for each in found if each}


def rows(figures: list[Figure], peer: dict[str, str]) -> Iterator[str]:
    for figure in figures:
        unit = 1.0 if figure.name == "throughput" else 1e3
        yield (
            f"| {figure.name} | {unit * figure.recorded:,.1f} | {unit * figure.predicted:,.1f} "
            f"| {100 * figure.error:+.1f}% | {peer.get(figure.name, '')} |"
        )


def show(name: str, each: TabledRun, per_step: float, peer: dict[str, str], whence: str) -> None:
    print(f"\n{name}, {1e3 * per_step:.2f} ms a step besides kernels ({whence})\n")
    print("| ms, requests/s | recorded | servetwin | error | LLMServingSim |\n|---|---|---|---|---|")
    print("\n".join(rows(each.figures(per_step), peer)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tables", type=Path, help="of another GPU or model")
    parser.add_argument("--run", type=Path, help="recorded there")
    parser.add_argument("--per-step", type=float, default=0.0, help="seconds a step that no kernel explains")
    parser.add_argument("--num-blocks", type=int, help="usable KV blocks, where meta.json does not tell")
    parser.add_argument("--equal-contexts", action="store_true", help="leave skew.csv out")
    parser.add_argument("--synchronous", action="store_true", help="schedule each step after the one before")
    options = parser.parse_args()
    if (options.tables is None) != (options.run is None):
        parser.error("--tables and --run go together: the kernels and the run of one GPU")
    given = {"num_blocks": options.num_blocks, "async_depth": 1 if options.synchronous else None}
    given = {name: value for name, value in given.items() if value is not None}
    if options.tables:
        each = tabled_run(options.tables, options.run, given, options.equal_contexts)
        show(options.run.name, each, options.per_step, peer_errors(options.run), "given")
    else:
        runs = {gpu: tabled_run(*folders(options.shared, gpu), given, options.equal_contexts) for gpu in GPUS}
        both_ways(runs, {gpu: peer_errors(folders(options.shared, gpu)[1]) for gpu in GPUS})


def both_ways(runs: dict[str, TabledRun], peers: dict[str, dict[str, str]]) -> None:
    for gpu in GPUS:
        show(gpu, runs[gpu], 0.0, peers[gpu], "none fitted")
    for lender, borrower in (GPUS, GPUS[::-1]):
        show(borrower, runs[borrower], runs[lender].fitted_per_step(), peers[borrower], f"fitted on {lender}")


if __name__ == "__main__":
    main()

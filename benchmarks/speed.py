"""How fast a simulation runs: requests a second, steps a second, peak memory; beside a yardstick of the machine.

    python benchmarks/speed.py [--shared DIR] [--rounds N] [--mooncake]

The yardstick is a fixed loop of plain Python timed in the same process, so that figures of different machines, or of
one machine under different loads, can be set against each other: compare "yardsticks a loop", not seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
BENCH_10K = "bench-10k/poisson4_conv_10000.csv"
MOONCAKE = "mooncake-fast25/conversation_trace.jsonl"


def yardstick() -> float:
    """Seconds for five million rounds of an empty loop's arithmetic."""
    begin, total = time.process_time(), 0
    for number in range(5_000_000):
        total += number & 7
    return time.process_time() - begin


def measure(trace: Path, jumps: bool) -> dict[str, Any]:
    """One run in this process."""
    sys.path.insert(0, str(ROOT))
    from sim.setup import Setup
    from sim.simulate import simulate

    if trace.name == Path(MOONCAKE).name:
        setup = Setup(trace=str(trace), model="qwen3-8b", gpu="h200", engine={"max_model_len": 131072})
    else:
        setup = Setup(trace=str(trace), model="llama-2-7b", gpu="a100", engine={"max_num_seqs": 128})
    before = yardstick()
    begin = time.perf_counter()
    workload = setup.load()
    loaded = time.perf_counter()
    config = setup.config()
    run = simulate(config, workload, setup.cost(config), jumps=jumps)
    simulated = time.perf_counter()
    summary = run.summary
    end = time.perf_counter()
    return {
        "requests": len(workload.items),
        "completed": summary.num_completed,
        "steps": summary.num_steps,
        "plans": run.num_plans,
        "load": loaded - begin,
        "loop": simulated - loaded,
        "all": end - begin,
        "yardstick": (before + yardstick()) / 2,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_fresh_process(trace: Path, jumps: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(trace), *(() if jumps else ("--no-jumps",))]
    result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return result


def row(name: str, results: list[dict[str, Any]]) -> list[str]:
    best = min(results, key=lambda result: float(result["loop"]))
    loops = sorted(float(result["loop"]) for result in results)
    return [
        name,
        f"{best['requests'] / best['loop']:,.0f}",
        f"{best['steps'] / best['loop']:,.0f}",
        f"{loops[0]:.2f} / {statistics.median(loops):.2f}",
        f"{best['load']:.2f}",
        f"{best['all']:.2f}",
        f"{statistics.median(result['loop'] / result['yardstick'] for result in results):.1f}",
        f"{best['peak_mb']:,.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared" / "data" / "traces")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mooncake", action="store_true", help="the Mooncake conversation trace as well (a minute)")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-jumps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, jumps=not options.no_jumps)))
        return
    bench = options.shared / BENCH_10K
    if not bench.is_file():
        sys.exit(f"no trace at {bench}: give the folder of traces by --shared")
    columns = ("requests/s", "steps/s", "loop s, best / median", "load s", "all s", "yardsticks a loop", "peak MB")
    table = Table("run", *columns, box=None, padding=(0, 2, 0, 0))
    for name, jumps, rounds in (("10k, jumps", True, options.rounds), ("10k, step by step", False, 1)):
        table.add_row(*row(name, [in_fresh_process(bench, jumps) for _ in range(rounds)]))
    if options.mooncake:
        table.add_row(*row("Mooncake conversation", [in_fresh_process(options.shared / MOONCAKE, True)]))
    console = Console(width=140)
    console.print(table)
    console.print(f"yardstick: {yardstick():.3f} s for 5 million rounds of a Python loop", highlight=False)


if __name__ == "__main__":
    main()

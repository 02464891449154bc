"""Does a choice between two policies come out alike in both bodies? Sign and size of each effect, live and simulated.

    servetwin calibrate body --model small --out small.json
    python -m benchmarks.policy_transfer --costs small.json [PAIR ...] [--live 4]

The live half plays each arm a few times on this CPU, a few seconds each, so it wants the machine for itself; the
simulation is of the same requests at the measured costs. Levels are another question (servetwin twin).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from calibration.quiet import Usage, others
from live_runner import Live
from sim.experiment.ab.bodies import Agreement, compare_bodies
from sim.experiment.runner import Simulated
from sim.experiment.statistics import Interval
from sim.setup import Setup

BASE = Setup(
    workload="tool-schema", num_requests=32, rate=5.0, model="small", seed=1, transforms=("cap,prompt=320,output=32",),
    engine={
        "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512, "num_blocks": 256, "async_depth": 1,
        "threat_decision": "a benchmark",
    },
)  # fmt: skip


class Pair(NamedTuple):
    """Two choices, what else both have, and the figure that they are chosen by."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    metric: str
    both: Mapping[str, Any] = {}


PAIRS = {
    "caching": Pair({"enable_prefix_caching": True}, {"enable_prefix_caching": False}, "ttft.mean"),
    "batching": Pair({"batching": "chunked"}, {"batching": "prefill_first"}, "tpot.mean"),
    "static": Pair({"batching": "chunked"}, {"batching": "static,group_size=4,max_wait=1"}, "ttft.mean"),
    "chunk": Pair({"max_num_batched_tokens": 256}, {"max_num_batched_tokens": 64}, "tpot.mean"),
    "seats": Pair({"max_num_seqs": 8}, {"max_num_seqs": 3}, "ttft.mean"),
    "scheduling": Pair({"scheduling": "fcfs"}, {"scheduling": "sjf"}, "ttft.mean", {"max_num_seqs": 3}),
    "allocation": Pair(
        {"allocation": "paged"}, {"allocation": "paged_reserve_output"}, "e2e.mean", {"num_blocks": 64}
    ),
    "eviction": Pair({"eviction": "lru"}, {"eviction": "fifo"}, "ttft.mean", {"num_blocks": 48, "max_num_seqs": 2}),
    "admission": Pair(
        {"admission": "accept_all"}, {"admission": "bounded_queue,max_waiting=2"}, "ttft.mean", {"max_num_seqs": 3}
    ),
}  # fmt: skip


def arms(pair: Pair) -> tuple[Setup, Setup]:
    a, b = ({**BASE.engine, **pair.both, **each} for each in (pair.a, pair.b))
    return replace(BASE, engine=a), replace(BASE, engine=b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=list(PAIRS), metavar="PAIR", help=f"of {', '.join(PAIRS)}")
    parser.add_argument("--costs", type=Path, required=True, help="of servetwin calibrate body")
    parser.add_argument("--live", type=int, default=4, help="live runs of each arm (4)")
    options = parser.parse_args()
    live = Live()
    print("| choice, by | simulated, B - A | live, B - A | sign | size, within 10 % of A | cores for others |")
    print("|---|---|---|---|---|---|")
    for name in options.pairs:
        pair, since = PAIRS[name], Usage.now()
        found = compare_bodies(
            *arms(pair), Simulated(1), live, live.settled,
            costs=str(options.costs), num=options.live, num_live=options.live, metrics=[pair.metric],
        )  # fmt: skip
        for each in found.agreements:
            print(f"| {row(name, pair, each)} | {others(since):.2f} |", flush=True)
        if not found.agreements:
            print(f"| {name}, {pair.metric} | {'; '.join(found.live.notes) or 'overloaded'} | | | | |", flush=True)


def row(name: str, pair: Pair, each: Agreement) -> str:
    chosen = " to ".join(", ".join(f"{value}" for value in side.values()) for side in (pair.a, pair.b))
    figures = " | ".join(map(shown, (each.simulated, each.live)))
    return f"{name}: {chosen}, {pair.metric} | {figures} | {each.sign} | {each.size}"


def shown(effect: Interval) -> str:
    return f"{100 * effect.mean:+.0f} ± {100 * effect.half_width:.0f} %"


if __name__ == "__main__":
    main()

"""One visit to a GPU, all that a twin needs: what the body's parts and steps take, then live runs with journals.

    python -m calibration.gpu_session [--out DIR] [--model random:llama-3.1-8b] [--time-limit SECONDS]
    python -m calibration.gpu_session --device cpu --model tiny --grid cpu-small --seconds 1   # end to end, in a minute

Needs torch, triton, numpy and scipy. Writes DIR/measured.jsonl as it measures, DIR/costs.json, a journal of each live
run (.jsonl.gz) and DIR/session.json, stage by stage; what is there already is not done again. Afterwards, elsewhere:
`servetwin twin-of DIR` simulates each run and sets it beside its journals.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from backend.executor import TorchExecutor
from backend.start import Body, start
from calibration.measure import measure, read_measurement
from calibration.own import body_costs
from calibration.points import GRIDS, Grid
from calibration.served import Open, play_open

SHARES = (0.5, 0.8, 1.1)  # of the rate at which the most clients were answered
POLICIES = ("chunked", "prefill_first")
REPEATS = 3
SETTINGS = {
    "cpu": {"max_model_len": 2048, "max_num_seqs": 16},
    "cuda": {"max_model_len": 8192, "max_num_seqs": 256, "num_blocks": 32768},  # 64 GiB of an 8B model's KV
}


class Play(NamedTuple):
    """One live run: the share of the largest rate, the policy, and which repeat it is."""

    share: float
    batching: str
    repeat: int

    @property
    def file(self) -> str:
        return f"{self.batching}-{self.share:g}-{self.repeat}.jsonl.gz"


PLAYS = [Play(*each) for each in product(SHARES, POLICIES, range(REPEATS))]


class Session:
    """Stages, each kept when it ends; one that throws is recorded, and the next begins."""

    def __init__(self, out: Path, limit: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self._until = time.monotonic() + limit
        self._told: dict[str, Any] = {}

    def run(self, stage: str, work: Callable[[], dict[str, Any]]) -> None:
        begin, told = time.monotonic(), dict[str, Any]()
        if begin > self._until:
            told = {"error": "left out: the time limit was reached"}
        else:
            try:
                told = work()
            except Exception as error:  # a device may fail in any way, and the other stages are wanted all the same
                told = {"error": "".join(traceback.format_exception(error))[-2000:]}
        self._told[stage] = {"seconds": round(time.monotonic() - begin, 2), **told}
        (self.out / "session.json").write_text(json.dumps(self._told, indent=1) + "\n")
        last = told["error"].strip().splitlines()[-1] if "error" in told else "done"
        print(f"{stage}: {last} after {self._told[stage]['seconds']} s", flush=True)

    @property
    def errors(self) -> list[str]:
        return [stage for stage, told in self._told.items() if "error" in told]


def stages(body: Body, grid: str, seconds: float, out: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    executor = body.executor()  # one for all: its graphs take long to record, and its memory is most of the GPU's
    yield "measure", lambda: _measured(body, executor, grid, out)
    yield "fit", lambda: _fitted(body, out)
    for play in PLAYS:
        yield play.file, partial(_played, body, executor, play, GRIDS[grid], seconds, out)


def _measured(body: Body, executor: TorchExecutor, grid: str, out: Path) -> dict[str, Any]:
    measured = measure(body, GRIDS[grid], out / "measured.jsonl", executor=executor)
    return {"num": len(measured.taken), "drift": measured.drift, "is_noisy": measured.is_noisy}


def _fitted(body: Body, out: Path) -> dict[str, Any]:
    costs = body_costs(body.model.name, read_measurement(out / "measured.jsonl"))
    (out / "costs.json").write_text(costs.to_json())
    return {"band": costs.band, "held_out_steps": costs.about["held_out_steps"]}


def _played(body: Body, executor: TorchExecutor, play: Play, grid: Grid, seconds: float, out: Path) -> dict[str, Any]:
    path = out / play.file
    if path.is_file():
        return {"kept": True}
    rate = play.share * max(service.rate for service in read_measurement(out / "measured.jsonl").services)
    config = replace(body.config, batching=play.batching, async_depth=1)
    lines: list[str] = []
    load = Open(rate, seconds, min(grid.longest_served, config.max_model_len), seed=1)
    play_open(body, executor, config, load, lines.append)
    unfinished = path.with_suffix(".part")
    with gzip.open(unfinished, "wt") as file:
        file.writelines(f"{line}\n" for line in lines)
    unfinished.replace(path)
    return {"rate": rate, "lines": len(lines), "bytes": path.stat().st_size}


def journals(out: Path) -> dict[tuple[str, float], list[list[str]]]:
    """What was played, repeats together. Raises ValueError where there is none."""
    found: dict[tuple[str, float], list[list[str]]] = {}
    for play in PLAYS:
        if (out / play.file).is_file():
            with gzip.open(out / play.file, "rt") as file:
                found.setdefault((play.batching, play.share), []).append(file.read().splitlines())
    if not found:
        raise ValueError(f"{out}: no journals of calibration.gpu_session lie here")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibration.gpu_session", description="Calibrate, then play live.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_session"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--grid", choices=sorted(GRIDS), help="default: the device's")
    parser.add_argument("--seconds", type=float, default=10.0, help="that requests come, in each live run (10)")
    parser.add_argument("--time-limit", type=float, default=460.0, help="s; no stage begins after it (460)")
    options = parser.parse_args(arguments)
    session = Session(options.out, options.time_limit)
    body = start(options.model, options.device, SETTINGS[options.device])
    for stage, work in stages(body, options.grid or options.device, options.seconds, options.out):
        session.run(stage, work)
    return int(bool(session.errors))


if __name__ == "__main__":
    sys.exit(main())

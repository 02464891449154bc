"""The stages in order, and what is kept of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
import triton

from backend.gpu_check import peers, speed, sweep
from backend.gpu_check.bench import Bench, Point, open_bench
from backend.gpu_check.correctness import Check, check_all
from backend.gpu_check.speed import Ceilings
from backend.gpu_check.verdicts import judge

Row = TypeVar("Row")
KERNELS = Path(__file__).parents[1] / "kernels"
Stage = Callable[[Bench], Iterable[Any]]
QUICK = ("device", "ceilings", "correctness", "decode", "prefill", "kv write", "mixed", "ceilings at the end")


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    num_sms: int
    l2_bytes: int
    memory_bytes: int
    torch: str
    triton: str
    cuda: str
    numpy: str
    python: str
    kernels: str  # hash of their sources and configurations
    timings_count: bool


@dataclass(slots=True)
class Log:
    """All stages so far, rewritten as a whole each time one ends: a reader never sees half of it."""

    path: Path
    stages: dict[str, Any] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)

    def keep(self, stage: str, rows: list[Any], seconds: float, error: str) -> None:
        self.rows += rows
        told = {"seconds": round(seconds, 2), "rows": [dataclasses.asdict(row) for row in rows]}
        self.stages[stage] = told | ({"error": error} if error else {})
        write(self.path, self.stages)

    def of(self, kind: type[Row]) -> list[Row]:
        return [row for row in self.rows if isinstance(row, kind)]


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(whole, path)


def device_of(bench: Bench) -> Iterator[Device]:
    versions = (torch.__version__, triton.__version__, str(torch.version.cuda), numpy.__version__)
    software = (*versions, platform.python_version(), kernels_hash())
    if bench.tiny:
        yield Device("CPU, interpreted", 0, 0, 0, *software, timings_count=False)
        return
    properties = torch.cuda.get_device_properties(bench.device)
    sizes = properties.multi_processor_count, properties.L2_cache_size, properties.total_memory
    yield Device(properties.name, *sizes, *software, timings_count=True)


def kernels_hash() -> str:
    """A measurement is of these kernels, and no others."""
    files = sorted(path for path in KERNELS.iterdir() if path.suffix in (".py", ".json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def ceilings(bench: Bench) -> Iterator[Ceilings]:
    yield speed.ceilings(bench)


STAGES: dict[str, Stage] = {
    "device": device_of,
    "ceilings": ceilings,
    "correctness": check_all,
    "decode": speed.decode_points,
    "prefill": speed.prefill_points,
    "kv write": speed.kv_write_points,
    "mixed": speed.mixed_points,
    "sdpa": peers.sdpa_points,
    "ceilings at the end": ceilings,
    "flex": peers.flex_points,
    "sweep": sweep.run,
}


def run_all(device: str, out: Path, quick: bool, time_limit: float) -> int:
    torch.manual_seed(0)
    bench, log = open_bench(device, quick, time_limit), Log(out / "gpu_check.json")
    for name in QUICK if quick else STAGES:
        rows, seconds, error = run_stage(STAGES[name], bench)
        log.keep(name, rows, seconds, error)
        print(f"-- {name}: {len(rows)} rows, {seconds:.1f} s{', FAILED: ' + error.splitlines()[-1] if error else ''}")
        for row in rows:
            print("  ", line_of(row), flush=True)
    return conclude(bench, log, out)


def run_stage(stage: Stage, bench: Bench) -> tuple[list[Any], float, str]:
    """What it had measured before it threw is kept."""
    rows: list[Any] = []
    began, error = time.monotonic(), ""
    if bench.time_left <= 0:
        return rows, 0.0, "not begun: the time is up"
    try:
        for row in stage(bench):
            rows.append(row)
    except Exception:  # of whatever kind: the next stage must have its chance
        error = traceback.format_exc()
    return rows, time.monotonic() - began, error


def conclude(bench: Bench, log: Log, out: Path) -> int:
    checks = log.of(Check)
    verdicts = judge(checks, [] if bench.tiny else log.of(Point), [] if bench.tiny else log.of(Ceilings))
    log.keep("verdicts", list(verdicts), 0.0, "")
    best = [result.row for result in log.of(sweep.Result) if result.row]
    if best and not bench.tiny:
        write(out / "configs.json", best)
    if bench.tiny:
        print("interpreted on a CPU: no time above means anything, and no goal of speed is judged")
    print(*verdicts, sep="\n")
    failed = [name for name, told in log.stages.items() if "error" in told]
    print(f"{out / 'gpu_check.json'}: {len(log.stages)} stages, failed: {', '.join(failed) or 'none'}")
    return 0 if checks and all(check.passed for check in checks) else 1


def line_of(row: Any) -> str:
    if isinstance(row, Point):
        return (
            f"{row.kernel:24} {row.layer:28} {row.case:26} {row.time * 1e6:9.1f} us ±{row.spread:.1%} "
            f"{row.gb_s:8.0f} GB/s {row.tflop_s:7.1f} TFLOP/s"
        )
    if isinstance(row, Check):
        word = "ok" if row.passed else "WRONG"
        return f"{word:5} {row.kernel:22} {row.layer:28} error {row.error:.2e} (limit {row.limit:g})"
    if isinstance(row, sweep.Result):
        return f"{len(row.tried)} tried, best {row.row}"
    return str(row)

"""A chance with a GPU must not be lost to a slip: every stage runs here, through the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.gpu_check import stages
from backend.gpu_check.bench import LLAMA_8B, LLAMA_8B_FP8, Bench, Point, name_of, open_bench
from backend.gpu_check.correctness import Check
from backend.gpu_check.speed import Ceilings
from backend.gpu_check.timing import GraphClock
from backend.gpu_check.verdicts import PUBLIC_FA3_US, judge
from backend.kernels.decode import decode_bytes
from tests.conftest import REPOSITORY


def test_every_stage_runs_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "backend.gpu_check", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(kept) == [*stages.STAGES, "verdicts"]
    assert {name: told["error"] for name, told in kept.items() if "error" in told} == {}
    assert all(told["rows"] for told in kept.values())
    rows = [row for told in kept.values() for row in told["rows"]]
    assert not [row for row in rows if row.get("reason")], "a peer or candidate did not run"
    assert "no time above means anything" in done.stdout
    assert not (tmp_path / "configs.json").exists()  # nothing measured here may become a configuration


def point(
    kernel: str, case: str, us: float, num_bytes: int = 10**9, flops: int = 10**12, shape: Any = LLAMA_8B
) -> Point:
    time = us / 1e6
    return Point(
        kernel, name_of(shape), case, num_bytes, flops, time, 0.0, 20, num_bytes / time / 1e9, flops / time / 1e12
    )


def met(*points: Point, checks: tuple[Check, ...] = (), ceilings: tuple[Ceilings, ...] = ()) -> dict[str, bool]:
    return {verdict.goal: verdict.met for verdict in judge(checks, points, ceilings)}


def test_goals_are_judged_by_the_worst_point() -> None:
    large = "decode, KV of 1 GB and more, TB/s"
    assert met(point("decode", "128 x 4096", 249.0), point("decode", "128 x 8192", 480.0, 2 * 10**9))[large]
    assert not met(point("decode", "128 x 4096", 251.0), point("decode", "128 x 8192", 480.0, 2 * 10**9))[large]
    assert met(point("decode", "1 x 128", 11.9, 10**6)) == {
        "decode, 1 x 128, us": True,
        "public FA3 time over ours, geometric mean of 1": True,
    }
    assert not met(point("decode", "1 x 128", 12.8, 10**6))["public FA3 time over ours, geometric mean of 1"]
    assert met(point("decode", "32 x 1024", 45.0, 2**27))["decode, KV of 128 MiB, TB/s"] is False
    fp8 = point("decode", "128 x 8192", 250.0, shape=LLAMA_8B_FP8)
    assert met(fp8, point("decode", "128 x 8192", 400.0))["decode, KV of 1 GB and more, fp8 over bf16"]
    assert not met(fp8, point("decode", "128 x 8192", 399.0))["decode, KV of 1 GB and more, fp8 over bf16"]


def test_what_fits_the_cache_is_compared_as_it_was_measured_in_public() -> None:
    cold, warm = point("decode", "1 x 4096", 30.0, 10**7), point("decode, warm", "1 x 4096", 16.0, 10**7)
    assert met(cold, warm)["public FA3 time over ours, geometric mean of 1"]
    assert len({case for _, case in PUBLIC_FA3_US}) == 9


def test_prefill_writes_mixed_steps_and_drift_are_judged() -> None:
    prefill = point("prefill", "1 x 4096 after 0", 1e6 / 450, flops=10**12), point("prefill", "1 x 512 after 0", 1e6)
    assert met(*prefill) == {
        "prefill, 4k tokens and more, TFLOP/s": True,
        "prefill, 4k tokens and more, TFLOP/s (stretch)": False,
    }
    write, slow = point("kv write", "4096", 1e6 / 3001), point("kv write", "4096", 1e6 / 2999)
    start, end = Ceilings(4000.0, 790.0), Ceilings(3900.0, 765.0)
    share = "KV write of 4k tokens and more, share of copy"
    assert met(write, ceilings=(start,)) == {share: True}
    assert met(slow, ceilings=(start, end)) == {share: False, "drift of the ceilings from start to end": False}
    parts = point("mixed: decode alone", "m", 100.0), point("mixed: prefill alone", "m", 100.0)
    goal = "mixed step against the sum of its parts, difference"
    assert (
        met(*parts, point("mixed: both", "m", 209.0))[goal] and not met(*parts, point("mixed: both", "m", 189.0))[goal]
    )


def test_a_wrong_kernel_is_no_matter_of_degree() -> None:
    right = Check("decode", "a", 1e-4, 1e-3, same_bits=True)
    goal = "kernels of 2 that are wrong or differ from run to run"
    assert met(checks=(right, right))[goal]
    assert not met(checks=(right, replace(right, error=float("inf"))))[goal]
    assert not met(checks=(right, replace(right, same_bits=False)))[goal]


def test_a_stage_that_throws_keeps_what_it_had_and_the_next_one_runs(tmp_path: Path) -> None:
    def broken(_bench: Bench) -> Iterator[Ceilings]:
        yield Ceilings(1.0, 2.0)
        raise RuntimeError("illegal memory access")

    bench, log = open_bench("cpu", quick=True), stages.Log(tmp_path / "gpu_check.json")
    for name, stage in {"broken": broken, "device": stages.device_of}.items():
        log.keep(name, *stages.run_stage(stage, bench))
    kept = json.loads(log.path.read_text())
    assert kept["broken"]["rows"] == [{"copy_gb_s": 1.0, "gemm_tflop_s": 2.0}]
    assert kept["broken"]["error"].endswith("RuntimeError: illegal memory access\n")
    assert "error" not in kept["device"]
    assert stages.conclude(bench, log, tmp_path) == 1  # nothing was found right


def test_a_stage_is_not_begun_when_the_time_is_up() -> None:
    rows, _, error = stages.run_stage(stages.device_of, open_bench("cpu", quick=True, time_limit=0.0))
    assert not rows and error == "not begun: the time is up"


def test_launches_of_a_graph_read_four_times_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = replace(open_bench("cpu", quick=True), tiny=False)
    monkeypatch.setattr(Bench, "l2_bytes", 60 * 2**20)
    assert bench.num_launches(decode_bytes([4096] * 8, LLAMA_8B)) == 10  # 134 MB
    assert bench.num_launches(decode_bytes([4096], LLAMA_8B)) == 15
    assert bench.num_launches(decode_bytes([128], LLAMA_8B)) == 466
    assert bench.num_launches(1) == 512


def test_batches_of_a_graph_share_no_block() -> None:
    bench = open_bench("cpu", quick=True)
    shape = bench.scaled(LLAMA_8B)
    tables = bench.arena.tables([40, 1, 17], shape, 5)
    used = [int(block) for table in tables for block in table.flatten() if block]
    assert len(tables) == 5 and len(used) == len(set(used)) == 5 * 6
    assert bench.arena.pools(shape)[0].shape[0] > max(used)
    with pytest.raises(ValueError, match="a smaller batch fits"):
        bench.arena.tables([10**6], shape, 1)


class FakeEvent:
    """Every replay takes 1 ms more than the last."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.count += 1
        self.at = FakeEvent.count**2 / 2

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


class FakeGraph:
    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


class FakeCapture:
    def __init__(self, graph: FakeGraph) -> None:
        assert isinstance(graph, FakeGraph)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_launch_is_timed_by_the_median_replay_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {"Event": FakeEvent, "CUDAGraph": FakeGraph, "graph": FakeCapture, "synchronize": lambda: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    launched: list[int] = []
    timing = GraphClock().time(launched.append, 4)
    assert launched == [0, 0, 1, 2, 3]  # once to compile, then into the graph
    assert FakeGraph.replays == 2 + timing.num_replays == 22
    times = [(n**2 - (n - 1) ** 2) / 2 / 1e3 for n in range(5, 25)]
    assert timing.time == pytest.approx((times[9] + times[10]) / 2 / 4)

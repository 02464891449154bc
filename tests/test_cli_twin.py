"""`servetwin calibrate body`, `twin` and the demo's live half, on a model too small to time well."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import calibration.demo
import cli

Run = Callable[..., tuple[int, str, str]]
BODY = ("calibrate", "body", "--model", "tiny", "--grid", "cpu-small", "--out")
LOAD = (
    "--model", "tiny", "--workload", "chat", "--num-requests", 40, "--max-num-seqs", 4, "--max-model-len", 2048,
    "--transform", "cap,prompt=64,output=12", "--repeats", 2, "--utilisation", 0.5, "--costs",
)  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["servetwin", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return call


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A body's costs, as the command writes them."""
    path = tmp_path_factory.mktemp("body") / "tiny.json"
    from calibration.commands_body import run_calibrate_body

    run_calibrate_body("tiny", "cpu", path, "cpu-small")
    return path


def test_a_body_is_measured_once(run: Run, costs: Path) -> None:
    measured = costs.with_suffix(".measured.jsonl").read_bytes()
    code, out, _ = run(*BODY, costs)
    assert code == 0 and "steps in service that were not fitted" in out
    assert costs.with_suffix(".measured.jsonl").read_bytes() == measured


def test_a_simulation_runs_at_a_bodys_costs_and_says_so(run: Run, costs: Path) -> None:
    code, out, _ = run(
        "simulate", "--costs", costs, "--model", "tiny", "--num-requests", 20, "--num-blocks", 4096, "--json", "-"
    )
    told = json.loads(out)["manifest"]
    assert code == 0 and told["profile"]["provenance"] == "measured" and told["profile"]["kernels"]
    assert told["front_end"]["engine_link_time"] > 0 == told["front_end"]["gateway_time_per_request"]
    _, out, _ = run(
        "simulate", "--costs", costs, "--model", "tiny", "--num-requests", 20, "--num-blocks", 4096, "--no-band"
    )
    basis = " ".join(out.split())
    assert "costs: measured on tiny on cpu" in basis and told["profile"]["kernels"] in basis
    assert "not measured here" not in basis and "h100" not in basis and "vllm serve" not in basis


def test_a_workload_is_played_in_both_bodies_and_set_side_by_side(run: Run, costs: Path, tmp_path: Path) -> None:
    _, out, _ = run("twin", *LOAD, costs, "--json", tmp_path / "twin.json")
    assert "replayed: all" in out and "decisions equal" in out and "ttft mean" in out
    (told,) = json.loads((tmp_path / "twin.json").read_text()).values()
    assert not told["divergences"] and told["differences"]["e2e.mean"]["margin"] == 0.1


def test_costs_of_other_kernels_price_another_body(run: Run, costs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibration.commands_body.kernel_hash", lambda: "other")
    code, _, err = run("twin", *LOAD, costs)
    assert code == 2 and "measured on kernels" in err and "these are other" in err and err.count("\n") == 1


def test_costs_of_another_model_are_refused(run: Run, costs: Path) -> None:
    code, _, err = run("twin", "--model", "small", *LOAD[2:], costs)
    assert code == 2 and "costs of tiny, not of small" in err


def test_requests_that_follow_from_answers_have_no_rate(run: Run, costs: Path) -> None:
    code, _, err = run(
        "twin", "--model", "tiny", "--max-model-len", 2048, "--arrivals", "closed,users=2,think=0.1", "--costs", costs
    )
    assert code == 2 and "have no rate" in err


def test_the_demos_live_half_keeps_its_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small grid and another model than a visitor's: the rest is what they see."""
    monkeypatch.setattr("calibration.commands_body.grid_for", lambda body: "cpu-small")
    monkeypatch.setattr(calibration.demo, "MODELS", ("tiny",))
    assert calibration.demo.run_twin_demo(tmp_path) == 0
    assert "measured now" in capsys.readouterr().out
    assert calibration.demo.run_twin_demo(tmp_path) == 0
    out = capsys.readouterr().out
    assert "kept" in out and "replayed: all" in out

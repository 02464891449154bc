"""What a user types to have a request, a run's fairness, or a workload's prompts explained."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cli

Run = Callable[..., tuple[int, str, str]]
BUSY = ("--workload", "chat", "--rate", 20, "--num-requests", 60, "--max-num-seqs", 8, "--costs", "datasheet",
        "--transform", "classes,interactive=0.7,batch=0.3")  # fmt: skip


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


def test_a_request_is_explained_alike_from_a_run_and_from_its_journal(run: Run, tmp_path: Path) -> None:
    """The engine's part of its life is the same; the client's ends are in the run only."""
    journal = tmp_path / "run.jsonl"
    assert run("simulate", *BUSY, "--no-band", "--journal", journal)[0] == 0
    code, out, _ = run("explain", 41, *BUSY)
    assert code == 0 and out.startswith("request 41: ") and "a slot" in out and "streaming" in out
    told = []
    for source in (BUSY, ("--journal", journal)):
        run("explain", 41, *source, "--json", tmp_path / "e.json")
        told.append(json.loads((tmp_path / "e.json").read_text()))
    of_run, of_journal = told
    assert (of_run["as_seen_by"], of_journal["as_seen_by"]) == ("client", "engine")
    for part in ("own prefill", "decode", "behind others' prefills"):
        assert of_run["parts"][part] == of_journal["parts"][part]
    assert of_run["e2e"] > of_journal["e2e"]
    assert math.fsum(of_run["parts"].values()) == pytest.approx(of_run["e2e"])


def test_the_slowest_is_explained_by_that_word(run: Run) -> None:
    code, out, _ = run("explain", "slowest", *BUSY, "--json", "-")
    assert code == 0 and json.loads(out)["parts"]["queue"] > 1.0


def test_who_is_not_there_is_said_in_a_line(run: Run) -> None:
    code, _, err = run("explain", "nobody", *BUSY)
    assert (code, err) == (
        2, "servetwin: error: no request 'nobody' in the journal: it has 60, '0' to '59'\n"
    )  # fmt: skip


def test_fairness_is_a_command(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("fairness", *BUSY, "--num", 2, "--json", tmp_path / "f.json")
    assert code == 0 and out.startswith("fcfs, by class: Jain ")
    told = json.loads((tmp_path / "f.json").read_text())
    assert told["groups"] == ["batch", "interactive"] and len(told["runs"]) == 2
    assert run("fairness", "--workload", "chat", "--num-requests", 5)[0] == 2


def test_describing_a_workload_lints_its_prompts(run: Run) -> None:
    code, out, _ = run("workload", "describe", "--workload", "shared-prefix", "--num-requests", 50, "--block-size", 32)
    assert code == 0 and "prompts, and a cache that forgets nothing, in blocks of 32" in out
    assert "only where the answers stay right" in " ".join(out.split())
    code, out, _ = run("workload", "describe", "--workload", "chat", "--num-requests", 50)
    assert code == 0 and "a cache that forgets nothing" not in out

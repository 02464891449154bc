"""The visit to a GPU, end to end on a CPU: measured, fitted, played, and the twins of what was played."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from calibration.commands_body import run_twin_of
from calibration.gpu_session import PLAYS, Session, journals, main
from calibration.journalled import Told
from calibration.twin import from_journals
from sim.cost.body import BodyCost, read_body_costs
from tests.conftest import REPOSITORY

VISIT = ["--device", "cpu", "--model", "tiny", "--grid", "cpu-small", "--seconds", "0.4", "--out"]


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In an environment without the simulator's libraries, as a bare GPU machine is."""
    out = tmp_path_factory.mktemp("visit")
    code = (
        "import sys\n"
        "for name in ('simpy', 'typer', 'rich', 'plotly', 'yaml'): sys.modules[name] = None\n"
        "from calibration.gpu_session import main\n"
        f"sys.exit(main({[*VISIT, str(out)]!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_stage_leaves_its_file(visited: Path) -> None:
    told = json.loads((visited / "session.json").read_text())
    assert list(told) == ["measure", "fit", *(play.file for play in PLAYS)]
    assert all("error" not in each for each in told.values())
    assert {path.name for path in visited.iterdir()} == {
        "measured.jsonl", "costs.json", "session.json", *(play.file for play in PLAYS)
    }  # fmt: skip


def test_what_was_played_elsewhere_replays_equal_and_has_its_twin(
    visited: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = BodyCost(read_body_costs(visited / "costs.json"))
    for lines in journals(visited).values():
        twin = from_journals(lines, cost)
        assert not twin.divergences and twin.num_replayed > 20
        assert [each.measure for each in twin.differences][:2] == ["ttft.mean", "ttft.p50"]
    assert run_twin_of(visited, visited / "twins.json") == 0
    assert "replayed: all" in capsys.readouterr().out
    assert len(json.loads((visited / "twins.json").read_text())) == 6


def test_equal_seeds_ask_for_the_same(visited: Path) -> None:
    for lines in journals(visited).values():
        asked = [[(r.arrival_time, r.prompt.num_tokens, n) for r, n in Told.of(each).asked()] for each in lines]
        assert all(sorted(each) == sorted(asked[0]) for each in asked)


def test_what_is_there_is_not_played_again(visited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = visited / PLAYS[0].file
    before = path.read_bytes()
    (visited / PLAYS[1].file).unlink()
    assert main([*VISIT, str(visited)]) == 0
    assert path.read_bytes() == before and (visited / PLAYS[1].file).is_file()
    with gzip.open(visited / PLAYS[1].file, "rt") as file:
        assert "config" in json.loads(file.readline())


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the kernels are not interpreted")
def test_on_a_gpu_the_parts_are_its_kernels_on_the_same_inputs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.calibration.interpreted_parts"],
        cwd=REPOSITORY, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    differences = json.loads(done.stdout)
    assert set(differences) == {"decode", "prefill", "skewed"} and max(differences.values()) < 1e-4


def test_a_stage_that_throws_is_told_and_the_next_one_runs(tmp_path: Path) -> None:
    session = Session(tmp_path, limit=60.0)
    session.run("first", lambda: {"quotient": 1 // 0})
    session.run("second", lambda: {"sum": 2})
    told = json.loads((tmp_path / "session.json").read_text())
    assert "ZeroDivisionError" in told["first"]["error"] and told["second"]["sum"] == 2
    assert session.errors == ["first"]


def test_no_stage_begins_after_the_time_limit(tmp_path: Path) -> None:
    session = Session(tmp_path, limit=-1.0)
    session.run("late", lambda: {"sum": 2})
    assert "time limit" in json.loads((tmp_path / "session.json").read_text())["late"]["error"]


def test_a_folder_without_journals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no journals"):
        journals(tmp_path)

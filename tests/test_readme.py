"""The README tells the truth: its commands run, its own policy loads."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import cli
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for line in README.splitlines()
    if re.match(r"servetwin (simulate|replay|policies|report|workload)", line)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a trace of theirs, and the policy that the README shows."""
    rows = "".join(f"{index / 4},{100 + index},{20 + index % 7}\n" for index in range(50))
    (tmp_path / "my_trace.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    policy = re.search(r"```python\n# least_computed.py\n(.*?)```", README, re.DOTALL)
    assert policy is not None
    (tmp_path / "least_computed.py").write_text(policy.group(1))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_readme_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(COMMANDS) >= 6
    for command in COMMANDS:
        fewer = ["--num-requests", "50"] if "simulate" in command and "my_trace" not in command else []
        monkeypatch.setattr(sys, "argv", shlex.split(command) + fewer)
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        assert (exit_.value.code or 0, err) == (0, ""), command
        assert out
    assert (folder / "result.json").is_file() and (folder / "run.jsonl").is_file()


def test_links_lead_somewhere() -> None:
    for document in (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "docs" / "tour.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} -> {target}"


def test_files_named_in_the_tour_are_there() -> None:
    tour = (REPOSITORY / "docs" / "tour.md").read_text()
    names = re.findall(r"`((?:policies|sim|backend|tests)/[\w/]+\.py)`", tour)
    assert len(names) > 8
    for name in names:
        assert (REPOSITORY / name).is_file(), name


def test_the_command_is_installed() -> None:
    assert shutil.which("servetwin", path=str(Path(sys.executable).parent)) is not None

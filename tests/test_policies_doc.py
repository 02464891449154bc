"""docs/policies.md tells the truth: it names every entry and no other, its policy is as good as those of the menus."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

import cli
from policies.catalogue import MENU, build, make, parameters
from policies.journal import replay
from tests.conftest import REPOSITORY
from tests.lives import Life, chooser, draw_settings
from tests.policies.test_conformance import RIVALS, waits_for_ever
from tests.watch import watch

TEXT = (REPOSITORY / "docs" / "policies.md").read_text()
SECTIONS = dict(re.findall(r"^### .*? `--(\w+)`\n(.*?)(?=^##)", TEXT, re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^(servetwin .*?)(?: +#.*)?$", TEXT, re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the policy that the text shows, and nothing else."""
    shown = re.search(r"```python\n# newest_first.py\n(.*?)```", TEXT, re.DOTALL)
    assert shown is not None
    code = shown.group(1)
    assert len(re.findall(r"^\s*[^\s#\"]", code, re.MULTILINE)) <= 30, "thirty lines were promised"
    (tmp_path / "newest_first.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("menu", MENU)
def test_every_entry_is_in_the_table_of_its_question_and_no_other(menu: str) -> None:
    named = re.findall(r"^\| [^|`]+ \| `(\w+)` \|", SECTIONS[menu], re.MULTILINE)
    assert sorted(named) == sorted(MENU[menu])


@pytest.mark.parametrize("menu", MENU)
def test_every_knob_it_speaks_of_is_there(menu: str) -> None:
    knobs = {knob for factory in MENU[menu].values() for knob in parameters(factory)}
    for knob in re.findall(r"`([a-z]\w*)(?:=\w+)?`", SECTIONS[menu]):
        known = knob in knobs or any(knob in entries for entries in MENU.values()) or knob in OF_REQUESTS_AND_ENGINES
        assert known, f"{menu}: {knob}"


OF_REQUESTS_AND_ENGINES = (
    "priority", "client_id", "max_tokens", "max_model_len", "preempt_for_waiting", "num_host_blocks",
)  # fmt: skip


def test_its_own_policy_keeps_the_contract(folder: Path) -> None:
    spec = f"{folder}/newest_first.py:NewestFirst"
    for seed in range(12):
        lines: list[str] = []
        choose = chooser("own", seed)
        life = Life(choose, draw_settings(choose, scheduling=f"{spec},every={2 + seed % 3}"), lines.append)
        watch(life.ledger.engine)
        life.run(80)
        life.end()
        found = replay(lines, build)
        assert found.divergence is None, str(found.divergence)
    assert make("scheduling", spec).promises_a_turn
    assert not any(waits_for_ever(spec, rivals) for rivals in RIVALS.values())
    with pytest.raises(ValueError, match=r"every \(1\) must be at least 2"):
        make("scheduling", f"{spec},every=1")


def test_its_commands_run_and_the_two_are_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(COMMANDS) == 6
    said = {}
    for command in COMMANDS:
        is_first = "weights=gold" in command
        fewer = ["--num-requests", "50"] if is_first else []
        monkeypatch.setattr(
            sys,
            "argv",
            shlex.split(command.replace("--num 5", "--num 2").replace("requests 200", "requests 60")) + fewer,
        )
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        assert (exit_.value.code or 0, err) == (0, ""), command
        said[command.split()[1]] = out
    assert "A 'fcfs', B 'newest_first.py:NewestFirst,every=8'" in said["compare"]
    assert said["replay"].startswith("equal: ")

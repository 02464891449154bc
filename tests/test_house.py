"""The house stands as drawn: rooms, arrows, and what a newcomer relies on."""

from __future__ import annotations

import ast
import subprocess
import sys

import policies
import sim
from tests.conftest import REPOSITORY


def test_the_core_under_test_is_this_repositorys() -> None:
    assert policies.__file__ is not None and policies.__file__.startswith(str(REPOSITORY))
    assert sim.__file__ is not None and sim.__file__.startswith(str(REPOSITORY))


def run_python(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_importing_the_simulators_room_imports_nothing() -> None:
    assert run_python("import sys, sim; print(any(m in sys.modules for m in ('numpy', 'simpy')))").strip() == "False"


def test_the_core_runs_with_the_standard_library_alone() -> None:
    """-S leaves site-packages out: what a bare machine has."""
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from policies.catalogue import build\n"
        "from policies.config import EngineConfig\n"
        "from policies.prompt import TokenPrompt\n"
        "from policies.types import Request, StepOutput\n"
        "engine = build(EngineConfig(num_blocks=8))\n"
        "engine.add(Request('a', 0.0, TokenPrompt((1, 2, 3)), max_tokens=2), 0.0)\n"
        "while (plan := engine.schedule(0.0)):\n"
        "    engine.update(plan, StepOutput(1.0), 0.0)\n"
        "print(engine.drain_records()[0].num_output_tokens)"
    )
    assert run_python(code, "-S").strip() == "2"


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys; sys.argv = ['servetwin', '--help']\n"
        "import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'simpy', 'scipy', 'plotly', 'sim.commands') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "simulate" in done.stdout


def test_the_core_imports_no_clock_no_chance_and_nothing_foreign() -> None:
    """Every import statement of policies/, lazy ones included."""
    forbidden = {"time", "random", "threading", "asyncio", "multiprocessing", "datetime", "secrets"}
    for path in sorted((REPOSITORY / "policies").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in (full.split(".")[0] for full in names):
                assert name == "policies" or name in sys.stdlib_module_names - forbidden, f"{path.name} imports {name}"


def test_functions_are_small() -> None:
    """A goal, held: half of all functions fit in ten lines."""
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for room in ("policies", "sim", "backend")
        for path in (REPOSITORY / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    )
    assert lengths[len(lengths) // 2] <= 10

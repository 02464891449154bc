"""What tests share: where outside data lies, and the counts printed at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
COUNTED = {
    "oracle_steps": "oracle steps compared",
    "decisions_replayed": "decisions replayed",
    "live_decisions": "live decisions, each replayed equal",
    "live_decisions_matched": "of these, taken alike by a simulation from the workload alone",
}


@pytest.fixture
def shared() -> Path:
    """Traces and oracles that are not part of the project; tests that need them are skipped where they are absent."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the shared data beside the repository, at {SHARED.name}/")
    return SHARED


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """`count("oracle_steps", 12)` adds to a total that is printed when all tests are done."""

    def add(name: str, number: int) -> None:
        assert name in COUNTED
        record_property(name, number)

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", ()):
        for name, number in report.user_properties:
            if name in COUNTED and report.when == "call":
                totals[name] += number
    for name, words in COUNTED.items():
        terminalreporter.write_line(f"{words}: {totals[name]:,}")

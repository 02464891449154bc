"""The core decides as vLLM 0.32.0's own scheduler did: every recorded step, bit for bit."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sim.steps import Difference, Script, check, compare, play, read_script, read_trace
from tests.conftest import SHARED

ORACLE = SHARED / "oracle" / "vllm"
WORKLOADS = sorted(ORACLE.rglob("*.workload.json"))
HAND_MADE, RANDOM = 24, 60


def trace_of(workload: Path) -> Path:
    return workload.with_name(workload.name.replace(".workload.json", ".trace.jsonl.gz"))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.relative_to(ORACLE).as_posix().split(".")[0])
def test_every_step_is_decided_as_vllm_did(workload: Path, count: Callable[[str, int], None]) -> None:
    outcome = check(workload, trace_of(workload), "vllm-v1")
    assert isinstance(outcome, int), str(outcome)
    with gzip.open(trace_of(workload), "rt") as file:
        assert outcome == sum(1 for _ in file) - 2, "header and footer are no steps"
    count("oracle_steps", outcome)


def test_the_whole_oracle_was_there(shared: Path) -> None:
    assert len(WORKLOADS) == HAND_MADE + RANDOM


@pytest.fixture
def script(shared: Path) -> Script:
    return read_script(ORACLE / "06_priority.workload.json")


def recorded(shared: Path) -> Iterator[dict[str, object]]:
    lines = read_trace(ORACLE / "06_priority.trace.jsonl.gz")
    next(lines)
    return lines


def played(script: Script) -> Iterator[dict[str, object]]:
    lines = play(script, "vllm-v1-priority")
    next(lines)
    return lines


CORRUPTIONS: dict[str, Callable[[dict[str, object]], object]] = {
    "a block id": lambda line: line["new"][0]["block_ids"].__setitem__(0, 99),  # type: ignore[index]
    "a reference count": lambda line: line["after"]["blocks"]["low0"][0].__setitem__(1, 2),  # type: ignore[index]
    "the free order": lambda line: line["after"]["free_queue"].reverse(),  # type: ignore[index]
    "an output": lambda line: line["outputs"][0][1].__setitem__(0, 7),  # type: ignore[index]
    "a hash seen twice": lambda line: line["kv_events"][0]["hashes"].__setitem__(  # type: ignore[index]
        0,
        line["kv_events"][0]["hashes"][1],  # type: ignore[index]
    ),
    "a missing field": lambda line: line.pop("stats"),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_one_changed_figure_is_the_first_difference(
    shared: Path, script: Script, corrupt: Callable[[dict[str, object]], object]
) -> None:
    lines = list(recorded(shared))
    corrupt(lines[0])
    outcome = compare(iter(lines), played(script))
    assert isinstance(outcome, Difference)
    assert outcome.step == "step 0"


def test_a_trace_cut_short_is_not_equal(shared: Path, script: Script) -> None:
    outcome = compare(iter(list(recorded(shared))[:-1]), played(script))
    assert isinstance(outcome, Difference)
    assert outcome.field == "length"


def test_fcfs_does_not_pass_for_priority(shared: Path) -> None:
    """The comparison can fail: another policy on the same workload decides otherwise."""
    original = read_script(ORACLE / "06_priority.workload.json")
    fcfs = Script(
        original.name, {**original.settings, "policy": "fcfs"}, original.requests, original.outputs, original.actions
    )
    lines = play(fcfs, "vllm-v1")
    next(lines)
    assert isinstance(compare(recorded(shared), lines), Difference)

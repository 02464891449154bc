"""Sweeps: designs, rows that survive a kill, what moves what, and a best point only where nobody pays for it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cli
from sim.experiment.runner import Outcome, play
from sim.experiment.sweep.judged import Goal, Measured, front
from sim.experiment.sweep.play import Sweep, read_toml, sweep, sweep_of
from sim.experiment.sweep.rows import Row, RowFile, identity
from sim.experiment.sweep.space import Choices, Range, grid, latin_hypercube, parse_knob, with_values
from sim.experiment.sweep.workers import Here, Processes, workers_named
from sim.setup import Setup
from tests.conftest import REPOSITORY

BASE = Setup(workload="fixed", num_requests=12, front_end="off", costs="datasheet", engine={"num_blocks": 2000})
GOAL = Goal("output_throughput", "ttft_p99<1s", "ttft_p99<2s")
SEQS = parse_knob("engine.max_num_seqs=4,16,64,128", BASE)
RATE = parse_knob("rate=1..9", BASE)
HERE = Here()


def outcome(setup: Setup, throughput: float, ttft: float, saturated: bool = False, **classes: float) -> Outcome:
    metrics: dict[str, Any] = {
        "output_throughput": throughput,
        "ttft": {"p99": ttft},
        "e2e": {"p99": ttft + 1.0},
        "max_kv_held": throughput / 1e4,
        "saturation": {"is_saturated": saturated},
        "goodput": float("nan"),
        "classes": {name: {"ttft": {"p99": value}} for name, value in classes.items()},
    }
    return Outcome({"seed": setup.seed}, metrics)


def drawn(setup: Setup) -> Outcome:
    """More running at once: more throughput, and longer waits; the rate does nothing; a little luck by seed."""
    size, luck = setup.engine["max_num_seqs"], 1.0 + 0.01 * (setup.seed % 3)
    return outcome(setup, 10.0 * size * luck, size / 100 * luck, interactive=size / 100, batch=size / 50)


# -- knobs and designs ------------------------------------------------------------------------------------------------


def test_a_knob_is_a_setting_of_any_room_by_its_dotted_name() -> None:
    base = replace(BASE, workload="shared-prefix", engine={"batching": "stall_free,chunk_size=512"})
    found = with_values(
        base,
        {
            "rate": 2.0,
            "engine.num_blocks": 100,
            "engine.batching.chunk_size": 64,
            "front_end_times.num_api_servers": 2,
            "workload.prefix_tokens": 512,
        },
    )
    assert found.rate == 2.0 and found.engine == {"batching": "stall_free,chunk_size=64", "num_blocks": 100}
    assert found.front_end_times == {"num_api_servers": 2} and found.workload == "shared-prefix,prefix_tokens=512"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("rate=1..9", (1.0, 3.0, 5.0, 7.0, 9.0)),
        ("rate=1..100:3:log", (1.0, 10.0, 100.0)),
        ("engine.max_num_seqs=16..64:3", (16, 40, 64)),
        ("engine.enable_prefix_caching=true,false", (True, False)),
        ("engine.eviction=lru;slru,protected=0.5", ("lru", "slru,protected=0.5")),
        ("engine.num_blocks=100, 200", (100, 200)),
    ],
)
def test_a_knob_reads_as_its_setting_is_typed(text: str, values: tuple[object, ...]) -> None:
    assert parse_knob(text, BASE).levels == values


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("engine.max_num_seq=4", r"unknown knob 'engine\.max_num_seq'.*Did you mean 'max_num_seqs'"),
        ("engine.batching.chunk=4", r"unknown knob 'engine\.batching\.chunk'; known there: .*none"),
        ("seed=1,2", "seed is no knob"),
        ("rate", "must read name=value"),
        ("rate=fast", "'fast' must be float"),
        ("engine.num_blocks=2.5", "'2.5' must be int"),
        ("rate=4..1", "low < high"),
        ("rate=0..1:log", "0 < low < high"),
        ("engine.num_blocks=4,4", "each once"),
    ],
)
def test_a_knob_that_is_none_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_knob(text, BASE)


def test_a_grid_is_every_combination() -> None:
    found = grid([Choices("a", (1, 2)), Range("b", 0.0, 1.0, 3)])
    assert [tuple(each.values()) for each in found] == [(a, b) for a in (1, 2) for b in (0.0, 0.5, 1.0)]


@settings(deadline=None, max_examples=40)
@given(num=st.integers(2, 40), seed=st.integers(0, 5))
def test_a_latin_hypercube_has_one_point_in_each_part_of_each_knob(num: int, seed: int) -> None:
    found = latin_hypercube([Range("a", 0.0, 1.0), Range("b", 1.0, 16.0, is_log=True)], num, seed)
    shares = [sorted(float(each["a"]) for each in found), sorted(math.log(float(each["b"]), 16.0) for each in found)]
    for part, share in (pair for each in shares for pair in enumerate(each)):
        assert part / num - 1e-8 <= share <= (part + 1) / num + 1e-8, "values are rounded to nine digits"


# -- rows -------------------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[Row]:
    with RowFile(path, identity(BASE)) as file:
        return sorted(file.rows.values(), key=lambda row: row.key)


def test_a_sweep_goes_on_where_it_was_and_a_larger_one_begins_there(tmp_path: Path) -> None:
    path, small = tmp_path / "rows.jsonl", Sweep(BASE, (SEQS,), num_seeds=2)
    first = sweep(small, path, HERE, drawn)
    assert first.num_found == 0 and len(rows_of(path)) == 8
    again = sweep(small, path, HERE, _never)
    assert again.num_found == 8 and repr(again.points) == repr(first.points)
    larger = sweep(replace(small, num_seeds=3), path, HERE, drawn)
    assert larger.num_found == 8 and len(rows_of(path)) == 12


def _never(setup: Setup) -> Outcome:
    raise AssertionError("it was played already")


def test_whatever_of_the_file_is_left_nothing_is_lost_and_nothing_doubled(tmp_path: Path) -> None:
    """Cut at every 29th byte, as a kill would leave it. Mutation: the torn line left in place, or its row taken."""
    path, what = tmp_path / "rows.jsonl", Sweep(BASE, (SEQS,))
    sweep(what, path, HERE, drawn)
    whole, wanted = path.read_bytes(), rows_of(path)
    for end in range(0, len(whole), 29):
        path.write_bytes(whole[:end])
        found = sweep(what, path, HERE, drawn)
        assert rows_of(path) == wanted
        assert len(path.read_bytes()) == len(whole), "no row twice, no piece left between"
        assert found.num_found == max(0, whole[:end].count(b"\n") - 1)


def test_a_torn_row_is_told(tmp_path: Path) -> None:
    path, what = tmp_path / "rows.jsonl", Sweep(BASE, (SEQS,))
    sweep(what, path, HERE, drawn)
    path.write_bytes(path.read_bytes()[:-5])
    assert any("torn" in note for note in sweep(what, path, HERE, drawn).notes)


def test_rows_of_another_setup_are_refused_and_so_are_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sweep(Sweep(BASE, (SEQS,)), path, HERE, drawn)
    with pytest.raises(ValueError, match=r"another sweep's rows \(not the same: base\)"):
        sweep(Sweep(replace(BASE, rate=3.0), (SEQS,)), path, HERE, drawn)
    changed = tmp_path / "trace.jsonl"
    for text, content in (("a", "b"), ("c", "d")):
        changed.write_text(text)
        before = identity(replace(BASE, workload=None, trace=str(changed)))
        changed.write_text(content)
        assert before != identity(replace(BASE, workload=None, trace=str(changed))), "another trace under its name"
    with RowFile(path, identity(BASE)), pytest.raises(ValueError, match="being written by another sweep"):
        sweep(Sweep(BASE, (SEQS,)), path, HERE, drawn)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a sweep's"):
        sweep(Sweep(BASE, (SEQS,)), path, HERE, drawn)


def test_a_row_that_was_spoilt_is_told_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sweep(Sweep(BASE, (SEQS,)), path, HERE, drawn)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], *lines[2:], ""]))
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: not a row"):
        sweep(Sweep(BASE, (SEQS,)), path, HERE, drawn)


def test_a_failed_run_is_a_row_with_its_error_and_the_others_go_on(tmp_path: Path) -> None:
    def fails(setup: Setup) -> Outcome:
        if setup.engine["max_num_seqs"] == 16:
            raise RuntimeError("no such GPU")
        return drawn(setup)

    path = tmp_path / "rows.jsonl"
    found = sweep(Sweep(BASE, (SEQS,), goal=GOAL), path, HERE, fails)
    assert [each.errors for each in found.points] == [[], ["RuntimeError: no such GPU"], [], []]
    assert sum(row.error is not None for row in rows_of(path)) == 1
    assert found.best.index == 2 and 1 not in found.front


def test_values_that_cannot_be_are_rows_with_errors_too() -> None:
    found = sweep(Sweep(BASE, (Choices("engine.block_size", (16, 0)),), goal=GOAL), None, HERE, play)
    assert [bool(each.errors) for each in found.points] == [False, True]
    assert "block_size (0) must be at least 1" in found.points[1].errors[0]


KILLED = """
import sys
from pathlib import Path
from sim.experiment.sweep.play import Sweep, sweep
from sim.experiment.sweep.workers import Processes
from tests.sim.test_sweep import LONG
if __name__ == "__main__":
    sweep(LONG, Path(sys.argv[1]), Processes(2))
"""
LONG = Sweep(BASE, (parse_knob("rate=1..9:30", BASE),))


def test_a_killed_sweep_goes_on_with_nothing_lost_and_nothing_doubled(tmp_path: Path) -> None:
    """SIGKILL somewhere between two rows, or within one; its workers end with it."""
    script, path = tmp_path / "killed.py", tmp_path / "rows.jsonl"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen([sys.executable, str(script), str(path)], env=environment, cwd=tmp_path)
    while child.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 8):
        time.sleep(0.002)
    workers = _children(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it was done before it could be killed"
    assert 7 <= sweep(LONG, path, HERE).num_found < 30
    alone = tmp_path / "alone.jsonl"
    sweep(LONG, alone, HERE)
    assert sorted(path.read_text().splitlines()) == sorted(alone.read_text().splitlines())
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker has outlived its sweep"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    task = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in task.read_text().split()] if task.exists() else []


# -- the best point ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tail", "fairness"), [(None, "ttft_p99<1s"), ("ttft_p99<1s", None), (None, None)])
def test_s61_an_objective_without_tail_or_without_fairness_is_refused(tail: str | None, fairness: str | None) -> None:
    with pytest.raises(ValueError, match=r"the objective 'output_throughput' alone lets a (tail|fairness) pay"):
        Goal("output_throughput", tail, fairness)


def test_s61_a_bound_on_each_request_or_on_no_percentile_is_no_tail() -> None:
    with pytest.raises(ValueError, match="is no tail: bound a percentile"):
        Goal("output_throughput", "ttft<1s", "ttft_p99<1s")


@pytest.mark.parametrize(
    ("tail", "fairness", "size"),
    [("1s", "9s", 64), ("0.2s", "9s", 16), ("9s", "1s", 16), ("9s", "9s", 128)],
)
def test_s61_the_best_point_is_the_largest_for_which_no_tail_and_no_class_pays(
    tail: str, fairness: str, size: int
) -> None:
    """Waits grow with the batch, those of one class twice as fast. Mutation: limits of classes judged over all
    requests together; the third case gives 64."""
    goal = Goal("output_throughput", f"ttft_p99<{tail}", f"ttft_p99<{fairness}")
    found = sweep(Sweep(BASE, (SEQS,), num_seeds=3, goal=goal), None, HERE, drawn)
    assert found.best.index is not None
    assert found.points[found.best.index].point == {"engine.max_num_seqs": size}


def test_s61_where_every_point_breaks_a_limit_none_is_best() -> None:
    found = sweep(
        Sweep(BASE, (SEQS,), goal=Goal("output_throughput", "ttft_p99<1ms", "ttft_p99<9s")), None, HERE, drawn
    )
    assert found.best.index is None and "none of 4 points keeps every limit" in found.best.reason
    assert "ttft p99 < 0.001 s (4)" in found.best.reason


def test_an_overloaded_point_is_never_the_best_nor_on_the_front() -> None:
    def overloaded(setup: Setup) -> Outcome:
        size = setup.engine["max_num_seqs"]
        return outcome(setup, 10.0 * size, 0.001, saturated=size == 128)

    found = sweep(Sweep(BASE, (SEQS,), goal=GOAL), None, HERE, overloaded)
    assert found.best.index == 2 and 3 not in found.front


def test_a_limit_counts_as_kept_where_the_interval_over_seeds_keeps_it() -> None:
    def luck(setup: Setup) -> Outcome:
        return outcome(setup, 1.0, 0.9 + 0.15 * (setup.seed % 2))

    what = Sweep(BASE, (Choices("rate", (1.0,)),), num_seeds=1, goal=GOAL)
    assert sweep(what, None, HERE, luck).best.index == 0
    assert sweep(replace(what, num_seeds=6), None, HERE, luck).best.index is None


def test_points_that_are_not_told_apart_are_named() -> None:
    def alike(setup: Setup) -> Outcome:
        size = setup.engine["max_num_seqs"]
        return outcome(setup, {4: 50.0}.get(size, 100.0) + (setup.seed * size) % 7, 0.1)

    found = sweep(Sweep(BASE, (SEQS,), num_seeds=6, goal=GOAL), None, HERE, alike)
    assert len(found.best.tied) == 2 and 0 not in found.best.tied


COSTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12)


@given(COSTS)
def test_the_front_is_what_nothing_betters(costs: list[tuple[int, int, int]]) -> None:
    points = [
        Measured(index, {}, (Row(str(index), {}, 0, {}, dict(outcome(BASE, gain, tail).metrics) | {"x": held}),))
        for index, (gain, tail, held) in enumerate(costs)
    ]
    found = front(points, ("output_throughput", "ttft.p99", "x"))
    for index, (gain, tail, held) in enumerate(costs):
        bettered = any(g >= gain and t <= tail and h <= held and (g, t, h) != (gain, tail, held) for g, t, h in costs)
        assert (index in found) == (not bettered)


# -- what moves what --------------------------------------------------------------------------------------------------


def test_the_sensitivity_tells_which_knob_moves_what_and_which_does_not() -> None:
    for method in ("grid", "lhs"):
        what = Sweep(BASE, (SEQS, RATE), method, num_points=40)
        found = {(s.knob, s.metric): s for s in sweep(what, None, HERE, drawn).sensitivities}
        size = found["engine.max_num_seqs", "output_throughput"]
        assert size.correlation > 0.95 and size.share > 0.9 and size.p_adjusted < 0.01
        assert size.first == 40.0 and size.last == 1280.0 and size.change == 31.0
        idle = found["rate", "output_throughput"]
        assert abs(idle.correlation) < 0.35 and idle.p_adjusted > 0.05


def test_a_knob_of_many_names_is_no_range() -> None:
    def by_name(setup: Setup) -> Outcome:
        return outcome(setup, float(len(setup.engine["eviction"])), setup.engine["max_num_seqs"])

    knob = Choices("engine.eviction", ("lru", "fifo", "lfu", "slru", "sieve", "s3fifo", "gdsf", "lru_leaf"))
    found = sweep(Sweep(BASE, (knob, SEQS)), None, HERE, by_name).sensitivities
    (eviction,) = [s for s in found if (s.knob, s.metric) == ("engine.eviction", "output_throughput")]
    assert eviction.share == pytest.approx(1.0) and (eviction.first, eviction.last) == (3.0, 8.0)


def test_one_point_a_level_tells_a_direction_and_is_as_sure_as_so_few_can_be() -> None:
    (size,) = [s for s in sweep(Sweep(BASE, (SEQS,)), None, HERE, drawn).sensitivities if s.metric == "ttft.p99"]
    assert (size.correlation, size.share) == (pytest.approx(1.0), pytest.approx(1.0))
    assert size.p_adjusted >= 2 / 24, "four points in order are no more than chance in twelve"


def test_a_knob_without_order_has_a_share_and_no_correlation() -> None:
    def by_name(setup: Setup) -> Outcome:
        return outcome(setup, {"chunked": 3.0, "static": 1.0}[setup.engine["batching"]], setup.engine["max_num_seqs"])

    knob = parse_knob("engine.batching=chunked;static", BASE)
    found = sweep(Sweep(BASE, (knob, SEQS)), None, HERE, by_name).sensitivities
    (batching,) = [s for s in found if (s.knob, s.metric) == ("engine.batching", "output_throughput")]
    assert batching.share == pytest.approx(1.0) and batching.correlation != batching.correlation
    assert batching.change == pytest.approx(-2 / 3)


# -- search -----------------------------------------------------------------------------------------------------------


def test_a_search_finds_what_a_limit_lets_it_and_goes_on_as_it_began(tmp_path: Path) -> None:
    """The best size is 50, where the class's tail is at its limit."""
    pytest.importorskip("optuna")
    goal = Goal("output_throughput", "ttft_p99<9s", "ttft_p99<1s")
    what = Sweep(BASE, (parse_knob("engine.max_num_seqs=1..128", BASE), RATE), "optuna", num_points=48, goal=goal)
    path = tmp_path / "rows.jsonl"
    found = sweep(what, path, HERE, drawn)
    assert found.best.index is not None
    assert 42 <= int(found.points[found.best.index].point["engine.max_num_seqs"]) <= 50
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:20]) + lines[20][:9])
    again = sweep(what, path, HERE, drawn)
    assert again.num_found == 19 and repr(again.points) == repr(found.points)


def test_a_search_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="say of what by --objective"):
        Sweep(BASE, (SEQS,), "optuna")


# -- where it is played -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["processes", "threading"])
def test_rows_are_the_same_wherever_they_are_played(name: str) -> None:
    pytest.importorskip("joblib")
    what = Sweep(BASE, (parse_knob("rate=2,6", BASE),), num_seeds=2)
    assert repr(sweep(what, None, workers_named(name, 2)).points) == repr(sweep(what, None, HERE).points)


def test_a_backend_that_is_not_there_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--workers ray needs ray.*pip install 'servetwin\[scale\]'"):
        sweep(Sweep(BASE, (SEQS,)), None, workers_named("ray"))


def dies(setup: Setup) -> Outcome:
    """As the system ends who takes too much memory."""
    if setup.rate == 3.0:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(setup, 1.0, 0.1)


def test_a_run_that_kills_its_process_is_a_row_and_the_others_are_played() -> None:
    found = sweep(Sweep(BASE, (RATE,)), None, Processes(2), dies)
    assert [bool(each.errors) for each in found.points] == [False, True, False, False, False]
    assert "was killed" in found.points[1].errors[0]


# -- from a file ------------------------------------------------------------------------------------------------------


TOML = """
workload = "fixed"
num_requests = 12
[sweep]
method = "lhs"
num_points = 9
objective = "output_throughput"
tail = "ttft_p99<1s"
fairness = "ttft_p99<2s"
[sweep.knobs]
rate = "1..8:log"
engine.max_num_seqs = [8, 32]
"engine.batching" = ["chunked", "static"]
"""


def test_a_toml_says_the_setup_and_the_sweep(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(TOML)
    base, said = read_toml(path)
    what = sweep_of(base, said, ["engine.max_num_seqs=64"])
    assert base.num_requests == 12 and what.method == "lhs" and what.num_points == 9
    assert what.goal == GOAL
    assert {knob.name: knob.levels for knob in what.knobs if isinstance(knob, Choices)} == {
        "engine.max_num_seqs": (64,),
        "engine.batching": ("chunked", "static"),
    }
    with pytest.raises(ValueError, match="unknown setting 'methods' of a sweep"):
        sweep_of(base, {**said, "methods": "lhs"})


def test_the_command_prints_writes_rows_json_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(TOML)
    command = ["servetwin", "sweep", str(path), "--method", "grid", "--knob", "rate=2,4", "--num-workers", "1"]
    outputs = [f"--{kind}={tmp_path / 'r'}.{kind}" for kind in ("rows", "json", "html")]
    monkeypatch.setattr(sys, "argv", [*command, *outputs])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "8 points (grid): 8 runs" in out and "best: " in out
    assert len((tmp_path / "r.rows").read_text().splitlines()) == 9
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["points"]) == 8 and result["best"]["index"] is not None
    assert "What throughput costs" in (tmp_path / "r.html").read_text()

"""A sweep: a setup played at many points of its knobs, each under the same seeds, and never twice.

All points share their seeds, so that two of them are compared over the same requests. Rows in a file make a sweep that
was killed go on where it was, and a larger one begin with what a smaller one found.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sim.experiment.runner import Outcome, play
from sim.experiment.sweep.judged import Best, Goal, Measured, best, front
from sim.experiment.sweep.rows import Row, RowFile, identity, key_of
from sim.experiment.sweep.sensitivity import Sensitivity, sensitivities
from sim.experiment.sweep.space import (
    Knob,
    Point,
    grid,
    latin_hypercube,
    one_at_a_time,
    parse_knob,
    read_knob,
    with_values,
)
from sim.experiment.sweep.workers import Processes, Workers
from sim.setup import Setup

METHODS = ("grid", "lhs", "one-at-a-time", "optuna")
METRICS = ("output_throughput", "ttft.p99", "tpot.p99", "e2e.p99", "max_kv_held", "token_hit_rate", "num_preemptions")
MEASURE_ONLY = Goal()
FRONT = ("output_throughput", "e2e.p99", "max_kv_held")
Play = Callable[[Setup], Outcome]
Tick = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is varied, how, and what for. `num_points`: of lhs and optuna; a grid has as many as it has.

    `metrics`: of which the sensitivity is told. `pareto`: metrics of the front, throughput against tail and occupancy.
    """

    base: Setup
    knobs: tuple[Knob, ...]
    method: str = "grid"
    num_points: int = 50
    num_seeds: int = 1
    goal: Goal = MEASURE_ONLY
    metrics: tuple[str, ...] = METRICS
    pareto: tuple[str, ...] = FRONT

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; known: {', '.join(METHODS)}")
        if not self.knobs:
            raise ValueError("a sweep varies something: give --knob name=value,value or [sweep.knobs] in the TOML")
        names = [knob.name for knob in self.knobs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"knob {twice[0]!r} is given twice: leave one out")
        for name, num in (("num_points", self.num_points), ("num_seeds", self.num_seeds)):
            if num < 1:
                raise ValueError(f"{name} ({num}) must be at least 1")
        if self.method == "optuna" and self.goal.objective is None:
            raise ValueError("method optuna looks for the best point: say of what by --objective, or take lhs")

    def points(self) -> list[Point]:
        """Of a design that is known beforehand."""
        if self.method == "lhs":
            return latin_hypercube(self.knobs, self.num_points, self.base.seed)
        return grid(self.knobs) if self.method == "grid" else one_at_a_time(self.knobs)


@dataclass(frozen=True, slots=True)
class Swept:
    """What came of it. `num_found`: runs that were there already. `front`: indices of the points that none betters."""

    sweep: Sweep
    points: tuple[Measured, ...]
    num_found: int
    best: Best
    front: tuple[int, ...]
    sensitivities: tuple[Sensitivity, ...]
    notes: tuple[str, ...] = field(default=())


def sweep(
    what: Sweep, path: Path | None = None, workers: Workers | None = None, play: Play = play, tick: Tick | None = None
) -> Swept:
    """Play what is not in the file yet. `tick` is called with each new row. Raises ValueError as RowFile does.

    A run that fails is a row with its error. With workers in other processes `play` is a function of a module.
    """
    with nullcontext() if path is None else RowFile(path, identity(what.base)) as file:
        runs = Runs(what, file, workers or Processes(), play, tick)
        if what.method == "optuna":
            from sim.experiment.sweep.search import search

            points = search(what, runs.played)
        else:
            points = runs.played(what.points())
    return _judged(what, points, runs)


class Runs:
    """Points to measured points, by rows there are and runs there were not."""

    def __init__(self, what: Sweep, file: RowFile | None, workers: Workers, play: Play, tick: Tick | None) -> None:
        self._sweep, self._file, self._workers, self._tick = what, file, workers, tick
        self._attempt = Attempt(play)
        self._rows: dict[str, Row] = {} if file is None else dict(file.rows)
        self._first = frozenset(self._rows)
        self._used: set[str] = set()
        self._num_points = 0

    @property
    def num_found(self) -> int:
        return len(self._first & self._used)

    @property
    def notes(self) -> Iterator[str]:
        if self._file is not None and self._file.num_torn_bytes:
            yield "the last row of the file was torn: it was cut off and played again"
        if left := len(self._first - self._used):
            yield f"{left} rows of the file are of other points, and left aside"

    def played(self, points: Sequence[Point]) -> list[Measured]:
        """In the order of the points; rows are written as runs end."""
        tasks = [[Task.of(self._sweep.base, point, seed) for seed in range(self._sweep.num_seeds)] for point in points]
        self._used |= {task.key for each in tasks for task in each}
        missing = {task.key: task for each in tasks for task in each if task.key not in self._rows}
        for row in self._workers.run(self._attempt, list(missing.values())):
            self._keep(row)
        first = self._num_points
        self._num_points += len(points)
        return [
            Measured(first + index, point, tuple(self._rows[task.key] for task in each))
            for index, (point, each) in enumerate(zip(points, tasks, strict=True))
        ]

    def _keep(self, row: Row) -> None:
        if self._file is not None:
            self._file.append(row)
        self._rows[row.key] = row.as_written()
        if self._tick is not None:
            self._tick(row)


@dataclass(frozen=True, slots=True)
class Task:
    """One run to be played. `error`: the values cannot be set."""

    key: str
    values: Mapping[str, Any]
    seed: int
    setup: Setup | None
    error: str | None = None

    @classmethod
    def of(cls, base: Setup, point: Point, index: int) -> Task:
        seeded = replace(base, seed=base.seed + index)
        try:
            setup = with_values(seeded, point)
        except ValueError as error:
            values = ";".join(f"{name}={value!r}" for name, value in point.items())
            return cls(f"{key_of(seeded)}:{values}", point, seeded.seed, None, str(error))
        return cls(key_of(setup), point, seeded.seed, setup)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Plays a task, whatever comes of it."""

    play: Play

    def __call__(self, task: Task) -> Row:
        if task.setup is None:
            return Row(task.key, task.values, task.seed, error=task.error)
        try:
            outcome = self.play(task.setup)
        except Exception as error:
            told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return Row(task.key, task.values, task.seed, error=" ".join(told.split()))
        return Row(task.key, task.values, task.seed, outcome.manifest, outcome.metrics)

    def lost(self, task: Task) -> Row:
        return Row(task.key, task.values, task.seed, error="the process that played it was killed (out of memory?)")


def _judged(what: Sweep, points: Sequence[Measured], runs: Runs) -> Swept:
    notes = list(runs.notes)
    if what.goal.objective is not None:
        notes += _doubts(what, points)
    return Swept(
        what,
        tuple(points),
        runs.num_found,
        best(points, what.goal),
        tuple(front(points, what.pareto)),
        tuple(sensitivities(what.knobs, points, what.metrics)),
        tuple(notes),
    )


def _doubts(what: Sweep, points: Sequence[Measured]) -> Iterator[str]:
    if what.num_seeds == 1:
        yield "one seed: limits are judged by one run each, without an interval; --num-seeds 5 gives one"
    else:
        yield "the best of many was chosen by the runs that tell its figures: they flatter it a little"
    if 1 < what.num_seeds < 5:
        yield f"intervals of {what.num_seeds} seeds are wide: 5 or more tell points apart that these do not"
    if what.method == "optuna":
        yield "points lie where the search looked: what moves what is not balanced over the rest"
    if not any(metrics.get("classes") for each in points for metrics in each.metrics):
        yield "there is but one class: the fairness constraint holds for it alone"


# -- from a file and options ------------------------------------------------------------------------------------------


def read_toml(path: Path) -> tuple[Setup, dict[str, Any]]:
    """A setup, and its [sweep] table for `sweep_of`. Raises ValueError of one line."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable TOML file ({error})") from None
    said = values.pop("sweep", {})
    if not isinstance(said, Mapping):
        raise ValueError(f"{path}: sweep must be a table: [sweep]")
    try:
        return Setup.from_dict(values), dict(said)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def sweep_of(base: Setup, said: Mapping[str, Any], knobs: Sequence[str] = ()) -> Sweep:
    """Of a [sweep] table, and of texts such as `rate=1..8`, which go before its knobs. Raises ValueError."""
    goal = [each.name for each in fields(Goal)]
    own = [each.name for each in fields(Sweep) if each.name not in ("base", "goal")]
    for name in said:
        if name not in (*own, *goal):
            raise ValueError(f"unknown setting {name!r} of a sweep; known: {', '.join((*own, *goal))}")
    table = {name: read_knob(name, each, base) for name, each in _dotted(said.get("knobs", {}))}
    table |= {knob.name: knob for knob in (parse_knob(text, base) for text in knobs)}
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in said.items() if name in own}
    wanted = Goal(**{name: value for name, value in said.items() if name in goal})
    return Sweep(base, goal=wanted, **{**values, "knobs": tuple(table.values())})


def _dotted(knobs: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """TOML reads an unquoted dot as a table within a table."""
    for name, said in knobs.items():
        if isinstance(said, Mapping):
            yield from _dotted(said, f"{before}{name}.")
        else:
            yield f"{before}{name}", said

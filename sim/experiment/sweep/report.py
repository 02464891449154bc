"""A sweep as people read it: the best point, the front, what moves what, and what failed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from sim.experiment.statistics import mean_interval, paired_effect
from sim.experiment.sweep.judged import Measured, broken
from sim.experiment.sweep.play import Sweep, Swept
from sim.experiment.sweep.sensitivity import Sensitivity
from sim.experiment.sweep.space import Point
from sim.report import seconds

MAX_ROWS = 16


def print_sweep(console: Console, found: Swept, rows: str) -> None:
    for line in headline(found, rows):
        console.print(line, highlight=False, soft_wrap=False)
    if found.best.index is not None or found.sweep.goal.objective is not None:
        console.print(f"best: {answer(found)}", style="bold", highlight=False)
    for note in found.notes:
        console.print(note, style="dim", highlight=False)
    for title, table in tables(found):
        console.print()
        console.print(title, highlight=False)
        console.print(table, highlight=False)
    for error, num in failures(found.points):
        console.print(f"failed, {num} runs: {error}", style="bold", highlight=False)


def headline(found: Swept, rows: str) -> Iterator[str]:
    what, num = found.sweep, sum(len(each.rows) for each in found.points)
    there = f"; {found.num_found} of them were there already" if found.num_found else ""
    seeds = "" if what.num_seeds == 1 else f" under {what.num_seeds} seeds"
    yield f"{len(found.points)} points{seeds} ({what.method}): {num} runs, {rows}{there}"
    if overloaded := sum(each.is_saturated for each in found.points):
        yield f"{overloaded} points were overloaded: they have no latencies to speak of, and are on no front"


def answer(found: Swept) -> str:
    """The best point in words, with its figures."""
    if found.best.index is None:
        return found.best.reason
    point, goal = found.points[found.best.index], found.sweep.goal
    figures = [_figure(point, metric) for metric in dict.fromkeys((goal.objective or "", *found.sweep.pareto))]
    tied = f"; not told apart from it: {len(found.best.tied)} points" if found.best.tied else ""
    return f"{told(point.point)}: {found.best.reason}; {', '.join(figures)}{tied}"


def told(point: Point) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in point.items()) or "as it is"


def _figure(point: Measured, metric: str) -> str:
    values = point.values(metric)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return f"{words(metric)} {shown(metric, point.mean(metric))}"
    interval = mean_interval(values)
    return f"{words(metric)} {shown(metric, interval.mean)} ± {shown(metric, interval.half_width)}"


def failures(points: Sequence[Measured]) -> list[tuple[str, int]]:
    errors: dict[str, int] = {}
    for error in (error for each in points for error in each.errors):
        errors[error] = errors.get(error, 0) + 1
    return sorted(errors.items(), key=lambda each: -each[1])[:MAX_ROWS]


# -- tables -----------------------------------------------------------------------------------------------------------


def tables(found: Swept) -> Iterator[tuple[str, Table]]:
    what = found.sweep
    if what.method == "one-at-a-time":
        if found.points[0].metrics:
            yield "each alone, against the setup as it is; * p < .05", alone_table(found)
        return
    if found.front:
        names = ", ".join(map(words, what.pareto))
        yield f"the front: nothing is better in one of {names} and worse in none", point_table(found, found.front)
    if found.sensitivities:
        yield (
            "what moves what: change from a knob's lowest level to its highest, rank correlation (of a knob without "
            "order, the share of variance it explains); * p < .05 (Holm)",
            sensitivity_table(found),
        )


def point_table(found: Swept, indices: Sequence[int]) -> Table:
    """Sorted by the first metric; where there are more than fit, evenly thinned, the best kept."""
    what = found.sweep
    names = short_names(what)
    table = _table("", *names.values(), *map(words, what.pareto), *(("limits",) if what.goal.limits else ()))
    ordered = sorted((found.points[index] for index in indices), key=lambda each: each.mean(what.pareto[0]))
    for each in _thinned(ordered, found.best.index):
        limits = ["kept" if not broken(each, what.goal.limits) else "broken"] if what.goal.limits else []
        table.add_row(
            "*" if each.index == found.best.index else "",
            *(_value(each.point[name]) for name in names),
            *(shown(metric, each.mean(metric)) for metric in what.pareto),
            *limits,
        )
    return table


def _thinned(points: list[Measured], best: int | None) -> list[Measured]:
    if len(points) <= MAX_ROWS:
        return points
    step = (len(points) - 1) / (MAX_ROWS - 1)
    kept = {round(index * step) for index in range(MAX_ROWS)}
    return [each for place, each in enumerate(points) if place in kept or each.index == best]


def sensitivity_table(found: Swept) -> Table:
    """A row a metric, a column a knob, the one that explains most first."""
    names = short_names(found.sweep)
    weights = {name: sum(s.share for s in found.sensitivities if s.knob == name) for name in names}
    knobs = sorted(names, key=lambda name: -weights[name])
    cells = {(each.metric, each.knob): each for each in found.sensitivities}
    table = _table("", *(names[knob] for knob in knobs))
    for metric in dict.fromkeys(each.metric for each in found.sensitivities):
        table.add_row(words(metric), *(_moved(cells.get((metric, knob))) for knob in knobs))
    return table


def _moved(each: Sensitivity | None) -> str:
    if each is None:
        return "-"
    strength = f"{100 * each.share:.0f} %" if math.isnan(each.correlation) else f"{each.correlation:+.2f}"
    return f"{_percent(each.change)} {strength:>6}{'*' if each.p_adjusted < 0.05 else ' '}"


def alone_table(found: Swept) -> Table:
    """Each point's metrics, and how far they are from the first point's."""
    first, *others = found.points
    metrics = [each for each in found.sweep.metrics if math.isfinite(first.mean(each))]
    table = _table("", *map(words, metrics))
    table.add_row("as it is", *(shown(metric, first.mean(metric)) for metric in metrics))
    table.columns[0].no_wrap = True
    names = short_names(found.sweep)
    for each in others:
        table.add_row(
            told({names[name]: value for name, value in each.point.items()}),
            *(_against(first, each, metric) for metric in metrics),
        )
    return table


def _against(first: Measured, other: Measured, metric: str) -> str:
    a, b = first.values(metric), other.values(metric)
    if other.errors or not a or len(a) != len(b) or not all(map(math.isfinite, (*a, *b))):
        return "failed" if other.errors else "-"
    base, mean = first.mean(metric), other.mean(metric)
    if len(a) < 2:
        return "=" if a == b else _percent((mean - base) / abs(base) if base else math.nan)
    effect = paired_effect(a, b)
    if effect.is_exactly_zero:
        return "="
    return f"{_percent(effect.relative.mean)}{'*' if effect.p_value < 0.05 else ''}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table


def short_names(what: Sweep) -> dict[str, str]:
    """Knobs by the last part of their name, where that is one knob's alone."""
    leaves = [knob.name.rpartition(".")[2] for knob in what.knobs]
    return {
        knob.name: words(leaf if leaves.count(leaf) == 1 else knob.name)
        for knob, leaf in zip(what.knobs, leaves, strict=True)
    }


def shown(metric: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if "rate" in metric or "kv" in metric or metric == "attainment":
        return f"{100 * value:.1f} %"
    return seconds(value) if "." in metric else f"{value:,.4g}"


def words(metric: str) -> str:
    return metric.replace(".", " ").replace("_", " ")


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:+.0f} %" if abs(share) < 10 else f"x{1 + share:,.0f}"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

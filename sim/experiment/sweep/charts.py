"""A sweep as charts: throughput against tail and occupancy with the front, and what each knob does to the three."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]

from sim import canvas
from sim.experiment.sweep.judged import Measured, broken
from sim.experiment.sweep.play import Swept
from sim.experiment.sweep.report import short_names, shown, told, words


def charts(found: Swept) -> list[go.Figure]:
    return [pareto(found), *by_knob(found)]


def pareto(found: Swept) -> go.Figure:
    """The first metric upwards, each of the others to the right; a point a dot, the front joined."""
    gain, *costs = found.sweep.pareto
    note = "A dot is a point of the sweep, the mean over its seeds. Joined: nothing is better in both of the panel."
    figure = canvas.frame("What throughput costs", note, "", 1, len(costs), 380, horizontal_spacing=0.1)
    kept, rest = _parted(found)
    for column, cost in enumerate(costs, 1):
        for name, points, color in ((_kept(found), kept, canvas.BLUE), ("a limit is broken", rest, canvas.ORANGE)):
            _dots(figure, column, name, points, cost, gain, color)
        _joined(figure, column, [each for each in found.points if each.is_steady], cost, gain)
        if found.best.index is not None:
            _ring(figure, column, found.points[found.best.index], cost, gain)
        figure.update_xaxes(title_text=_axis(cost), row=1, col=column)
    figure.update_yaxes(title_text=_axis(gain), row=1, col=1)
    figure.update_layout(hovermode="closest")
    return canvas.said_if_empty(figure, "no point was played to its end without being overloaded")


def _kept(found: Swept) -> str:
    return "limits kept" if found.sweep.goal.limits else "not overloaded"


def _parted(found: Swept) -> tuple[list[Measured], list[Measured]]:
    steady = [each for each in found.points if each.is_steady]
    bad = {each.index for each in steady if broken(each, found.sweep.goal.limits)}
    return [each for each in steady if each.index not in bad], [each for each in steady if each.index in bad]


def _dots(figure: go.Figure, column: int, name: str, points: Sequence[Measured], x: str, y: str, color: str) -> None:
    if not points:
        return
    figure.add_trace(
        go.Scatter(
            x=[_scaled(x, each) for each in points],
            y=[_scaled(y, each) for each in points],
            mode="markers",
            name=name,
            legendgroup=name,
            showlegend=column == 1,
            marker={"color": color, "size": 8, "opacity": 0.8},
            text=[told(each.point) for each in points],
            hovertemplate="%{text}<br>%{x:,.4~g}, %{y:,.4~g}",
        ),
        row=1,
        col=column,
    )


def _joined(figure: go.Figure, column: int, points: Sequence[Measured], x: str, y: str) -> None:
    """From the least cost on, whatever gains."""
    path: list[tuple[float, float]] = []
    for cost, _, gain in sorted((_scaled(x, e), -_scaled(y, e), _scaled(y, e)) for e in points):
        if not path or gain > path[-1][1]:
            path.append((cost, gain))
    if path:
        xs, ys = (np.array(each) for each in zip(*path, strict=True))
        look = {"line": {"color": canvas.GREY, "width": 1.5}, "column": column}
        canvas.line(figure, 1, "front", xs, ys, look, column == 1)


def _ring(figure: go.Figure, column: int, best: Measured, x: str, y: str) -> None:
    marker = {"color": canvas.CLEAR, "size": 17, "line": {"color": canvas.VERMILLION, "width": 2}}
    point = {"x": [_scaled(x, best)], "y": [_scaled(y, best)]}
    style = {"mode": "markers", "marker": marker, "name": "best", "legendgroup": "best", "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(**point, **style, showlegend=column == 1), row=1, col=column)


def by_knob(found: Swept) -> Iterator[go.Figure]:
    """A figure a knob of numbers, a panel a metric of the front."""
    metrics, names = found.sweep.pareto, short_names(found.sweep)
    for knob, name in names.items():
        points = [each for each in found.points if each.is_steady and _is_number(each.point.get(knob))]
        if len({each.point[knob] for each in points}) < 2:
            continue
        note = "A dot is a point; the line is the mean of all points with that value. Overloaded points are left out."
        figure = canvas.frame(f"What {name} does", note, "", 1, len(metrics), 260, horizontal_spacing=0.09)
        for column, metric in enumerate(metrics, 1):
            _dots_by_knob(figure, column, points, knob, metric)
            figure.update_yaxes(title_text=_axis(metric), row=1, col=column)
            figure.update_xaxes(title_text=name, row=1, col=column)
        figure.update_layout(hovermode="closest", showlegend=False)
        yield figure


def _dots_by_knob(figure: go.Figure, column: int, points: Sequence[Measured], knob: str, metric: str) -> None:
    x = np.array([float(each.point[knob]) for each in points])
    y = np.array([_scaled(metric, each) for each in points])
    marker = {"color": canvas.SKY, "size": 6}
    text = [f"{told(each.point)}: {shown(metric, each.mean(metric))}" for each in points]
    dots = go.Scatter(x=x, y=y, mode="markers", marker=marker, text=text, hovertemplate="%{text}<extra></extra>")
    figure.add_trace(dots, row=1, col=column)
    levels = np.unique(x)
    if len(levels) < len(x) or len(levels) <= 12:
        means = np.array([y[x == level].mean() for level in levels])
        line = {"color": canvas.BLUE, "width": 2}
        figure.add_trace(go.Scatter(x=levels, y=means, mode="lines", line=line, hoverinfo="skip"), row=1, col=column)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scaled(metric: str, point: Measured) -> float:
    return (100.0 if _is_share(metric) else 1e3 if _is_short(metric) else 1.0) * point.mean(metric)


def _is_share(metric: str) -> bool:
    return "kv" in metric or "hit_rate" in metric


def _is_short(metric: str) -> bool:
    return metric.startswith(("tpot.", "itl."))


def _axis(metric: str) -> str:
    seconds = "ms" if _is_short(metric) else "s" if "." in metric else ""
    unit = "%" if _is_share(metric) else "tok/s" if "put_throughput" in metric else seconds
    return f"{words(metric)}, {unit}" if unit else words(metric)

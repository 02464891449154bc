"""Charts of runs, of one or side by side: latencies, throughput, queue, KV pool, steps; as plotly figures.

What they draw is computed in sim.spread and sim.series. Each says in its subtitle what it counts, and on what costs it
rests if `basis` says so. `most` bounds the points of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]

from sim import canvas
from sim.series import MAX_POINTS, Floats, Steps, steps, thin, throughput, timeline
from sim.simulate import Run
from sim.spread import OTHERS, Latencies, by_class, cdf, largest_classes

Runs = Mapping[str, Run]  # by the name that people read
Latency = tuple[str, str, float, Callable[[Latencies], Floats]]

MAX_CLASSES = 6
MAX_CDF_POINTS = 500  # a curve
ALL_CDF_POINTS = 6000  # of all curves of one latency
WIDE = 20.0  # greatest over least, from which on a logarithmic axis helps

TPOT = {
    "vllm": "(last − first token) / (tokens − 1)",
    "guidellm": "(last token − intended arrival) / tokens",
    "aiperf": "(last − first token) / (tokens − 1)",
    "distserve": "(last − first token) / (tokens − 1), 0 for one token",
}
LATENCIES: tuple[Latency, ...] = (
    ("TTFT", "s", 1.0, lambda of: of.ttft),
    ("TPOT", "ms", 1e3, lambda of: of.tpot),
    ("E2E", "s", 1.0, lambda of: of.e2e),
)


def charts(runs: Runs, basis: str = "", most: int = MAX_POINTS, convention: str = "vllm") -> list[go.Figure]:
    over_time = (throughput_over_time, queue_over_time, kv_over_time, step_timeline)
    return [latency_cdfs(runs, basis, most, convention), *(draw(runs, basis, most) for draw in over_time)]


# -- latencies ----------------------------------------------------------------------------------------------------


def latency_cdfs(runs: Runs, basis: str = "", most: int = MAX_POINTS, convention: str = "vllm") -> go.Figure:
    """Of one run, all classes in one row of panels; of several, a row a class with a curve a run."""
    at = "client" if any(run.clients for run in runs.values()) else "engine"
    note = (
        f"Answered requests, as the {at} saw them. TTFT: first token − intended arrival. TPOT ({convention}): "
        f"{TPOT[convention]}. E2E: end − intended arrival."
    )
    curves = _curves(runs, convention)
    rows = max([curve.row for curve in curves], default=1)
    grid = {"horizontal_spacing": 0.07, "vertical_spacing": 0.16 / rows, "shared_xaxes": "columns"}
    figure = canvas.frame("Latency", note, basis, rows, 3, 70 + 190 * rows, **grid)
    most = min(most, MAX_CDF_POINTS, max(60, ALL_CDF_POINTS // max(1, len(curves))))
    for column, latency in enumerate(LATENCIES, 1):
        for curve in curves:
            _cdf(figure, curve, column, latency, most)
        figure.update_xaxes(title_text=f"{latency[0]}, {latency[1]}", row=rows, col=column)
        figure.update_xaxes(_log_axis([latency[2] * latency[3](curve.of) for curve in curves]), col=column)
    figure.update_yaxes(range=[0, 1.01], tickvals=[0, 0.25, 0.5, 0.75, 0.9, 1], tickformat=".0%")
    for curve in curves:
        figure.update_yaxes(title_text=escape(curve.title), row=curve.row, col=1)
    figure.update_layout(hovermode="closest")
    return canvas.said_if_empty(figure, "no request was answered")


class _Curve(NamedTuple):
    """Of one run and class, a panel a latency."""

    row: int
    title: str
    label: str
    number: int
    in_legend: bool
    of: Latencies


def _curves(runs: Runs, convention: str) -> list[_Curve]:
    shown = largest_classes(runs.values(), MAX_CLASSES)
    found = {name: by_class(run, shown, convention) for name, run in runs.items()}
    if len(runs) == 1:
        (groups,) = found.values()
        return [
            _Curve(1, "answered requests", f"{name} ({len(of.e2e):,})", number, True, of)
            for number, (name, of) in enumerate(groups.items())
        ]
    answered = [each for each in (*shown, OTHERS) if any(each in groups for groups in found.values())]
    return [
        _Curve(row, shorten(each, 24, placeholder="…"), name, number, row == 1, groups[each])
        for row, each in enumerate(answered, 1)
        for number, (name, groups) in enumerate(found.items())
        if each in groups
    ]


def _cdf(figure: go.Figure, curve: _Curve, column: int, latency: Latency, most: int) -> None:
    _, unit, scale, pick = latency
    x, y = cdf(scale * pick(curve.of), most)
    style = {"color": canvas.color(curve.number), "dash": canvas.dash(curve.number), "width": 2}
    look = {"line": style, "column": column, "hover": f"%{{y:.1%}} within %{{x:.4~g}} {unit}"}
    canvas.line(figure, curve.row, curve.label, x, y, look, curve.in_legend and column == 1)


def _log_axis(values: Sequence[Floats]) -> dict[str, Any]:
    """Where the range is wide, with ticks that say all their digits."""
    known = np.concatenate([*values, np.empty(0)])
    known = known[~np.isnan(known)]
    if not len(known) or known.min() <= 0 or known.max() < WIDE * known.min():
        return {}
    decades = np.arange(np.floor(np.log10(known.min())), np.log10(known.max()) + 1)
    mantissas = (1, 2, 5) if len(decades) <= 2 else (1, 3) if len(decades) <= 3 else (1,)
    ticks = [mantissa * 10**decade for decade in decades for mantissa in mantissas]
    return {"type": "log", "rangemode": "normal", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}


# -- over time ----------------------------------------------------------------------------------------------------


def throughput_over_time(runs: Runs, basis: str = "", most: int = MAX_POINTS) -> go.Figure:
    """Tokens put out, prompt tokens computed, requests; means over bins of time."""
    found = {name: throughput(run) for name, run in runs.items()}
    widths = [f"{each.edges[1] - each.edges[0]:.3g} s" for each in found.values() if len(each.edges)]
    note = (
        f"Means over bins of {' and '.join(dict.fromkeys(widths)) or '-'}: peaks within a bin do not show. "
        "Prefill: tokens computed, not those found in the cache. Dotted: arrivals."
    )
    figure = canvas.frame("Throughput over time", note, basis, 3, 1, 460, shared_xaxes=True, vertical_spacing=0.07)
    for number, (name, of) in enumerate(found.items()):
        several, look = len(runs) > 1, {"line": {"color": canvas.color(number)}}
        if number == 0:
            canvas.binned(figure, 3, "arrived", of.edges, of.arrived, {"line": {"color": canvas.GREY, "dash": "dot"}})
        for row, label, values in (
            (1, "output tokens", of.output_tokens),
            (2, "prefill tokens", of.prefill_tokens),
            (3, "completed", of.completed),
        ):
            canvas.binned(figure, row, name if several else label, of.edges, values, look, several and row == 1)
    return canvas.over_time(figure, {1: "output, tok/s", 2: "prefill, tok/s", 3: "completed, req/s"})


def queue_over_time(runs: Runs, basis: str = "", most: int = MAX_POINTS) -> go.Figure:
    """Requests that run above, those that wait beneath."""
    note = "At the engine, as each step begins; those preempted wait again. " + _thinning(most)
    figure = canvas.frame("Running and waiting", note, basis, 2, 1, 320, shared_xaxes=True, vertical_spacing=0.1)
    for number, (name, run) in enumerate(runs.items()):
        of, several = timeline(run), len(runs) > 1
        for row, label, values, alone in (
            (1, "running", of.running, canvas.BLUE),
            (2, "waiting", of.waiting, canvas.VERMILLION),
        ):
            keep = thin(of.time, values, most)
            look = {"line": {"color": canvas.color(number) if several else alone}}
            canvas.line(
                figure, row, name if several else label, of.time[keep], values[keep], look, row == 1 or not several
            )
    return canvas.over_time(figure, {1: "running, requests", 2: "waiting, requests"})


def kv_over_time(runs: Runs, basis: str = "", most: int = MAX_POINTS) -> go.Figure:
    """A panel a run: what of the pool is held, cached and idle, or free."""
    note = "Shares of all blocks. Cached and idle: findable, and free for whoever needs room. " + _thinning(most)
    figure = canvas.panels("KV cache", note, basis, list(runs), 1, 200)
    for row, run in enumerate(runs.values(), 1):
        of = timeline(run)
        keep = thin(of.time, of.held, most)
        for label, shares, fill in (
            ("held by requests", of.held, canvas.BLUE),
            ("cached, idle", of.cached, canvas.SKY),
            ("free", of.free, canvas.FAINT),
        ):
            look = {"stackgroup": "pool", "fillcolor": fill, "line": {"width": 0, "color": fill}, "hover": "%{y:.1%}"}
            canvas.line(figure, row, label, of.time[keep], shares[keep], look, row == 1)
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    return canvas.over_time(figure, dict.fromkeys(range(1, len(runs) + 1), "share of KV blocks"))


def step_timeline(runs: Runs, basis: str = "", most: int = MAX_POINTS) -> go.Figure:
    """Two panels a run: how long steps took, and how many tokens of which kind they held."""
    note = (
        "A point a step. Decode: tokens that gave an answer's second or a later one. Prefill: all others, those "
        "computed again included. " + _thinning(most)
    )
    figure = canvas.panels("Steps", note, basis, list(runs), 2, 190)
    titles: dict[int, str] = {}
    for first, run in zip(range(1, 2 * len(runs), 2), runs.values(), strict=True):
        for each in _points(steps(run)):
            chosen, row = each.chosen, first + each.panel
            unit = ("ms", "tokens")[each.panel]
            canvas.dots(figure, row, each.label, each.x[chosen], each.y[chosen], most, each.color, unit, first == 1)
        titles |= {first: "duration, ms", first + 1: "tokens a step"}
        figure.update_yaxes(type="log", dtick=1, rangemode="normal", row=first + 1, col=1)
    figure.update_layout(hovermode="closest", legend_itemsizing="constant")
    return canvas.over_time(figure, titles)


class _Points(NamedTuple):
    panel: int
    label: str
    color: str
    x: Floats
    y: Floats
    chosen: np.ndarray[Any, np.dtype[np.bool_]]


def _points(of: Steps) -> Iterator[_Points]:
    prefills, decodes, padding = of.prefill_tokens, of.decode_tokens, of.padding_tokens
    yield _Points(0, "steps with prefill", canvas.ORANGE, of.begin, 1e3 * of.duration, prefills > 0)
    yield _Points(0, "steps of decodes only", canvas.GREEN, of.begin, 1e3 * of.duration, prefills == 0)
    yield _Points(1, "prefill tokens", canvas.ORANGE, of.begin, prefills, prefills > 0)
    yield _Points(1, "decode tokens", canvas.GREEN, of.begin, decodes, decodes > 0)
    if padding.any():
        yield _Points(1, "padding tokens", canvas.GREY, of.begin, padding, padding > 0)


def _thinning(most: int) -> str:
    return f"At most {most:,} points a trace, every peak among them."

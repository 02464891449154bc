"""Capacity as a page: the answer, what it rests on, and rates as charts."""

from __future__ import annotations

from html import escape

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]

from sim import canvas
from sim.experiment.capacity.commands import answer, lines, tables
from sim.experiment.capacity.plan import Capacity, pareto
from sim.experiment.capacity.slo_rate import SloRate
from sim.html_page import figure, from_rich, page, section


def page_of(found: Capacity) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines(found))
    parts = [f"<p class='answer'>{escape(answer(found))}</p>", section("What goes with it", f"<dl>{rows}</dl>")]
    parts += [section("Rates", *map(from_rich, tables(found)))] if found.plan else []
    parts += [section("Charts", *map(figure, charts(found)))] if found.plan else []
    return page("capacity", "\n".join(parts))


def charts(found: Capacity) -> list[go.Figure]:
    drawn = [by_rate(found), tokens(found)]
    return [*drawn, day(found)] if found.day is not None else drawn


def by_rate(found: Capacity) -> go.Figure:
    """Who meets every bound, and the goodput; the interval of a replica's rate is shaded."""
    known = [(each.rate, each.attained, each.goodput) for each in found.points if each.attained is not None]
    rates = np.array([rate for rate, _, _ in known])
    note = "One replica; overloaded rates are left out. Shaded: the largest rate that keeps the objectives."
    chart = canvas.frame("Objectives and goodput by rate", note, found.provenance, 1, 2, 300, horizontal_spacing=0.1)
    met = np.array([100.0 * share.mean for _, share, _ in known])
    goodput = np.array([each for _, _, each in known], dtype=np.float64)
    for column, (name, values, title) in enumerate(
        (("every bound met", met, "requests, %"), ("goodput", goodput, "req/s that met every bound")), 1
    ):
        look = {"line": {"shape": "linear", "width": 2, "color": canvas.color(column - 1)}, "column": column}
        canvas.line(chart, 1, name, rates, values, look)
        chart.update_xaxes(title_text="req/s", row=1, col=column)
        chart.update_yaxes(title_text=title, row=1, col=column)
        if isinstance(found.found, SloRate):
            ends = found.found.rate
            chart.add_vrect(ends.low, ends.high, fillcolor=canvas.GREEN, opacity=0.2, line_width=0, row=1, col=column)
    return canvas.said_if_empty(chart, "every rate was overloaded")


def tokens(found: Capacity) -> go.Figure:
    """What a user sees of the speed against what a GPU makes of it."""
    known = [each for each in found.points if each.tokens_per_user is not None]
    front = pareto(known)
    note = "A dot is a rate; of the median request. Joined: no other is better for users without being worse per GPU."
    chart = canvas.frame("Speed for users against throughput", note, found.provenance, 1, 1, 320)
    kept = [each for each in known if each.keeps]
    for name, points, color in (
        ("objectives kept", kept, canvas.BLUE),
        ("objectives missed", [each for each in known if not each.keeps], canvas.VERMILLION),
    ):
        x, y = (np.array(each, dtype=np.float64) for each in ([p.tokens_per_user for p in points],
                [p.tokens_per_gpu for p in points]))  # fmt: skip
        look = {"mode": "markers", "marker": {"color": color, "size": 10}}
        canvas.trace(chart, 1, name, x, y, bool(points), look)
    ordered = sorted(front, key=lambda each: each.tokens_per_user or 0.0)
    x, y = (np.array(each, dtype=np.float64) for each in ([p.tokens_per_user for p in ordered],
            [p.tokens_per_gpu for p in ordered]))  # fmt: skip
    canvas.line(chart, 1, "front", x, y, {"line": {"shape": "linear", "color": canvas.GREY, "width": 1.5}})
    chart.update_xaxes(title_text="tokens a second, of a user")
    chart.update_yaxes(title_text="tokens of answers a second, of a GPU")
    chart.update_layout(hovermode="closest")
    return canvas.said_if_empty(chart, "every rate was overloaded")


def day(found: Capacity) -> go.Figure:
    assert found.day is not None and isinstance(found.found, SloRate), "no day to draw"
    rates = np.array(found.day.rates)
    needed = np.ceil(rates / found.found.rate.low) * found.gpus_per_replica
    note = "GPUs that each part of the time needs; a fleet that cannot follow it needs the most of them all the time."
    chart = canvas.frame("Over the day", note, found.day.source, 2, 1, 320, shared_xaxes=True, vertical_spacing=0.1)
    edges = np.linspace(0.0, 1.0, len(rates) + 1) * 100.0
    canvas.binned(chart, 1, "req/s", edges, rates, {"line": {"color": canvas.BLUE}}, legend=False)
    canvas.binned(chart, 2, "GPUs", edges, needed, {"line": {"color": canvas.VERMILLION}}, legend=False)
    chart.update_xaxes(title_text="% of the time", row=2, col=1)
    chart.update_yaxes(title_text="req/s", row=1, col=1)
    chart.update_yaxes(title_text="GPUs", row=2, col=1)
    return chart

"""Charts of predictions against records: latency distributions by run, and levels over time where they were sampled."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go  # type: ignore[import-untyped]

from calibration.figures import LATENCIES
from calibration.validate import Validation
from sim import canvas
from sim.series import timeline
from sim.spread import cdf

MOST = 400  # points a curve


def validation_charts(found: Sequence[Validation], basis: str = "") -> list[go.Figure]:
    charts = [latency_cdfs(found, basis)]
    return charts + [levels(each, basis) for each in found if each.run.series.times]


def latency_cdfs(found: Sequence[Validation], basis: str = "") -> go.Figure:
    """A row a run; recorded and predicted in each panel."""
    rows = len(found)
    grid = {"horizontal_spacing": 0.07, "vertical_spacing": 0.16 / rows}
    note = "Share of completed requests; milliseconds. TPOT: (last - first token) / (tokens - 1)."
    figure = canvas.frame("Predicted and recorded latency", note, basis, rows, 3, 70 + 190 * rows, **grid)
    for row, each in enumerate(found, 1):
        for column, name in enumerate(LATENCIES, 1):
            for label, color, of in (
                ("recorded", canvas.BLUE, each.recorded),
                ("predicted", canvas.VERMILLION, each.predicted),
            ):
                curve = cdf(getattr(of, name) * 1e3, MOST)
                line = {"color": color, "shape": "hv", "dash": "solid" if label == "recorded" else "dash"}
                trace = go.Scatter(
                    x=curve.x, y=curve.y, name=label, legendgroup=label, line=line, mode="lines",
                    showlegend=row == column == 1,
                )  # fmt: skip
                figure.add_trace(trace, row=row, col=column)
            figure.update_xaxes(title_text=f"{name.upper()}, ms", row=row, col=column)
        figure.update_yaxes(title_text=each.run.name, row=row, col=1)
    return figure


def levels(each: Validation, basis: str = "") -> go.Figure:
    """Running, waiting and the pool's share in use, as sampled and as predicted."""
    series, line = each.run.series, timeline(each.played)
    panels = [
        ("running", series.running, line.running),
        ("waiting", series.waiting, line.waiting),
        ("KV in use", series.kv_usage, line.held),
    ]
    panels = [panel for panel in panels if panel[1]]
    figure = canvas.frame(
        f"Levels: {each.run.name}", "Seconds from the start.", basis, len(panels), 1, 170 * len(panels)
    )
    for row, (name, theirs, ours) in enumerate(panels, 1):
        for label, color, x, y in (
            ("recorded", canvas.BLUE, series.times, theirs),
            ("predicted", canvas.VERMILLION, line.time, ours),
        ):
            line_style = {"color": color, "shape": "hv"}
            trace = go.Scatter(
                x=x, y=y, name=label, legendgroup=label, line=line_style, mode="lines", showlegend=row == 1
            )
            figure.add_trace(trace, row=row, col=1)
        figure.update_yaxes(title_text=name, row=row, col=1)
    return figure

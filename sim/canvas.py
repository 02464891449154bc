"""What all charts share: the frame with its title and subtitle, the clock, the colours, and how lines are drawn.

Colours are Okabe and Ito's (2008), told apart by the colour blind, and seen on white and on black.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import Any

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from plotly.subplots import make_subplots  # type: ignore[import-untyped]

from sim.series import Floats, thin

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
GREY, FAINT, CLEAR = "#8A8A8A", "rgba(128,128,128,0.22)", "rgba(0,0,0,0)"
TOP, BOTTOM = 40, 60  # pixels, for the legend and the clock


def color(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> str:
    return DASHES[index % len(DASHES)]


def frame(title: str, note: str, basis: str, rows: int, cols: int, height: int, **grid: Any) -> go.Figure:
    """`height` of all panels, in pixels. `meta` is for pages that set the texts themselves, and take the room back."""
    figure = make_subplots(rows=rows, cols=cols, **grid)
    lines = wrap(f"{note} {basis}".strip(), 140)
    subtitle = "".join(f"<br><span style='font-size:12px'>{escape(line)}</span>" for line in lines)
    text_height = 40 + 16 * len(lines)
    figure.update_layout(
        template="none",
        meta={"title": title, "note": note, "basis": basis, "text_height": text_height},
        title={"text": f"<b>{escape(title)}</b>{subtitle}", "x": 0, "xref": "paper", "y": 1, "yref": "container",
               "yanchor": "top", "pad": {"t": 12}, "font": {"size": 16}},
        height=height + text_height + TOP + BOTTOM,
        margin={"l": 84, "r": 20, "t": text_height + TOP, "b": BOTTOM},
        legend={"orientation": "h", "x": 0, "y": 1 + 16 / height, "yanchor": "bottom"},
        font={"family": "system-ui, sans-serif", "size": 13},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        modebar={"bgcolor": CLEAR, "color": GREY, "activecolor": BLUE},
        hovermode="x unified",
    )  # fmt: skip
    axis = {"gridcolor": FAINT, "zeroline": False, "separatethousands": True, "rangemode": "tozero",
            "title": {"font": {"size": 12}, "standoff": 12}}  # fmt: skip
    figure.update_xaxes(axis, hoverformat=",.6~g")
    figure.update_yaxes(axis)
    return figure


def panels(title: str, note: str, basis: str, names: Sequence[str], rows_a_run: int, height: int) -> go.Figure:
    """Rows of `height` pixels, one below the other on one clock; each run's first is named where there are several."""
    rows = rows_a_run * len(names)
    titles = [escape(name) if row == 0 and len(names) > 1 else "" for name in names for row in range(rows_a_run)]
    grid = {"shared_xaxes": True, "vertical_spacing": min(0.9, 44 / height) / rows, "subplot_titles": titles}
    figure = frame(title, note, basis, rows, 1, height * rows, **grid)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    if len(names) > 1:
        figure.update_layout(legend_y=1 + 34 / (height * rows), margin_t=figure.layout.margin.t + 18)
        figure.update_layout(height=figure.layout.height + 18)
    return figure


def over_time(figure: go.Figure, titles: Mapping[int, str]) -> go.Figure:
    """Titles by row; one clock for all."""
    ends = [trace.x[end] for trace in figure.data if len(trace.x) for end in (0, -1)]
    figure.update_xaxes(matches="x", range=[min(ends), max(ends)] if ends else None)
    figure.update_xaxes(title_text="simulated time, s", row=max(titles), col=1)
    for row, title in titles.items():
        figure.update_yaxes(title_text=title, row=row, col=1)
    return said_if_empty(figure, "no step ran")


def said_if_empty(figure: go.Figure, text: str) -> go.Figure:
    if not any(len(trace.x) for trace in figure.data):
        figure.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    return figure


# -- traces -------------------------------------------------------------------------------------------------------


def line(
    figure: go.Figure, row: int, name: str, x: Floats, y: Floats, look: Mapping[str, Any], legend: bool = True
) -> None:
    """Flat from each point to the next. `look` may say how to hover, and in which column to draw."""
    style = {"width": 1.5, "shape": "hv", **look.get("line", {})}
    trace(figure, row, name, x, y, legend, {**look, "line": style, "mode": "lines"})


def binned(
    figure: go.Figure, row: int, name: str, edges: Floats, y: Floats, look: Mapping[str, Any], legend: bool = True
) -> None:
    line(figure, row, name, edges, np.append(y, y[-1:]), look, legend)


def dots(
    figure: go.Figure, row: int, name: str, x: Floats, y: Floats, most: int, color: str, unit: str, legend: bool
) -> None:
    """Thinned to `most`, its peaks kept."""
    keep = thin(x, y, most)
    marker = {"color": color, "size": 4, "opacity": 0.7}
    look = {"mode": "markers", "marker": marker, "cliponaxis": False, "hover": f"%{{y:,.4~g}} {unit} at %{{x:,.6~g}} s"}
    trace(figure, row, name, x[keep], y[keep], legend, look)


def trace(figure: go.Figure, row: int, name: str, x: Floats, y: Floats, legend: bool, look: Mapping[str, Any]) -> None:
    """Names come from users, and plotly reads HTML in them. Curves of one name are shown and hidden together."""
    style = {key: value for key, value in look.items() if key not in ("hover", "column")}
    label = escape(name)
    figure.add_trace(
        go.Scatter(
            x=x,
            y=np.asarray(y, dtype=np.float32),
            name=label,
            legendgroup=label,
            showlegend=legend,
            hovertemplate=look.get("hover", "%{y:,.4~g}"),
            **style,
        ),
        row=row,
        col=look.get("column", 1),
    )

"""What leaks, as charts: each channel's advantage with its bounds, scope by scope; and what noise does to it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]

from sim import canvas
from sim.experiment.isolation.audit import Audit, Found
from sim.experiment.isolation.channels import POSITIVE
from sim.experiment.isolation.leakage import LEVEL


def charts(found: Audit) -> list[go.Figure]:
    loads = {each.load for each in found.found}
    return [advantages(found), *([by_load(found)] if len(loads) > 1 else [])]


def advantages(found: Audit) -> go.Figure:
    """A panel a channel, a row a scope: D, and where the true one lies."""
    first, channels = found.found[0].load, _channels(found)
    note = (
        f"{found.num_trials} trials of each kind, others at load {first:g}. Bars: where the true advantage lies, to "
        f"either side with {100 * LEVEL:g} %. Grey: nothing was found."
    )
    figure = canvas.frame("What an attacker gains over guessing", note, "", 1, len(channels), 300, shared_yaxes=True)
    for column, channel in enumerate(channels, 1):
        cells = [each for each in reversed(found.found) if each.channel == channel and each.load == first]
        for color, name, part in (
            (canvas.VERMILLION, "found", [each for each in cells if each.leaks]),
            (canvas.GREY, "nothing found", [each for each in cells if not each.leaks]),
        ):
            if part:
                figure.add_trace(_dots(part, name, color, column == 1), row=1, col=column)
        figure.update_xaxes(title_text=f"D, {channel}", range=[-0.04, 1.04], row=1, col=column)
        figure.update_yaxes(categoryorder="array", categoryarray=[each.scope for each in cells], row=1, col=column)
    figure.update_layout(hovermode="closest", margin_l=140)
    return figure


def _dots(cells: Sequence[Found], name: str, color: str, legend: bool) -> go.Scatter:
    leaks = [each.leak for each in cells]
    return go.Scatter(
        x=[it.advantage for it in leaks],
        y=[escape(each.scope) for each in cells],
        error_x={
            "array": [it.most - it.advantage for it in leaks],
            "arrayminus": [it.advantage - it.least for it in leaks],
            "symmetric": False,
            "thickness": 2,
            "width": 0,
        },
        mode="markers",
        marker={"color": color, "size": 9},
        name=name,
        legendgroup=name,
        showlegend=legend,
        hovertemplate="%{y}: D %{x:.3f}<extra></extra>",
    )


def by_load(found: Audit) -> go.Figure:
    """A panel a channel, a line a scope, over how busy others keep the server."""
    channels = _channels(found)
    note = "What others keep busy drowns what the attacker measures. Scopes that lie on one another are one line."
    figure = canvas.frame("An attacker's gain against the load", note, "", 1, len(channels), 260)
    scopes = list(dict.fromkeys(each.scope for each in found.found))
    for column, channel in enumerate(channels, 1):
        for number, scope in enumerate(scopes):
            cells = sorted(
                (each for each in found.found if (each.channel, each.scope) == (channel, scope)), key=lambda it: it.load
            )
            x, y = (np.array([value(each) for each in cells]) for value in (_load, _advantage))
            style = {"color": canvas.color(number), "dash": canvas.dash(number), "width": 2, "shape": "linear"}
            look = {"line": style, "column": column, "hover": "D %{y:.3f} at load %{x:g}"}
            canvas.line(figure, 1, scope, x, y, look, column == 1)
        figure.update_xaxes(title_text=f"load; {channel}", row=1, col=column)
        figure.update_yaxes(range=[-0.02, 1.04], row=1, col=column)
    figure.update_yaxes(title_text="D", row=1, col=1)
    return figure


def _load(each: Found) -> float:
    return each.load


def _advantage(each: Found) -> float:
    return each.leak.advantage


def _channels(found: Audit) -> list[str]:
    return [name for name in dict.fromkeys(each.channel for each in found.found) if name != POSITIVE.name]

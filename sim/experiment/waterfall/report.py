"""The waterfall as people read it: a line that answers, a table, a page with its chart."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from sim import canvas
from sim.experiment.waterfall.losses import Level, Waterfall, waterfall
from sim.files import whole_file
from sim.report import quantity, seconds
from sim.setup import Setup


def run_waterfall(setup: Setup, out: Path | None, html: Path | None) -> None:
    found = waterfall(setup)
    if out is not None:
        with whole_file(out) as file:
            json.dump(to_dict(found, setup), file, indent=1)
            file.write("\n")
    if html is not None:
        write_html(html, found, setup)
    if str(out) != "-":
        print_waterfall(Console(), found)


def to_dict(found: Waterfall, setup: Setup) -> dict[str, Any]:
    return {
        "setup": setup.to_dict(),
        "num_requests": found.num_requests,
        "num_prompt_tokens": found.num_prompt_tokens,
        "prefill_nanoseconds": found.prefill.nanoseconds,
        "levels": [asdict(each) for each in found.levels],
        "losses": [asdict(each) for each in found.losses],
    }


def print_waterfall(console: Console, found: Waterfall) -> None:
    console.print(answer(found), style="bold", highlight=False)
    if found.ceiling.num_tokens:
        console.print()
        console.print(table(found), highlight=False)
        console.print(NOTE, style="dim", highlight=False)


NOTE = (
    "The run's own string of requests, in order of admission, played through caches ever more like the run's. Seconds: "
    "each prompt computed alone. +: a gain."
)


def answer(found: Waterfall) -> str:
    """What of the possible is found, and what costs most."""
    if not found.num_requests:
        return "no request was admitted: there is nothing to find"
    if not found.ceiling.num_tokens:
        return f"not one of {found.num_prompt_tokens:,} prompt tokens has come before: no cache would find any"
    whole, share = found.ceiling, found.found.num_tokens / found.ceiling.num_tokens
    begin = (
        f"{_share(whole.num_tokens, found.num_prompt_tokens)} of {found.num_prompt_tokens:,} prompt tokens have come "
        f"before; of these {quantity('%', share)} are found, which saves {seconds(found.found.seconds)} of prefill"
    )
    worst = max(found.losses, key=lambda each: each.num_tokens)
    if worst.num_tokens <= 0:
        return f"{begin}; nothing is lost"
    lost = f"{_share(worst.num_tokens, whole.num_tokens)}, {seconds(worst.seconds)} of prefill"
    return f"{begin}; most is lost to {worst.name} ({lost})"


def table(found: Waterfall) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    made.add_column("")
    for name in ("tokens", "of the possible", "prefill saved"):
        made.add_column(name, justify="right")
    made.add_row(f"{found.ceiling.name} finds", *_cells(found.ceiling, found))
    for each in found.losses:
        made.add_row(f"  lost to {each.name}", *_cells(each, found, "-"))
    made.add_row("this run finds", *_cells(found.found, found))
    return made


def _cells(level: Level, found: Waterfall, sign: str = "") -> tuple[str, str, str]:
    if sign and not level.num_tokens and not level.nanoseconds:
        return "0", "0.0 %", "-"
    gain = sign and (level.num_tokens < 0 or level.nanoseconds < 0)
    sign = "+" if gain else sign
    tokens, time = abs(level.num_tokens), abs(level.seconds)
    return f"{sign}{tokens:,}", f"{sign}{_share(tokens, found.ceiling.num_tokens)}", f"{sign}{seconds(time)}"


def _share(part: int, whole: int) -> str:
    return quantity("%", part / whole) if whole else "-"


# -- the page ---------------------------------------------------------------------------------------------------------


def write_html(path: Path, found: Waterfall, setup: Setup) -> None:
    from sim.html_page import figure, from_rich, note, page, section

    said = f"<p class='answer short'>{escape(answer(found))}</p>"
    body = "".join(
        (
            section("Where hits go", said, figure(chart(found)), from_rich(table(found)), note(NOTE)),
            section("Setup", f"<pre>{escape(setup.to_toml() or 'all defaults')}</pre>"),
        )
    )
    with whole_file(path) as file:
        file.write(page("waterfall", body))


def chart(found: Waterfall) -> go.Figure:
    """From the endless cache down to the run, a bar a loss."""
    note = "Shares of all prompt tokens; what is lost hangs from what was left before it."
    figure = canvas.frame("From the endless cache to this run", note, "", 1, 1, 360)
    names = [found.ceiling.name, *(each.name for each in found.losses), "this run"]
    scale = 100.0 / max(1, found.num_prompt_tokens)
    tops = [0, *(each.num_tokens for each in found.levels[1:]), 0]
    heights = [found.ceiling.num_tokens, *(each.num_tokens for each in found.losses), found.found.num_tokens]
    signed = [heights[0], *(-height for height in heights[1:-1]), heights[-1]]
    figure.add_trace(
        go.Bar(
            x=[escape(name).replace(" ", "<br>", 1) for name in names],
            y=[height * scale for height in heights],
            base=[base * scale for base in tops],
            marker={"color": [canvas.BLUE, *_colors(found), canvas.BLUE]},
            text=[f"{height * scale:.1f} %" for height in signed],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{x}: %{text}<extra></extra>",
        )
    )
    figure.update_yaxes(title_text="of prompt tokens, %", row=1, col=1)
    figure.update_layout(hovermode="closest", showlegend=False, bargap=0.35)
    return figure


def _colors(found: Waterfall) -> list[str]:
    return [canvas.ORANGE if each.num_tokens >= 0 else canvas.GREEN for each in found.losses]

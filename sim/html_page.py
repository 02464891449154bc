"""An HTML page that needs no network: its parts, its style, and plotly.js within.

All text is escaped here. A content security policy keeps the page from loading anything. Colours follow the reader's
light or dark setting, and paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import plotly.graph_objects as go  # type: ignore[import-untyped]
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
from rich.table import Table


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def note(text: str) -> str:
    return f"<p class='note'>{escape(text)}</p>" if text else ""


def figure(chart: go.Figure) -> str:
    """Title and subtitle as text of the page, which wraps; the figure as data that the page's script draws."""
    meta, layout = chart.layout.meta, chart.layout
    room = meta["text_height"]
    chart.update_layout(title=None, height=layout.height - room, margin_t=layout.margin.t - room)
    data = chart.to_json().replace("<", "\\u003c")
    return (
        f"<figure><h3>{escape(meta['title'])}</h3>{note(meta['note'] + ' ' + meta['basis'])}"
        f"<div class='chart' style='height:{layout.height}px'></div>"
        f"<script type='application/json'>{data}</script></figure>"
    )


def page(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} - servetwin</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>servetwin</h1>
{body}
<noscript><p>Charts need JavaScript; everything else does not.</p></noscript>
</main>
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def from_rich(table: Table) -> str:
    """The terminal's table: what is dim there is small print here."""
    columns = [[_cell(str(cell)) for cell in column.cells] for column in table.columns]
    head = "".join(f"<th>{escape(str(column.header))}</th>" for column in table.columns)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in zip(*columns, strict=True))
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(markup: str) -> str:
    """Of rich's markup only what the tables use: all else in brackets is a name."""
    plain, _, dim = markup.replace("\\[", "[").removesuffix("[/dim]").partition("[dim]")
    return f"<td>{escape(plain.strip())}{f' <small>{escape(dim)}</small>' if dim else ''}</td>"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --paper: #fff; --card: #f6f8fa;
  --good: #00724f; --bad: #b34700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a3acb6; --line: #3a424b; --paper: #14181c;
  --card: #1d2329; --good: #3ecf9b; --bad: #ff9a57; } }
@media print { :root { --ink: #000; --soft: #444; --line: #ccc; --paper: #fff; --card: #fff; --good: #00724f;
  --bad: #b34700; } figure, tr, .verdicts, dl { break-inside: avoid; } h2 { break-after: avoid; }
  table { font-size: 10.5px !important; } .wide { overflow: visible !important; }
  details, .modebar { display: none !important; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 14px; font-weight: 600; color: var(--soft); margin: 0 0 12px; letter-spacing: .04em; }
h2 { font-size: 19px; margin: 36px 0 10px; } h3 { font-size: 16px; margin: 18px 0 4px; }
.answer { font-size: 21px; line-height: 1.4; font-weight: 600; margin: 0 0 10px; overflow-wrap: anywhere; }
.answer.short { font-size: 16px; } .runs { display: grid; grid-template-columns: 
  repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 0 30px; }
.verdicts { list-style: none; padding: 0; margin: 0; } .verdicts li { padding: 4px 0; overflow-wrap: anywhere; }
.sign { font-weight: 700; display: inline-block; width: 1.2em; } .good .sign { color: var(--good); }
.bad .sign { color: var(--bad); } .note, small { color: var(--soft); font-size: 13px; } .note { margin: 8px 0 6px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 10px 0 18px; } table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; } th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
tr:has(+ tr > td:first-child:empty) td { border-bottom: 0; } .tables { display: flex; flex-wrap: wrap; gap: 0 60px; }
figure { margin: 0 0 26px; } details { margin-top: 30px; } summary { cursor: pointer; }
pre { background: var(--card); border: 1px solid var(--line); padding: 12px; font-size: 12px; overflow-x: auto; }
.chart :not(.hovertext) > text { fill: var(--ink) !important; }
.chart .gridlayer path { stroke: var(--line) !important; stroke-opacity: 1 !important; }
.chart .hoverlayer .legend .bg { fill: var(--card) !important; }
"""

SCRIPT = """
for (const data of document.querySelectorAll("figure script")) {
  const figure = JSON.parse(data.textContent);
  Plotly.newPlot(data.previousElementSibling, figure.data, figure.layout, {responsive: true, displaylogo: false});
}
const fit = () => document.querySelectorAll(".chart").forEach((chart) => Plotly.Plots.resize(chart));
addEventListener("beforeprint", fit);
addEventListener("afterprint", fit);
"""

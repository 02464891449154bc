"""What `servetwin sweep` does, once its options are known."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from sim.commands import progress
from sim.experiment.sweep.play import Sweep, Swept, sweep
from sim.experiment.sweep.report import answer, headline, print_sweep, tables
from sim.experiment.sweep.workers import Workers
from sim.files import plain, whole_file
from sim.setup import Setup


def run_sweep(what: Sweep, rows: Path, workers: Workers, out: Path | None, html: Path | None) -> None:
    """Rows go to their file as they come; the result is judged once all are there."""
    num = what.num_points if what.method in ("lhs", "optuna") else len(what.points())
    with progress("sweep", num * what.num_seeds, every=1) as tick:
        found = sweep(what, rows, workers, tick=tick)
    told = f"rows in {rows}"
    if out is not None:
        with whole_file(out) as file:
            json.dump(to_dict(found), file, indent=1)
            file.write("\n")
    if html is not None:
        write_html(html, found, told)
    if str(out) != "-":
        print_sweep(Console(), found, told)


def to_dict(found: Swept) -> dict[str, Any]:
    """Without the runs' own metrics: these are the rows."""
    what = found.sweep
    result: dict[str, Any] = plain(
        {
            "base": what.base.to_dict(),
            "method": what.method,
            "num_seeds": what.num_seeds,
            "goal": asdict(what.goal),
            "knobs": [asdict(knob) for knob in what.knobs],
            "points": [
                {
                    "values": point.point,
                    "is_steady": point.is_steady,
                    "errors": point.errors,
                    **{metric: point.mean(metric) for metric in dict.fromkeys((*what.pareto, *what.metrics))},
                }
                for point in found.points
            ],
            "best": asdict(found.best),
            "front": found.front,
            "sensitivities": [asdict(each) for each in found.sensitivities],
            "notes": found.notes,
        }
    )
    return result


def write_html(path: Path, found: Swept, rows: str) -> None:
    from sim.experiment.sweep.charts import charts
    from sim.html_page import figure, from_rich, note, page, section

    said = f"<p class='answer short'>{_escaped(answer(found))}</p>" if found.sweep.goal.objective else ""
    body = "".join(
        (
            section("Sweep", said, *map(note, (*headline(found, rows), *found.notes))),
            section("Charts", *map(figure, charts(found))),
            *(section(title.partition(":")[0], note(title), from_rich(table)) for title, table in tables(found)),
            section("Setup", f"<pre>{_escaped(_toml(found.sweep.base))}</pre>"),
        )
    )
    with whole_file(path) as file:
        file.write(page("sweep", body))


def _toml(base: Setup) -> str:
    return base.to_toml() or "all defaults"


def _escaped(text: str) -> str:
    from html import escape

    return escape(text)

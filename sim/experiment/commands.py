"""What the experiments' commands do, once their options are known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.experiment.compare import METRICS, Compared, Comparison, compare
from sim.experiment.runner import Runner
from sim.files import whole_file
from sim.report import seconds
from sim.setup import Setup


def run_compare(
    a: Path,
    b: Path,
    runner: Runner,
    *,
    num: int,
    metrics: Sequence[str],
    precision: float | None,
    margin: float | None,
    factor: str | None,
    out: Path | None,
) -> None:
    """Print what differs between two setups, and how sure that is."""
    found = compare(
        Setup.from_toml(a),
        Setup.from_toml(b),
        runner,
        num=num,
        metrics=metrics or METRICS,
        primary=metrics[0] if metrics else "ttft.mean",
        precision=precision,
        margin=margin,
        factor=factor,
    )
    if out is not None:
        with whole_file(out) as file:
            json.dump(_plain(asdict(found)), file, indent=1)
            file.write("\n")
    if str(out) != "-":
        print_comparison(Console(), a.stem, b.stem, found, margin)


def print_comparison(console: Console, a: str, b: str, found: Comparison, margin: float | None = None) -> None:
    console.print(f"A: {a}   B: {b}", style="bold", highlight=False)
    for name, (x, y) in found.factor.items():
        console.print(f"{name}: A {x!r}, B {y!r}", highlight=False)
    if not found.factor:
        console.print("the arms do not differ")
    if found.compared:
        console.print(_table(found.compared), highlight=False)
    for arm, num in found.saturated.items():
        console.print(f"{arm} was overloaded in {num} of {found.num} runs", style="bold", highlight=False)
    if found.refused:
        console.print("latencies are not compared: they grow with the length of an overloaded run", highlight=False)
    equal = "" if margin is None else f"; equivalent: surely less than {100 * margin:g} % apart"
    console.print(
        f"{found.num} seeds an arm, the same requests in both; B - A in shares of A, with 95 % intervals; r: "
        f"correlation of the pairs; p: Holm over all rows{equal}",
        style="dim",
        highlight=False,
    )
    best, reason = found.winner
    console.print(f"better: {f'{best}, ' if best else 'neither, '}{reason}", style="bold", highlight=False)
    for note in found.notes:
        console.print(note, highlight=False)


def _table(compared: Sequence[Compared]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("", "A", "B", "B - A", "r", "p"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in compared:
        table.add_row(
            each.metric.replace(".", " ").replace("_", " "),
            _shown(each.metric, each.a),
            _shown(each.metric, each.b),
            _change(each),
            "-" if math.isnan(each.effect.correlation) else f"{each.effect.correlation:.2f}",
            "<.001" if each.p_adjusted < 0.001 else f"{each.p_adjusted:.3f}",
            each.verdict,
        )
    return table


def _shown(metric: str, value: float) -> str:
    if "rate" in metric:
        return f"{100 * value:.1f} %"
    return seconds(value) if "." in metric else f"{value:,.4g}"


def _change(each: Compared) -> str:
    relative, d = each.effect.relative, each.effect.difference
    if math.isnan(relative.mean):
        return f"{d.mean:+.3g} ± {d.half_width:.2g}" if d.mean else "0"
    return f"{100 * relative.mean:+.1f} ± {100 * relative.half_width:.1f} %"


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

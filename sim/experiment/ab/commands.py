"""What the experiments' commands do, once their options are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sim.experiment.ab.bodies import MARGIN, Bodies, compare_bodies
from sim.experiment.ab.compare import METRICS, Compared, Comparison, compare
from sim.experiment.runner import Runner
from sim.experiment.statistics import Interval
from sim.files import write_json
from sim.report import cache_said, seconds
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
        write_json(out, asdict(found))
    if str(out) != "-":
        print_comparison(Console(), a.stem, b.stem, found, margin)


def run_compare_bodies(
    a: Path,
    b: Path,
    simulated: Runner,
    live: Runner,
    settle: Callable[[Setup], Setup],
    *,
    model: str,
    costs: str | None,
    num: int,
    num_live: int,
    metrics: Sequence[str],
    margin: float | None,
    factor: str | None,
    out: Path | None,
) -> None:
    """Print what differs in each body, and whether the bodies agree on it."""
    one, other = (replace(Setup.from_toml(path), model=model) for path in (a, b))
    found = compare_bodies(
        one,
        other,
        simulated,
        live,
        settle,
        costs=costs,
        num=num,
        num_live=num_live,
        metrics=metrics or METRICS,
        margin=margin or MARGIN,
        factor=factor,
    )
    if out is not None:
        told = [{**asdict(each), "sign": each.sign, "size": each.size} for each in found.agreements]
        write_json(out, {**asdict(found), "agreements": told})
    if str(out) != "-":
        print_bodies(Console(), a.stem, b.stem, found, margin or MARGIN)


def print_bodies(console: Console, a: str, b: str, found: Bodies, margin: float) -> None:
    for name, comparison in (("simulated", found.simulated), ("live", found.live)):
        console.print(name, style="bold underline", highlight=False)
        print_comparison(console, a, b, comparison, margin)
        console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("B - A of A", "simulated", "live", "sign", "size"):
        table.add_column(column, justify="left" if column in ("B - A of A", "sign", "size") else "right", no_wrap=True)
    for each in found.agreements:
        table.add_row(_named(each.metric), _percent(each.simulated), _percent(each.live), each.sign, each.size)
    console.print(table, highlight=False)
    console.print(
        f"sizes agree if surely (two tests at 5 %) within {100 * margin:g} % of A; undecided: intervals are too wide",
        style="dim",
        highlight=False,
    )


def _percent(effect: Interval) -> str:
    return f"{100 * effect.mean:+.1f} ± {100 * effect.half_width:.1f} %"


def print_comparison(console: Console, a: str, b: str, found: Comparison, margin: float | None = None) -> None:
    console.print(f"A: {a}   B: {b}", style="bold", highlight=False)
    for name, (x, y) in found.factor.items():
        console.print(f"{name}: A {x!r}, B {y!r}", highlight=False)
    if not found.factor:
        console.print("the arms do not differ")
    _print_scopes(console, found)
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


def _print_scopes(console: Console, found: Comparison) -> None:
    """Whatever is compared: who may learn by its speed what others asked."""
    a, b = found.scopes
    told = f"in both arms {a}" if a == b else f"A {a}; B {b}"
    cache = " against ".join(dict.fromkeys(map(cache_said, found.cache_states)))
    console.print(f"prefixes shared: {told}; cache {cache}", highlight=False, markup=False)


def _table(compared: Sequence[Compared]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("", "A", "B", "B - A", "r", "p"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in compared:
        table.add_row(
            _named(each.metric),
            _shown(each.metric, each.a),
            _shown(each.metric, each.b),
            _change(each),
            "-" if math.isnan(each.effect.correlation) else f"{each.effect.correlation:.2f}",
            "<.001" if each.p_adjusted < 0.001 else f"{each.p_adjusted:.3f}",
            each.verdict,
        )
    return table


def _named(metric: str) -> str:
    return metric.replace(".", " ").replace("_", " ")


def _shown(metric: str, value: float) -> str:
    if "rate" in metric:
        return f"{100 * value:.1f} %"
    return seconds(value) if "." in metric else f"{value:,.4g}"


def _change(each: Compared) -> str:
    relative, d = each.effect.relative, each.effect.difference
    if math.isnan(relative.mean):
        return f"{d.mean:+.3g} ± {d.half_width:.2g}" if d.mean else "0"
    return _percent(relative)

"""`servetwin fairness`: who gets what, and at whose cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sim.experiment.fairness.shares import Fairness, Share, fairness
from sim.experiment.statistics import Interval
from sim.files import write_json
from sim.report import seconds
from sim.setup import Setup

Show = Callable[[float], str]


def run_fairness(setup: Setup, num: int, by: str | None, out: Path | None) -> None:
    found = fairness(setup, num, by)
    if out is not None:
        write_json(out, asdict(found))
    if str(out) != "-":
        print_fairness(Console(), found)


def print_fairness(console: Console, found: Fairness) -> None:
    for line in verdicts(found):
        console.print(line, style="bold", highlight=False, markup=False)
    console.print()
    console.print(_table(found), highlight=False)
    console.print(_legend(found), style="dim", highlight=False)


def verdicts(found: Fairness) -> list[str]:
    """How evenly, who is slowed most and by whom, and whether the policy keeps its promise."""
    service, waits = found.of_run(lambda run: run.jain_service), found.of_run(lambda run: run.jain_waits)
    jain = f"{found.scheduling}, by {found.kind}: Jain {_digits(service)} of service"
    if found.num_saturated:
        times = f"{found.num_saturated} of {len(found.runs)} runs"
        grows = "waits and slowdowns grow with the length of the run and are left out; service is not"
        return [jain, f"overloaded in {times}: {grows}", _promise(found)]
    lines = [f"{jain}, {_digits(waits)} of waits"]
    slowed = {name: found.of_group(name, lambda share: share.slowdown_mean) for name in found.groups}
    worst = max(found.groups, key=lambda name: -1.0 if math.isnan(slowed[name].mean) else slowed[name].mean)
    loudest = found.runs[0].loudest
    lines.append(f"slowed most: {worst}, to ×{_digits(slowed[worst])} of its time alone; the loudest is {loudest}")
    return [*lines, _promise(found)]


def _promise(found: Fairness) -> str:
    gap = max(run.gap for run in found.runs)
    if not gap:
        return "no two of them ever waited at once: nothing to be fair about"
    told = f"while two waited, what they got came {gap:,.0f} charged tokens apart at most"
    bounds = [run.bound for run in found.runs if run.bound is not None]
    if not bounds:
        return f"{told}; the policy promises no bound"
    kept = all(run.bound is not None and run.gap <= run.bound.tokens for run in found.runs)
    least = min(bound.tokens for bound in bounds)
    return f"{told}; bound {least:,.0f}, {'kept' if kept else 'BROKEN'} ({bounds[0].rule})"


COLUMNS: tuple[tuple[str, Callable[[Share], float], str], ...] = (
    ("service", lambda s: s.service, "%"),
    ("of alone", lambda s: s.normalised, "%"),
    ("KV held", lambda s: s.block_seconds, "%"),
    ("wait", lambda s: s.wait_mean, "s"),
    ("p99", lambda s: s.wait_p99, "s"),
    ("most", lambda s: s.wait_max, "s"),
    ("slowed", lambda s: s.slowdown_mean, "x"),
    ("p99", lambda s: s.slowdown_p99, "x"),
    ("noise", lambda s: s.amplification, "x"),
)


def _table(found: Fairness) -> Table:
    """A row a group, and beneath it half the width of each interval."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(found.kind, no_wrap=True)
    left_out = ("s", "x") if found.num_saturated else ()
    for name, _, unit in COLUMNS:
        if unit not in left_out:
            table.add_column(name, justify="right", no_wrap=True)
    for name in found.groups:
        cells = [(found.of_group(name, pick), unit) for _, pick, unit in COLUMNS if unit not in left_out]
        table.add_row(escape(name), *[_shown(each.mean, unit) for each, unit in cells])
        if len(found.runs) > 1:
            table.add_row("", *[f"[dim]±{_shown(each.half_width, unit)}[/dim]" for each, unit in cells])
    return table


def _shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "s":
        return seconds(value)
    return f"{100 * value:.0f} %" if unit == "%" else f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _digits(value: Interval) -> str:
    places = 3 if value.mean <= 1.0 else 2
    if math.isnan(value.low):
        return f"{value.mean:.{places}f}"
    return f"{value.mean:.{places}f} ± {value.half_width:.{places}f}"


def _legend(found: Fairness) -> str:
    num = len(found.runs)
    seeds = f"means of {num} seeds with 95 % intervals" if num > 1 else "one run, so no intervals"
    return (
        f"{seeds}. service: charged tokens; of alone: what it was served by the last arrival, of what it gets when it "
        "is alone; slowed: a request's time over its time alone, times; noise: TTFT p99 over that without the loudest "
        "other. A block that several share counts for each."
    )

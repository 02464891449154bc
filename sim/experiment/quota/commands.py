"""What `servetwin quota` does, once its options are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sim.experiment.quota.largest import KINDS, At, Quota, quota
from sim.experiment.runner import Runner
from sim.experiment.statistics import Interval
from sim.files import write_json
from sim.report import seconds
from sim.setup import Setup


def run_quota(
    setup: Setup, budgeted: str, protected: str, runner: Runner, *, kind: str, num: int, out: Path | None
) -> None:
    found = quota(setup, budgeted, protected, runner, kind, num)
    if out is not None:
        write_json(out, asdict(found))
    if str(out) != "-":
        print_quota(Console(), found)


def print_quota(console: Console, found: Quota) -> None:
    console.print(answer(found), style="bold", highlight=False)
    for line in details(found):
        console.print(line, highlight=False)
    if found.tried:
        console.print()
        console.print(table(found), highlight=False)
    num = found.unlimited.worst.num
    console.print(
        f"{num} seeds a budget, the same for all; in brackets 95 % intervals. Kept: all of it lies beneath the limit.",
        style="dim",
        highlight=False,
    )


def answer(found: Quota) -> str:
    limits = ", ".join(map(str, found.limits))
    if found.verdict == "no limit needed":
        return f"no limit needed: without one {found.protected} keeps {limits} ({_limited(found.unlimited)})"
    if found.best is None:
        first = KINDS[found.kind].first
        return (
            f"none: {found.protected} does not keep {limits} even if {found.budgeted} gets {found.kind} {first}, "
            f"the smallest tried ({KINDS[found.kind].unit})"
        )
    return (
        f"{found.kind} {found.best.budget:,} for {found.budgeted} ({KINDS[found.kind].unit}): {found.protected} then "
        f"keeps {limits} ({_limited(found.best)})"
    )


def details(found: Quota) -> Iterator[str]:
    if found.best is not None and found.verdict == "quota":
        yield (
            f"that buys {_rate(found.best.bought)} output tokens a second of {found.budgeted}, of "
            f"{_rate(found.unlimited.bought)} without a limit, where {found.protected} has {_limited(found.unlimited)}"
        )
    if found.of_seeds is not None:
        low, high = max(0.0, found.of_seeds.low), found.of_seeds.high
        yield f"each seed's own largest budget: {found.of_seeds.mean:,.4g} in the mean ({low:,.4g}–{high:,.4g})"
    yield from found.notes


def table(found: Quota) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    made.add_column(found.kind.replace("_", " "), justify="right")
    for limit in found.limits:
        name = f"{limit.metric} p{limit.percentile:g}".replace("_", " ")
        made.add_column(f"{found.protected} {name}", justify="right")
    made.add_column("", justify="left")
    made.add_column(f"{found.budgeted} out, tok/s", justify="right")
    for each in (*found.tried, found.unlimited):
        made.add_row(
            "no limit" if each.budget is None else f"{each.budget:,}",
            *(_seconds(interval) for interval in each.limited),
            "kept" if each.is_kept else "broken",
            _rate(each.bought),
        )
    return made


def _limited(at: At) -> str:
    return ", ".join(map(_seconds, at.limited))


def _seconds(interval: Interval) -> str:
    return f"{seconds(interval.mean)} ({seconds(max(0.0, interval.low), interval.high)})"


def _rate(interval: Interval) -> str:
    return f"{interval.mean:,.0f} ({max(0.0, interval.low):,.0f}–{interval.high:,.0f})"

"""`servetwin results`: what any benchmark tool measured, in one table, and as a Benchmark Report for others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from calibration.importers.llm_d import benchmark_report
from calibration.importers.read import read_results
from calibration.records import MeasuredRun
from calibration.summaries import MeasuredSummary, summary_of
from sim.files import whole_file


def show_results(paths: Sequence[Path], report: Path | None) -> None:
    """Print the totals of all runs in the files; write the only one as a Benchmark Report, if asked to."""
    summaries = [
        summary_of(each, "requests, one by one") if isinstance(each, MeasuredRun) else each
        for path in paths
        for each in read_results(path)
    ]
    console = Console()
    console.print(_table(summaries))
    for finding, names in _findings(summaries).items():
        whose = "all" if len(names) == len(summaries) > 1 else ", ".join(names)
        console.print(f"{whose}: {finding}", highlight=False, markup=False)
    if report is not None:
        _write(report, summaries)


def _findings(summaries: Sequence[MeasuredSummary]) -> dict[str, list[str]]:
    """What is doubtful, and in which runs."""
    found: dict[str, list[str]] = {}
    for summary in summaries:
        for finding in summary.findings:
            found.setdefault(finding, []).append(summary.name)
    return found


def _table(summaries: Sequence[MeasuredSummary]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    for name in ("done", "req/s", "TTFT ms", "p99", "TPOT ms", "p99", "E2E ms", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in summaries:
        done = f"{each.num_completed}" + (f" of {each.num_completed + each.num_failed}" if each.num_failed else "")
        times = [time for stats in (each.ttft, each.tpot, each.e2e) for time in (stats.mean, stats.p99)]
        shown = [_shown(None if time is None else time * 1e3) for time in times]
        table.add_row(each.name, done, _shown(each.request_rate), *shown)
    return table


def _shown(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _write(path: Path, summaries: Sequence[MeasuredSummary]) -> None:
    if len(summaries) > 1:
        raise ValueError(f"a Benchmark Report is of one run, and here are {len(summaries)}: give one file of one load")
    with whole_file(path) as file:
        yaml.safe_dump(benchmark_report(summaries[0]), file, sort_keys=False)

"""What `servetwin scenarios` does: play named cases in a body, and say of each which rules it kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.experiment.runner import Runner
from sim.experiment.scenarios import SCENARIOS, Scale, Verdict, named, play
from sim.experiment.scenarios.scenario import Arm
from sim.files import write_json
from sim.report import cache_said, quantity, seconds

# What the article asks to be reported of every case: name, metric, unit.
FIGURES = (
    ("TTFT mean", "ttft.mean", "s"),
    ("TTFT p99", "ttft.p99", "s"),
    ("TPOT mean", "tpot.mean", "s"),
    ("ITL p99", "itl.p99", "s"),
    ("queue delay mean", "queue_delay.mean", "s"),
    ("input, tok/s", "input_throughput", ""),
    ("output, tok/s", "output_throughput", ""),
    ("KV held, most", "max_kv_held", "%"),
    ("prefix tokens reused", "num_cached_tokens", "n"),
    ("prefix hits by token", "token_hit_rate", "%"),
    ("cancelled", "num_aborted", "n"),
    ("rejections", "num_rejected", "n"),
    ("errors", "num_failed", "n"),
)


def list_scenarios() -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("scenario", "of", "factor", "question"):
        table.add_column(column, no_wrap=column != "question")
    for each in SCENARIOS:
        table.add_row(each.name, each.requirement, each.factor.removeprefix("engine."), each.question)
    Console().print(table, highlight=False)


def run_scenarios(names: Sequence[str], runner: Runner, scale: Scale, out: Path | None) -> int:
    """0 if every case keeps its rules, else 1. All names are looked at before the first case is played."""
    chosen, console = named(list(names)), Console()
    owns_stdout = str(out) == "-"
    verdicts = []
    for scenario in chosen:
        verdicts.append(play(scenario, runner, scale))
        if not owns_stdout:
            print_verdict(console, verdicts[-1])
    num = sum(verdict.passes for verdict in verdicts)
    if out is not None:
        write_json(out, [to_dict(each) for each in verdicts])
    if not owns_stdout:
        console.print(f"{num} of {len(verdicts)} pass ({scale.body}, {scale.model})", style="bold", highlight=False)
    return int(num < len(verdicts))


def print_verdict(console: Console, verdict: Verdict) -> None:
    scenario, num = verdict.scenario, len(next(iter(verdict.arms.values())).outcomes)
    word = "PASS" if verdict.passes else "FAIL"
    console.print(f"{word}  {scenario.name} ({scenario.requirement})", style="bold", highlight=False)
    console.print(scenario.question, highlight=False)
    seeds = "one run" if num == 1 else f"{num} seeds"
    cache = cache_said(next(iter(verdict.arms.values())).outcomes[0].manifest["cache_state"])
    console.print(
        f"only {scenario.factor} differs; {seeds} an arm on {verdict.scale.model}, cache {cache}",
        style="dim",
        highlight=False,
    )
    console.print(_figures(list(verdict.arms.values())), highlight=False)
    console.print(_checks(verdict), highlight=False)
    console.print()


def _figures(arms: Sequence[Arm]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("mean of the runs", no_wrap=True)
    for arm in arms:
        table.add_column(arm.name, justify="right")
    classes = arms[0].outcomes[0].metrics["classes"]
    by_class = [(f"TTFT p50 of {name}", f"classes.{name}.ttft.p50", "s") for name in classes]
    for name, metric, unit in (*FIGURES, *by_class):
        table.add_row(name, *(_shown(unit, arm.mean(metric)) for arm in arms))
    return table


def _shown(unit: str, value: float) -> str:
    return seconds(value) if unit == "s" else quantity(unit, value)


def _checks(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for check in verdict.checks:
        table.add_row("kept" if check.is_kept else "BROKEN", check.rule, check.measured)
    return table


def to_dict(verdict: Verdict) -> dict[str, Any]:
    scenario = verdict.scenario
    return {
        "scenario": scenario.name,
        "requirement": scenario.requirement,
        "body": verdict.scale.body,
        "passes": verdict.passes,
        "factor": {name: dict(found) for name, found in verdict.factor.items()},
        "checks": [check._asdict() for check in verdict.checks],
        "arms": {name: [outcome._asdict() for outcome in arm.outcomes] for name, arm in verdict.arms.items()},
    }

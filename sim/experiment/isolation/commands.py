"""What `servetwin isolation` does, once its options are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.commands import progress
from sim.experiment.isolation.audit import LOADS, NUM_TRIALS, Audit, Prober, audit
from sim.experiment.isolation.channels import CHANNELS, Sizes
from sim.experiment.isolation.prices import Prices, prices
from sim.experiment.isolation.report import audit_parts, price_parts
from sim.experiment.isolation.scopes import scopes_of
from sim.files import whole_file, write_json
from sim.setup import Setup

WORKLOAD = "shared-prefix"  # of several tenants, unless another is named
NUM_CHANNELS = len(CHANNELS) + 1  # the positive control
DEFAULT_SIZES = Sizes()
LIVE_TRIALS, LIVE_TOKENS = 25, 1024  # a clock takes its time


@dataclass(frozen=True, slots=True)
class Asked:
    """What to do with each setup."""

    num_trials: int = NUM_TRIALS
    loads: Sequence[float] = LOADS
    scopes: Sequence[str] = ()
    sizes: Sizes = DEFAULT_SIZES
    num_seeds: int = 3
    costs: bool = True
    num_workers: int = 0


def asked_of(
    live: bool,
    num_workers: int,
    *,
    audit_only: bool,
    trials: int | None,
    load: Sequence[float] | None,
    scope: Sequence[str] | None,
    prompt_tokens: int | None,
    num_seeds: int,
) -> Asked:
    """Of the options. What it costs is told by the simulator only."""
    tokens = prompt_tokens or (LIVE_TOKENS if live else DEFAULT_SIZES.prompt_tokens)
    return Asked(
        trials or (LIVE_TRIALS if live else NUM_TRIALS),
        load or LOADS,
        scope or (),
        Sizes(prompt_tokens=tokens),
        num_seeds,
        not (audit_only or live),
        num_workers,
    )


def run_isolation(setups: Sequence[Setup], asked: Asked, prober: Prober, out: Path | None, html: Path | None) -> None:
    results = [_result(setup, asked, prober) for setup in setups]
    if out is not None:
        write_json(out, [each.to_dict() for each in results])
    if html is not None:
        write_html(html, results)
    if str(out) != "-":
        for each in results:
            print_isolation(Console(), each)


@dataclass(frozen=True, slots=True)
class Result:
    setup: Setup
    prices: Prices | None
    audit: Audit

    def to_dict(self) -> dict[str, Any]:
        prices = None if self.prices is None else asdict(self.prices)
        return {"setup": self.setup.to_dict(), "prices": prices, "audit": asdict(self.audit)}

    def parts(self) -> Iterator[str | Table]:
        """Titles end with a colon."""
        yield f"this setup shares: {self.audit.isolation}; threat decision: {self.audit.threat_decision}"
        if self.prices is not None:
            yield from price_parts(self.prices)
        yield from audit_parts(self.audit)


def _result(setup: Setup, asked: Asked, prober: Prober) -> Result:
    if setup.trace is None and setup.workload is None:
        setup = replace(setup, workload=WORKLOAD)
    scopes, costs = scopes_of(setup, asked.scopes), None
    if asked.costs:
        with progress("what it costs", len(scopes) * (asked.num_seeds + 1), every=1) as tick:
            costs = prices(setup, scopes=scopes, num=asked.num_seeds, num_workers=asked.num_workers, tick=tick)
    with progress("what leaks", len(scopes) * NUM_CHANNELS * len(asked.loads), every=1) as tick:
        trials, loads, sizes = asked.num_trials, asked.loads, asked.sizes
        leaks = audit(setup, prober, scopes=scopes, num_trials=trials, loads=loads, sizes=sizes, tick=tick)
    return Result(setup, costs, leaks)


def print_isolation(console: Console, result: Result) -> None:
    for part in result.parts():
        style = None if isinstance(part, Table) else "bold" if part.endswith(":") else "dim"
        console.print(part, style=style, highlight=False)


def write_html(path: Path, results: Sequence[Result]) -> None:
    from sim.experiment.isolation.charts import charts
    from sim.html_page import figure, from_rich, note, page, section

    def shown(result: Result) -> Iterator[str]:
        """A section a title, with what follows it."""
        title, body = "Isolation", list[str]()
        for part in result.parts():
            if isinstance(part, str) and part.endswith(":"):
                yield from [section(title, *body)] * bool(body)
                title, body = part.removesuffix(":"), []
            else:
                body.append(from_rich(part) if isinstance(part, Table) else note(part))
        yield section(title, *body)
        yield section("Charts", *map(figure, charts(result.audit)))

    with whole_file(path) as file:
        file.write(page("isolation", "".join(part for each in results for part in shown(each))))

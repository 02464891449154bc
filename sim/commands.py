"""What the commands of servetwin do, once their options are known."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from policies.catalogue import MENU, build, parameters
from policies.config import EngineConfig
from policies.journal import Write, replay
from sim.cost import MeasuredCost, StepCost
from sim.cost.best import Cost
from sim.cost.draws import draws
from sim.cost.gauge import Gauge
from sim.diff import check_comparable, read_result
from sim.files import whole_file
from sim.metrics import Summary, summarise
from sim.report import (
    DRAWN_SHARE,
    Banded,
    answer,
    comparison,
    difference_table,
    intervals,
    print_basis,
    print_run,
)
from sim.setup import Setup, manifest, scaled
from sim.sharing import check_sharing
from sim.simulate import Run, simulate
from sim.steps import check, play, read_script
from sim.warmth import counted
from sim.workload.workload import Workload

Tick = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go; None: nowhere."""

    journal: Path | None = None
    json: Path | None = None
    html: Path | None = None
    records: Path | None = None
    toml: Path | None = None

    @property
    def owns_stdout(self) -> bool:
        return any(str(path) in ("-", "/dev/stdout") for path in (self.json, self.html, self.records, self.toml))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A setup and all that was built from it, checked before the first step runs."""

    name: str
    setup: Setup
    config: EngineConfig
    workload: Workload
    cost: Cost

    @classmethod
    def of(cls, setup: Setup, name: str | None = None, workload: Workload | None = None) -> Prepared:
        config = setup.config()
        build(config)
        setup.front_end_model()
        setup.objectives()
        cost = setup.cost(config)
        workload = workload or setup.load()
        check_sharing(config, workload)
        return cls(name or workload.name, setup, config, workload, cost)

    @property
    def manifest(self) -> dict[str, Any]:
        return manifest(self.setup, self.config, self.workload, self.cost)

    def other_costs(self, band: bool, num_draws: int = 0) -> list[Cost]:
        """Costs that might be as well: drawn where draws are asked for, else both ends of the band."""
        if num_draws:
            return [self.cost.drawn(draw) for draw in draws(num_draws, self.setup.seed)]
        by = self.cost.band
        return [scaled(self.cost, 1 / by), scaled(self.cost, by)] if band else []

    def run(
        self, cost: StepCost | None = None, journal: Sequence[Write | None] | None = None, tick: Tick | None = None
    ) -> Run:
        """With the setup's costs, unless others are given; only what counts, where the cache is prepared first."""
        warmth = self.setup.warmth
        played = warmth.played(self.workload)
        run = simulate(
            self.config,
            played,
            cost or self.cost,
            journal=journal,
            on_record=tick,
            front_end=self.setup.front_end_model(),
            num_replicas=self.setup.num_replicas,
            routing=self.setup.routing,
            load_staleness=self.setup.load_staleness,
            block_transfer_time=self.setup.block_transfer_time(self.config),
        )
        return counted(run, warmth.num_left_out(played))

    def summary(self, run: Run) -> Summary:
        return summarise(run, self.setup.convention, self.setup.objectives())


def run_simulation(setup: Setup, outputs: Outputs, band: bool, num_draws: int = 0) -> None:
    """Everything is checked before the first step runs; files appear only when they are whole."""
    prepared = Prepared.of(setup)
    others = prepared.other_costs(band, num_draws)
    with progress(prepared.name, prepared.workload.num_requests * (1 + len(others))) as tick:
        run, found = run_banded(prepared, others, outputs.journal, tick)
    write_outputs(prepared, run, found, outputs)
    if not outputs.owns_stdout:
        console = Console()
        print_run(console, found, prepared.manifest)
        if outputs.journal is not None:
            console.print(f"journal: {outputs.journal} (servetwin replay {outputs.journal})", highlight=False)


def run_banded(
    prepared: Prepared, others: Sequence[Cost], journal: Path | None = None, tick: Tick | None = None
) -> tuple[Run, Banded]:
    """A run, and summaries of the same one with other costs."""
    gauge = Gauge(prepared.cost) if isinstance(prepared.cost, MeasuredCost) else None
    with ExitStack() as stack:
        run = prepared.run(gauge, journal=journals(stack, journal, prepared.setup.num_replicas), tick=tick)
    summary = prepared.summary(run)
    found = tuple(prepared.summary(prepared.run(cost, tick=tick)) for cost in others)
    share = DRAWN_SHARE if len(found) > 2 else 1.0
    return run, Banded(prepared.name, summary, found, share, gauge.shares if gauge else {})


def journals(stack: ExitStack, path: Path | None, num_replicas: int) -> list[Write | None] | None:
    """One a replica; of several, numbered before the ending."""
    if path is None:
        return None
    paths = [path] if num_replicas == 1 else [path.with_suffix(f".{i}{path.suffix}") for i in range(num_replicas)]
    return [partial(_write_line, stack.enter_context(whole_file(each))) for each in paths]


def _write_line(file: Any, line: str) -> None:
    file.write(line + "\n")


class Basis(Protocol):
    """What a run rests on, simulated or live."""

    @property
    def setup(self) -> Setup: ...
    @property
    def manifest(self) -> dict[str, Any]: ...


def write_outputs(basis: Basis, run: Run, found: Banded, outputs: Outputs) -> None:
    if outputs.json is not None:
        with whole_file(outputs.json) as file:
            json.dump({"manifest": basis.manifest, **_figures(found)}, file, indent=1)
            file.write("\n")
    toml = outputs.toml
    if toml is None and outputs.json is not None and not outputs.owns_stdout:
        toml = outputs.json.with_suffix(".toml")  # how to get this result again
    if toml is not None:
        with whole_file(toml) as file:
            file.write(basis.setup.to_toml())
    if outputs.records is not None:
        from sim.export import export

        export(outputs.records, run)
    if outputs.html is not None:
        from sim.html_report import Reported, write_html

        write_html(outputs.html, [Reported(found, run)], basis.manifest)


def _figures(run: Banded) -> dict[str, Any]:
    """Both ends of the band whole; of draws the interval of each figure."""
    figures: dict[str, Any] = {"metrics": _plain(run.summary.to_dict())}
    others = [_plain(each.to_dict()) for each in run.others]
    if len(others) == 2:
        figures["band"] = {"low_cost": others[0], "high_cost": others[1]}
    elif others:
        figures["draws"] = {"num": len(others), "share": run.share, "intervals": intervals(others, run.share)}
    if run.extrapolated:
        figures["extrapolated"] = dict(run.extrapolated)
    return figures


def _plain(value: Any) -> Any:
    """JSON has no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and value != value else value


@contextmanager
def progress(what: str, total: int, every: int = 64) -> Iterator[Tick]:
    """A bar on standard error, once a second has passed; `every`: ticks from one look at it to the next."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True)
    task, begin, done, shown = bar.add_task(what, total=total), time.monotonic(), 0, False

    def tick(*_: object) -> None:
        nonlocal done, shown
        done += 1
        if done % every == 0 and console.is_terminal and (shown or time.monotonic() - begin > 1.0):
            if not shown:
                bar.start()
                shown = True
            bar.update(task, completed=done)

    try:
        yield tick
    finally:
        if shown:
            bar.stop()


# -- comparing ----------------------------------------------------------------------------------------------------


def report(configs: Sequence[Path], html: Path, band: bool) -> None:
    """Run setups from TOML files and write one page about them."""
    from sim.html_report import Reported, write_html

    many = [Prepared.of(Setup.from_toml(path), path.stem) for path in configs]
    reported = []
    with progress("report", sum(each.workload.num_requests for each in many) * (3 if band else 1)) as tick:
        for prepared in many:
            run, found = run_banded(prepared, prepared.other_costs(band), tick=tick)
            reported.append(Reported(found, run, prepared.manifest))
    write_html(html, reported, many[0].manifest)
    for each in reported:
        Console().print(answer(each.banded), highlight=False)


def diff(a: Path, b: Path, factor: str) -> None:
    """Two results, if nothing but the factor differs between them."""
    results = [read_result(path) for path in (a, b)]
    found = check_comparable(results[0]["manifest"], results[1]["manifest"], factor)
    console = Console()
    for name, (x, y) in found.items():
        console.print(f"{name}: {x} -> {y}", style="bold", highlight=False)
    console.print(difference_table(a.name, b.name, results[0]["metrics"], results[1]["metrics"]), highlight=False)


# -- workloads and profiles ---------------------------------------------------------------------------------------


def describe_workload(setup: Setup) -> None:
    from sim.workload.describe import describe
    from sim.workload.lint import lint
    from sim.workload.lint_report import print_lint

    workload = setup.load()
    found = lint(workload, setup.engine.get("block_size"))
    console = Console()
    console.print(f"{workload.name}: {workload.source}", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in _rows(describe(workload)):
        table.add_row(name, value)
    console.print(table, highlight=False)
    for finding in workload.findings:
        console.print(f"  {finding}", highlight=False)
    if found is not None:
        console.print()
        print_lint(console, found)


def _rows(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A dataclass of dataclasses as lines."""
    if hasattr(value, "__dataclass_fields__"):
        for each in value.__dataclass_fields__:
            yield from _rows(getattr(value, each), f"{name} {each}".replace("_", " ").strip())
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _rows(each, f"{name} {key}")
    elif value is not None:
        yield (
            name,
            f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value),
        )


def convert_workload(setup: Setup, out: Path) -> None:
    from sim.workload.convert import write_mooncake, write_vidur

    write = {".jsonl": write_mooncake, ".csv": write_vidur}.get(out.suffix)
    if write is None:
        raise ValueError(f"cannot tell the format of {str(out)!r}: write .jsonl for Mooncake's, .csv for Vidur's")
    workload = setup.load()
    write(workload, out)
    print(f"{out}: {workload.num_requests:,} requests")


def list_profiles() -> None:
    """All costs there are, the best of each GPU first: that is what `simulate` takes."""
    from sim.cost.profile import shipped
    from sim.hardware import DEVICES
    from sim.models import MODELS

    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("GPU", "memory GB", "bandwidth GB/s", "bf16 TF", "costs", "provenance", "band (68 %)", "from"):
        table.add_column(column)
    for each in DEVICES:
        numbers = (each.name, f"{each.memory_gb:g}", f"{each.bandwidth_gb_s:,.0f}", f"{each.bf16_tflops:,.0f}")
        rows = [(p.name, p.provenance, f"×/÷{p.band}", str(p.about.get("source", ""))) for p in shipped(each.name)]
        for row in (*rows, ("datasheet", "datasheet", f"×/÷{each.band}", each.efficiency_source)):
            table.add_row(*numbers, *row)
            numbers = ("", "", "", "")
    console.print(table, highlight=False)
    console.print(
        f"models: {', '.join(each.name for each in MODELS)}, or the path of a Hugging Face config.json", highlight=False
    )


# -- steps, replay, policies --------------------------------------------------------------------------------------


def play_steps(workload: Path, preset: str, out: Path | None, trace: Path | None) -> int:
    """0 if there was nothing to compare with, or nothing differed."""
    if out is not None or trace is None:
        with whole_file(out or Path("-")) as file:
            for line in play(read_script(workload), preset):
                file.write(json.dumps(line) + "\n")
    if trace is None:
        return 0
    outcome = check(workload, trace, preset)
    if isinstance(outcome, int):
        print(f"equal: {outcome} steps")
        return 0
    print(outcome)
    return 1


def replay_journal(path: Path) -> int:
    try:
        with path.open() as file:
            outcome = replay(file, build)
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not a journal: it is not text") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None
    if outcome.divergence is None:
        print(f"equal: {outcome.num_lines:,} lines, {outcome.num_decisions:,} decisions")
        return 0
    print(f"{path}: {outcome.divergence}")
    return 1


def list_policies(menu: str | None) -> None:
    if menu is not None and menu not in MENU:
        raise ValueError(f"unknown menu {menu!r}; known: {', '.join(MENU)}")
    console = Console()
    for name, entries in MENU.items():
        if menu in (None, name):
            table = Table(box=None, pad_edge=False, padding=(0, 2), show_header=False)
            for entry, factory in entries.items():
                knobs = [f"{knob.name}={knob.default}" for knob in parameters(factory).values()]
                text = _first_line(importlib.import_module(factory.__module__))
                table.add_row(entry, text + (f" [dim]Knobs: {', '.join(knobs)}[/dim]" if knobs else ""))
            console.print(f"{name}: {_first_line(importlib.import_module(f'policies.{name}'))}", style="bold")
            console.print(table, highlight=False)


def _first_line(module: Any) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


# -- demo ---------------------------------------------------------------------------------------------------------

Arms = dict[str, dict[str, Any]]


def run_demo(shared: Path, out: Path) -> int:
    """The main job: a question, two answers side by side, and a proof that the decisions can be repeated."""
    console = Console()
    console.print("Which batching? Does sharing prefixes help? Two policies on each of these loads.", style="bold")
    journals = [_compare(console, out, *case) for case in _demo_cases(shared)]
    if len(journals) == 1:
        console.print(f"(no traces at {shared}: Azure and Mooncake left out)", style="dim")
    outcomes = []
    for journal in journals:
        console.print(f"journal: {journal}", highlight=False)
        outcomes.append(replay_journal(journal))
    return max(outcomes)


def _demo_cases(shared: Path) -> list[tuple[str, Setup, Arms]]:
    batching: Arms = {"chunked (vLLM V1)": {"batching": "chunked"}, "prefill first (V0)": {"batching": "prefill_first"}}
    sharing: Arms = {"prefixes shared": {"isolation": "global"}, "not shared": {"isolation": "no_reuse"}}
    azure = shared / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv"
    mooncake = shared / "mooncake-fast25" / "conversation_trace.jsonl"
    long = {"max_model_len": 131072}
    cases = [("built-in chat, 12 req/s", Setup(workload="chat", rate=12.0, num_requests=300), batching)]
    if azure.is_file():
        cases.append(("Azure 2023 conversation", Setup(trace=str(azure), num_requests=500), batching))
    if mooncake.is_file():
        setup = Setup(trace=str(mooncake), num_requests=250, rate=0.8, model="qwen3-8b", gpu="h200", engine=long)
        cases.append(("Mooncake conversation, at 0.8 req/s, Qwen3-8B on H200", setup, sharing))
    return cases


def _compare(console: Console, out: Path, title: str, setup: Setup, arms: Arms) -> Path:
    """Two policies on one workload; returns the journal of the first."""
    workload = setup.load()
    journal = out / f"{title.split(',')[0].lower().replace(' ', '-')}.journal.jsonl"
    many = [
        Prepared.of(replace(setup, engine={**setup.engine, **engine}), name, workload) for name, engine in arms.items()
    ]
    with progress(title, 3 * len(many) * workload.num_requests) as tick:
        found = [
            run_banded(each, each.other_costs(band=True), None if index else journal, tick)[1]
            for index, each in enumerate(many)
        ]
    console.print()
    console.print(title, style="bold underline", highlight=False)
    for each in found:
        console.print(answer(each), highlight=False)
    console.print(comparison(found), highlight=False)
    print_basis(console, many[0].manifest, len(found[0].others))
    return journal

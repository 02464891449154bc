"""What the commands of servetwin do, once their options are known."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from policies.catalogue import MENU, build, parameters
from policies.config import EngineConfig
from policies.journal import Write, replay
from sim.cost import StepCost
from sim.files import whole_file
from sim.metrics import Summary
from sim.report import Banded, answer, comparison, print_basis, print_run
from sim.setup import Setup, manifest, scaled
from sim.simulate import simulate
from sim.steps import check, play, read_script
from sim.workload.workload import Workload

Tick = Callable[..., object]


def run_simulation(setup: Setup, journal: Path | None, result: Path | None, band: bool) -> None:
    """Everything is checked before the first step runs; files appear only when they are whole."""
    config, cost = setup.config(), setup.cost()
    build(config)
    workload = setup.load()
    with _progress(workload.name, workload.num_requests * (3 if band else 1)) as tick:
        run = banded(workload.name, config, workload, cost, journal, band, tick)
    basis = manifest(setup, config, workload, cost)
    if result is not None:
        with whole_file(result) as file:
            json.dump({"manifest": basis, **_figures(run)}, file, indent=1)
            file.write("\n")
    if result is None or str(result) not in ("-", "/dev/stdout"):
        console = Console()
        print_run(console, run, basis)
        if journal is not None:
            console.print(f"journal: {journal} (servetwin replay {journal})", highlight=False)


def banded(
    name: str,
    config: EngineConfig,
    workload: Workload,
    cost: Any,
    journal: Path | None = None,
    band: bool = True,
    tick: Tick | None = None,
) -> Banded:
    """A run and, with `band`, the same one with all costs at either end of theirs."""
    with ExitStack() as stack:
        write = _line_writer(stack, journal)
        summary = _summary(config, workload, cost, write, tick)
    if not band or cost.band == 1.0:
        return Banded(name, summary)
    ends = [_summary(config, workload, scaled(cost, by), None, tick) for by in (1 / cost.band, cost.band)]
    return Banded(name, summary, fast=ends[0], slow=ends[1])


def _summary(
    config: EngineConfig, workload: Workload, cost: StepCost, write: Write | None, tick: Tick | None
) -> Summary:
    return simulate(config, workload, cost, journal=write, on_record=tick).summary


def _line_writer(stack: ExitStack, path: Path | None) -> Write | None:
    if path is None:
        return None
    file = stack.enter_context(whole_file(path))
    return lambda line: file.write(line + "\n")


def _figures(run: Banded) -> dict[str, Any]:
    figures: dict[str, Any] = {"metrics": _finite(run.summary.to_dict())}
    if run.fast is not None and run.slow is not None:
        figures["band"] = {"low_cost": _finite(run.fast.to_dict()), "high_cost": _finite(run.slow.to_dict())}
    return figures


def _finite(value: Any) -> Any:
    """JSON has no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and value != value else value


@contextmanager
def _progress(what: str, total: int) -> Iterator[Tick]:
    """A bar on standard error, once a second has passed."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, begin, done, shown = bar.add_task(what, total=total), time.monotonic(), 0, False

    def tick(*_: object) -> None:
        nonlocal done, shown
        done += 1
        if done % 64 == 0 and (shown or time.monotonic() - begin > 1.0):
            if not shown:
                bar.start()
                shown = True
            bar.update(task, completed=done)

    try:
        yield tick
    finally:
        if shown:
            bar.stop()


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


def run_demo(shared: Path, out: Path) -> int:
    """The main job: a question, two answers side by side, and a proof that the decisions can be repeated."""
    console = Console()
    console.print("Which batching, on Llama-3-8B and one H100?", style="bold")
    ends = [_compare(console, out, *case) for case in _demo_cases(shared)]
    if len(ends) == 1:
        console.print(f"(no traces at {shared}: Azure and Mooncake left out)", style="dim")
    outcomes = []
    for journal in ends:
        console.print(f"journal: {journal}", highlight=False)
        outcomes.append(replay_journal(journal))
    return max(outcomes)


Arms = dict[str, dict[str, Any]]


def _demo_cases(shared: Path) -> list[tuple[str, Setup, Arms]]:
    batching: Arms = {"chunked (vLLM V1)": {"batching": "chunked"}, "prefill first (V0)": {"batching": "prefill_first"}}
    caching: Arms = {"prefix cache on": {}, "prefix cache off": {"enable_prefix_caching": False}}
    azure = shared / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv"
    mooncake = shared / "mooncake-fast25" / "conversation_trace.jsonl"
    long = {"max_model_len": 131072}
    cases = [("built-in chat, 12 req/s", Setup(workload="chat", rate=12.0, num_requests=500), batching)]
    if azure.is_file():
        cases.append(("Azure 2023 conversation", Setup(trace=azure, num_requests=1000), batching))
    if mooncake.is_file():
        setup = Setup(trace=mooncake, num_requests=500, rate=0.8, model="qwen3-8b", gpu="h200", engine=long)
        cases.append(("Mooncake conversation, at 0.8 req/s, Qwen3-8B on H200", setup, caching))
    return cases


def _compare(console: Console, out: Path, title: str, setup: Setup, arms: Arms) -> Path:
    """Two policies on one workload; returns the journal of the first."""
    workload = setup.load()
    journal = out / f"{title.split(',')[0].lower().replace(' ', '-')}.journal.jsonl"
    runs: list[Banded] = []
    with _progress(title, 3 * len(arms) * workload.num_requests) as tick:
        for name, engine in arms.items():
            config = Setup(**{**_fields(setup), "engine": {**setup.engine, **engine}}).config()
            runs.append(banded(name, config, workload, setup.cost(), None if runs else journal, True, tick))
    console.print()
    console.print(title, style="bold underline", highlight=False)
    for run in runs:
        console.print(answer(run), highlight=False)
    console.print(comparison(runs), highlight=False)
    print_basis(console, manifest(setup, config, workload, setup.cost()), banded=True)
    return journal


def _fields(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in Setup.__dataclass_fields__}

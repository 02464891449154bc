"""The commands that play many runs for one answer. Heavy imports wait until a command needs them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from options import Body, Html, IsLive, Json, LiveModel, of_a_run, setup_of, with_options_of

if TYPE_CHECKING:
    from sim.experiment.isolation.audit import Prober
    from sim.experiment.runner import Runner

app = typer.Typer(rich_markup_mode=None)
scenarios_app = typer.Typer(help="Named cases, in either body.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(scenarios_app, name="scenarios")


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="TOML of one arm, as simulate --toml writes it.")],
    b: Annotated[Path, typer.Argument(help="TOML of the other, alike but for the factor under test.")],
    num: Annotated[int, typer.Option(help="Seeds, each played in both arms.")] = 20,
    metric: Annotated[
        list[str] | None, typer.Option(help="ttft.p99, goodput, ...; the first one decides when to stop.")
    ] = None,
    precision: Annotated[
        float | None, typer.Option(help="Go on until B - A is known to this share of A: 0.01.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="A difference below this share of A does not matter: 0.02.")
    ] = None,
    factor: Annotated[str | None, typer.Option(help="All that may differ, by its name: engine.batching.")] = None,
    json_: Json = None,
    num_workers: Annotated[int, typer.Option(help="Processes; 0: one a core.")] = 0,
    live: Annotated[bool, typer.Option("--live", help="Also on the live body: do sign and size agree?")] = False,
    num_live: Annotated[int, typer.Option(help="Seeds of the live arms.")] = 5,
    model: LiveModel = "tiny",
    device: Body = "cpu",
    costs: Annotated[str | None, typer.Option(help="With --live: the live body's, of `calibrate body`.")] = None,
) -> None:
    """A/B: the same requests through two setups, what differs and how sure that is."""
    from sim.experiment.ab.commands import run_compare, run_compare_bodies
    from sim.experiment.runner import Simulated

    runner = Simulated(num_workers)
    if live:
        from live_runner import Live

        body = Live(device)
        run_compare_bodies(
            a, b, runner, body, body.settled, model=model or "tiny", costs=costs, num=num, num_live=num_live,
            metrics=metric or (), margin=margin, factor=factor, out=json_,
        )  # fmt: skip
        return
    run_compare(
        a, b, runner, num=num, metrics=metric or (), precision=precision, margin=margin, factor=factor, out=json_
    )


@app.command()
@with_options_of(
    of_a_run,
    config=(Annotated[Path | None, typer.Argument(help="TOML of the setup, perhaps with a [sweep] table.")], None),
    knob=(
        Annotated[
            list[str] | None, typer.Option(help="engine.max_num_seqs=64,128; rate=1..8; rate=1..8:4:log; a knob each.")
        ],
        None,
    ),
    method=(Annotated[str | None, typer.Option(help="grid, lhs, one-at-a-time or optuna.")], None),
    num_points=(Annotated[int | None, typer.Option(help="Of lhs and optuna.")], None),
    num_seeds=(Annotated[int | None, typer.Option(help="Runs a point.")], None),
    objective=(Annotated[str | None, typer.Option(help="output_throughput, goodput, ttft.p99, ...")], None),
    tail=(Annotated[str | None, typer.Option(help="What the best point must keep: ttft_p99<1s,tpot_p99<50ms")], None),
    fairness=(Annotated[str | None, typer.Option(help="What each class must have there: ttft_p99<2s")], None),
    metric=(Annotated[list[str] | None, typer.Option(help="Of which the sensitivity is told.")], None),
    pareto=(
        Annotated[list[str] | None, typer.Option(help="Metrics of the front; default: throughput, tail, occupancy.")],
        None,
    ),
    rows=(
        Annotated[Path, typer.Option(help="A row a run; a sweep that was stopped goes on here.")],
        Path("sweep.jsonl"),
    ),
    workers=(Annotated[str, typer.Option(help="processes, or a backend of joblib: ray, dask, loky.")], "processes"),
    num_workers=(Annotated[int, typer.Option(help="0: one a core.")], 0),
    json_=(Json, None),
    html=(Html, None),
)
def sweep(
    config: Path | None,
    from_: str | None,
    knob: list[str] | None,
    rows: Path,
    workers: str,
    num_workers: int,
    json_: Path | None,
    html: Path | None,
    **given: Any,
) -> None:
    """Many runs over knobs of a setup: what moves what, throughput against tail, the best point within limits."""
    from sim.experiment.sweep.commands import run_sweep
    from sim.experiment.sweep.play import read_toml, sweep_of
    from sim.experiment.sweep.workers import workers_named

    options = ("method", "num_points", "num_seeds", "objective", "tail", "fairness", "pareto")
    told = {name: given.pop(name) for name in options} | {"metrics": given.pop("metric")}
    base, said = (None, {}) if config is None else read_toml(config)
    said |= {name: value for name, value in told.items() if value}
    what = sweep_of(setup_of(base, from_, given), said, knob or ())
    run_sweep(what, rows, workers_named(workers, num_workers), json_, html)


@app.command()
@with_options_of(
    of_a_run,
    request=(Annotated[str, typer.Argument(help="Its id in the run, or: slowest.")], inspect.Parameter.empty),
    journal=(Annotated[Path | None, typer.Option(help="Of a run, as simulate or bench writes it; or play one.")], None),
    json_=(Json, None),
)
def explain(
    request: str, config: Path | None, from_: str | None, journal: Path | None, json_: Path | None, **given: Any
) -> None:
    """Where one request's time went, and who held what it waited for."""
    from sim.experiment.explain.commands import run_explain

    run_explain(request, journal, setup_of(config, from_, given), json_)


@app.command()
@with_options_of(
    of_a_run,
    config=(Annotated[list[Path] | None, typer.Argument(help="TOMLs of setups; none: shared-prefix.")], None),
    audit_only=(Annotated[bool, typer.Option("--audit-only", help="What leaks, not what it costs.")], False),
    trials=(Annotated[int | None, typer.Option(help="Of each kind; simulated 250, live 25.")], None),
    load=(Annotated[list[float] | None, typer.Option(help="Share of the time others keep it busy: 0.3.")], None),
    scope=(Annotated[list[str] | None, typer.Option(help="Only this one: tenant, 'hard partition', ...")], None),
    prompt_tokens=(Annotated[int | None, typer.Option(help="Of the victim's prompts and the probes.")], None),
    num_seeds=(Annotated[int, typer.Option(help="Runs a scope.")], 3),
    live=(IsLive, False),
    device=(Body, "cpu"),
    json_=(Json, None),
    html=(Html, None),
    num_workers=(Annotated[int, typer.Option(help="Processes of a simulation; 0: one a core.")], 0),
)
def isolation(
    config: list[Path] | None, from_: str | None, live: bool, device: str, num_workers: int, json_: Path | None,
    html: Path | None, **given: Any,
) -> None:  # fmt: skip
    """The price of keeping tenants apart, scope by scope, and an audit of what still leaks."""
    from sim.experiment.isolation.commands import asked_of, run_isolation

    names = ("audit_only", "trials", "load", "scope", "prompt_tokens", "num_seeds")
    asked = asked_of(live, num_workers, **{name: given.pop(name) for name in names})
    setups = [setup_of(each, from_, given) for each in config or (None,)]
    run_isolation(setups, asked, _prober(live, device, num_workers), json_, html)


def _prober(live: bool, device: str, num_workers: int) -> Prober:
    if live:
        from live_audit import LiveProber

        return LiveProber(device)
    from sim.experiment.isolation.audit import Simulated

    return Simulated(num_workers)


@scenarios_app.command("list")
def list_scenarios() -> None:
    """Each with the requirement it stands for, what alone differs between its arms, and what it asks."""
    from sim.experiment.scenarios.commands import list_scenarios as print_list

    print_list()


@scenarios_app.command("run")
def run_scenarios(
    names: Annotated[list[str], typer.Argument(help="As `scenarios list` has them, or: all.")],
    live: IsLive = False,
    device: Body = "cpu",
    json_: Json = None,
    num_workers: Annotated[int, typer.Option(help="Processes of a simulation; 0: one a core.")] = 0,
) -> None:
    """Play cases, print figures and verdicts; the exit status is 1 if a rule is broken."""
    from sim.experiment.scenarios import LIVE, SIMULATED
    from sim.experiment.scenarios.commands import run_scenarios as run

    raise typer.Exit(run(names, _runner(live, device, num_workers), LIVE if live else SIMULATED, json_))


def _runner(live: bool, device: str, num_workers: int) -> Runner:
    if live:
        from live_runner import Live

        return Live(device)
    from sim.experiment.runner import Simulated

    return Simulated(num_workers)


@app.command()
@with_options_of(
    of_a_run,
    num=(Annotated[int, typer.Option(help="Seeds; of a recorded trace there is one.")], 5),
    by=(
        Annotated[str | None, typer.Option(help="class or client; default: the first of which there are several.")],
        None,
    ),
    json_=(Json, None),
)
def fairness(
    config: Path | None, from_: str | None, num: int, by: str | None, json_: Path | None, **given: Any
) -> None:
    """Who gets what of a server and at whose cost: each class or client beside itself alone."""
    from sim.experiment.fairness.commands import run_fairness

    run_fairness(setup_of(config, from_, given), num, by, json_)


@app.command()
@with_options_of(of_a_run, json_=(Json, None), html=(Html, None))
def waterfall(config: Path | None, from_: str | None, json_: Path | None, html: Path | None, **given: Any) -> None:
    """Where prefix hits go: from an endless cache down to this run, in tokens and in seconds of prefill."""
    from sim.experiment.waterfall.report import run_waterfall

    run_waterfall(setup_of(config, from_, given), json_, html)


@app.command()
@with_options_of(
    of_a_run,
    precision=(Annotated[float, typer.Option(help="Of a replica's rate: half the interval, as a share.")], 0.05),
    attainment=(Annotated[float, typer.Option(help="Who keeps a bound without percentile: this share.")], 0.99),
    price=(Annotated[float | None, typer.Option(help="Of a GPU for an hour, in dollars.")], None),
    curve=(Annotated[str | None, typer.Option(help="Rates in equal parts of a day: 2,3,8,12,9,4")], None),
    tune=(Annotated[bool, typer.Option("--tune", help="Try other engine settings, too: twice as long.")], False),
    num_workers=(Annotated[int, typer.Option(help="Processes; 0: one a core.")], 0),
    json_=(Json, None),
    html=(Html, None),
)
def capacity(
    config: Path | None,
    from_: str | None,
    precision: float,
    attainment: float,
    price: float | None,
    curve: str | None,
    tune: bool,
    num_workers: int,
    json_: Path | None,
    html: Path | None,
    **given: Any,
) -> None:
    """How many GPUs a load needs at its objectives, how sure that is, and what it hangs on; --rate: what is to come."""
    from sim.experiment.capacity.commands import run_capacity

    run_capacity(
        setup_of(config, from_, given), precision=precision, attainment=attainment, price=price, curve=curve,
        tuned=tune, num_workers=num_workers, json=json_, html=html,
    )  # fmt: skip


@app.command()
@with_options_of(
    of_a_run,
    config=(Annotated[Path | None, typer.Argument(help="TOML of the setup, with its objectives.")], None),
    class_=(Annotated[str, typer.Option("--class", help="Whose budget is sought.")], "batch"),
    protect=(Annotated[str, typer.Option(help="Whose percentiles --slo bounds.")], "interactive"),
    budget=(Annotated[str, typer.Option(help="Of what: max_running, max_blocks, or rate (tokens).")], "max_running"),
    num=(Annotated[int, typer.Option(help="Seeds a budget.")], 5),
    json_=(Json, None),
    num_workers=(Annotated[int, typer.Option(help="Processes; 0: one a core.")], 0),
)
def quota(
    config: Path | None,
    from_: str | None,
    class_: str,
    protect: str,
    budget: str,
    num: int,
    json_: Path | None,
    num_workers: int,
    **given: Any,
) -> None:
    """The largest budget of one class under which another keeps its limits, and what it buys."""
    from sim.experiment.quota.commands import run_quota
    from sim.experiment.runner import Simulated

    setup, runner = setup_of(config, from_, given), Simulated(num_workers)
    run_quota(setup, class_, protect, runner, kind=budget, num=num, out=json_)

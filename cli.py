"""servetwin: the command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import cli_experiments
from options import (
    Arrivals,
    AsyncDepth,
    Band,
    BlockSize,
    Body,
    ContentSize,
    Costs,
    Draws,
    Dtype,
    From,
    GpuName,
    Html,
    Journal,
    Json,
    LiveModel,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelName,
    NumBlocks,
    NumRequests,
    PrefixCaching,
    Preset,
    Rate,
    Records,
    Seed,
    Ticks,
    Toml,
    Transforms,
    Unit,
    WorkloadName,
    of_a_run,
    setup_of,
    with_options_of,
)

app = typer.Typer(
    help="What an LLM server will do, decided by the same policies that can run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
workload_app = typer.Typer(help="Look at a workload, or convert it.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(workload_app, name="workload")
calibrate_app = typer.Typer(help="Fit costs to measured kernels.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(calibrate_app, name="calibrate")
app.add_typer(cli_experiments.app)


@app.command()
@with_options_of(
    of_a_run,
    journal=(Journal, None),
    json=(Json, None),
    html=(Html, None),
    records=(Records, None),
    toml=(Toml, None),
    band=(Band, True),
    draws=(Draws, 0),
)
def simulate(band: bool, draws: int, **given: Any) -> None:
    """Play a workload on a simulated server; print latencies, throughput, cache and memory."""
    outputs = {name: given.pop(name) for name in ("journal", "json", "html", "records", "toml")}
    from sim.commands import Outputs, run_simulation

    run_simulation(setup_of(given.pop("config"), given.pop("from_"), given), Outputs(**outputs), band, draws)


@app.command()
@with_options_of(simulate, model=(LiveModel, None), device=(Body, "cpu"))
def bench(**given: Any) -> None:
    """Play a workload on a live server, as simulate does on a simulated one; print the same report."""
    outputs = {name: given.pop(name) for name in ("journal", "json", "html", "records", "toml")}
    config, from_, device = (given.pop(name) for name in ("config", "from_", "device"))
    given.pop("band"), given.pop("draws")  # of costs, which a live run has none of
    from bench import run_bench
    from sim.commands import Outputs

    raise typer.Exit(run_bench(setup_of(config, from_, given, model="tiny"), device, Outputs(**outputs)))


Utilisations = Annotated[
    list[float] | None, typer.Option("--utilisation", help="Share of the largest rate: 0.5, 0.8, 0.95, 1.2.")
]
Repeats = Annotated[int, typer.Option(help="Live runs at each load.")]


@app.command()
@with_options_of(bench, costs=(Costs, "body-costs.json"), utilisation=(Utilisations, None), repeats=(Repeats, 5))
def twin(**given: Any) -> None:
    """Play a workload live several times and simulate it at measured costs: decisions and latencies side by side."""
    from bench import Bench
    from calibration.commands_body import run_twin

    outputs = {name: given.pop(name) for name in ("journal", "json", "html", "records", "toml")}
    config, from_, device, costs, shares, repeats = (
        given.pop(name) for name in ("config", "from_", "device", "costs", "utilisation", "repeats")
    )
    given.pop("band"), given.pop("draws")
    run = Bench.of(setup_of(config, from_, given, model="smollm2-135m", num_requests=64), device)
    if run.setup.cache_state != "cold":
        raise ValueError(f"cache_state ({run.setup.cache_state}) of a twin must be cold: leave it out")
    raise typer.Exit(run_twin(run.body, run.workload, Path(costs), shares or [0.5, 0.8], repeats, outputs["json"]))


@app.command("twin-of")
def twin_of(
    folder: Annotated[Path, typer.Argument(help="What python -m calibration.gpu_session wrote.")], json: Json = None
) -> None:
    """Simulate the live runs of another machine at the costs that were measured there, and compare."""
    from calibration.commands_body import run_twin_of

    raise typer.Exit(run_twin_of(folder, json))


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="What the model goes on from; several run in one batch.")],
    model: LiveModel = "smollm2-135m",
    device: Body = "cpu",
    max_tokens: Annotated[int, typer.Option(help="Of each answer, at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that weigh so much together.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of what is drawn; default: one of each prompt's own.")] = None,
    dtype: Dtype = "auto",
    async_depth: AsyncDepth = 2,
    journal: Journal = None,
) -> None:
    """Print what a model says, as it says it."""
    from contextlib import ExitStack

    from backend.generate import Wish
    from backend.generate import generate as run
    from backend.start import start
    from policies.types import Sampling
    from sim.commands import journals

    wish = Wish(max_tokens, Sampling(temperature=temperature, top_p=top_p, seed=seed))
    body = start(model or "", device, {"async_depth": async_depth}, dtype or "auto")
    with ExitStack() as stack:
        write, *_ = journals(stack, journal, num_replicas=1) or [None]
        run(body, prompts, wish, write)


@app.command()
def report(
    configs: Annotated[list[Path], typer.Argument(help="TOML files of runs, as simulate --toml writes them.")],
    html: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    band: Band = True,
) -> None:
    """Run one or several setups and write a page with charts, side by side."""
    from sim.commands import report as write_report

    write_report(configs, html, band)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A result of simulate --json.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    factor: Annotated[str, typer.Option(help="What may differ, as named in the manifest: engine.batching, workload.")],
) -> None:
    """Compare two results; refused if anything but the factor differs between them."""
    from sim.commands import diff as print_diff

    print_diff(a, b, factor)


@workload_app.command()
def describe(
    trace: Annotated[str | None, typer.Argument(help="Trace file; or give --workload.")] = None,
    workload: WorkloadName = None,
    num_requests: NumRequests = None,
    rate: Rate = None,
    seed: Seed = None,
    arrivals: Arrivals = None,
    transforms: Transforms = None,
    ticks: Ticks = None,
    timestamp_unit: Unit = None,
    content_size: ContentSize = None,
    block_size: BlockSize = None,
) -> None:
    """Rates, lengths, prefix reuse and what stands in its way, sessions, and what had to be assumed."""
    given = dict(locals())
    from sim.commands import describe_workload

    describe_workload(setup_of(None, None, given))


@workload_app.command()
def convert(
    trace: Annotated[str, typer.Argument(help="Trace file.")],
    out: Annotated[Path, typer.Argument(help=".jsonl for Mooncake's format, .csv for Vidur's.")],
    num_requests: NumRequests = None,
    rate: Rate = None,
    seed: Seed = None,
    transforms: Transforms = None,
    ticks: Ticks = None,
    timestamp_unit: Unit = None,
    content_size: ContentSize = None,
) -> None:
    """Write a workload in another format."""
    given = dict(locals())
    from sim.commands import convert_workload

    given.pop("out")
    convert_workload(setup_of(None, None, given), out)


Gpus = Annotated[list[str] | None, typer.Argument(help="h100, h200, ...; all if none is named.")]
Tables = Annotated[Path | None, typer.Option(help="Directory with h200_sxm/ and others; default: aiconfigurator-core.")]


@calibrate_app.command("fit")
def calibrate_fit(
    gpus: Gpus = None,
    tables: Tables = None,
    out: Annotated[Path | None, typer.Option(help="Where profiles go; default: into the package.")] = None,
) -> None:
    """Fit profiles to public kernel tables; print how far each fit is off where it was not fitted."""
    from calibration.commands import fit

    fit(gpus or [], tables, out)


@calibrate_app.command("check")
def calibrate_check(
    gpus: Gpus = None,
    tables: Tables = None,
    profiles: Annotated[Path | None, typer.Option(help="Where profiles lie; default: in the package.")] = None,
) -> None:
    """Fit the profiles again; every number must come out the same to a millionth."""
    from calibration.commands import check

    raise typer.Exit(check(gpus or [], tables, profiles))


@calibrate_app.command("body")
def calibrate_body(
    model: LiveModel = "smollm2-135m",
    device: Body = "cpu",
    out: Annotated[Path, typer.Option(help="The costs, for simulate --costs; measurements go beside it.")] = Path(
        "body-costs.json"
    ),
    grid: Annotated[
        str | None, typer.Option(help="cpu, cpu-large, cuda, ...: what is measured; default: by device and size.")
    ] = None,
) -> None:
    """Measure this machine's own live body, part by part and in service; write what its steps cost."""
    from calibration.commands_body import run_calibrate_body

    run_calibrate_body(model or "", device, out, grid)


@app.command()
def profiles() -> None:
    """List GPUs and models, with the provenance and the band of their costs."""
    from sim.commands import list_profiles

    list_profiles()


@app.command()
def results(
    files: Annotated[list[Path], typer.Argument(help="Of vLLM, GuideLLM, aiperf, SGLang, inference-perf, llm-d, ...")],
    out: Annotated[Path | None, typer.Option(help="Write the run as a Benchmark Report 0.2.1 here (YAML).")] = None,
) -> None:
    """Show what a benchmark tool measured, in one table whatever the tool."""
    from calibration.commands_results import show_results

    show_results(files, out)


ServerRecords = Annotated[
    list[Path], typer.Argument(help="Results with one entry a request, of one server; a load each.")
]


@app.command("fit-server")
def fit_server(
    records: ServerRecords,
    out: Annotated[Path, typer.Option(help="The costs, for simulate --costs.")] = Path("server-costs.json"),
    name: Annotated[str | None, typer.Option(help="Of the server; default: the file's.")] = None,
    from_: From = None,
    preset: Preset = None,
    model: ModelName = None,
    gpu: GpuName = None,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    enable_prefix_caching: PrefixCaching = None,
    async_depth: AsyncDepth = None,
) -> None:
    """Fit what a running server's steps cost, from the records of its requests; refused where they do not tell."""
    given = dict(locals())
    from calibration.commands_server import run_fit_server, told

    run_fit_server(records, told(given), out, name)


@app.command()
def validate(
    records: ServerRecords,
    costs: Annotated[Path, typer.Option(help="What fit-server wrote.")],
    html: Html = None,
    draws: Annotated[bool, typer.Option("--draws/--no-draws", help="Also predict with the fit's other prices.")] = True,
    from_: From = None,
    preset: Preset = None,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    enable_prefix_caching: PrefixCaching = None,
    async_depth: AsyncDepth = None,
) -> None:
    """Play recorded runs again at fitted costs: predicted against recorded, beside what repeats differ by."""
    given = dict(locals())
    from calibration.commands_server import run_validate, told

    run_validate(records, costs, told(given), html, draws)


@app.command()
def steps(
    workload: Annotated[Path, typer.Argument(help="Scheduler workload: settings, requests by step, resets.")],
    preset: Annotated[str, typer.Option(help="Whose decisions: vllm-v1, vllm-v1-priority.")] = "vllm-v1",
    out: Annotated[Path | None, typer.Option(help="Write the decisions here (.jsonl or .jsonl.gz).")] = None,
    check: Annotated[Path | None, typer.Option(help="Compare with a recorded trace.")] = None,
) -> None:
    """Play a scripted workload step by step, outputs forced; write or check every scheduler decision."""
    from sim.commands import play_steps

    raise typer.Exit(play_steps(workload, preset, out, check))


@app.command()
def replay(journal: Annotated[Path, typer.Argument(help="A journal written by simulate --journal.")]) -> None:
    """Feed a journal's inputs to a fresh engine; every decision must come out the same."""
    from sim.commands import replay_journal

    raise typer.Exit(replay_journal(journal))


@app.command()
def policies(
    menu: Annotated[str | None, typer.Argument(help="admission, scheduling, batching, ...; default: all.")] = None,
) -> None:
    """List the policies of each menu, what they do and their knobs."""
    from sim.commands import list_policies

    list_policies(menu)


def _ask_planners_question() -> None:
    """How many GPUs for a load, at the best costs that are shipped."""
    from sim.experiment.capacity.commands import run_capacity
    from sim.setup import Setup

    question = "How many H100s for 40 requests a second like Azure's conversations, the first token within a second?"
    typer.secho(question, bold=True)
    setup = Setup(workload="azure-conv", rate=40.0, slo="ttft_p99<1s,tpot_p99<50ms")
    run_capacity(
        setup, precision=0.1, attainment=0.99, price=2.5, curve=None, tuned=False, num_workers=0, json=None, html=None
    )
    typer.echo()


@app.command()
def demo(
    shared: Annotated[Path, typer.Option(help="Where the traces lie.")] = Path("../shared/data/traces"),
    out: Annotated[Path, typer.Option(help="Where journals and results go.")] = Path("demo-results"),
    live: Annotated[bool, typer.Option("--live/--no-live", help="Also calibrate, and play a live model here.")] = True,
) -> None:
    """Answer a planner's question, compare policies, replay a journal; then hold a live model against its twin."""
    from importlib.util import find_spec

    from sim.commands import run_demo

    _ask_planners_question()
    code = run_demo(shared, out)
    if live and find_spec("torch"):
        from calibration.demo import run_twin_demo

        code = max(code, run_twin_demo(out))
    elif live:
        print("the live half needs torch: pip install -e '.[backend]'")
    raise typer.Exit(code)


def main() -> None:
    """Errors are one line on standard error, exit code 2."""
    try:
        code = typer.main.get_command(app).main(prog_name="servetwin", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 141
    except (ValueError, OSError) as error:
        code = _complain(str(error))
    except Exception as error:
        code = _usage_error(error)
    sys.exit(code if isinstance(code, int) else 0)


def _usage_error(error: Exception) -> int:
    """Typer's own errors, whose classes moved between its versions: they can format their message."""
    if type(error).__name__ == "Abort":
        return 130
    if not hasattr(error, "format_message"):
        raise error
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 2
    errors: list[dict[str, object]] = getattr(error.__cause__, "errors", list)()
    given = f" ({errors[0]['input']!r})" if errors else ""
    return _complain(f"{error.format_message()}{given}; see servetwin --help")


def _complain(message: str) -> int:
    print(f"servetwin: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()

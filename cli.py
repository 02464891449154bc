"""servetwin: the command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sim.setup import Setup

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

Config = Annotated[Path | None, typer.Option(help="TOML file with a run's settings; options here go before it.")]
From = Annotated[str | None, typer.Option("--from", help="'vllm serve MODEL --flag ...', or the path of its YAML.")]
Trace = Annotated[str | None, typer.Option(help="Trace or measured result; its format is told by its content.")]
WorkloadName = Annotated[str | None, typer.Option("--workload", help="Built-in workload: chat, azure-conv, ...")]
NumRequests = Annotated[int | None, typer.Option(help="Only the first so many requests.")]
Rate = Annotated[float | None, typer.Option(help="Requests a second; a trace's times are scaled to it.")]
Seed = Annotated[int | None, typer.Option(help="Of everything that is drawn.")]
Arrivals = Annotated[str | None, typer.Option(help="poisson; gamma,cv=3; onoff,on=10,off=30; closed,users=32,think=5")]
Transforms = Annotated[list[str] | None, typer.Option("--transform", help="scale_rate=2; cancel=0.1,patience=5; ...")]
Ticks = Annotated[str | None, typer.Option(help="Arrivals recorded on a coarse clock: spread or as-is.")]
Unit = Annotated[str | None, typer.Option(help="Of a trace's times, where it does not say: s, ms, us, ns.")]
ContentSize = Annotated[int | None, typer.Option(help="Tokens a content id, where the trace does not say.")]
MaxTokens = Annotated[int | None, typer.Option(help="max_tokens of every request; default: the longest answer's.")]
ModelName = Annotated[str | None, typer.Option("--model", help="llama-3-8b, qwen3-8b, ..., or a config.json.")]
GpuName = Annotated[str | None, typer.Option("--gpu", help="h100, h200, a100, ...: servetwin profiles lists them.")]
TensorParallel = Annotated[int | None, typer.Option(help="GPUs that share the model.")]
Dtype = Annotated[str | None, typer.Option(help="Of the weights: auto, bfloat16, fp8.")]
KvDtype = Annotated[str | None, typer.Option(help="Of the KV cache: auto, fp8.")]
Costs = Annotated[str | None, typer.Option(help="auto: the best there are; datasheet; a profile's name or path.")]
CudaGraphs = Annotated[str | None, typer.Option(help="full, piecewise or eager.")]
Memory = Annotated[float | None, typer.Option("--gpu-memory-utilization", help="Share of GPU memory to use.")]
NumReplicas = Annotated[int | None, typer.Option(help="Engines behind one router.")]
Routing = Annotated[str | None, typer.Option(help="Which replica? round_robin, prefix_aware, pinned, ...")]
Staleness = Annotated[float | None, typer.Option(help="How old, in seconds, what the router knows may be.")]
FrontEnd = Annotated[str | None, typer.Option(help="default, or off: latencies at the engine.")]
Slo = Annotated[str | None, typer.Option(help="Objectives: ttft_p99<1s,tpot<50ms")]
Convention = Annotated[str | None, typer.Option(help="What TPOT and ITL mean: vllm, guidellm, aiperf, distserve.")]
Preset = Annotated[str | None, typer.Option(help="Settings of a real engine: vllm-v1, vllm-v1-priority.")]
Admission = Annotated[
    str | None, typer.Option(help="May it come in? accept_all, bounded_queue, class_budgets, token_buckets, shed_late.")
]
Scheduling = Annotated[str | None, typer.Option(help="Who is next? fcfs, priority.")]
Batching = Annotated[str | None, typer.Option(help="How many tokens each? chunked, stall_free, prefill_first, ...")]
Allocation = Annotated[
    str | None,
    typer.Option(help="Which memory is promised? paged_full_prompt, paged_reserve_output, past_future, ..."),
]
Preemption = Annotated[str | None, typer.Option(help="Memory is full, who yields? latest, least_computed, ...")]
PreemptForWaiting = Annotated[
    bool | None, typer.Option("--preempt-for-waiting/--no-preempt-for-waiting", help="The urgent need not wait.")
]
NumHostBlocks = Annotated[int | None, typer.Option(help="KV blocks of the preempted that host memory keeps.")]
HostBandwidth = Annotated[float | None, typer.Option("--host-bandwidth", help="To host memory, in GB/s.")]
Eviction = Annotated[str | None, typer.Option(help="Which cached block goes? lru, s3fifo, sieve, gdsf, ...")]
Isolation = Annotated[str | None, typer.Option(help="Who may share a prefix? global, tenant, user, partition, ...")]
ThreatDecision = Annotated[str | None, typer.Option(help="Why tenants may share prefixes, if they do: printed.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens a KV block.")]
NumBlocks = Annotated[int | None, typer.Option(help="KV blocks; default: what fits in the GPU's memory.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Requests running at once.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens a step.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Prompt and answer of one request; default: the model's.")]
PrefixCaching = Annotated[bool | None, typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse prefixes.")]
ChunkedPrefill = Annotated[bool | None, typer.Option("--chunked-prefill/--no-chunked-prefill", help="Cut prompts.")]
AsyncDepth = Annotated[int | None, typer.Option(help="Steps in flight: 1, or 2 to schedule ahead.")]
Journal = Annotated[Path | None, typer.Option(help="Write every input and decision here.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result here; - for standard output.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page with charts here.")]
Records = Annotated[Path | None, typer.Option(help="Write one row a request: .csv, .jsonl or .parquet.")]
Toml = Annotated[Path | None, typer.Option("--toml", help="Write these settings here; also beside --json.")]
Body = Annotated[str, typer.Option(help="cpu or cuda.")]
LiveModel = Annotated[
    str | None,
    typer.Option("--model", help="tiny, small, smollm2-135m, random:SHAPE, a Hugging Face folder, or a .gguf file."),
]
Draws = Annotated[int, typer.Option(help="Draw costs so often, instead of a band: each figure with its interval.")]
Band = Annotated[bool, typer.Option("--band/--no-band", help="Also run with all costs at the ends of their band.")]


@app.command()
def simulate(
    config: Config = None,
    from_: From = None,
    trace: Trace = None,
    workload: WorkloadName = None,
    num_requests: NumRequests = None,
    rate: Rate = None,
    seed: Seed = None,
    arrivals: Arrivals = None,
    transforms: Transforms = None,
    ticks: Ticks = None,
    timestamp_unit: Unit = None,
    content_size: ContentSize = None,
    max_tokens: MaxTokens = None,
    model: ModelName = None,
    gpu: GpuName = None,
    tensor_parallel: TensorParallel = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    costs: Costs = None,
    cuda_graphs: CudaGraphs = None,
    gpu_memory_utilization: Memory = None,
    num_replicas: NumReplicas = None,
    routing: Routing = None,
    load_staleness: Staleness = None,
    host_bandwidth_gb_s: HostBandwidth = None,
    front_end: FrontEnd = None,
    slo: Slo = None,
    convention: Convention = None,
    preset: Preset = None,
    admission: Admission = None,
    scheduling: Scheduling = None,
    batching: Batching = None,
    allocation: Allocation = None,
    preemption: Preemption = None,
    preempt_for_waiting: PreemptForWaiting = None,
    num_host_blocks: NumHostBlocks = None,
    eviction: Eviction = None,
    isolation: Isolation = None,
    threat_decision: ThreatDecision = None,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    enable_prefix_caching: PrefixCaching = None,
    enable_chunked_prefill: ChunkedPrefill = None,
    async_depth: AsyncDepth = None,
    journal: Journal = None,
    json: Json = None,
    html: Html = None,
    records: Records = None,
    toml: Toml = None,
    band: Band = True,
    draws: Draws = 0,
) -> None:
    """Play a workload on a simulated server; print latencies, throughput, cache and memory."""
    given = dict(locals())
    outputs = {name: given.pop(name) for name in ("journal", "json", "html", "records", "toml")}
    from sim.commands import Outputs, run_simulation

    for name in ("config", "from_", "band", "draws"):
        given.pop(name)
    run_simulation(_setup(config, from_, given), Outputs(**outputs), band, draws)


def _with_options_of(other: Callable[..., None], **also: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that takes the same options as another, and these besides: (annotation, default) by name."""

    def dress(command: Callable[..., None]) -> Callable[..., None]:
        parameters = dict(inspect.signature(other, eval_str=True).parameters)
        for name, (annotation, default) in also.items():
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters[name] = inspect.Parameter(name, kind, default=default, annotation=annotation)
        in_order = sorted(parameters.values(), key=lambda each: each.kind)
        setattr(command, "__signature__", inspect.Signature(in_order))  # noqa: B010
        command.__annotations__ = {name: each.annotation for name, each in parameters.items()}
        return command

    return dress


@app.command()
@_with_options_of(simulate, model=(LiveModel, None), device=(Body, "cpu"))
def bench(**given: Any) -> None:
    """Play a workload on a live server, as simulate does on a simulated one; print the same report."""
    outputs = {name: given.pop(name) for name in ("journal", "json", "html", "records", "toml")}
    config, from_, device = (given.pop(name) for name in ("config", "from_", "device"))
    given.pop("band"), given.pop("draws")  # of costs, which a live run has none of
    from bench import run_bench
    from sim.commands import Outputs

    raise typer.Exit(run_bench(_setup(config, from_, given, model="tiny"), device, Outputs(**outputs)))


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


def _setup(config: Path | None, from_: str | None, given: dict[str, Any], **defaults: Any) -> Setup:
    """The file's settings, over them a vLLM command's, over them the options; `defaults` where none of them says."""
    from policies.config import EngineConfig
    from sim.setup import Setup
    from sim.vllm_args import parse_command, parse_yaml

    told = {name: value for name, value in given.items() if value not in (None, [])}
    engine = {name: told.pop(name) for name in list(told) if name in EngineConfig.__dataclass_fields__}
    base = Setup() if config is None else Setup.from_toml(config)
    values = {**defaults, **base.to_dict(), **told}
    values["engine"] = {**base.engine, **engine}
    setup = Setup.from_dict(values)
    if from_ is None:
        return setup
    is_file = from_.endswith((".yaml", ".yml"))
    return setup.with_vllm(parse_yaml(Path(from_)) if is_file else parse_command(from_))


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
) -> None:
    """Rates, lengths, prefix reuse, sessions, and what had to be assumed."""
    given = dict(locals())
    from sim.commands import describe_workload

    describe_workload(_setup(None, None, given))


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
    convert_workload(_setup(None, None, given), out)


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


@app.command()
def profiles() -> None:
    """List GPUs and models, with the provenance and the band of their costs."""
    from sim.commands import list_profiles

    list_profiles()


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
) -> None:
    """A/B: the same requests through two setups, what differs and how sure that is."""
    from sim.experiment.commands import run_compare
    from sim.experiment.runner import Simulated

    runner = Simulated(num_workers)
    run_compare(
        a, b, runner, num=num, metrics=metric or (), precision=precision, margin=margin, factor=factor, out=json_
    )


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


@app.command()
def demo(
    shared: Annotated[Path, typer.Option(help="Where the traces lie.")] = Path("../shared/data/traces"),
    out: Annotated[Path, typer.Option(help="Where journals and results go.")] = Path("demo-results"),
) -> None:
    """Compare policies on a built-in workload and on real traces, then replay a journal."""
    from sim.commands import run_demo

    raise typer.Exit(run_demo(shared, out))


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

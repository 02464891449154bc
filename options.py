"""Options that several commands share, and the setup that they add up to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sim.setup import Setup

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
CacheState = Annotated[str | None, typer.Option(help="cold; warm=0.2: that share is played first; primed.")]
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
IsLive = Annotated[bool, typer.Option("--live", help="On the live body, which takes as long as it takes.")]
LiveModel = Annotated[
    str | None,
    typer.Option("--model", help="tiny, small, smollm2-135m, random:SHAPE, a Hugging Face folder, or a .gguf file."),
]
Draws = Annotated[int, typer.Option(help="Draw costs so often, instead of a band: each figure with its interval.")]
Band = Annotated[bool, typer.Option("--band/--no-band", help="Also run with all costs at the ends of their band.")]


def of_a_run(
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
    cache_state: CacheState = None,
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
) -> None:
    """The options that say what is run, for commands to take by `with_options_of`; `setup_of` makes a setup of them."""


def with_options_of(other: Callable[..., None], **also: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


def setup_of(config: Path | Setup | None, from_: str | None, given: dict[str, Any], **defaults: Any) -> Setup:
    """The file's settings, over them a vLLM command's, over them the options; `defaults` where none of them says."""
    from policies.config import EngineConfig
    from sim.setup import Setup
    from sim.vllm_args import parse_command, parse_yaml

    told = {name: value for name, value in given.items() if value not in (None, [])}
    engine = {name: told.pop(name) for name in list(told) if name in EngineConfig.__dataclass_fields__}
    base = Setup() if config is None else Setup.from_toml(config) if isinstance(config, Path) else config
    values = {**defaults, **base.to_dict(), **told}
    values["engine"] = {**base.engine, **engine}
    setup = Setup.from_dict(values)
    if from_ is None:
        return setup
    is_file = from_.endswith((".yaml", ".yml"))
    return setup.with_vllm(parse_yaml(Path(from_)) if is_file else parse_command(from_))

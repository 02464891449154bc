"""servetwin: the command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    pass

app = typer.Typer(
    help="What an LLM server will do, decided by the same policies that can run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Trace = Annotated[Path | None, typer.Option(help="Trace file: Azure CSV, Mooncake JSONL or Vidur CSV.")]
WorkloadName = Annotated[str | None, typer.Option("--workload", help="Built-in workload: chat, fixed, shared-prefix.")]
NumRequests = Annotated[int | None, typer.Option(help="Only the first so many requests.")]
Rate = Annotated[float | None, typer.Option(help="Requests a second; a trace's times are scaled to it.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Ticks = Annotated[str, typer.Option(help="Arrivals recorded on a coarse clock: spread or as-is.")]
MaxTokens = Annotated[int | None, typer.Option(help="max_tokens of every request; default: the longest answer's.")]
ModelName = Annotated[str, typer.Option("--model", help="llama-3-8b, llama-2-7b or qwen3-8b.")]
GpuName = Annotated[str, typer.Option("--gpu", help="h100, h200 or a100.")]
Memory = Annotated[float, typer.Option("--gpu-memory-utilization", help="Share of GPU memory the engine may use.")]
Preset = Annotated[str | None, typer.Option(help="Settings of a real engine: vllm-v1, vllm-v1-priority.")]
Admission = Annotated[str | None, typer.Option(help="May it come in?")]
Scheduling = Annotated[str | None, typer.Option(help="Who is next? fcfs, priority.")]
Batching = Annotated[str | None, typer.Option(help="How many tokens each? chunked, stall_free, prefill_first, static.")]
Allocation = Annotated[
    str | None,
    typer.Option(help="Which memory is promised? paged, paged_full_prompt, paged_reserve_output, contiguous_max_len."),
]
Preemption = Annotated[str | None, typer.Option(help="Memory is full, who yields? latest, lowest_priority.")]
Eviction = Annotated[str | None, typer.Option(help="Which cached block goes? lru.")]
Isolation = Annotated[str | None, typer.Option(help="Who may share a prefix? global, tenant, no_reuse.")]
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
Band = Annotated[bool, typer.Option("--band/--no-band", help="Also run with all costs at the ends of their band.")]


@app.command()
def simulate(
    trace: Trace = None,
    workload: WorkloadName = None,
    num_requests: NumRequests = None,
    rate: Rate = None,
    seed: Seed = 0,
    ticks: Ticks = "spread",
    max_tokens: MaxTokens = None,
    model: ModelName = "llama-3-8b",
    gpu: GpuName = "h100",
    gpu_memory_utilization: Memory = 0.9,
    preset: Preset = None,
    admission: Admission = None,
    scheduling: Scheduling = None,
    batching: Batching = None,
    allocation: Allocation = None,
    preemption: Preemption = None,
    eviction: Eviction = None,
    isolation: Isolation = None,
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
    band: Band = True,
) -> None:
    """Play a workload on a simulated replica; print latencies, throughput, cache and memory."""
    from sim.commands import run_simulation
    from sim.setup import Setup

    engine = {
        "admission": admission,
        "scheduling": scheduling,
        "batching": batching,
        "allocation": allocation,
        "preemption": preemption,
        "eviction": eviction,
        "isolation": isolation,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "enable_prefix_caching": enable_prefix_caching,
        "enable_chunked_prefill": enable_chunked_prefill,
        "async_depth": async_depth,
    }
    setup = Setup(
        trace=trace,
        workload=workload if trace or workload else "chat",
        num_requests=num_requests,
        rate=rate,
        seed=seed,
        ticks=ticks,
        max_tokens=max_tokens,
        model=model,
        gpu=gpu,
        gpu_memory_utilization=gpu_memory_utilization,
        preset=preset,
        engine=_given(engine),
    )
    run_simulation(setup, journal, json, band)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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

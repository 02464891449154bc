"""A measured run played again: its arrivals, lengths and prefixes as a workload, its engine as a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibration.records import MeasuredRequest, MeasuredRun
from policies.catalogue import preset
from policies.config import EngineConfig
from policies.prompt import ContentPrompt, LengthPrompt, Prompt
from policies.types import Request
from sim.cost import StepCost
from sim.frontend import FrontEndTimes
from sim.simulate import Run, simulate
from sim.workload.workload import WorkItem, Workload

HOW = {
    "num_blocks": "--num-blocks, as the server logs or its vllm:cache_config_info says",
    "block_size": "--block-size",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "enable_prefix_caching": "--prefix-caching or --no-prefix-caching",
}


def config_of(run: MeasuredRun, given: Mapping[str, Any], preset_name: str = "vllm-v1") -> EngineConfig:
    """The preset's settings, over them what the run tells, over them what is given.

    Raises ValueError naming a limit that nobody tells, and one on which the server and the caller disagree.
    """
    for name, value in run.engine.items():
        if name in given and given[name] != value:
            raise ValueError(f"run {run.name!r}: its server says {name} {value}, you say {given[name]}: which is it?")
    values = {**preset(preset_name), **run.engine, **given}
    if missing := [name for name in HOW if name not in values]:
        raise ValueError(
            f"run {run.name!r} does not tell {', '.join(missing)}: a wrong limit swamps any cost. "
            f"Give {'; '.join(HOW[name] for name in missing)}, or all by --from 'vllm serve ...'"
        )
    values.setdefault("max_model_len", longest(run))
    return EngineConfig.from_dict(values)


def longest(run: MeasuredRun) -> int:
    """Tokens of the longest request, prompt and answer."""
    return max(each.num_prompt_tokens + max(each.num_output_tokens, each.max_tokens or 0) for each in run.completed)


def request_of(request: MeasuredRequest, content_size: int | None) -> Request:
    prompt: Prompt = LengthPrompt(request.num_prompt_tokens)
    if request.content_ids and content_size:
        prompt = ContentPrompt(request.num_prompt_tokens, request.content_ids, content_size)
    return Request(
        request.request_id,
        request.arrival_time,
        prompt,
        request.max_tokens or request.num_output_tokens,
        class_name=request.class_name,
    )


def workload_of(run: MeasuredRun) -> Workload:
    """Of completed requests: what the failed ones cost the server, nobody knows."""
    items = [WorkItem(request_of(each, run.content_size), each.num_output_tokens) for each in run.completed]
    return Workload(run.name, items, run.findings, run.source)


def replay(run: MeasuredRun, config: EngineConfig, cost: StepCost, front_end: FrontEndTimes | None) -> Run:
    return simulate(config, workload_of(run), cost, front_end=front_end)

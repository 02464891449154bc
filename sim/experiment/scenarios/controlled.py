"""The four controlled cases: cold unique prompts, repeated long prefixes, mixed lengths at once, competing classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.experiment.scenarios.checks import all_answered, falls, is_at_least, is_exactly, rises
from sim.experiment.scenarios.scenario import Arms, Check, Scale, Scenario
from sim.setup import Setup

NUM_PREFIXES = 2


def _crowd(scale: Scale) -> str:
    """Four times as many users as slots: somebody always waits."""
    return scale.users(4 * scale.num_slots)


def _caching(scale: Scale, workload: str, arrivals: str) -> Mapping[str, Setup]:
    on_off = {"caching off": False, "caching on": True}
    return {
        name: scale.setup(workload, arrivals, enable_prefix_caching=is_on, max_num_batched_tokens=scale.long)
        for name, is_on in on_off.items()
    }


# -- S40 --------------------------------------------------------------------------------------------------------------


def _cold(scale: Scale) -> Mapping[str, Setup]:
    workload = f"fixed,num_prompt_tokens={4 * scale.short},num_output_tokens={scale.answer}"
    return _caching(scale, workload, scale.users(scale.num_slots))


def _nothing_is_found(arms: Arms, scale: Scale) -> Sequence[Check]:
    computed = scale.num_requests * 4 * scale.short
    found = [is_exactly(arm, "num_cached_tokens", 0, "prompt tokens found in the cache") for arm in arms.values()]
    asked = [is_exactly(arm, "num_prompt_tokens", computed, "prompt tokens") for arm in arms.values()]
    return [all_answered(arms.values()), *asked, *found]


COLD_UNIQUE = Scenario(
    "cold-unique",
    "S40",
    "Prompts that share nothing: what does everything cost when nothing can be reused?",
    "engine.enable_prefix_caching",
    _cold,
    _nothing_is_found,
    is_counted=True,
)

# -- S41 --------------------------------------------------------------------------------------------------------------


def _repeated(scale: Scale) -> Mapping[str, Setup]:
    lengths = f"prefix_tokens={scale.long},own_tokens={scale.short},output_tokens={scale.answer}"
    workload = f"repeated-prefix,num_prefixes={NUM_PREFIXES},{lengths}"
    return _caching(scale, workload, scale.users(1))


def _prefixes_are_found(arms: Arms, scale: Scale) -> Sequence[Check]:
    off, on = arms.values()
    found = (scale.num_requests - NUM_PREFIXES) * scale.long
    return [
        all_answered((off, on)),
        is_exactly(off, "num_cached_tokens", 0, "prompt tokens found in the cache"),
        is_exactly(on, "num_cached_tokens", found, "prompt tokens found in the cache"),
        falls(off, on, "ttft.p50", 0.8, "TTFT p50"),
    ]


REPEATED_PREFIXES = Scenario(
    "repeated-prefixes",
    "S41",
    "Long prefixes that come again: is each computed once, and does the first token come sooner?",
    "engine.enable_prefix_caching",
    _repeated,
    _prefixes_are_found,
)

# -- S42 --------------------------------------------------------------------------------------------------------------


def _mixed(scale: Scale) -> Mapping[str, Setup]:
    short, long = f"short:{scale.short}+{scale.answer}", f"long:{4 * scale.short}+{8 * scale.answer}"
    batching = {"static groups": "static", "continuous": "chunked"}
    return {
        name: scale.setup(f"cycle,turns={short}/{short}/{short}/{long}", _crowd(scale), batching=each)
        for name, each in batching.items()
    }


def _short_ones_leave_early(arms: Arms, scale: Scale) -> Sequence[Check]:
    static, continuous = arms.values()
    return [
        all_answered((static, continuous)),
        is_at_least(static, "num_padding_tokens", 1, "padding tokens"),
        is_exactly(continuous, "num_padding_tokens", 0, "padding tokens"),
        falls(static, continuous, "classes.short.e2e.p50", 0.8, "E2E p50 of short requests"),
        rises(static, continuous, "output_throughput", 1.1, "output tokens a second"),
    ]


MIXED_LENGTHS = Scenario(
    "mixed-lengths",
    "S42",
    "Short and long at once: do the short wait for the longest of their batch?",
    "engine.batching",
    _mixed,
    _short_ones_leave_early,
)

# -- S43 --------------------------------------------------------------------------------------------------------------


def _competing(scale: Scale) -> Mapping[str, Setup]:
    chat, offline = f"interactive:{scale.short}+{scale.answer}", f"batch:{4 * scale.short}+{2 * scale.answer}"
    scheduling = {"in order": "fcfs", "by weight": "wfq,weights=interactive:8/batch:1"}
    return {
        name: scale.setup(f"cycle,turns={chat}/{offline}/{offline}/{offline}", _crowd(scale), scheduling=each)
        for name, each in scheduling.items()
    }


def _classes_are_protected(arms: Arms, scale: Scale) -> Sequence[Check]:
    in_order, by_weight = arms.values()
    offline = 3 * scale.num_requests // 4
    return [
        all_answered((in_order, by_weight)),
        falls(in_order, by_weight, "classes.interactive.ttft.p50", 0.8, "TTFT p50 of interactive requests"),
        is_exactly(by_weight, "classes.batch.num_completed", offline, "batch requests answered"),
    ]


COMPETING_CLASSES = Scenario(
    "competing-classes",
    "S43",
    "Interactive and batch work on an overloaded engine: who waits, and is anybody starved?",
    "engine.scheduling",
    _competing,
    _classes_are_protected,
)

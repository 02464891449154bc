"""Names to policies, a configuration to an engine, presets of real engines."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from policies.admission.accept_all import AcceptAll
from policies.admission.bounded_queue import BoundedQueue
from policies.admission.class_budgets import ClassBudgets
from policies.admission.shed_late import ShedLate
from policies.admission.token_buckets import TokenBuckets
from policies.allocation.contiguous_max_len import ContiguousMaxLen
from policies.allocation.new_token_ratio import NewTokenRatio
from policies.allocation.paged import Paged
from policies.allocation.paged_full_prompt import PagedFullPrompt
from policies.allocation.paged_reserve_output import PagedReserveOutput
from policies.allocation.past_future import PastFuture
from policies.batching.chunked import ChunkedPrefill
from policies.batching.decode_first import DecodeFirst
from policies.batching.prefill_first import PrefillFirst
from policies.batching.stall_free import StallFree
from policies.batching.static import StaticBatches
from policies.batching.tpot_budget import TpotBudget
from policies.config import MENUS, EngineConfig
from policies.engine import EngineCore, Policies
from policies.eviction.belady import Belady
from policies.eviction.class_quota import ClassQuota
from policies.eviction.fifo import FirstInFirstOut
from policies.eviction.gdsf import GreedyDualSizeFrequency
from policies.eviction.lfu import LeastFrequentlyUsed
from policies.eviction.lru import LeastRecentlyUsed
from policies.eviction.lru_leaf import LeastRecentlyUsedLeaf
from policies.eviction.queue_informed import QueueInformed
from policies.eviction.s3fifo import S3Fifo
from policies.eviction.sieve import Sieve
from policies.eviction.slru import SegmentedLru
from policies.eviction.ttl import TimeToLive
from policies.eviction.workload_aware import WorkloadAware
from policies.interfaces import (
    AdmissionPolicy,
    AllocationPolicy,
    BatchingPolicy,
    EvictionPolicy,
    IsolationPolicy,
    Partitions,
    PreemptionPolicy,
    RoutingPolicy,
    SchedulingPolicy,
)
from policies.isolation.application import WithinApplication
from policies.isolation.global_pool import GlobalPool
from policies.isolation.hierarchical import SharedUpToBarrier
from policies.isolation.no_reuse import NoReuse
from policies.isolation.partition import PartitionedPool
from policies.isolation.request import WithinRequest
from policies.isolation.session import WithinSession
from policies.isolation.tenant import WithinTenant
from policies.isolation.user import WithinUser
from policies.journal import RecordingEngine, Write
from policies.parts import ByPart
from policies.preemption.fewest_outputs import FewestOutputs
from policies.preemption.fewest_shared import FewestShared
from policies.preemption.latest import LatestAdmitted
from policies.preemption.least_computed import LeastComputed
from policies.preemption.lowest_priority import LowestPriority
from policies.preemption.most_blocks import MostBlocks
from policies.routing.consistent_hash import ConsistentHash
from policies.routing.least_loaded import LeastLoaded
from policies.routing.pinned import PinnedTenants
from policies.routing.prefix_aware import PrefixAware
from policies.routing.random_choice import RandomChoice
from policies.routing.round_robin import RoundRobin
from policies.scheduling.dlpm import DeficitLongestPrefixMatch
from policies.scheduling.drr import DeficitRoundRobin
from policies.scheduling.edf import EarliestDeadlineFirst
from policies.scheduling.fcfs import FirstComeFirstServed
from policies.scheduling.hrrn import HighestResponseRatioNext
from policies.scheduling.least_slack import LeastSlackFirst
from policies.scheduling.lpm import LongestPrefixMatch
from policies.scheduling.priority import PriorityOrder
from policies.scheduling.sjf import ShortestPromptFirst
from policies.scheduling.srpt import ShortestRemaining
from policies.scheduling.vtc import VirtualTokenCounter
from policies.scheduling.wfq import WeightedFairQueueing

ADMISSION: dict[str, Callable[..., AdmissionPolicy]] = {
    "accept_all": AcceptAll,
    "bounded_queue": BoundedQueue,
    "class_budgets": ClassBudgets,
    "token_buckets": TokenBuckets,
    "shed_late": ShedLate,
}
SCHEDULING: dict[str, Callable[..., SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityOrder,
    "sjf": ShortestPromptFirst,
    "hrrn": HighestResponseRatioNext,
    "srpt": ShortestRemaining,
    "edf": EarliestDeadlineFirst,
    "least_slack": LeastSlackFirst,
    "lpm": LongestPrefixMatch,
    "vtc": VirtualTokenCounter,
    "dlpm": DeficitLongestPrefixMatch,
    "drr": DeficitRoundRobin,
    "wfq": WeightedFairQueueing,
}
BATCHING: dict[str, Callable[..., BatchingPolicy]] = {
    "chunked": ChunkedPrefill,
    "prefill_first": PrefillFirst,
    "stall_free": StallFree,
    "tpot_budget": TpotBudget,
    "decode_first": DecodeFirst,
    "static": StaticBatches,
}
ALLOCATION: dict[str, Callable[..., AllocationPolicy]] = {
    "paged": Paged,
    "paged_full_prompt": PagedFullPrompt,
    "paged_reserve_output": PagedReserveOutput,
    "contiguous_max_len": ContiguousMaxLen,
    "new_token_ratio": NewTokenRatio,
    "past_future": PastFuture,
}
PREEMPTION: dict[str, Callable[..., PreemptionPolicy]] = {
    "latest": LatestAdmitted,
    "lowest_priority": LowestPriority,
    "least_computed": LeastComputed,
    "most_blocks": MostBlocks,
    "fewest_shared": FewestShared,
    "fewest_outputs": FewestOutputs,
}
EVICTION: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lru_leaf": LeastRecentlyUsedLeaf,
    "fifo": FirstInFirstOut,
    "lfu": LeastFrequentlyUsed,
    "slru": SegmentedLru,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "gdsf": GreedyDualSizeFrequency,
    "queue_informed": QueueInformed,
    "ttl": TimeToLive,
    "class_quota": ClassQuota,
    "workload_aware": WorkloadAware,
    "belady": Belady,
}
ISOLATION: dict[str, Callable[..., IsolationPolicy]] = {
    "no_reuse": NoReuse,
    "request": WithinRequest,
    "session": WithinSession,
    "user": WithinUser,
    "tenant": WithinTenant,
    "application": WithinApplication,
    "global": GlobalPool,
    "hierarchical": SharedUpToBarrier,
    "partition": PartitionedPool,
}
ROUTING: dict[str, Callable[..., RoutingPolicy]] = {
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
    "consistent_hash": ConsistentHash,
    "pinned": PinnedTenants,
}

MENU: dict[str, Mapping[str, Callable[..., Any]]] = {
    "admission": ADMISSION,
    "scheduling": SCHEDULING,
    "batching": BATCHING,
    "allocation": ALLOCATION,
    "preemption": PREEMPTION,
    "eviction": EVICTION,
    "isolation": ISOLATION,
    "routing": ROUTING,
}
assert tuple(MENU) == (*MENUS, "routing")  # the last is a cluster's choice, not an engine's

# Settings that make the core decide as a real engine does, by its version.
_VLLM_V1: dict[str, Any] = {  # 0.32.0, for requests that its front end lets through
    "scheduling": "fcfs",
    "batching": "chunked",
    "allocation": "paged_full_prompt",
    "preemption": "latest",
    "eviction": "lru",
    "isolation": "global",
    "cache_at": "schedule",
    "hol_skip": 0,
    "unhashed_first": True,
    "drop_unwritten_keys": False,
}
PRESETS: dict[str, dict[str, Any]] = {
    "vllm-v1": _VLLM_V1,
    "vllm-v1-priority": {**_VLLM_V1, "scheduling": "priority", "preemption": "lowest_priority"},
}


def preset(name: str) -> dict[str, Any]:
    """Raises ValueError naming the known ones."""
    if name not in PRESETS:
        raise ValueError(_unknown("preset", name, PRESETS))
    return dict(PRESETS[name])


def build(config: EngineConfig, journal: Write | None = None, secret: bytes = b"") -> EngineCore:
    """An engine, told to `journal` line by line if there is one.

    Raises ValueError for an unknown policy or knob, and for policies that cannot go together.
    """
    made = {menu: make(menu, getattr(config, menu)) for menu in MENUS}
    if isinstance(made["isolation"], Partitions):
        made["eviction"] = ByPart([make("eviction", config.eviction) for _ in range(made["isolation"].parts)])
    policies = Policies(**made)
    if journal is None:
        return EngineCore(config, policies, secret)
    return RecordingEngine(config, policies, secret, journal)


def make(menu: str, spec: str) -> Any:
    """`name`, `name,knob=value,...` or `my_file.py:MyPolicy,knob=value,...`."""
    return find(menu, spec.partition(",")[0])(**knobs(menu, spec))


def knobs(menu: str, spec: str) -> dict[str, Any]:
    """What a policy is made with, defaults left out. Raises ValueError for an unknown policy, knob or value."""
    name, *told = spec.split(",")
    known, values = parameters(find(menu, name)), dict[str, str]()
    for each in told:
        knob, value = _knob(menu, name, each)
        if knob in values:
            raise ValueError(f"knob {knob!r} of {menu} policy {name!r} is given twice: say it once")
        values[knob] = value
    for knob, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and knob not in values:
            raise ValueError(f"{menu} policy {name!r} needs its knob {knob!r}: write {name},{knob}=value")
    for knob in values:
        if knob not in known:
            raise ValueError(
                f"unknown knob {knob!r} of {menu} policy {name!r}; known: {', '.join(known) or 'none'}"
                f"{_hint(knob, known)}"
            )
    return {knob: _convert(f"{menu} {name}", knob, text, known[knob]) for knob, text in values.items()}


def find(menu: str, name: str) -> Callable[..., Any]:
    """The factory behind a name of a menu, or behind a class in somebody's file."""
    if ":" in name:
        return _from_file(menu, name)
    if name not in MENU[menu]:
        raise ValueError(_unknown(f"{menu} policy", name, MENU[menu]))
    return MENU[menu][name]


def parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The knobs of a policy."""
    return dict(inspect.signature(factory).parameters)


def _unknown(what: str, name: str, known: Mapping[str, Any]) -> str:
    return f"unknown {what} {name!r}; known: {', '.join(sorted(known))}{_hint(name, known)}"


def _hint(name: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f". Did you mean {close[0]!r}?" if close else ""


def _knob(menu: str, name: str, text: str) -> tuple[str, str]:
    knob, equals, value = text.partition("=")
    if not equals or not knob or not value:
        raise ValueError(f"{text!r} after {menu} policy {name!r} must read knob=value")
    return knob, value


def _convert(policy: str, knob: str, text: str, parameter: inspect.Parameter) -> Any:
    """Read a value as the type of the knob's default."""
    kind = type(parameter.default) if parameter.default is not inspect.Parameter.empty else str
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text) if kind in (int, float, str) else text
    except (KeyError, ValueError):
        raise ValueError(f"{knob}={text} of {policy} must be {kind.__name__}") from None


def _from_file(menu: str, name: str) -> Callable[..., Any]:
    """Load `path/to/my_file.py:MyPolicy`."""
    path_text, _, class_name = name.rpartition(":")
    path = Path(path_text)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{menu} policy {name!r}: there is no Python file {path_text!r}; write my_file.py:MyPolicy")
    module_name = f"_policy_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{menu} policy file {path_text!r} failed to load: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if not callable(found):
        names = [
            key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == module_name
        ]
        raise ValueError(f"{path_text!r} has no class {class_name!r}; it has: {', '.join(names) or 'none'}")
    factory: Callable[..., Any] = found
    return factory


def describe(config: EngineConfig) -> dict[str, str]:
    """Menu -> the class that answers, by its full name."""
    factories = {menu: find(menu, getattr(config, menu).split(",")[0]) for menu in MENUS}
    return {menu: f"{factory.__module__}.{factory.__qualname__}" for menu, factory in factories.items()}


def source_hash() -> str:
    """Of all files of the core: two results with the same hash were decided by the same code."""
    root = Path(__file__).parent
    hasher = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        hasher.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]

"""EngineConfig: every choice that changes a decision, checked once and stored beside each result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

MENUS = ("admission", "scheduling", "batching", "allocation", "preemption", "eviction", "isolation")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes in tokens and blocks. Policies are named as on the command line: `name` or `name,knob=value,...`."""

    num_blocks: int = 4096  # usable blocks of the pool
    block_size: int = 16  # tokens a block
    max_num_batched_tokens: int = 2048  # tokens a step
    max_num_seqs: int = 128  # requests running at once
    max_model_len: int = 8192  # prompt and output of one request
    admission: str = "accept_all"
    scheduling: str = "fcfs"
    batching: str = "chunked"
    allocation: str = "paged_full_prompt"
    preemption: str = "latest"
    eviction: str = "lru"
    isolation: str = "global"
    threat_decision: str = ""  # why tenants may share prefixes, where the isolation lets them
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # largest prefill chunk while others are there; 0 is off
    long_prefill_token_threshold_adaptive: bool = False
    async_depth: int = 1  # steps in flight; 2 schedules a step before the last one's tokens are known
    cache_at: str = "schedule"  # or "step_end": when a block filled by a step can be found by others
    hol_skip: int = 0  # candidates that may be passed over when they do not fit; 0 stops at the first
    unhashed_first: bool = True  # free blocks without a key are reused before any cached block is evicted
    drop_unwritten_keys: bool = True  # of a request thrown out of the step that was to fill its blocks; vLLM keeps them
    refuse_unfittable: bool = True  # refuse at `add` what can never run
    preempt_for_waiting: bool = False  # a waiting request takes the place of running ones that it outranks
    preempt_min_steps: int = 0  # steps somebody has run before a waiting request may take its place
    num_host_blocks: int = 0  # KV blocks of the preempted that host memory holds; what finds no room is recomputed

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("num_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        for name in ("long_prefill_token_threshold", "hol_skip", "preempt_min_steps", "num_host_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 0 (off) or more")
        if self.async_depth not in (1, 2):
            raise ValueError(f"async_depth ({self.async_depth}) must be 1 (synchronous) or 2 (one step ahead)")
        if self.cache_at not in ("schedule", "step_end"):
            raise ValueError(f"cache_at ({self.cache_at!r}) must be 'schedule' or 'step_end'")
        if self.num_host_blocks and self.async_depth > 1:
            raise ValueError(
                f"num_host_blocks ({self.num_host_blocks}) needs async_depth 1: swapping is modelled step by step"
            )
        if self.refuse_unfittable:
            self._check_liveness()

    def _check_types(self) -> None:
        for each in fields(self):
            value, expected = getattr(self, each.name), type(each.default)
            if type(value) is not expected:
                raise ValueError(f"{each.name} ({value!r}) must be {expected.__name__}, not {type(value).__name__}")

    def _check_liveness(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request decodes one token a step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len}) when chunked prefill is off: a prompt then needs one step"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Raises ValueError naming the first unknown key or bad value."""
        known = {each.name for each in fields(cls)}
        for name in values:
            if name not in known:
                raise ValueError(f"unknown engine setting {name!r}; known: {', '.join(sorted(known))}")
        return cls(**values)

"""Who reads which tokens of a decode step: equal shares of all KV, cut where a share ends.

All (sequence, KV head) segments lie end to end on one line, each as long as its tiles plus OVERHEAD, which is what
starting a segment costs. The line is cut into one share a program; a program walks its share. A segment that a cut
falls into is in parts, one in each program it reaches. So the work is even to within a tile, whatever the lengths,
and the grid never changes: a CUDA graph may hold it. Built on the device, once a step; all layers use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.configs import Config, Constants, config_for, key_of
from backend.kernels.shape import AttentionShape

OVERHEAD = 1  # tiles' worth of time that a segment's start costs: pointers, queries, an empty pipeline
MIN_SHARE_TOKENS = 256  # smaller parts cost more to add up than to read
MAX_PARTS = 64  # of a segment: one program adds them up
INTERPRETED_PROGRAMS = 8  # without a GPU


@triton.jit(do_not_specialize=["num_seqs", "min_share"])
def _plan_kernel(context_lens, plan, starts, spans, num_seqs, min_share,
                 NUM_PROGRAMS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TILE: tl.constexpr, OVERHEAD: tl.constexpr,
                 MAX_PARTS: tl.constexpr, SEQS: tl.constexpr) -> None:  # fmt: skip
    """One program a share: finds the segments at its two ends. The first also writes what all share."""
    pid = tl.program_id(0)
    seq = tl.arange(0, SEQS)
    length = tl.load(context_lens + seq, mask=seq < num_seqs, other=0)
    cost = tl.where(seq < num_seqs, tl.maximum((length + TILE - 1) // TILE, 1) + OVERHEAD, 0)
    ends = tl.cumsum(cost * NUM_KV_HEADS, 0)
    total = tl.sum(cost * NUM_KV_HEADS, 0)
    share = tl.maximum((total + NUM_PROGRAMS - 1) // NUM_PROGRAMS, min_share)
    share = tl.maximum(share, (tl.max(cost, 0) + MAX_PARTS - 2) // (MAX_PARTS - 1))
    if pid == 0:
        tl.store(plan, share)
        tl.store(plan + 1, total)
        tl.store(starts + seq, ends - cost * NUM_KV_HEADS, mask=seq < num_seqs)
    begin = pid * share
    last = tl.minimum(begin + share, total) - 1
    if begin < total:
        tl.store(spans + 2 * pid, _segment_at(begin, seq, cost, ends, NUM_KV_HEADS))
        tl.store(spans + 2 * pid + 1, _segment_at(last, seq, cost, ends, NUM_KV_HEADS) + 1)
    else:
        tl.store(spans + 2 * pid, 0)
        tl.store(spans + 2 * pid + 1, 0)


@triton.jit
def _segment_at(point, seq, cost, ends, NUM_KV_HEADS: tl.constexpr):
    """sequence * NUM_KV_HEADS + head of the segment that holds `point`."""
    holds = (ends > point) & (ends - cost * NUM_KV_HEADS <= point)
    head = (point - (ends - cost * NUM_KV_HEADS)) // tl.maximum(cost, 1)
    return tl.sum(tl.where(holds, seq * NUM_KV_HEADS + head, 0), 0)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The plan of a step and room for its parts, on the device; kept from step to step and layer to layer.

    plan      [2] int32: the length of a share, the length of the line
    starts    [max_num_seqs] int32: where on the line each sequence begins
    spans     [num_programs, 2] int32: first segment and the one after the last of each share
    parts     [2 * num_programs, group, head_dim] fp32: parts of segments begun before a share, then in it
    weights   [2 * num_programs, group] fp32, log2
    arrivals  [max_num_seqs * num_kv_heads] int32, 0 between launches
    """

    shape: AttentionShape
    config: Config
    plan: Tensor
    starts: Tensor
    spans: Tensor
    parts: Tensor
    weights: Tensor
    arrivals: Tensor

    @property
    def num_programs(self) -> int:
        return self.spans.shape[0]

    @property
    def max_num_seqs(self) -> int:
        return self.starts.shape[0]


def allocate_work(max_num_seqs: int, shape: AttentionShape, device: torch.device | str, config: Config | None = None,
                  num_programs: int | None = None) -> DecodeWork:  # fmt: skip
    """Room for steps of up to `max_num_seqs` sequences: once for a CUDA graph, or for all eager steps."""
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs ({max_num_seqs}) must be 1 or more")
    config = config or config_for(key_of("decode", shape, max_num_seqs * shape.num_kv_heads, device))
    programs = num_programs or _num_programs(torch.device(device), config)
    return DecodeWork(
        shape,
        config,
        plan=torch.zeros(2, dtype=torch.int32, device=device),
        starts=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
        spans=torch.zeros(programs, 2, dtype=torch.int32, device=device),
        parts=torch.empty(2 * programs, shape.group, shape.head_dim, dtype=torch.float32, device=device),
        weights=torch.empty(2 * programs, shape.group, dtype=torch.float32, device=device),
        arrivals=torch.zeros(max_num_seqs * shape.num_kv_heads, dtype=torch.int32, device=device),
    )


def _num_programs(device: torch.device, config: Config) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * config.programs_per_sm


def plan_work(context_lens: Tensor, work: DecodeWork) -> None:
    """Cut the step of `context_lens` [num_seqs] int32 into shares. Launched once a step, before its first layer.

    A length of 0 is a row of a padded batch: its output is 0.
    """
    num_seqs = context_lens.shape[0]
    if num_seqs > work.max_num_seqs:
        raise ValueError(f"{num_seqs} sequences, but this work has room for {work.max_num_seqs}: allocate more")
    min_share = max(MIN_SHARE_TOKENS // work.config.tile, 1) + OVERHEAD
    _plan_kernel[(work.num_programs,)](
        context_lens, work.plan, work.starts, work.spans, num_seqs, min_share,
        **plan_constants(work.shape, work.config, work.num_programs, work.max_num_seqs), num_warps=8,
    )  # fmt: skip


def plan_constants(shape: AttentionShape, config: Config, num_programs: int, max_num_seqs: int) -> Constants:
    return {
        "NUM_PROGRAMS": num_programs, "NUM_KV_HEADS": shape.num_kv_heads, "TILE": config.tile, "OVERHEAD": OVERHEAD,
        "MAX_PARTS": MAX_PARTS, "SEQS": triton.next_power_of_2(max_num_seqs),
    }  # fmt: skip

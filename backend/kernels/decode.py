"""Paged decode attention: one new token a sequence over its paged KV, bound by memory bandwidth.

Split-KV over the shares of decode_work.py, in a persistent grid. The query heads of a group are the rows of one tile,
padded to 16, so that K and V are read once. Full tiles run unmasked, the last one masked. A segment in parts is added
up by whoever finishes last (an atomic counter, one launch), or by a second launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.configs import Config, Constants
from backend.kernels.decode_work import OVERHEAD, DecodeWork, allocate_work, plan_work
from backend.kernels.shape import (
    LOG2_E,
    AttentionShape,
    check_heads,
    check_pools,
    gather,
    num_pages,
    precision_of,
    shape_of,
)
from backend.kernels.softmax import LOWEST, attend, load_pages, load_tile, normalised, operand, pool_rows, sum_parts

__all__ = ["DecodeWork", "allocate_work", "decode_bytes", "decode_flops", "decode_reference", "paged_decode",
           "plan_work"]  # fmt: skip


def decode_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor,
                     scale: float, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:  # fmt: skip
    """What `paged_decode` computes, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for seq, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        k = gather(k_cache, block_tables[seq], length, k_scale)
        v = gather(v_cache, block_tables[seq], length, v_scale)
        heads = q[seq].to(torch.float64).view(k.shape[0], -1, q.shape[2])
        weights = torch.softmax(heads @ k.transpose(1, 2) * scale, -1)
        out[seq] = (weights @ v).flatten(0, 1)
    return out


def decode_bytes(context_lens: Sequence[int], shape: AttentionShape) -> int:
    """K and V once, block tables, lengths, queries in and outputs out."""
    tables = shape.table_bytes * (num_pages(context_lens, shape.block_size) + len(context_lens))
    return sum(context_lens) * shape.token_kv_bytes + 2 * len(context_lens) * shape.token_query_bytes + tables


def decode_flops(context_lens: Sequence[int], shape: AttentionShape) -> int:
    """A multiplication and an addition for each of the scores' and the values' products."""
    return 4 * sum(context_lens) * shape.num_heads * shape.head_dim


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(q, k_cache, v_cache, block_tables, context_lens, out, plan, starts, spans, parts, weights, arrivals,
                   scale, v_scale, q_stride, table_stride,
                   NUM_PROGRAMS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
                   HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, OVERHEAD: tl.constexpr,
                   ONE_LAUNCH: tl.constexpr, GROUP_ROWS: tl.constexpr, PARTS: tl.constexpr,
                   PRECISION: tl.constexpr) -> None:  # fmt: skip
    pid = tl.program_id(0)
    share = tl.load(plan)
    begin = pid * share
    stop = tl.minimum(begin + share, tl.load(plan + 1))
    rows = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, HEAD_DIM)[None, :]
    for segment in range(tl.load(spans + 2 * pid), tl.load(spans + 2 * pid + 1)):
        seq = tl.cast(segment // NUM_KV_HEADS, tl.int64)
        head = segment % NUM_KV_HEADS
        length = tl.load(context_lens + seq)
        num_tiles = tl.maximum((length + TILE - 1) // TILE, 1)
        start = tl.load(starts + seq) + head * (num_tiles + OVERHEAD) + OVERHEAD
        first_tile = tl.maximum(begin - start, 0)
        last_tile = tl.minimum(stop - start, num_tiles)
        if first_tile < last_tile:
            queries = tl.load(
                q + seq * q_stride + (head * GROUP + rows) * HEAD_DIM + dims, mask=rows < GROUP, other=0.0
            )
            result, weight = _read_segment(
                operand(queries, k_cache), k_cache + head * PAGE * HEAD_DIM, v_cache + head * PAGE * HEAD_DIM,
                block_tables + seq * table_stride, length, first_tile, last_tile, scale,
                ROWS, HEAD_DIM, PAGE, NUM_KV_HEADS * PAGE * HEAD_DIM, TILE, PRECISION,
            )  # fmt: skip
            first_program = start // share
            num_parts = (start + num_tiles - 1) // share - first_program + 1
            if num_parts == 1:
                at = (seq * NUM_KV_HEADS + head) * GROUP + rows
                tl.store(out + at * HEAD_DIM + dims, result * v_scale, mask=rows < GROUP)
            else:
                slot = tl.where(pid == first_program, NUM_PROGRAMS + pid, pid).to(tl.int64)
                tl.store(parts + (slot * GROUP + rows) * HEAD_DIM + dims, result, mask=rows < GROUP)
                tl.store(weights + slot * GROUP + rows, weight[:, None], mask=rows < GROUP)
                if ONE_LAUNCH:
                    tl.debug_barrier()  # all threads' stores come before the one atomic that publishes them
                    arrived = tl.atomic_add(arrivals + segment, 1, sem="acq_rel", scope="gpu")
                    if arrived == num_parts - 1:
                        tl.store(arrivals + segment, 0)
                        _store_sum(parts, weights, out, segment, first_program, num_parts, v_scale,
                                   NUM_PROGRAMS, GROUP, GROUP_ROWS, 0, HEAD_DIM, PARTS)  # fmt: skip


@triton.jit
def _read_segment(q, k_head, v_head, table, length, first_tile, last_tile, scale,
                  ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                  TILE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Attention over tiles `first_tile` to `last_tile` of a sequence."""
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    pages = load_pages(table, first_tile, length, PAGE, TILE)
    for tile in range(first_tile, last_tile):
        positions = tile * TILE + tl.arange(0, TILE)
        visible = positions < length
        at = pool_rows(pages, positions, PAGE, HEAD_DIM, PAGE_STRIDE)
        k = load_tile(k_head, at, visible, HEAD_DIM, True)
        v = load_tile(v_head, at, visible, HEAD_DIM, True)
        pages = load_pages(table, tile + 1, length, PAGE, TILE)
        top, total, acc = attend(q, k, v, top, total, acc, scale, visible[None, :], True, PRECISION)
    return normalised(top, total, acc)


@triton.jit
def _store_sum(parts, weights, out, segment, first_program, num_parts, v_scale,
               NUM_PROGRAMS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, row0,
               HEAD_DIM: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    whole = sum_parts(parts, weights, NUM_PROGRAMS + first_program, first_program + 1, num_parts,
                      GROUP, row0, ROWS, GROUP, HEAD_DIM, PARTS)  # fmt: skip
    rows = row0 + tl.arange(0, ROWS)[:, None]
    at = (tl.cast(segment, tl.int64) * GROUP + rows) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out + at, whole * v_scale, mask=rows < GROUP)


@triton.jit
def _sum_kernel(context_lens, out, plan, starts, parts, weights, v_scale,
                NUM_PROGRAMS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                TILE: tl.constexpr, OVERHEAD: tl.constexpr, PARTS: tl.constexpr) -> None:  # fmt: skip
    """The second launch: one program a (sequence, query head) adds up its parts, if there is more than one."""
    segment = tl.program_id(0)
    share = tl.load(plan)
    seq = segment // NUM_KV_HEADS
    num_tiles = tl.maximum((tl.load(context_lens + seq) + TILE - 1) // TILE, 1)
    start = tl.load(starts + seq) + segment % NUM_KV_HEADS * (num_tiles + OVERHEAD) + OVERHEAD
    first_program = start // share
    num_parts = (start + num_tiles - 1) // share - first_program + 1
    if num_parts > 1:
        _store_sum(parts, weights, out, segment, first_program, num_parts, v_scale,
                   NUM_PROGRAMS, GROUP, 1, tl.program_id(1), HEAD_DIM, PARTS)  # fmt: skip


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float,
                 work: DecodeWork, out: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0,
                 one_launch: bool = True) -> Tensor:  # fmt: skip
    """Attention of one new token a sequence; `work` was planned for these `context_lens`.

    q                 [num_seqs, num_heads, head_dim]; rows may lie apart
    k_cache, v_cache  [num_blocks + 1, num_kv_heads, block_size, head_dim], the new token's K and V included
    block_tables      [num_seqs, max_blocks] int32; entries past a sequence's last block are not read
    context_lens      [num_seqs] int32, the new token included; 0 gives 0
    k_scale, v_scale  what a stored fp8 value is multiplied by
    Returns [num_seqs, num_heads, head_dim] of q's type (`out`, if given).
    """
    shape = shape_of(q, k_cache)
    check_heads("q", q)
    check_pools(k_cache, v_cache)
    if shape != work.shape:
        raise ValueError(f"this work was allocated for {work.shape}, not for {shape}")
    if q.shape[0] != context_lens.shape[0] or q.shape[0] > block_tables.shape[0]:
        raise ValueError(f"{q.shape[0]} queries, {context_lens.shape[0]} lengths, {block_tables.shape[0]} block tables")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _decode_kernel[(work.num_programs,)](
        q, k_cache, v_cache, block_tables, context_lens, out, work.plan, work.starts, work.spans, work.parts,
        work.weights, work.arrivals, scale * k_scale * LOG2_E, v_scale, q.stride(0), block_tables.stride(0),
        **decode_constants(shape, work.config, work.num_programs, one_launch),
        num_warps=work.config.num_warps, num_stages=work.config.num_stages,
    )  # fmt: skip
    if not one_launch:
        _sum_kernel[(q.shape[0] * shape.num_kv_heads, shape.group)](
            context_lens, out, work.plan, work.starts, work.parts, work.weights, v_scale,
            **sum_constants(shape, work.config, work.num_programs), num_warps=4,
        )  # fmt: skip
    return out


def decode_constants(shape: AttentionShape, config: Config, num_programs: int, one_launch: bool) -> Constants:
    group_rows = triton.next_power_of_2(shape.group)
    return {
        "NUM_PROGRAMS": num_programs, "NUM_KV_HEADS": shape.num_kv_heads, "GROUP": shape.group,
        "ROWS": max(config.rows, group_rows), "HEAD_DIM": shape.head_dim, "PAGE": shape.block_size,
        "TILE": config.tile, "OVERHEAD": OVERHEAD, "ONE_LAUNCH": one_launch, "GROUP_ROWS": group_rows,
        "PARTS": _parts_at_once(group_rows, shape.head_dim), "PRECISION": precision_of(shape),
    }  # fmt: skip


def sum_constants(shape: AttentionShape, config: Config, num_programs: int) -> Constants:
    return {
        "NUM_PROGRAMS": num_programs, "NUM_KV_HEADS": shape.num_kv_heads, "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim, "TILE": config.tile, "OVERHEAD": OVERHEAD,
        "PARTS": _parts_at_once(1, shape.head_dim),
    }  # fmt: skip


def _parts_at_once(rows: int, head_dim: int) -> int:
    """So that a program of 4 warps holds 32 values of parts a thread."""
    return max(4096 // (rows * head_dim), 1)

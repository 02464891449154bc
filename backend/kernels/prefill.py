"""Chunked prefill attention over paged KV: the chunk's own K and V lie in the cache already. Bound by arithmetic.

A tile's rows are tokens x heads of a group, so that K and V are read once for the group. Tiles of context that every
row sees run unmasked, those on the diagonal masked: two loops, so that the long one has no comparison in it. A launch
of its own, apart from decode: the costs add, and neither's tile sizes bind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.configs import Config, Constants
from backend.kernels.prefill_work import PrefillWork, plan_prefill, query_rows
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

__all__ = ["PrefillWork", "paged_prefill", "plan_prefill", "prefill_bytes", "prefill_flops", "prefill_reference"]

SUM_ROWS = 8  # of a cut block that one program adds up


def prefill_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, query_lens: Sequence[int],
                      context_lens: Sequence[int], scale: float, k_scale: float = 1.0,
                      v_scale: float = 1.0) -> Tensor:  # fmt: skip
    """What `paged_prefill` computes, in fp64."""
    out = []
    ends = list(accumulate(query_lens))
    for seq, (end, query_len, context) in enumerate(zip(ends, query_lens, context_lens, strict=True)):
        chunk, length = q[end - query_len : end], context + query_len
        k = gather(k_cache, block_tables[seq], length, k_scale)
        v = gather(v_cache, block_tables[seq], length, v_scale)
        heads = chunk.to(torch.float64).transpose(0, 1).reshape(k.shape[0], -1, *chunk.shape[::2])
        scores = heads @ k.transpose(1, 2).unsqueeze(1) * scale
        position = torch.arange(context, length, device=q.device)
        hidden = torch.arange(length, device=q.device) > position[:, None]
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        out.append((weights @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1))
    return torch.cat(out)


def prefill_bytes(query_lens: Sequence[int], context_lens: Sequence[int], shape: AttentionShape) -> int:
    """K and V of contexts and chunks once, block tables, queries in and outputs out."""
    lengths = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    tables = shape.table_bytes * num_pages(lengths, shape.block_size)
    return sum(lengths) * shape.token_kv_bytes + 2 * sum(query_lens) * shape.token_query_bytes + tables


def prefill_flops(query_lens: Sequence[int], context_lens: Sequence[int], shape: AttentionShape) -> int:
    """Of the pairs that the causal mask lets through: q * c + q * (q + 1) / 2 a chunk."""
    pairs = sum(q * (2 * c + q + 1) // 2 for q, c in zip(query_lens, context_lens, strict=True))
    return 4 * pairs * shape.num_heads * shape.head_dim


@triton.jit(do_not_specialize=["num_items", "num_slots", "section", "table_stride"])
def _prefill_kernel(q, k_cache, v_cache, block_tables, out, items, parts, weights, num_items, num_slots, section,
                    scale, v_scale, q_stride, table_stride,
                    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
                    PAGE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr) -> None:  # fmt: skip
    pid = tl.program_id(0)
    head = pid // (num_items * section) * section + pid % section
    item = items + pid // section % num_items * 7
    seq = tl.load(item).to(tl.int64)
    first_token = tl.load(item + 1).to(tl.int64)
    num_tokens = tl.load(item + 2)
    position = tl.load(item + 3)
    first_tile = tl.load(item + 4)
    last_tile = tl.load(item + 5)
    slot = tl.load(item + 6)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    token = rows // GROUP
    real = token < num_tokens
    column = (head * GROUP + rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + (first_token + token)[:, None] * q_stride + column, mask=real[:, None], other=0.0)
    queries = operand(queries, k_cache)
    k_head = k_cache + head * PAGE * HEAD_DIM
    v_head = v_cache + head * PAGE * HEAD_DIM
    table = block_tables + seq * table_stride
    page_stride: tl.constexpr = NUM_KV_HEADS * PAGE * HEAD_DIM

    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    seen_by_all = tl.minimum(last_tile, (position + 1) // TILE)
    end = position + num_tokens
    pages = load_pages(table, first_tile, end, PAGE, TILE)
    for tile in range(first_tile, seen_by_all):
        keys = tile * TILE + tl.arange(0, TILE)
        at = pool_rows(pages, keys, PAGE, HEAD_DIM, page_stride)
        k = load_tile(k_head, at, keys, HEAD_DIM, False)
        v = load_tile(v_head, at, keys, HEAD_DIM, False)
        pages = load_pages(table, tile + 1, end, PAGE, TILE)
        top, total, acc = attend(queries, k, v, top, total, acc, scale, keys, False, PRECISION)
    diagonal = tl.maximum(first_tile, seen_by_all)
    pages = load_pages(table, diagonal, end, PAGE, TILE)
    for tile in range(diagonal, last_tile):
        keys = tile * TILE + tl.arange(0, TILE)
        at = pool_rows(pages, keys, PAGE, HEAD_DIM, page_stride)
        k = load_tile(k_head, at, keys < end, HEAD_DIM, True)
        v = load_tile(v_head, at, keys < end, HEAD_DIM, True)
        pages = load_pages(table, tile + 1, end, PAGE, TILE)
        allowed = keys[None, :] <= (position + token)[:, None]
        top, total, acc = attend(queries, k, v, top, total, acc, scale, allowed, True, PRECISION)

    result, weight = normalised(top, total, acc)
    if slot < 0:
        at = (first_token + token)[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + column
        tl.store(out + at, result * v_scale, mask=real[:, None])
    else:
        row = (head * num_slots + slot).to(tl.int64) * ROWS + rows
        tl.store(parts + row[:, None] * HEAD_DIM + dims[None, :], result, mask=real[:, None])
        tl.store(weights + row, weight, mask=real)


@triton.jit(do_not_specialize=["num_slots"])
def _sum_kernel(out, sums, parts, weights, num_slots, v_scale,
                NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr,
                HEAD_DIM: tl.constexpr, PARTS: tl.constexpr) -> None:  # fmt: skip
    """One program a (cut block, KV head, ROWS of its rows)."""
    head = tl.program_id(1)
    row0 = tl.program_id(2) * ROWS
    cut = sums + tl.program_id(0) * 4
    first_token = tl.load(cut).to(tl.int64)
    num_rows = tl.load(cut + 1) * GROUP
    slot = head * num_slots + tl.load(cut + 2)
    if row0 < num_rows:
        whole = sum_parts(parts, weights, slot, slot + 1, tl.load(cut + 3), BLOCK_ROWS, row0, ROWS, num_rows, HEAD_DIM,
                          PARTS)  # fmt: skip
        rows = row0 + tl.arange(0, ROWS)
        at = (first_token + rows // GROUP) * (NUM_KV_HEADS * GROUP) + head * GROUP + rows % GROUP
        tl.store(out + at[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], whole * v_scale,
                 mask=(rows < num_rows)[:, None])  # fmt: skip


def paged_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, work: PrefillWork, scale: float,
                  out: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:  # fmt: skip
    """Causal attention of the chunks that `work` was planned for, one after another in `q`.

    q                 [num_tokens, num_heads, head_dim]; rows may lie apart
    k_cache, v_cache  [num_blocks + 1, num_kv_heads, block_size, head_dim], the chunks' own K and V included
    block_tables      [num_chunks, max_blocks] int32; entries past a chunk's last block are not read
    k_scale, v_scale  what a stored fp8 value is multiplied by
    Returns [num_tokens, num_heads, head_dim] of q's type (`out`, if given).
    """
    shape = shape_of(q, k_cache)
    check_heads("q", q)
    check_pools(k_cache, v_cache)
    if shape != work.shape:
        raise ValueError(f"this work was planned for {work.shape}, not for {shape}")
    if q.shape[0] != work.num_tokens:
        raise ValueError(f"{q.shape[0]} queries, but this work was planned for {work.num_tokens}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    num_items, num_slots = work.items.shape[0], work.parts.shape[1]
    _prefill_kernel[(num_items * shape.num_kv_heads,)](
        q, k_cache, v_cache, block_tables, out, work.items, work.parts, work.weights, num_items, num_slots,
        work.section, scale * k_scale * LOG2_E, v_scale, q.stride(0), block_tables.stride(0),
        **prefill_constants(shape, work.config),
        num_warps=work.config.num_warps, num_stages=work.config.num_stages,
    )  # fmt: skip
    if num_slots:
        constants = sum_constants(shape, work.config)
        _sum_kernel[(work.sums.shape[0], shape.num_kv_heads, -(-query_rows(shape, work.config) // SUM_ROWS))](
            out, work.sums, work.parts, work.weights, num_slots, v_scale, **constants, num_warps=4
        )
    return out


def prefill_constants(shape: AttentionShape, config: Config) -> Constants:
    return {
        "NUM_KV_HEADS": shape.num_kv_heads, "GROUP": shape.group, "ROWS": query_rows(shape, config),
        "HEAD_DIM": shape.head_dim, "PAGE": shape.block_size, "TILE": config.tile, "PRECISION": precision_of(shape),
    }  # fmt: skip


def sum_constants(shape: AttentionShape, config: Config) -> Constants:
    return {
        "NUM_KV_HEADS": shape.num_kv_heads, "GROUP": shape.group, "BLOCK_ROWS": query_rows(shape, config),
        "ROWS": SUM_ROWS, "HEAD_DIM": shape.head_dim, "PARTS": max(4096 // (SUM_ROWS * shape.head_dim), 1),
    }  # fmt: skip

"""What decode and prefill share on the device: the step of the online softmax, and the sum of parts of one row.

Scores are in units of log2: the scale times log2(e) is folded into one factor, so that each weight is one exp2. A
part's result is kept normalised, with the log2 of its weight. The running maximum starts finite, so that a tile in
which nothing is visible gives weight 0 and not NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def load_pages(table, tile, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The blocks that hold tile `tile` of a sequence, for each of its tokens or, if they share one, as a scalar.

    Entries for tokens from `end` on are not read. Asked for a tile ahead of its use, so that K and V do not wait.
    """
    positions = tile * TILE
    if PAGE < TILE:
        positions += tl.arange(0, TILE)
    return tl.load(table + positions // PAGE, mask=positions < end, other=0)


@triton.jit
def pool_rows(pages, positions, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
              PAGE_STRIDE: tl.constexpr):  # fmt: skip
    """Where in a head's share of the pool the tokens at `positions` lie, in elements (int64)."""
    return pages.to(tl.int64) * PAGE_STRIDE + (positions % PAGE) * HEAD_DIM


@triton.jit
def load_tile(pool, rows, visible, HEAD_DIM: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """[tile, head_dim]; what is not visible reads as 0, whatever lies there."""
    pointers = pool + rows[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    if MASKED:
        return tl.load(pointers, mask=visible[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def operand(queries, pool):
    """Queries as they are multiplied. fp8 widens to fp16 exactly and in one instruction; to bf16 it takes three."""
    if pool.dtype.element_ty == tl.float8e4nv:
        queries = queries.to(tl.float16)
    return queries


@triton.jit
def attend(q, k, v, top, total, acc, scale, allowed,
           MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One tile more: (top, total, acc). q [rows, head_dim]; k, v [tile, head_dim]; allowed [rows or 1, tile]."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])  # one fused instruction, and the exponential
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def normalised(top, total, acc):
    """The result of a part and the log2 of its weight; a part that saw nothing gives 0 and weighs nothing."""
    total = tl.where(total > 0.0, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def sum_parts(parts, weights, first_slot, next_slot, num_parts,
              SLOT_ROWS: tl.constexpr, row0, ROWS: tl.constexpr, num_rows, HEAD_DIM: tl.constexpr,
              PARTS: tl.constexpr):  # fmt: skip
    """Rows row0 .. of the whole from its parts: slot `first_slot`, then `next_slot`, `next_slot` + 1, ...

    parts [slots, SLOT_ROWS, head_dim] fp32, weights [slots, SLOT_ROWS] in log2. Reads past L1, which is not coherent.
    """
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for part0 in range(0, num_parts, PARTS):
        part = part0 + tl.arange(0, PARTS)
        slot = tl.where(part == 0, first_slot, next_slot + part - 1).to(tl.int64)
        at = slot[:, None] * SLOT_ROWS + row0 + rows[None, :]
        real = (part < num_parts)[:, None] & (row0 + rows < num_rows)[None, :]
        weight = tl.load(weights + at, mask=real, other=LOWEST, cache_modifier=".cg")
        value = tl.load(parts + at[:, :, None] * HEAD_DIM + dims[None, None, :], mask=real[:, :, None], other=0.0,
                        cache_modifier=".cg")  # fmt: skip
        new_top = tl.maximum(top, tl.max(weight, 0))
        share = tl.where(real, tl.exp2(weight - new_top[None, :]), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(share, 0)
        acc = acc * shrink[:, None] + tl.sum(value * share[:, :, None], 0)
        top = new_top
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]

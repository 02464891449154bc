"""RoPE of a step's queries and keys, and the write of its keys and values to their slots: one pass over Q, K and V.

Bound by memory bandwidth. Many tokens and heads a program, so that every access is a full vector. Launched before any
attention of the layer reads, so that a hit on a block written in the same step finds it written.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.configs import Config, Constants, config_for, key_of
from backend.kernels.shape import FP8, FP8_MAX, AttentionShape, check_heads, check_pools, shape_of

ANGLE_BYTES = 4  # cosine or sine, fp32
POSITION_BYTES = 8
SLOT_BYTES = 8


def rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """heads [num_tokens, num_heads, head_dim] turned by cos, sin [num_tokens, head_dim / 2], in fp64."""
    heads, cos, sin = heads.to(torch.float64), cos.to(torch.float64)[:, None], sin.to(torch.float64)[:, None]
    first, second = (heads[..., 0::2], heads[..., 1::2]) if interleaved else heads.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def kv_write_bytes(num_tokens: int, shape: AttentionShape) -> int:
    """Queries, keys and values in, queries and cache out, angles, positions and slots."""
    width = shape.num_kv_heads * shape.head_dim
    moved = 2 * shape.token_query_bytes + 2 * width * shape.dtype.itemsize + shape.token_kv_bytes
    return num_tokens * (moved + shape.head_dim * ANGLE_BYTES + POSITION_BYTES + SLOT_BYTES)


def kv_write_flops(num_tokens: int, shape: AttentionShape) -> int:
    """Six for each pair of dimensions of a query or key."""
    return 3 * num_tokens * (shape.num_heads + shape.num_kv_heads) * shape.head_dim


@triton.jit(do_not_specialize=["num_tokens"])
def _kv_write_kernel(q, k, v, cos, sin, positions, slots, k_cache, v_cache, num_tokens, q_stride, k_stride, v_stride,
                     k_factor, v_factor,
                     NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
                     TOKENS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
                     LARGEST: tl.constexpr) -> None:  # fmt: skip
    """One program: TOKENS tokens x HEADS heads, of the queries or of the keys and values."""
    query_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    part = tl.program_id(1)
    half = tl.arange(0, HEAD_DIM // 2)[None, :]
    position = tl.load(positions + token, mask=token < num_tokens, other=0)
    angle = position[:, None] * (HEAD_DIM // 2) + half
    c = tl.load(cos + angle)
    s = tl.load(sin + angle)
    far = token.to(tl.int64)
    if part < query_parts:
        head = part * HEADS + row % HEADS
        real = (token < num_tokens) & (head < NUM_HEADS)
        at = q + (far * q_stride + head * HEAD_DIM)[:, None]
        first, second = _turned(at, real, c, s, HEAD_DIM, INTERLEAVED)
        _store(at, real, first, second, 1.0, HEAD_DIM, INTERLEAVED, 0)
    else:
        head = (part - query_parts) * HEADS + row % HEADS
        real = (token < num_tokens) & (head < NUM_KV_HEADS)
        slot = tl.load(slots + token, mask=real, other=-1)
        kept = slot >= 0
        to = slot // PAGE * (NUM_KV_HEADS * PAGE * HEAD_DIM) + (head * PAGE + slot % PAGE) * HEAD_DIM
        first, second = _turned(k + (far * k_stride + head * HEAD_DIM)[:, None], kept, c, s, HEAD_DIM, INTERLEAVED)
        _store(k_cache + to[:, None], kept, first, second, k_factor, HEAD_DIM, INTERLEAVED, LARGEST)
        dims = tl.arange(0, HEAD_DIM)[None, :]
        value = tl.load(v + (far * v_stride + head * HEAD_DIM)[:, None] + dims, mask=kept[:, None], other=0.0)
        tl.store(v_cache + to[:, None] + dims, _quantised(value, v_factor, LARGEST), mask=kept[:, None])


@triton.jit
def _turned(at, real, c, s, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows of heads, turned: the two members of every pair, fp32."""
    if INTERLEAVED:
        whole = tl.load(at + tl.arange(0, HEAD_DIM)[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(whole, [whole.shape[0], HEAD_DIM // 2, 2]))
    else:
        half = tl.arange(0, HEAD_DIM // 2)[None, :]
        first = tl.load(at + half, mask=real[:, None], other=0.0).to(tl.float32)
        second = tl.load(at + HEAD_DIM // 2 + half, mask=real[:, None], other=0.0).to(tl.float32)
    return first * c - second * s, second * c + first * s


@triton.jit
def _store(at, real, first, second, factor, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
           LARGEST: tl.constexpr) -> None:  # fmt: skip
    first = _quantised(first, factor, LARGEST)
    second = _quantised(second, factor, LARGEST)
    if INTERLEAVED:
        whole = tl.reshape(tl.join(first, second), [first.shape[0], HEAD_DIM])
        tl.store(at + tl.arange(0, HEAD_DIM)[None, :], whole, mask=real[:, None])
    else:
        half = tl.arange(0, HEAD_DIM // 2)[None, :]
        tl.store(at + half, first, mask=real[:, None])
        tl.store(at + HEAD_DIM // 2 + half, second, mask=real[:, None])


@triton.jit
def _quantised(x, factor, LARGEST: tl.constexpr):
    """In steps of the cache's scale, within what fp8 holds; LARGEST 0: as it is."""
    if LARGEST:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -LARGEST), LARGEST)
    return x


def write_kv(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor,
             k_cache: Tensor, v_cache: Tensor, interleaved: bool = False, k_scale: float = 1.0, v_scale: float = 1.0,
             config: Config | None = None) -> None:  # fmt: skip
    """Turn `q` in place, and write turned `k` and `v` to their slots.

    q                 [num_tokens, num_heads, head_dim]; rows may lie apart, as in a fused projection (k, v too)
    k, v              [num_tokens, num_kv_heads, head_dim]
    cos, sin          [num_positions, head_dim / 2] fp32
    positions         [num_tokens] int64
    slots             [num_tokens] int64: block * block_size + offset; below 0: nothing is written (a padded row)
    k_cache, v_cache  [num_blocks + 1, num_kv_heads, block_size, head_dim]
    interleaved       pairs are (0, 1), (2, 3), ...; else (0, D/2), (1, D/2 + 1), ...
    k_scale, v_scale  what a stored fp8 value stands for; values beyond 448 of them saturate
    """
    shape = shape_of(q, k_cache)
    check_pools(k_cache, v_cache)
    for name, heads in (("q", q), ("k", k), ("v", v)):
        check_heads(name, heads)
    if not k.shape == v.shape == (q.shape[0], shape.num_kv_heads, shape.head_dim):
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not match q and the pools of {shape}")
    config = config or config_for(key_of("kv_write", shape, q.shape[0], q.device))
    if not q.is_cuda:  # interpreted: a program costs what it costs, whatever it does
        config = replace(config, tile=triton.next_power_of_2(shape.num_heads))
    constants = kv_write_constants(shape, config, interleaved)
    parts = sum(-(-heads // config.tile) for heads in (shape.num_heads, shape.num_kv_heads))
    _kv_write_kernel[(-(-q.shape[0] // config.rows), parts)](
        q, k, v, cos, sin, positions, slots, k_cache, v_cache, q.shape[0], q.stride(0), k.stride(0), v.stride(0),
        1.0 / k_scale, 1.0 / v_scale, **constants, num_warps=config.num_warps,
    )  # fmt: skip


def kv_write_constants(shape: AttentionShape, config: Config, interleaved: bool) -> Constants:
    return {
        "NUM_HEADS": shape.num_heads, "NUM_KV_HEADS": shape.num_kv_heads, "HEAD_DIM": shape.head_dim,
        "PAGE": shape.block_size, "TOKENS": config.rows, "HEADS": config.tile, "INTERLEAVED": interleaved,
        "LARGEST": FP8_MAX if shape.kv_dtype == FP8 else 0,
    }  # fmt: skip

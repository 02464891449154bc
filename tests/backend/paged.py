"""A layer's paged KV as an adversary would lay it: blocks scattered, NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.kernels.shape import AttentionShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
NO_BLOCK = 2**30  # reading what it stands for ends the process


def layer(group: int, num_kv_heads: int = 2, head_dim: int = 64, block_size: int = 16,
          dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None) -> AttentionShape:  # fmt: skip
    return AttentionShape(group * num_kv_heads, num_kv_heads, head_dim, block_size, dtype, kv_dtype or dtype)


@dataclass(frozen=True, slots=True)
class PagedKV:
    k: Tensor
    v: Tensor
    tables: Tensor
    lengths: Tensor


def paged_kv(lengths: Sequence[int], shape: AttentionShape, seed: int = 0) -> PagedKV:
    """Random K and V for sequences of `lengths`; block 0, slots past each end and spare table entries are traps."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // shape.block_size) for length in lengths]
    scattered = (torch.randperm(sum(num_blocks), generator=generator) + 1).split(num_blocks)
    size = (sum(num_blocks) + 1, shape.num_kv_heads, shape.block_size, shape.head_dim)
    k, v = torch.full(size, float("nan")), torch.full(size, float("nan"))
    tables = torch.full((len(lengths), max(num_blocks) + 1), NO_BLOCK, dtype=torch.int32)
    for seq, (length, blocks) in enumerate(zip(lengths, scattered, strict=True)):
        tables[seq, : len(blocks)] = blocks
        position = torch.arange(length)
        at = blocks[position // shape.block_size], slice(None), position % shape.block_size
        for pool in (k, v):
            pool[at] = torch.randn(length, shape.num_kv_heads, shape.head_dim, generator=generator)
    pools = k.to(shape.kv_dtype).to(DEVICE), v.to(shape.kv_dtype).to(DEVICE)
    return PagedKV(*pools, tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE))


def queries(num_tokens: int, shape: AttentionShape, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=generator)
    return heads.to(shape.dtype).to(DEVICE)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference; NaN is no agreement."""
    assert torch.isfinite(found).all()
    return float((found.to(torch.float64) - expected).abs().max())

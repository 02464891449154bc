"""What every attention kernel must know of a layer: its heads, and the pages its keys and values lie in.

K and V are two pools [num_blocks + 1, num_kv_heads, block_size, head_dim], contiguous: one head's share of a block is
one burst. Blocks are numbered from 1; block 0 is never read as content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

BLOCK_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`dtype` is that of queries and outputs, `kv_dtype` that of the pools: the same, or fp8."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    table_bytes: ClassVar[int] = 4  # of one entry of a block table

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim ({self.head_dim}) must be one of {HEAD_DIMS} for the Triton kernels")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size ({self.block_size}) must be one of {BLOCK_SIZES} for the Triton kernels")
        if self.dtype not in DTYPES:
            raise ValueError(f"queries of {self.dtype} are not supported; known: {', '.join(map(str, DTYPES))}")
        if self.kv_dtype not in (self.dtype, FP8) or (self.kv_dtype == FP8 and self.dtype == torch.float32):
            raise ValueError(f"a KV cache of {self.kv_dtype} needs queries of its type, or 16-bit ones for {FP8}")

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def page_stride(self) -> int:
        """Elements from a block to the next."""
        return self.num_kv_heads * self.block_size * self.head_dim

    @property
    def token_kv_bytes(self) -> int:
        """K and V of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def token_query_bytes(self) -> int:
        return self.num_heads * self.head_dim * self.dtype.itemsize


def shape_of(q: Tensor, k_cache: Tensor) -> AttentionShape:
    """From q [num_tokens, num_heads, head_dim] and a pool; ValueError where no kernel would be right."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    if q.shape[-1] != head_dim:
        raise ValueError(f"q has heads of {q.shape[-1]}, the KV cache of {head_dim}")
    return AttentionShape(q.shape[1], num_kv_heads, head_dim, block_size, q.dtype, k_cache.dtype)


def precision_of(shape: AttentionShape) -> str:
    """Of tl.dot: fp32 operands are multiplied as such; for 16-bit ones it says nothing."""
    return "ieee" if shape.dtype == torch.float32 else "tf32"


def check_pools(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError("the K and V pools must have one shape and one type")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the K and V pools must be contiguous: [num_blocks + 1, num_kv_heads, block_size, head_dim]")


def check_heads(name: str, heads: Tensor) -> None:
    """[num_tokens, num_heads, head_dim]; rows may lie apart (a slice of a fused projection), heads may not."""
    if heads.stride(2) != 1 or heads.stride(1) != heads.shape[2]:
        raise ValueError(f"the heads of {name} must lie side by side: only the stride of tokens is free")


def gather(cache: Tensor, blocks: Tensor, length: int, scale: float = 1.0) -> Tensor:
    """The first `length` tokens that `blocks` [num_blocks] hold: [num_kv_heads, length, head_dim] fp64."""
    num_blocks = -(-length // cache.shape[2])
    pages = cache[blocks[:num_blocks].long()].to(torch.float64)
    return pages.transpose(0, 1).flatten(1, 2)[:, :length] * scale


def num_pages(lengths: Sequence[int], block_size: int) -> int:
    """Entries of block tables that are read."""
    return sum(-(-length // block_size) for length in lengths)

"""The same attention by others on the same device: torch's SDPA backends on contiguous KV, and flex paged attention.

A backend that does not run here is recorded with what it said; it judges nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from backend.gpu_check.bench import LLAMA_8B, Bench, Point
from backend.kernels.decode import decode_bytes, decode_flops
from backend.kernels.prefill import prefill_bytes, prefill_flops
from backend.kernels.shape import AttentionShape

DECODES = ((8, 4096), (32, 4096))  # sequences, context
PREFILLS = (4096, 16384)
FLEX_PAGE = 128
FLEX_TIME = 60.0  # s, for its compiler


@dataclass(frozen=True, slots=True)
class Absent:
    peer: str
    reason: str


def sdpa_points(bench: Bench) -> Iterator[Point | Absent]:
    cuda = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    for backend in (SDPBackend.MATH,) if bench.tiny else cuda:
        for num_seqs, context in DECODES:
            lengths = [bench.size(context, 40)] * bench.size(num_seqs, 2)
            yield _attempt(f"{name_of_backend(backend)} decode", partial(_sdpa_decode, bench, backend, lengths))
        for length in PREFILLS:
            yield _attempt(f"{name_of_backend(backend)} prefill",
                           partial(_sdpa_prefill, bench, backend, bench.size(length, 40)))  # fmt: skip


def name_of_backend(backend: SDPBackend) -> str:
    return f"sdpa {backend.name.removesuffix('_ATTENTION').lower()}"


def _attempt(label: str, measure: Callable[[str], Point]) -> Point | Absent:
    try:
        return measure(label)
    except Exception as why:  # of torch's compiler, of a backend: whatever it is, it does not run here
        return Absent(label, f"{type(why).__name__}: {str(why).strip()[:200]}")


def _sdpa_decode(bench: Bench, backend: SDPBackend, lengths: Sequence[int], label: str) -> Point:
    shape = bench.scaled(LLAMA_8B)
    q = _heads(bench, len(lengths), shape.num_heads, 1, shape)
    k, v = (_heads(bench, len(lengths), shape.num_kv_heads, lengths[0], shape) for _ in range(2))
    sizes = decode_bytes(lengths, shape), decode_flops(lengths, shape)
    case = f"{len(lengths)} x {lengths[0]}"
    return bench.measure(label, shape, case, *sizes, lambda _: _sdpa(backend, q, k, v, causal=False))


def _sdpa_prefill(bench: Bench, backend: SDPBackend, length: int, label: str) -> Point:
    shape = bench.scaled(LLAMA_8B)
    q = _heads(bench, 1, shape.num_heads, length, shape)
    k, v = (_heads(bench, 1, shape.num_kv_heads, length, shape) for _ in range(2))
    sizes = prefill_bytes([length], [0], shape), prefill_flops([length], [0], shape)
    return bench.measure(label, shape, f"1 x {length} after 0", *sizes, lambda _: _sdpa(backend, q, k, v, causal=True))


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _heads(bench: Bench, batch: int, num_heads: int, length: int, shape: AttentionShape) -> Tensor:
    return torch.randn(batch, num_heads, length, shape.head_dim, device=bench.device, dtype=shape.dtype)


def flex_points(bench: Bench) -> Iterator[Point | Absent]:
    if bench.time_left < FLEX_TIME:
        yield Absent("flex paged decode", f"only {bench.time_left:.0f} s left")
        return
    lengths = [bench.size(4096, 2 * FLEX_PAGE)] * bench.size(32, 2)
    yield _attempt("flex paged decode", partial(_flex_decode, bench, lengths))


def _flex_decode(bench: Bench, lengths: Sequence[int], label: str) -> Point:
    shape, num_pages = bench.scaled(LLAMA_8B), sum(lengths) // FLEX_PAGE
    mask = _paged_mask(len(lengths), lengths[0], num_pages, bench.device)
    q = _heads(bench, len(lengths), shape.num_heads, 1, shape)
    k, v = (_heads(bench, 1, shape.num_kv_heads, num_pages * FLEX_PAGE, shape) for _ in range(2))
    attention = flex_attention if bench.tiny else torch.compile(flex_attention)
    sizes = decode_bytes(lengths, shape), decode_flops(lengths, shape)
    case = f"{len(lengths)} x {lengths[0]}, pages of {FLEX_PAGE}"
    return bench.measure(label, shape, case, *sizes, lambda _: attention(q, k, v, block_mask=mask, enable_gqa=True))


def _paged_mask(num_seqs: int, context: int, num_pages: int, device: torch.device) -> BlockMask:
    """One query a sequence sees its whole context, wherever its pages lie."""

    def visible(_batch: Tensor, _head: Tensor, _query: Tensor, key: Tensor) -> Tensor:
        return key < context

    paged = PagedAttention(num_pages, FLEX_PAGE, num_seqs, str(device))
    for seq in range(num_seqs):
        paged.reserve(torch.tensor(seq, device=device), torch.tensor(context, device=device))
    logical = create_block_mask(visible, num_seqs, None, 1, context, device=str(device), BLOCK_SIZE=FLEX_PAGE)
    return paged.convert_logical_block_mask(logical)

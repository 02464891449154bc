"""Every kernel against its float64 reference, with NaN wherever nothing may be read, and the same bits every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.gpu_check.bench import LLAMA_8B, LLAMA_8B_FP8, LLAMA_70B_TP8, SMOLLM2, Bench, name_of
from backend.kernels.decode import allocate_work, decode_reference, paged_decode, plan_work
from backend.kernels.kv_write import rotate_reference, write_kv
from backend.kernels.prefill import paged_prefill, plan_prefill, prefill_reference
from backend.kernels.shape import FP8, AttentionShape

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # of norm(found - expected) / norm(expected)
FP8_LIMIT = 5e-2  # of what is rounded to fp8: half a step is 1/16 at most
LAYERS = (
    LLAMA_8B,
    SMOLLM2,
    LLAMA_70B_TP8,
    replace(LLAMA_8B, block_size=64, dtype=torch.float16, kv_dtype=torch.float16),
    LLAMA_8B_FP8,
)
RUNS = 2


@dataclass(frozen=True, slots=True)
class Check:
    kernel: str
    layer: str
    error: float
    limit: float
    same_bits: bool

    @property
    def passed(self) -> bool:
        return self.error <= self.limit and self.same_bits


@dataclass(frozen=True, slots=True)
class PagedKV:
    k: Tensor
    v: Tensor
    tables: Tensor


def check_all(bench: Bench) -> Iterator[Check]:
    for shape in map(bench.scaled, LAYERS[::2] if bench.tiny else LAYERS):
        yield _check_decode(bench, shape, one_launch=True)
        yield _check_prefill(bench, shape)
        for interleaved in (False, True):
            if not (bench.tiny and shape.kv_dtype == FP8):  # the interpreter rounds to fp8 wrongly
                yield _check_kv_write(bench, shape, interleaved)
    yield _check_decode(bench, bench.scaled(LLAMA_8B), one_launch=False)


def _check_decode(bench: Bench, shape: AttentionShape, one_launch: bool) -> Check:
    page = shape.block_size
    lengths = [1, page - 1, page, page + 1, bench.size(8192, 150), *range(2, bench.size(29, 3))]
    kv, scale = _paged_kv(bench, shape, lengths), shape.head_dim**-0.5
    q = _heads(bench, len(lengths), shape.num_heads, shape)
    lens = torch.tensor(lengths, dtype=torch.int32, device=bench.device)
    work = allocate_work(len(lengths), shape, bench.device)
    plan_work(lens, work)
    expected = decode_reference(q, kv.k, kv.v, kv.tables, lens, scale)

    def run(out: Tensor) -> None:
        paged_decode(q, kv.k, kv.v, kv.tables, lens, scale, work, out, one_launch=one_launch)

    return _judge("decode" if one_launch else "decode, two launches", shape, run, expected)


def _check_prefill(bench: Bench, shape: AttentionShape) -> Check:
    page = shape.block_size
    query_lens = [1, page - 1, page + 1, 16, bench.size(1000, 3)]
    context_lens = [page, 0, 5, bench.size(16_000, 20), bench.size(777, 3)]
    lengths = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    kv, scale = _paged_kv(bench, shape, lengths), shape.head_dim**-0.5
    q = _heads(bench, sum(query_lens), shape.num_heads, shape)
    work = plan_prefill(query_lens, context_lens, shape, bench.device)
    expected = prefill_reference(q, kv.k, kv.v, kv.tables, query_lens, context_lens, scale)
    return _judge("prefill", shape, lambda out: paged_prefill(q, kv.k, kv.v, kv.tables, work, scale, out), expected)


def _check_kv_write(bench: Bench, shape: AttentionShape, interleaved: bool) -> Check:
    """Queries, and then keys and values as they lie in the pools, as one tensor."""
    num_tokens = bench.size(1000, 20)
    q, k, v = (_heads(bench, num_tokens, heads, shape) for heads in (shape.num_heads, *[shape.num_kv_heads] * 2))
    angles = torch.rand(4096, shape.head_dim // 2, device=bench.device) * 6.28
    positions = torch.randint(0, 4096, (num_tokens,), device=bench.device)
    slots = torch.randperm(num_tokens, device=bench.device) + shape.block_size
    num_blocks = -(-num_tokens // shape.block_size)
    cos, sin = angles.cos(), angles.sin()
    turned = [rotate_reference(heads, cos[positions], sin[positions], interleaved) for heads in (q, k)]
    expected = torch.cat((*turned, v.to(torch.float64)), 1)

    def run(out: Tensor) -> None:
        size = (num_blocks + 1, shape.num_kv_heads, shape.block_size, shape.head_dim)
        k_cache, v_cache = (torch.full(size, float("nan"), device=bench.device).to(shape.kv_dtype) for _ in range(2))
        queries = q.clone()
        write_kv(queries, k, v, cos, sin, positions, slots, k_cache, v_cache, interleaved)
        at = slots // shape.block_size, slice(None), slots % shape.block_size
        written = (pool[at].to(out.dtype) for pool in (k_cache, v_cache))
        out.copy_(torch.cat((queries, *written), 1))

    return _judge(f"kv write, {'interleaved' if interleaved else 'halves'}", shape, run, expected, written=True)


def _judge(kernel: str, shape: AttentionShape, run: Callable[[Tensor], object], expected: Tensor,
           written: bool = False) -> Check:  # fmt: skip
    """Each run fills a poisoned output."""
    outs = [torch.full(expected.shape, float("nan"), dtype=shape.dtype, device=expected.device) for _ in range(RUNS)]
    for out in outs:
        run(out)
    error = (outs[0].to(torch.float64) - expected).norm() / expected.norm()
    limit = FP8_LIMIT if written and shape.kv_dtype == FP8 else LIMITS[shape.dtype]
    same = all(torch.equal(outs[0], out) for out in outs[1:])
    return Check(kernel, name_of(shape), float(error.nan_to_num(float("inf"))), limit, same)


def _heads(bench: Bench, num_tokens: int, num_heads: int, shape: AttentionShape) -> Tensor:
    return torch.randn(num_tokens, num_heads, shape.head_dim, device=bench.device).to(shape.dtype)


def _paged_kv(bench: Bench, shape: AttentionShape, lengths: Sequence[int]) -> PagedKV:
    """Scattered blocks; block 0 and the slots past each end are NaN, spare table entries are far outside."""
    counts = [-(-length // shape.block_size) for length in lengths]
    blocks = torch.split(torch.randperm(sum(counts)) + 1, counts)
    size = (sum(counts) + 1, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pools = [torch.full(size, float("nan")) for _ in range(2)]
    tables = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
    for seq, (length, mine) in enumerate(zip(lengths, blocks, strict=True)):
        tables[seq, : len(mine)] = mine
        at = torch.arange(length)
        for pool in pools:
            pool[mine[at // shape.block_size], :, at % shape.block_size] = torch.randn(
                length, shape.num_kv_heads, shape.head_dim
            )
    k, v = (pool.to(bench.device).to(shape.kv_dtype) for pool in pools)
    return PagedKV(k, v, tables.to(bench.device))

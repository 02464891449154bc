"""How fast the kernels run, each at the points that servers run at, and what the device itself can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from backend.gpu_check.bench import (
    LLAMA_8B,
    LLAMA_8B_FP8,
    LLAMA_70B_TP8,
    QWEN_30B,
    Bench,
    Point,
)
from backend.gpu_check.timing import Launch
from backend.kernels.configs import Config
from backend.kernels.decode import allocate_work, decode_bytes, decode_flops, paged_decode, plan_work
from backend.kernels.kv_write import kv_write_bytes, kv_write_flops, write_kv
from backend.kernels.prefill import paged_prefill, plan_prefill, prefill_bytes, prefill_flops
from backend.kernels.shape import AttentionShape

Case = TypeVar("Case")
COPY_BYTES = 2**31
GEMM_SIZE = 8192
TINY_CASES = 2  # of each list, without a GPU
DECODES = (  # layer, sequences, context: the public table's, and 1 GB and more
    (LLAMA_8B, 1, 128), (LLAMA_8B, 1, 4096), (LLAMA_8B, 1, 65536), (LLAMA_8B, 8, 4096), (LLAMA_8B, 32, 1024),
    (LLAMA_8B, 32, 4096), (LLAMA_8B, 128, 1024), (LLAMA_8B, 128, 4096), (LLAMA_8B, 128, 8192), (LLAMA_8B, 512, 128),
    (QWEN_30B, 32, 4096), (LLAMA_70B_TP8, 32, 4096), (LLAMA_70B_TP8, 128, 4096),
    (LLAMA_8B_FP8, 32, 4096), (LLAMA_8B_FP8, 128, 8192),
)  # fmt: skip
PREFILLS = (  # layer, chunks, tokens of each, context of each
    (LLAMA_8B, 1, 512, 0), (LLAMA_8B, 1, 1024, 0), (LLAMA_8B, 1, 2048, 0), (LLAMA_8B, 1, 4096, 0),
    (LLAMA_8B, 1, 8192, 0), (LLAMA_8B, 1, 16384, 0), (LLAMA_8B, 8, 1024, 0), (LLAMA_8B, 8, 4096, 0),
    (LLAMA_8B, 1, 2048, 8192), (LLAMA_8B, 1, 512, 32768), (LLAMA_8B, 1, 16, 65536), (LLAMA_70B_TP8, 1, 2048, 8192),
    (LLAMA_8B_FP8, 1, 4096, 0),
)  # fmt: skip
KV_WRITES = (
    (LLAMA_8B, 32),
    (LLAMA_8B, 512),
    (LLAMA_8B, 4096),
    (LLAMA_8B, 8192),
    (LLAMA_8B, 16384),
    (LLAMA_8B_FP8, 8192),
)


@dataclass(frozen=True, slots=True)
class Ceilings:
    copy_gb_s: float  # read and written
    gemm_tflop_s: float


def ceilings(bench: Bench) -> Ceilings:
    source = torch.randn(bench.size(COPY_BYTES, 4096) // 4, device=bench.device)
    target = torch.empty_like(source)
    copy = bench.clock.time(lambda _: target.copy_(source), bench.size(10, 1))
    size = bench.size(GEMM_SIZE, 64)
    a, b = (torch.randn(size, size, device=bench.device).to(torch.bfloat16) for _ in range(2))
    gemm = bench.clock.time(lambda _: torch.mm(a, b), bench.size(10, 1))
    return Ceilings(2 * source.nbytes / copy.time / 1e9, 2 * size**3 / gemm.time / 1e12)


def decode_points(bench: Bench) -> Iterator[Point]:
    for shape, num_seqs, context in _some(bench, DECODES):
        lengths = [bench.size(context, min(context, 40))] * bench.size(num_seqs, 2)
        yield decode_point(bench, bench.scaled(shape), lengths)
        if decode_bytes(lengths, shape) < bench.l2_bytes:
            yield decode_point(bench, bench.scaled(shape), lengths, warm=True)
    skewed = [bench.size(64_000, 200)] + [bench.size(500, 20)] * bench.size(127, 3)
    yield decode_point(bench, bench.scaled(LLAMA_8B), skewed)
    even = [bench.size(4096, 40)] * bench.size(32, 2)
    yield decode_point(bench, bench.scaled(LLAMA_8B), even, one_launch=False)
    yield plan_point(bench, bench.scaled(LLAMA_8B), [1000] * bench.size(256, 2))


def decode_point(bench: Bench, shape: AttentionShape, lengths: Sequence[int], config: Config | None = None,
                 one_launch: bool = True, warm: bool = False) -> Point:  # fmt: skip
    num_bytes = decode_bytes(lengths, shape)
    launch = decode_launch(bench, shape, lengths, config, one_launch)
    longest = f", longest {max(lengths)}" if max(lengths) != min(lengths) else ""
    kernel = ("decode" if one_launch else "decode, two launches") + (", warm" if warm else "")
    case = f"{len(lengths)} x {sum(lengths) // len(lengths)}{longest}"
    return bench.measure(kernel, shape, case, num_bytes, decode_flops(lengths, shape), launch, warm)


def decode_launch(bench: Bench, shape: AttentionShape, lengths: Sequence[int], config: Config | None = None,
                  one_launch: bool = True) -> Launch:  # fmt: skip
    k_cache, v_cache = bench.arena.pools(shape)
    tables = bench.arena.tables(lengths, shape, bench.num_launches(decode_bytes(lengths, shape)))
    lens = torch.tensor(lengths, dtype=torch.int32, device=bench.device)
    q = torch.randn(len(lengths), shape.num_heads, shape.head_dim, device=bench.device).to(shape.dtype)
    work, out = allocate_work(len(lengths), shape, bench.device, config), torch.empty_like(q)
    plan_work(lens, work)

    def launch(index: int) -> None:
        table = tables[index % len(tables)]
        paged_decode(q, k_cache, v_cache, table, lens, shape.head_dim**-0.5, work, out, one_launch=one_launch)

    return launch


def plan_point(bench: Bench, shape: AttentionShape, lengths: Sequence[int]) -> Point:
    lens = torch.tensor(lengths, dtype=torch.int32, device=bench.device)
    work = allocate_work(len(lengths), shape, bench.device)
    num_bytes = 4 * len(lengths) + 8 * work.num_programs
    return bench.measure("decode plan", shape, f"{len(lengths)}", num_bytes, 0, lambda _: plan_work(lens, work))


def prefill_points(bench: Bench) -> Iterator[Point]:
    for shape, num_chunks, query, context in _some(bench, PREFILLS):
        sizes = bench.size(query, 20), bench.size(context, min(context, 40))
        yield prefill_point(bench, bench.scaled(shape), num_chunks, *sizes)


def prefill_point(bench: Bench, shape: AttentionShape, num_chunks: int, query: int, context: int,
                  config: Config | None = None) -> Point:  # fmt: skip
    queries, contexts = [query] * num_chunks, [context] * num_chunks
    num_bytes, flops = prefill_bytes(queries, contexts, shape), prefill_flops(queries, contexts, shape)
    case = f"{num_chunks} x {query} after {context}"
    return bench.measure(
        "prefill", shape, case, num_bytes, flops, prefill_launch(bench, shape, queries, contexts, config)
    )


def prefill_launch(bench: Bench, shape: AttentionShape, query_lens: Sequence[int], context_lens: Sequence[int],
                   config: Config | None = None) -> Launch:  # fmt: skip
    k_cache, v_cache = bench.arena.pools(shape)
    lengths = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    tables = bench.arena.tables(lengths, shape, bench.num_launches(prefill_bytes(query_lens, context_lens, shape)))
    q = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, device=bench.device).to(shape.dtype)
    work, out = plan_prefill(query_lens, context_lens, shape, bench.device, config), torch.empty_like(q)

    def launch(index: int) -> None:
        paged_prefill(q, k_cache, v_cache, tables[index % len(tables)], work, shape.head_dim**-0.5, out)

    return launch


def kv_write_points(bench: Bench) -> Iterator[Point]:
    for shape, num_tokens in _some(bench, KV_WRITES):
        yield kv_write_point(bench, bench.scaled(shape), bench.size(num_tokens, 20))


def kv_write_point(bench: Bench, shape: AttentionShape, num_tokens: int, config: Config | None = None) -> Point:
    """Every launch has queries, keys and slots of its own."""
    num_bytes = kv_write_bytes(num_tokens, shape)
    k_cache, v_cache = bench.arena.pools(shape)
    tables = bench.arena.tables([num_tokens], shape, bench.num_launches(num_bytes))
    num_sets = len(tables)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    fused = torch.randn(num_sets, num_tokens, heads + 2 * kv_heads, shape.head_dim, device=bench.device).to(shape.dtype)
    angles = torch.rand(num_tokens, shape.head_dim // 2, device=bench.device)
    positions = torch.arange(num_tokens, device=bench.device)
    offsets = positions % shape.block_size
    targets = [table[0].long()[positions // shape.block_size] * shape.block_size + offsets for table in tables]

    def launch(index: int) -> None:
        at = index % num_sets
        q, k, v = fused[at, :, :heads], fused[at, :, heads : heads + kv_heads], fused[at, :, heads + kv_heads :]
        write_kv(q, k, v, angles, angles, positions, targets[at], k_cache, v_cache, config=config)

    return bench.measure("kv write", shape, f"{num_tokens}", num_bytes, kv_write_flops(num_tokens, shape), launch)


def mixed_points(bench: Bench) -> Iterator[Point]:
    """Decodes, a chunk, and both in one graph."""
    shape = bench.scaled(LLAMA_8B)
    for num_seqs, context, query in ((32, 8192, 2048), (128, 2048, 512), (8, 32768, 4096)):
        lengths = [bench.size(context, 40)] * bench.size(num_seqs, 2)
        query, ahead = bench.size(query, 20), bench.size(4096, 20)
        decode, prefill = decode_launch(bench, shape, lengths), prefill_launch(bench, shape, [query], [ahead])
        sizes = decode_bytes(lengths, shape), prefill_bytes([query], [ahead], shape)
        flops = decode_flops(lengths, shape), prefill_flops([query], [ahead], shape)
        case = f"{len(lengths)} x {lengths[0]} and {query} after {ahead}"
        yield bench.measure("mixed: decode alone", shape, case, sizes[0], flops[0], decode)
        yield bench.measure("mixed: prefill alone", shape, case, sizes[1], flops[1], prefill)
        both = _in_turn(decode, prefill)
        yield bench.measure("mixed: both", shape, case, sum(sizes), sum(flops), both)


def _in_turn(first: Launch, second: Launch) -> Launch:
    def launch(index: int) -> None:
        first(index)
        second(index)

    return launch


def _some(bench: Bench, cases: Sequence[Case]) -> Sequence[Case]:
    if bench.tiny:
        return cases[:TINY_CASES]
    return cases[::2] if bench.quick else cases

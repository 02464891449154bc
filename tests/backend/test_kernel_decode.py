"""Decode attention against float64, and the laws of its work list."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.kernels.configs import Config
from backend.kernels.decode import (
    allocate_work,
    decode_bytes,
    decode_flops,
    decode_reference,
    paged_decode,
    plan_work,
)
from backend.kernels.decode_work import MAX_PARTS, OVERHEAD, DecodeWork
from backend.kernels.shape import FP8, AttentionShape
from sim.cost.formulas import decode_attention_bytes, prefill_attention_flops
from tests.backend.paged import DEVICE, TOLERANCE, PagedKV, error, layer, paged_kv, queries

WIDE = Config(rows=16, tile=128, num_warps=4, num_stages=1)
HALF, FULL = torch.float16, torch.float32


def decode(kv: PagedKV, shape: AttentionShape, work: DecodeWork, one_launch: bool = True) -> float:
    """The error of one decode step."""
    scale = shape.head_dim**-0.5
    q = queries(len(kv.lengths), shape)
    plan_work(kv.lengths, work)
    found = paged_decode(q, kv.k, kv.v, kv.tables, kv.lengths, scale, work, one_launch=one_launch)
    return error(found, decode_reference(q, kv.k, kv.v, kv.tables, kv.lengths, scale))


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "dtype"),
    [
        (1, 64, 16, FULL),
        (3, 64, 16, HALF),
        (4, 128, 16, HALF),
        (8, 128, 32, FULL),
        (3, 64, 128, FULL),
        (4, 64, 64, HALF),
    ],
)
def test_ragged_batches_agree_with_float64(group: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    shape = layer(group, 2, head_dim, block_size, dtype)
    lengths = [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 5]
    work = allocate_work(len(lengths), shape, DEVICE, num_programs=4)
    assert decode(paged_kv(lengths, shape), shape, work) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("one_launch", [True, False])
def test_one_of_8k_beside_31_short_ones(dtype: torch.dtype, one_launch: bool) -> None:
    """The long one is read by nearly all programs, its parts added up four at a time; the short ones lie between."""
    shape = layer(8, 1, 128, 16, dtype)
    lengths = [1 + (7 * seq) % 48 for seq in range(31)]
    lengths.insert(17, 8192)
    work = allocate_work(32, shape, DEVICE, WIDE, num_programs=8)
    assert decode(paged_kv(lengths, shape), shape, work, one_launch) < TOLERANCE[dtype]
    assert len({program for program, (segment, _, _) in walks(work, lengths) if segment == 17}) > 4


def test_fp8_values_are_widened_by_their_scales() -> None:
    shape = layer(4, 2, 64, 32, HALF, FP8)
    lengths = [1, 31, 32, 33, 100]
    kv, q = paged_kv(lengths, shape), queries(len(lengths), shape)
    work = allocate_work(len(lengths), shape, DEVICE, WIDE, num_programs=3)
    plan_work(kv.lengths, work)
    found = paged_decode(q, kv.k, kv.v, kv.tables, kv.lengths, 0.125, work, k_scale=0.5, v_scale=3.0)
    expected = decode_reference(q, kv.k, kv.v, kv.tables, kv.lengths, 0.125, k_scale=0.5, v_scale=3.0)
    assert error(found, expected) < 3 * TOLERANCE[HALF]


def test_a_work_list_serves_step_after_step_and_smaller_batches() -> None:
    """The counters are back at 0 after every launch, and nothing of the last plan is left."""
    shape = layer(4)
    work = allocate_work(8, shape, DEVICE, replace(WIDE, tile=32), num_programs=5)
    for lengths in ([700, 3, 900, 41], [1], [33, 64, 65, 1, 1, 1, 1, 1200], [900, 41]):
        assert decode(paged_kv(lengths, shape), shape, work) < 1e-5
        assert not work.arrivals.any()


def test_a_padded_row_gives_zero() -> None:
    shape = layer(4, dtype=HALF)
    kv = paged_kv([40, 1], shape)
    q = queries(4, shape)
    lengths = torch.tensor([40, 1, 0, 0], dtype=torch.int32, device=DEVICE)
    tables = torch.cat((kv.tables, torch.zeros_like(kv.tables)))
    work = allocate_work(4, shape, DEVICE, num_programs=3)
    plan_work(lengths, work)
    out = torch.full_like(q, float("nan"))
    paged_decode(q, kv.k, kv.v, tables, lengths, 0.125, work, out)
    assert not out[2:].any()
    assert error(out, decode_reference(q, kv.k, kv.v, tables, lengths, 0.125)) < 2e-3


def test_queries_may_be_a_slice_of_a_fused_projection() -> None:
    shape = layer(3)
    kv = paged_kv([5, 20], shape)
    fused = torch.randn(2, shape.num_heads + 4, 64, device=DEVICE)
    q = fused[:, : shape.num_heads]
    work = allocate_work(2, shape, DEVICE, num_programs=2)
    plan_work(kv.lengths, work)
    found = paged_decode(q, kv.k, kv.v, kv.tables, kv.lengths, 0.125, work)
    assert error(found, decode_reference(q, kv.k, kv.v, kv.tables, kv.lengths, 0.125)) < 1e-5


def test_a_plan_for_another_layer_is_refused() -> None:
    shape = layer(4)
    kv = paged_kv([5], shape)
    work = allocate_work(1, layer(4, block_size=32), DEVICE, num_programs=1)
    with pytest.raises(ValueError, match="this work was allocated for"):
        paged_decode(queries(1, shape), kv.k, kv.v, kv.tables, kv.lengths, 0.125, work)
    with pytest.raises(ValueError, match="2 sequences, but this work has room for 1"):
        plan_work(torch.ones(2, dtype=torch.int32, device=DEVICE), work)


Walk = tuple[int, tuple[int, int, int]]  # program, (segment, first tile, one past the last)


def walks(work: DecodeWork, lengths: list[int]) -> list[Walk]:
    """What each program reads, by the plan's numbers."""
    share, total = work.plan.tolist()
    starts, spans, heads = work.starts.tolist(), work.spans.tolist(), work.shape.num_kv_heads
    found = []
    for program, (first, end) in enumerate(spans):
        for segment in range(first, end):
            tiles = max(-(-lengths[segment // heads] // work.config.tile), 1)
            start = starts[segment // heads] + segment % heads * (tiles + OVERHEAD) + OVERHEAD
            begin, stop = program * share, min((program + 1) * share, total)
            tile, last = max(begin - start, 0), min(stop - start, tiles)
            if tile < last:
                found.append((program, (segment, tile, last)))
    return found


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 100), st.integers(0, 20_000)), min_size=1, max_size=12),
    num_kv_heads=st.sampled_from([1, 3, 8]),
    num_programs=st.integers(1, 12),
    tile=st.sampled_from([16, 64, 256]),
)
@example(lengths=[20_000], num_kv_heads=1, num_programs=100, tile=16)  # even shares would make too many parts
def test_shares_cover_every_tile_once_and_are_even(
    lengths: list[int], num_kv_heads: int, num_programs: int, tile: int
) -> None:
    shape = layer(1, num_kv_heads)
    work = allocate_work(12, shape, DEVICE, replace(WIDE, tile=tile), num_programs)
    plan_work(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), work)
    read = walks(work, lengths)
    tiles = [max(-(-length // tile), 1) for length in lengths for _ in range(num_kv_heads)]
    covered = Counter((segment, at) for _, (segment, first, end) in read for at in range(first, end))
    assert covered == Counter((segment, at) for segment, count in enumerate(tiles) for at in range(count))
    share, total = work.plan.tolist()
    assert total == sum(tiles) + OVERHEAD * len(tiles)
    assert num_programs * share >= total  # the grid holds the work
    assert max(Counter(segment for _, (segment, _, _) in read).values()) <= MAX_PARTS
    busiest = Counter[int]()
    for program, (_, first, end) in read:
        busiest[program] += end - first
    assert max(busiest.values()) <= share
    least = max(
        -(-total // num_programs), max(256 // tile, 1) + OVERHEAD, -(-(max(tiles) + OVERHEAD) // (MAX_PARTS - 1))
    )
    assert share == least  # no larger than what is even, worth a start, and few enough to add up


def test_bytes_and_flops_are_those_of_the_formulas() -> None:
    shape = layer(4, 8, 128, 16, HALF)
    lengths = [1, 16, 17, 300]
    blocks = 1 + 1 + 2 + 19
    kv = decode_attention_bytes(sum(lengths), 8, 128, 2)
    assert decode_bytes(lengths, shape) == kv + 2 * (4 * 32 * 128 * 2) + 4 * blocks + 4 * len(lengths)
    assert decode_flops(lengths, shape) == prefill_attention_flops(2 * sum(lengths), 32, 128)


def test_bytes_are_what_a_kernel_must_touch() -> None:
    """Counted element by element on a small step."""
    shape = layer(3, 2, 64, 16, HALF, FP8)
    lengths = [1, 15, 16, 17]
    kv = paged_kv(lengths, shape)
    slots = sum(int(torch.isfinite(pool.float()).sum()) for pool in (kv.k, kv.v))
    entries = int((kv.tables < 2**30).sum())
    q = queries(len(lengths), shape)
    assert decode_bytes(lengths, shape) == slots + 2 * q.numel() * 2 + 4 * entries + 4 * len(lengths)

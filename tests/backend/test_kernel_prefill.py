"""Chunked prefill against float64, and the laws of its plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.kernels.configs import Config
from backend.kernels.prefill import paged_prefill, plan_prefill, prefill_bytes, prefill_flops, prefill_reference
from backend.kernels.prefill_work import INTERPRETED_SMS, MIN_PART_TOKENS
from backend.kernels.shape import FP8, AttentionShape
from sim.cost.formulas import prefill_attention_flops
from tests.backend.paged import DEVICE, TOLERANCE, error, layer, paged_kv, queries

HALF, FULL = torch.float16, torch.float32
WIDE = Config(rows=64, tile=64, num_warps=4, num_stages=1)


def prefill(query_lens: list[int], context_lens: list[int], shape: AttentionShape, config: Config = WIDE) -> float:
    """The error of one step's chunks."""
    kv = paged_kv([query + context for query, context in zip(query_lens, context_lens, strict=True)], shape)
    q, scale = queries(sum(query_lens), shape), shape.head_dim**-0.5
    work = plan_prefill(query_lens, context_lens, shape, DEVICE, config)
    found = paged_prefill(q, kv.k, kv.v, kv.tables, work, scale)
    return error(found, prefill_reference(q, kv.k, kv.v, kv.tables, query_lens, context_lens, scale))


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
def test_ragged_chunks_agree_with_float64(group: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    query_lens = [1, block_size - 1, block_size, block_size + 1, 5]
    context_lens = [block_size - 1, 0, 1, block_size, 2 * block_size + 3]
    assert prefill(query_lens, context_lens, layer(group, 1, head_dim, block_size, dtype)) < TOLERANCE[dtype]


def test_a_chunk_may_stand_anywhere_on_a_tiles_edge() -> None:
    """First position and length around a multiple of the tile: where the unmasked loop must end."""
    for context in (63, 64, 65):
        assert prefill([2, 63, 66], [context] * 3, layer(3, 1)) < 1e-5


@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_a_small_chunk_after_8k_is_cut_and_added_up_beside_31_short_ones(dtype: torch.dtype) -> None:
    shape = layer(4, 1, 128, 16, dtype)
    query_lens = [16, 2] + [1 + seq % 5 for seq in range(30)]
    context_lens = [8192, 3000] + [(3 * seq) % 40 for seq in range(30)]
    config = replace(WIDE, tile=128)
    parts = [num_parts for *_, num_parts in plan_prefill(query_lens, context_lens, shape, DEVICE, config).sums.tolist()]
    assert len(parts) == 2 and parts[0] > 4  # four are added up at a time
    assert prefill(query_lens, context_lens, shape, config) < TOLERANCE[dtype]


def test_heads_computed_in_sections_are_all_computed() -> None:
    """More KV than the cache holds for all heads at once."""
    shape = layer(1, 4, 64, 128)
    assert plan_prefill([3], [2500], shape, "cpu", WIDE).section < 4
    assert prefill([3], [2500], shape, replace(WIDE, tile=256)) < 1e-5


def test_fp8_values_are_widened_by_their_scales() -> None:
    shape = layer(4, 2, 64, 32, HALF, FP8)
    kv, q = paged_kv([40, 33], shape), queries(43, shape)
    work = plan_prefill([40, 3], [0, 30], shape, DEVICE, WIDE)
    found = paged_prefill(q, kv.k, kv.v, kv.tables, work, 0.125, k_scale=0.5, v_scale=3.0)
    expected = prefill_reference(q, kv.k, kv.v, kv.tables, [40, 3], [0, 30], 0.125, k_scale=0.5, v_scale=3.0)
    assert error(found, expected) < 3 * TOLERANCE[HALF]


def test_what_does_not_fit_together_is_refused() -> None:
    shape = layer(4)
    kv = paged_kv([8], shape)
    work = plan_prefill([8], [0], shape, DEVICE)
    with pytest.raises(ValueError, match="7 queries, but this work was planned for 8"):
        paged_prefill(queries(7, shape), kv.k, kv.v, kv.tables, work, 0.125)
    with pytest.raises(ValueError, match="a chunk has 1 token or more"):
        plan_prefill([0], [5], shape, DEVICE)
    with pytest.raises(ValueError, match="2 chunks, 1 contexts"):
        plan_prefill([1, 1], [5], shape, DEVICE)


chunks = st.lists(st.tuples(st.integers(1, 300), st.one_of(st.just(0), st.integers(0, 40_000))), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(chunks, st.sampled_from([1, 3, 4, 8]), st.sampled_from([1, 8]), st.sampled_from([(16, 16), (64, 64), (128, 32)]))
def test_the_plan_covers_every_query_and_tile_once_longest_first(
    chunks: list[tuple[int, int]], group: int, num_kv_heads: int, sizes: tuple[int, int]
) -> None:
    rows, tile = sizes
    config = Config(rows, tile, num_warps=4, num_stages=1)
    shape = layer(group, num_kv_heads)
    work = plan_prefill([q for q, _ in chunks], [c for _, c in chunks], shape, "cpu", config)
    starts = [sum(q for q, _ in chunks[:seq]) for seq in range(len(chunks))]
    covered = Counter[tuple[int, int]]()
    for seq, first, num_tokens, position, first_tile, last_tile, _ in work.items.tolist():
        assert num_tokens >= 1 and num_tokens * group <= rows
        assert first - starts[seq] == position - chunks[seq][1]
        covered.update((first, at) for at in range(first_tile, last_tile))
    expected = Counter[tuple[int, int]]()
    for start, (query, context) in zip(starts, chunks, strict=True):
        for first in range(0, query, rows // group):
            seen = context + min(first + rows // group, query)  # tokens before or at the block's last query
            expected.update((start + first, at) for at in range(-(-seen // tile)))
    assert covered == expected
    wholes = {item[1]: 0 for item in work.items.tolist()}
    for item in work.items.tolist():
        wholes[item[1]] += item[5] - item[4]
    assert list(wholes.values()) == sorted(wholes.values(), reverse=True)


@settings(max_examples=50, deadline=None)
@given(chunks, st.sampled_from([1, 8]))
def test_no_part_is_larger_than_an_even_share_needs(chunks: list[tuple[int, int]], num_kv_heads: int) -> None:
    work = plan_prefill([q for q, _ in chunks], [c for _, c in chunks], layer(4, num_kv_heads), "cpu", WIDE)
    sizes = [item[5] - item[4] for item in work.items.tolist()]
    even = -(-sum(sizes) * num_kv_heads // INTERPRETED_SMS)
    cut = [item[5] - item[4] for item in work.items.tolist() if item[6] >= 0]
    one_wave = len({item[1] for item in work.items.tolist()}) * num_kv_heads <= INTERPRETED_SMS
    if one_wave:
        assert len(sizes) * num_kv_heads <= INTERPRETED_SMS  # cut, it is one still
    else:
        assert max(sizes) <= max(even, MIN_PART_TOKENS // WIDE.tile)
    assert all(2 * size >= MIN_PART_TOKENS // WIDE.tile for size in cut)
    slots = [item[6] for item in work.items.tolist() if item[6] >= 0]
    assert sorted(slots) == list(range(work.parts.shape[1]))
    assert sum(parts for *_, parts in work.sums.tolist()) == len(slots)


def test_bytes_and_flops_are_those_of_the_formulas() -> None:
    shape = layer(4, 8, 128, 16, HALF)
    query_lens, context_lens = [1, 300, 17], [100, 0, 31]
    pairs = sum(c + 1 + at for q, c in zip(query_lens, context_lens, strict=True) for at in range(q))
    assert prefill_flops(query_lens, context_lens, shape) == prefill_attention_flops(2 * pairs, 32, 128)
    kv = 2 * 8 * 128 * 2 * (101 + 300 + 48)
    blocks = 7 + 19 + 3
    assert prefill_bytes(query_lens, context_lens, shape) == kv + 2 * 318 * 32 * 128 * 2 + 4 * blocks

"""The rotary turn and the write of K and V, against float64; what is written is what attention reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backend.config import Rope
from backend.kernels.decode import allocate_work, decode_reference, paged_decode, plan_work
from backend.kernels.kv_write import kv_write_bytes, kv_write_flops, rotate_reference, write_kv
from backend.kernels.shape import FP8, AttentionShape
from backend.rope import RotaryTable
from tests.backend.paged import DEVICE, error, layer, queries

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}  # an ulp of what lies near 4 is 4e-3 in fp16


def fused(num_tokens: int, shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V as slices of one projection."""
    heads = queries(num_tokens, replace(shape, num_heads=shape.num_heads + 2 * shape.num_kv_heads, num_kv_heads=1))
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    return q, k, v


def empty_pools(num_blocks: int, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    size = (num_blocks + 1, shape.num_kv_heads, shape.block_size, shape.head_dim)
    nan = torch.full(size, float("nan"), device=DEVICE).to(shape.kv_dtype)
    return nan, nan.clone()


def at(pool: Tensor, slots: Tensor) -> Tensor:
    return pool[slots // pool.shape[2], :, slots % pool.shape[2]].to(torch.float64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "dtype"),
    [(1, 2, 64, torch.float32), (3, 3, 64, torch.float16), (4, 2, 128, torch.float32), (8, 1, 128, torch.float16)],
)
def test_queries_and_keys_are_turned_and_all_is_written(
    interleaved: bool, group: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    shape = layer(group, num_kv_heads, head_dim, 16, dtype)
    q, k, v = fused(37, shape)
    before = q.clone()
    positions = torch.randint(0, 500, (37,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    slots = (torch.randperm(64, generator=torch.Generator().manual_seed(4))[:37] + 16).to(DEVICE)
    slots[5] = -1  # a padded row
    table = RotaryTable(Rope(interleaved=interleaved), head_dim, 500, DEVICE)
    k_cache, v_cache = empty_pools(4, shape)
    write_kv(q, k, v, table.cos, table.sin, positions, slots, k_cache, v_cache, interleaved)

    cos, sin = table.cos[positions], table.sin[positions]
    assert error(q, rotate_reference(before, cos, sin, interleaved)) < TOLERANCE[dtype]
    kept = slots >= 0
    assert error(at(k_cache, slots[kept]), rotate_reference(k, cos, sin, interleaved)[kept]) < TOLERANCE[dtype]
    assert torch.equal(at(v_cache, slots[kept]), v[kept].to(torch.float64))
    for pool in (k_cache, v_cache):
        assert int(torch.isfinite(pool).all(-1).all(1).sum()) == 36  # no other slot was touched


def test_the_reference_is_the_models_own_turn() -> None:
    heads = queries(9, layer(2))
    positions = torch.arange(9, device=DEVICE)
    for interleaved in (False, True):
        table = RotaryTable(Rope(interleaved=interleaved), 64, 9, DEVICE)
        expected = rotate_reference(heads, table.cos, table.sin, interleaved)
        assert error(table.rotate(heads, table.turns(positions)), expected) < 1e-5


def test_fp8_is_quantised_by_its_scale_and_saturates() -> None:
    """On values that fp8 holds exactly: the interpreter does not carry when it rounds up to the next power of two."""
    shape = layer(2, 2, 64, 16, torch.float16, FP8)
    q, k, v = fused(20, shape)
    held = torch.tensor([0.0, 1.0, -1.5, 26.0, -448.0, 208.0, 0.0625, 3.25], device=DEVICE)
    k.copy_((held * 0.25).repeat(20, 2, 8))
    v.copy_((held * 2.0).repeat(20, 2, 8))
    k[3, 1, 7], v[4, 0, 9] = 6e4, -6e4
    still = torch.ones(1, 32, device=DEVICE), torch.zeros(1, 32, device=DEVICE)  # no turn
    positions, slots = torch.zeros(20, dtype=torch.int64, device=DEVICE), torch.arange(16, 36, device=DEVICE)
    k_cache, v_cache = empty_pools(2, shape)
    write_kv(q, k, v, *still, positions, slots, k_cache, v_cache, k_scale=0.25, v_scale=2.0)
    assert at(k_cache, slots)[3, 1, 7] == 448.0 and at(v_cache, slots)[4, 0, 9] == -448.0
    k[3, 1, 7], v[4, 0, 9] = 448.0 * 0.25, -448.0 * 2.0
    assert torch.equal(at(k_cache, slots) * 0.25, k.to(torch.float64))
    assert torch.equal(at(v_cache, slots) * 2.0, v.to(torch.float64))


def test_what_was_written_is_what_decode_reads() -> None:
    """Token by token into scattered blocks, then the attention of the last one."""
    shape = layer(3, 2, 64, 16)
    q, k, v = fused(20, shape)
    table = RotaryTable(Rope(), 64, 20, DEVICE)
    positions = torch.arange(20, device=DEVICE)
    blocks = torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE)
    slots = blocks[0, positions // 16].long() * 16 + positions % 16
    k_cache, v_cache = empty_pools(3, shape)
    write_kv(q, k, v, table.cos, table.sin, positions, slots, k_cache, v_cache)
    length = torch.tensor([20], dtype=torch.int32, device=DEVICE)
    work = allocate_work(1, shape, DEVICE, num_programs=1)
    plan_work(length, work)
    found = paged_decode(q[19:], k_cache, v_cache, blocks, length, 0.125, work)
    assert error(found, decode_reference(q[19:], k_cache, v_cache, blocks, length, 0.125)) < 1e-5
    turned = rotate_reference(k, table.cos, table.sin, interleaved=False).transpose(0, 1)
    weights = torch.softmax(q[19].to(torch.float64).view(2, 3, 64) @ turned.transpose(1, 2) * 0.125, -1)
    expected = (weights @ v.to(torch.float64).transpose(0, 1)).flatten(0, 1)
    assert error(found[0], expected) < 1e-5


def test_heads_that_do_not_match_the_pools_are_refused() -> None:
    shape = layer(2)
    q, k, v = fused(4, shape)
    table = RotaryTable(Rope(), 64, 4, DEVICE)
    rows = torch.arange(4, device=DEVICE)
    with pytest.raises(ValueError, match="do not match"):
        write_kv(q, k[:, :1], v, table.cos, table.sin, rows, rows, *empty_pools(1, shape))
    with pytest.raises(ValueError, match="heads of k must lie side by side"):
        write_kv(q, k.transpose(0, 1), v, table.cos, table.sin, rows, rows, *empty_pools(1, shape))


def test_bytes_are_those_of_all_tensors_that_are_touched() -> None:
    shape = layer(4, 2, 64, 16, torch.float16, FP8)
    q, k, v = fused(10, shape)
    moved = 2 * q.numel() * 2 + (k.numel() + v.numel()) * (2 + 1)
    assert kv_write_bytes(10, shape) == moved + 10 * (2 * 32 * 4) + 10 * 8 + 10 * 8
    assert kv_write_flops(10, shape) == 6 * (q.numel() + k.numel()) // 2

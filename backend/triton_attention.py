"""Paged attention by the Triton kernels: KV write with rotary positions, then decodes and prefills, a launch each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backend.batch import Batch
from backend.config import ModelConfig
from backend.kernels.decode import paged_decode
from backend.kernels.decode_work import allocate_work, plan_work
from backend.kernels.kv_write import write_kv
from backend.kernels.prefill import paged_prefill
from backend.kernels.prefill_work import PrefillWork, plan_prefill
from backend.kernels.shape import AttentionShape
from backend.pool import KVPool
from backend.rope import RotaryTable


class Prefills(NamedTuple):
    """The step's chunks of more than one token."""

    tables: Tensor  # [chunks, blocks] int32
    work: PrefillWork


class PagedStep(NamedTuple):
    """What the kernels must know of a step, on the device. The rows of decodes come first."""

    positions: Tensor  # [n] int64
    slots: Tensor  # [n] int64: block * block_size + offset; -1 for a row of padding
    decode_tables: Tensor  # [decodes, blocks] int32
    decode_lens: Tensor  # [decodes] int32; 0 for a row of padding
    prefills: Prefills | None


class TritonAttention:
    """Over one pool; `begin` tells it of each step before the first layer."""

    def __init__(self, config: ModelConfig, pool: KVPool, rotary: RotaryTable, max_num_seqs: int) -> None:
        """Raises ValueError for a shape or a block size that the kernels do not know."""
        self._rotary = rotary
        self._layers = pool.layers()
        self._scale = config.head_dim**-0.5
        self.shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, pool.block_size, pool.k.dtype, pool.k.dtype
        )
        self._work = allocate_work(max_num_seqs, self.shape, pool.k.device)
        self._step: PagedStep | None = None

    def begin(self, step: PagedStep) -> None:
        self._step = step
        if len(step.decode_lens):
            plan_work(step.decode_lens, self._work)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step, (k_pool, v_pool) = self._step, self._layers[layer]
        assert step is not None, "attend before begin"
        write_kv(
            q, k, v, self._rotary.cos, self._rotary.sin, step.positions, step.slots, k_pool, v_pool,
            interleaved=self._rotary.interleaved,
        )  # fmt: skip
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        decodes = len(step.decode_lens)
        if decodes:
            paged_decode(
                q[:decodes], k_pool, v_pool, step.decode_tables, step.decode_lens, self._scale, self._work,
                out=out[:decodes],
            )  # fmt: skip
        if step.prefills is not None:
            tables, work = step.prefills
            paged_prefill(q[decodes:], k_pool, v_pool, tables, work, self._scale, out=out[decodes:])
        return out.flatten(1)

    def step_of(self, batch: Batch, device: torch.device) -> PagedStep:
        """The batch as it is, its tensors moved to the device."""
        lens = torch.tensor(batch.decode_lens, dtype=torch.int32)
        return PagedStep(
            batch.positions.to(device),
            slots_of(batch, self.shape.block_size).to(device),
            padded(batch.decode_tables).to(device),
            lens.to(device),
            self._prefills(batch, device) if batch.prefills else None,
        )

    def _prefills(self, batch: Batch, device: torch.device) -> Prefills:
        lens = [prefill.num_tokens for prefill in batch.prefills]
        starts = [prefill.start for prefill in batch.prefills]
        tables = padded([prefill.block_ids for prefill in batch.prefills]).to(device)
        return Prefills(tables, plan_prefill(lens, starts, self.shape, device))


def slots_of(batch: Batch, block_size: int) -> Tensor:
    return batch.slot_blocks * block_size + batch.slot_offsets


def padded(tables: Sequence[Sequence[int]]) -> Tensor:
    """[sequences, blocks of the longest] int32; what lies past a table's end is not read."""
    width = max(map(len, tables), default=0)
    return torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32).view(
        len(tables), width
    )

"""Paged attention on a CPU: whole blocks are gathered by index, then scaled dot products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from backend.batch import Batch, Prefill
from backend.config import ModelConfig
from backend.pool import KVPool
from backend.rope import RotaryTable

NUM_SHORT_BLOCKS = 4


class Gather(NamedTuple):
    """Where the K and V of some sequences lie, and what of it each row may see."""

    rows: Tensor  # [sequences * num_kv_heads * blocks] int64, into the pool as rows of one block and head
    num_blocks: int
    mask: Tensor  # 0 where a row sees a token, -inf elsewhere


class CpuAttention:
    """One step's sequences over the pool. Built once a step, used by every layer."""

    def __init__(self, config: ModelConfig, pool: KVPool, rotary: RotaryTable, batch: Batch) -> None:
        self._config = config
        self._pool = pool
        self._rotary = rotary
        self._batch = batch
        self._layers = pool.layers()
        self._turns = rotary.turns(batch.positions)
        heads = torch.arange(config.num_kv_heads)
        self._slots = self._slot_rows(batch, heads)
        self._decodes = [(rows, self._gather_decodes(batch, rows)) for rows in like_lengths(batch.decode_tables)]
        self._prefills = [self._gather_prefill(prefill) if prefill.start else None for prefill in batch.prefills]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self._rotary.rotate(q, self._turns), self._rotary.rotate(k, self._turns)
        k_pool, v_pool = self._layers[layer]
        k_pool.view(-1, self._config.head_dim).index_copy_(0, self._slots, k.reshape(-1, self._config.head_dim))
        v_pool.view(-1, self._config.head_dim).index_copy_(0, self._slots, v.reshape(-1, self._config.head_dim))
        outputs = []
        for rows, decodes in self._decodes:
            outputs.append(self._decode(q[rows], k_pool, v_pool, decodes))
        for prefill, gather in zip(self._batch.prefills, self._prefills, strict=True):
            rows = slice(prefill.first, prefill.first + prefill.num_tokens)
            outputs.append(self._prefill(q[rows], k[rows], v[rows], k_pool, v_pool, gather))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    # -- once a step --------------------------------------------------------------------------------------------

    def _slot_rows(self, batch: Batch, heads: Tensor) -> Tensor:
        """[n * num_kv_heads]: the row of each token and head in the pool seen as rows of head_dim."""
        blocks = batch.slot_blocks.unsqueeze(1) * self._config.num_kv_heads + heads
        return (blocks * self._pool.block_size + batch.slot_offsets.unsqueeze(1)).flatten()

    def _gather_decodes(self, batch: Batch, rows: slice) -> Gather:
        decodes = batch.decode_tables[rows]
        num_blocks = len(decodes[0])
        tables = np.zeros((len(decodes), num_blocks), dtype=np.int64)
        for row, table in enumerate(decodes):
            tables[row, : len(table)] = table
        lens = torch.tensor(batch.decode_lens[rows])
        seen = torch.arange(num_blocks * self._pool.block_size) < lens.unsqueeze(1)
        return Gather(self._rows(torch.from_numpy(tables)), num_blocks, self._mask(seen[:, None, None, :]))

    def _gather_prefill(self, prefill: Prefill) -> Gather:
        table = torch.tensor(prefill.block_ids).unsqueeze(0)
        rows = torch.arange(prefill.start, prefill.start + prefill.num_tokens).unsqueeze(1)
        seen = torch.arange(table.shape[1] * self._pool.block_size) <= rows
        return Gather(self._rows(table), table.shape[1], self._mask(seen))

    def _mask(self, seen: Tensor) -> Tensor:
        """As numbers, made once a step: a mask of truth values would be turned into one by every layer."""
        return torch.zeros(seen.shape, dtype=self._pool.k.dtype).masked_fill_(~seen, -torch.inf)

    def _rows(self, tables: Tensor) -> Tensor:
        """Block tables [sequences, blocks] as rows of one block and head, head by head."""
        num_heads = self._config.num_kv_heads
        return (tables.unsqueeze(1) * num_heads + torch.arange(num_heads)[:, None]).flatten()

    # -- in every layer -----------------------------------------------------------------------------------------

    def _read(self, pool: Tensor, gather: Gather) -> Tensor:
        """[sequences, num_kv_heads, tokens, head_dim], block after block."""
        blocks = pool.flatten(0, 1).flatten(1).index_select(0, gather.rows)
        return blocks.view(
            -1, self._config.num_kv_heads, gather.num_blocks * self._pool.block_size, self._config.head_dim
        )

    def _decode(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, gather: Gather) -> Tensor:
        """Query heads of one KV head are its rows: [decodes, num_kv_heads, group, head_dim]."""
        grouped = q.view(len(q), self._config.num_kv_heads, self._config.group_size, self._config.head_dim)
        k, v = self._read(k_pool, gather), self._read(v_pool, gather)
        return functional.scaled_dot_product_attention(grouped, k, v, attn_mask=gather.mask).flatten(1)

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, gather: Gather | None
    ) -> Tensor:
        """A chunk without context reads what it has just written from where it still lies."""
        queries = q.transpose(0, 1).unsqueeze(0)
        if gather is None:
            keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
            mask, is_causal = None, True
        else:
            keys, values = self._read(k_pool, gather), self._read(v_pool, gather)
            mask, is_causal = gather.mask, False
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True
        )
        return attended.squeeze(0).transpose(0, 1).flatten(1)


def like_lengths(tables: Sequence[Sequence[int]]) -> Iterator[slice]:
    """Runs of block tables, longest first, that are padded to their first one: to twice their own length at most.

    Short ones are not told apart: what padding costs them is less than another call.
    """
    first = 0
    for index, table in enumerate(tables):
        if len(tables[first]) > 2 * max(len(table), NUM_SHORT_BLOCKS):
            yield slice(first, index)
            first = index
    if tables:
        yield slice(first, len(tables))

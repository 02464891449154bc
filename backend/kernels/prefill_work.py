"""Which program computes what of a step's prefill chunks: blocks of queries, longest first, long ones in parts.

The host knows every chunk's length, so that the plan is made there and copied once a step; all layers use it. A block
of queries holds as many tokens as fill a tile with all heads of a group. One that has more KV to read than an equal
share of the whole is cut along it: 16 tokens after a context of 64k must not be one program's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from backend.kernels.configs import Config, config_for, key_of
from backend.kernels.shape import AttentionShape

MIN_PART_TOKENS = 1024  # parts are added up by a second launch: not worth it for less
INTERPRETED_SMS = 8  # without a GPU
INTERPRETED_L2_BYTES = 2**20


class Block(NamedTuple):
    """Queries of one chunk and the KV tiles they see, for each KV head."""

    seq: int
    first_token: int  # row of q
    num_tokens: int
    position: int  # of the first token in its sequence
    num_tiles: int


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The plan of a step, on the device.

    items    [num_items, 7] int32: seq, first token, tokens, position, first KV tile, one past the last, slot or -1
    sums     [num_sums, 4] int32: first token, tokens, first slot, parts: blocks that were cut
    parts    [num_kv_heads, num_slots, rows, head_dim] fp32, and weights [num_kv_heads, num_slots, rows] fp32, log2
    section  KV heads computed together: their KV fits in half the L2 cache
    """

    shape: AttentionShape
    config: Config
    items: Tensor
    sums: Tensor
    parts: Tensor
    weights: Tensor
    section: int
    num_tokens: int


def plan_prefill(query_lens: Sequence[int], context_lens: Sequence[int], shape: AttentionShape,
                 device: torch.device | str, config: Config | None = None) -> PrefillWork:  # fmt: skip
    """Cut chunks of `query_lens` tokens, each after `context_lens` tokens in the cache, into programs."""
    if len(query_lens) != len(context_lens) or not query_lens:
        raise ValueError(
            f"{len(query_lens)} chunks, {len(context_lens)} contexts: a plan needs one each, and at least 1"
        )
    if min(query_lens) < 1 or min(context_lens) < 0:
        raise ValueError("a chunk has 1 token or more, and a context 0 or more")
    device = torch.device(device)
    config = config or config_for(key_of("prefill", shape, max(query_lens) * shape.group, device))
    num_sms, l2_bytes = _chip(device)
    blocks = _blocks(query_lens, context_lens, shape, config)
    limit = _part_tiles(blocks, shape.num_kv_heads, num_sms * config.programs_per_sm, config.tile)
    items, sums, num_slots = _cut(blocks, limit)
    slots = (shape.num_kv_heads, num_slots, query_rows(shape, config))
    return PrefillWork(
        shape,
        config,
        torch.tensor(items, dtype=torch.int32).to(device, non_blocking=True),
        torch.tensor(sums, dtype=torch.int32).reshape(-1, 4).to(device, non_blocking=True),
        torch.empty(*slots, shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(slots, dtype=torch.float32, device=device),
        _section(sum(query_lens) + sum(context_lens), shape, l2_bytes),
        sum(query_lens),
    )


def query_rows(shape: AttentionShape, config: Config) -> int:
    """Rows of a program's tile: at least one token's heads of a group."""
    return max(config.rows, 1 << (shape.group - 1).bit_length())


def _chip(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return INTERPRETED_SMS, INTERPRETED_L2_BYTES
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


def _blocks(query_lens: Sequence[int], context_lens: Sequence[int], shape: AttentionShape,
            config: Config) -> list[Block]:  # fmt: skip
    """Longest first: what is begun last is short."""
    size = query_rows(shape, config) // shape.group
    blocks, chunk_start = [], 0
    for seq, (length, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        for first in range(0, length, size):
            num_tokens = min(size, length - first)
            num_tiles = -(-(context + first + num_tokens) // config.tile)
            blocks.append(Block(seq, chunk_start + first, num_tokens, context + first, num_tiles))
        chunk_start += length
    return sorted(blocks, key=lambda block: -block.num_tiles)


def _part_tiles(blocks: Sequence[Block], num_kv_heads: int, num_places: int, tile: int) -> int:
    """The most KV tiles of a part: an equal share, or more where a wave's last programs would run alone."""
    total = sum(block.num_tiles for block in blocks) * num_kv_heads
    limit = max(MIN_PART_TOKENS // tile, -(-total // num_places), 1)
    if len(blocks) * num_kv_heads <= num_places:
        while sum(-(-block.num_tiles // limit) for block in blocks) * num_kv_heads > num_places:
            limit += max(limit // 32, 1)
    return limit


def _cut(blocks: Sequence[Block], limit: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Items, sums and the number of slots; the parts of a block differ by one tile at most."""
    items: list[list[int]] = []
    sums: list[list[int]] = []
    num_slots = 0
    for block in blocks:
        num_parts = -(-block.num_tiles // limit)
        ends = [block.num_tiles * part // num_parts for part in range(num_parts + 1)]
        for part in range(num_parts):
            slot = num_slots + part if num_parts > 1 else -1
            items.append([*block[:4], ends[part], ends[part + 1], slot])
        if num_parts > 1:
            sums.append([block.first_token, block.num_tokens, num_slots, num_parts])
            num_slots += num_parts
    return items, sums, num_slots


def _section(num_kv_tokens: int, shape: AttentionShape, l2_bytes: int) -> int:
    head_bytes = num_kv_tokens * shape.token_kv_bytes // shape.num_kv_heads
    fitting = max(l2_bytes // 2 // max(head_bytes, 1), 1)
    return max(n for n in range(1, min(fitting, shape.num_kv_heads) + 1) if shape.num_kv_heads % n == 0)

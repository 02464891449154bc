"""A plan as tensors: which tokens, at which positions, into which slots, and who attends to which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from policies.types import Chunk


class Prefill(NamedTuple):
    """Rows [first, first + num_tokens) of the batch, which continue a context of `start` tokens."""

    first: int
    num_tokens: int
    start: int
    block_ids: Sequence[int]  # of the context and the chunk itself


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks of one token come first, the longest context first: attention takes those of like lengths together."""

    token_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    slot_blocks: Tensor  # [n] int64: the block each token is written to
    slot_offsets: Tensor  # [n] int64: and where in it
    num_decodes: int
    decode_tables: list[Sequence[int]]
    decode_lens: list[int]  # tokens attended to, the new one included
    prefills: list[Prefill]
    sample_rows: list[int]  # the last row of each chunk that yields a token, in the order of `sampled`
    sampled: list[Chunk]


def _place(chunk: Chunk) -> int:
    return 0 if chunk.num_tokens > 1 else -1 - chunk.start


def build_batch(chunks: Sequence[Chunk], token_ids: Sequence[Sequence[int]], block_size: int) -> Batch:
    """`token_ids` of each chunk, `num_tokens` of them."""
    order = sorted(range(len(chunks)), key=lambda index: _place(chunks[index]))
    tokens: list[int] = []
    decode_tables: list[Sequence[int]] = []
    decode_lens: list[int] = []
    prefills: list[Prefill] = []
    sample_rows: list[int] = []
    sampled: list[Chunk] = []
    positions: list[int] = []
    blocks: list[int] = []
    for index in order:
        chunk = chunks[index]
        start, end = chunk.start, chunk.start + chunk.num_tokens
        if chunk.num_tokens == 1:
            decode_tables.append(chunk.block_ids[: start // block_size + 1])
            decode_lens.append(end)
        else:
            prefills.append(Prefill(len(tokens), chunk.num_tokens, start, chunk.block_ids[: -(-end // block_size)]))
        tokens.extend(token_ids[index])
        positions.extend(range(start, end))
        blocks.extend(chunk.block_ids[position // block_size] for position in range(start, end))
        if chunk.samples:
            sample_rows.append(len(tokens) - 1)
            sampled.append(chunk)
    places = torch.from_numpy(np.array(positions, dtype=np.int64))
    return Batch(
        token_ids=torch.from_numpy(np.array(tokens, dtype=np.int64)),
        positions=places,
        slot_blocks=torch.from_numpy(np.array(blocks, dtype=np.int64)),
        slot_offsets=places % block_size,
        num_decodes=len(decode_lens),
        decode_tables=decode_tables,
        decode_lens=decode_lens,
        prefills=prefills,
        sample_rows=sample_rows,
        sampled=sampled,
    )

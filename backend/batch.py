"""A plan as tensors: which tokens, at which positions, into which slots, and who attends to which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
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


def build_batch(chunks: Sequence[Chunk], token_ids: Sequence[Sequence[int]], block_size: int) -> Batch:
    """`token_ids` of each chunk, `num_tokens` of them."""
    order = sorted(range(len(chunks)), key=lambda index: _place(chunks[index]))
    rows = [chunks[index] for index in order]
    decodes = [chunk for chunk in rows if chunk.num_tokens == 1]
    firsts = list(accumulate((chunk.num_tokens for chunk in rows), initial=0))
    positions = _integers(position for chunk in rows for position in _positions(chunk))
    return Batch(
        token_ids=_integers(token for index in order for token in token_ids[index]),
        positions=positions,
        slot_blocks=_integers(chunk.block_ids[at // block_size] for chunk in rows for at in _positions(chunk)),
        slot_offsets=positions % block_size,
        num_decodes=len(decodes),
        decode_tables=[_table(chunk, block_size) for chunk in decodes],
        decode_lens=[chunk.start + 1 for chunk in decodes],
        prefills=[
            Prefill(first, chunk.num_tokens, chunk.start, _table(chunk, block_size))
            for first, chunk in zip(firsts[len(decodes) :], rows[len(decodes) :], strict=False)
        ],
        sample_rows=[end - 1 for end, chunk in zip(firsts[1:], rows, strict=True) if chunk.samples],
        sampled=[chunk for chunk in rows if chunk.samples],
    )


def _place(chunk: Chunk) -> int:
    """What it is sorted by: decodes, the longest context first, then the others as they come."""
    return 0 if chunk.num_tokens > 1 else -1 - chunk.start


def _positions(chunk: Chunk) -> range:
    return range(chunk.start, chunk.start + chunk.num_tokens)


def _table(chunk: Chunk, block_size: int) -> Sequence[int]:
    """Blocks up to its last token; the request's own table may have grown since."""
    return chunk.block_ids[: -(-(chunk.start + chunk.num_tokens) // block_size)]


def _integers(values: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=np.int64))

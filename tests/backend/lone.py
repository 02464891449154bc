"""A sequence through the paged KV by hand: no scheduler, blocks in a scattered order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.attention import CpuAttention
from backend.batch import build_batch
from backend.model import Decoder
from backend.pool import KVPool
from backend.rope import RotaryTable
from policies.types import Chunk

BLOCK_SIZE = 4


def lone_logits(decoder: Decoder, prompt: Sequence[int], num_decoded: int) -> tuple[list[int], Tensor]:
    """The prompt as one chunk, then greedy tokens one by one: all tokens but the last drawn, and everyone's logits."""
    num_tokens = len(prompt) + num_decoded
    table = list(range(-(-num_tokens // BLOCK_SIZE), 0, -1))
    table = table[::2] + table[1::2]
    pool = KVPool(decoder.config, len(table), BLOCK_SIZE)
    rotary = RotaryTable(decoder.config.rope, decoder.config.head_dim, num_tokens)
    tokens, rows, start = list(prompt), list[Tensor](), 0
    with torch.inference_mode():
        for _ in range(1 + num_decoded):
            batch = build_batch([Chunk("a", start, len(tokens) - start, table, True)], [tokens[start:]], BLOCK_SIZE)
            attention = CpuAttention(decoder.config, pool, rotary, batch)
            logits = decoder.logits(decoder.hidden(batch.token_ids, attention))
            rows.append(logits)
            start = len(tokens)
            tokens.append(int(logits[-1].argmax()))
    return tokens[:-1], torch.cat(rows)

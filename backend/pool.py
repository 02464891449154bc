"""The KV pool: blocks of tokens, one tensor for K and one for V, all layers; block 0 belongs to nobody and is zero."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from backend.config import ModelConfig


class KVPool:
    """`k` and `v` are [num_layers, num_blocks + 1, num_kv_heads, block_size, head_dim]; the core's ids begin at 1."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.num_layers, num_blocks + 1, config.num_kv_heads, block_size, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return 2 * self.k.nbytes

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer, [num_blocks + 1, num_kv_heads, block_size, head_dim]."""
        return list(zip(self.k.unbind(0), self.v.unbind(0), strict=True))

    def scrub(self, block_ids: Iterable[int]) -> None:
        """Zero blocks that a failed step may have left with values that are no numbers.

        Slots past a sequence's end are read and weighted with zero; zero times NaN would be NaN.
        """
        ids = torch.tensor(sorted(set(block_ids)), dtype=torch.int64, device=self.k.device)
        self.k[:, ids] = 0.0
        self.v[:, ids] = 0.0

"""A Llama-family decoder over a flat list of tokens: whatever they attend to is the attention's business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from backend.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [outputs, inputs]. Q, K and V, and gate and up, lie one below the other: one product each."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`lm_head` is the embedding itself where the two are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


class Attention(Protocol):
    """Knows the step's sequences and owns the paged KV."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Turn q and k by their positions, write k and v to the pool, then attend: [n, num_heads * head_dim].

        q [n, num_heads, head_dim], k and v [n, num_kv_heads, head_dim]. All tokens of the step are written before any
        is read, so that one sequence may read what another writes in the same step.
        """


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # rows, weight [outputs, inputs], bias


class Decoder:
    """Weights and the arithmetic between them; no state."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, product: Product = functional.linear) -> None:
        self.config = config
        self.weights = weights
        self._product = product

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def hidden(self, token_ids: Tensor, attention: Attention) -> Tensor:
        """[n] int64 -> [n, hidden_size], before the last norm."""
        x = functional.embedding(token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            x += self._attention(index, layer, self._norm(x, layer.input_norm), attention)
            x += self._mlp(layer, self._norm(x, layer.post_attention_norm))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]."""
        return self._product(self._norm(hidden, self.weights.norm), self.weights.lm_head, None)

    def _attention(self, index: int, layer: LayerWeights, x: Tensor, attention: Attention) -> Tensor:
        config = self.config
        heads = self._product(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return self._product(attention.attend(index, q, k, v), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = self._product(x, layer.gate_up, None).chunk(2, dim=-1)
        return self._product(functional.silu(gate, inplace=True).mul_(up), layer.down, None)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

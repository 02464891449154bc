"""Bytes and flops of a step's operations: the kernels state the same numbers."""

from __future__ import annotations

from sim.models.shape import ACTIVATION_BYTES, Model


def gemm_flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def gemm_bytes(m: int, n: int, k: int, dtype_bytes: int) -> int:
    """Input and output of m rows and the weight [n, k], each moved once."""
    return (m * k + n * k + m * n) * dtype_bytes


def decode_attention_bytes(context: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """K and V of `context` tokens in all, one layer."""
    return 2 * context * num_kv_heads * head_dim * dtype_bytes


def latent_attention_bytes(context: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype_bytes: int) -> int:
    """The latents and rotated keys of `context` tokens in all, one layer: all heads share them."""
    return context * (kv_lora_rank + qk_rope_head_dim) * dtype_bytes


def latent_attention_flops(context: int, num_heads: int, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """One new token a sequence, in latent space: scores over latent and rotated key, values over the latent."""
    return 2 * context * num_heads * (2 * kv_lora_rank + qk_rope_head_dim)


def prefill_attention_flops(pairs: int, num_heads: int, head_dim: int, v_head_dim: int | None = None) -> int:
    """Scores and values of one layer. `pairs` counts each query-key pair twice, as in StepWork: (4 / 2) * pairs."""
    return pairs * num_heads * (head_dim + (v_head_dim or head_dim))


def all_reduce_bytes(num_tokens: int, hidden_size: int, dtype_bytes: int, num_gpus: int) -> float:
    """What each GPU sends, a ring's share: 2 * (p - 1) / p of the hidden states."""
    return 2 * (num_gpus - 1) / num_gpus * num_tokens * hidden_size * dtype_bytes


def experts_touched(num_experts: int, num_experts_per_token: int, num_tokens: int) -> list[float]:
    """Of one layer, expected at 0, 1, ... `num_tokens` tokens that choose alike: E * (1 - (1 - k / E) ** n).

    By repeated multiplication: the same bits everywhere.
    """
    left = [1.0]
    for _ in range(num_tokens):
        left.append(left[-1] * (1.0 - num_experts_per_token / num_experts))
    return [num_experts * (1.0 - share) for share in left]


def small_kernel_bytes(model: Model) -> int:
    """Memory traffic of one token in the small kernels of all layers."""
    norms = 2 * 4 * model.hidden_size  # each reads and writes the stream and the residual
    rotated = model.num_heads * model.latent.qk_rope_head_dim if model.latent else model.num_heads * model.head_dim
    keys = model.kv_width if model.latent else model.num_kv_heads * model.head_dim
    rope = 2 * (rotated + keys)
    kv_write = 2 * model.kv_width
    total = model.num_layers * (norms + rope + kv_write) + model.num_dense_layers * 3 * model.intermediate_size
    if model.experts:
        each = model.experts
        activation = 3 * (each.num_experts_per_token * each.intermediate_size + each.shared_intermediate_size)
        combine = (each.num_experts_per_token + 1) * model.hidden_size  # each expert's row read, their sum written
        total += model.num_expert_layers * (activation + combine + 2 * each.num_experts)
    return total * ACTIVATION_BYTES


def sampling_bytes(model: Model) -> int:
    """Traffic of one sampled row: logits read and widened to fp32 (dtype + 4), and read once more (4)."""
    return model.vocab_size * (ACTIVATION_BYTES + 8)

"""How many KV blocks fit: the memory an engine may use, less weights, peak activations and overhead.

Within 0.05 GiB of what vLLM reported for three dense models on one H100 (llm-d-planner's memory profiles).
"""

from __future__ import annotations

from sim.hardware import Device
from sim.models import Model

GIB = 1024**3

# A GPU sold with "80 GB" has 80 GiB, less what ECC and the driver take before any process sees it: an H100 shows
# 79.18 GiB to vLLM = 80 * 0.98975, an H200 sold as 141 GB about 139.8 = 141 * 0.991. So the number on the box is
# read as GiB and 1 % is taken off.
VISIBLE_SHARE = 0.99

# CUDA context, cuBLAS workspaces and what else torch does not see: 0.13 or 0.14 GiB in each profile on one GPU.
# CUDA graphs are not charged: in the same profiles they came to -0.9..+0.1 GiB for dense models, noise of the
# allocator, and vLLM let them live in the share of memory that gpu_memory_utilization leaves out.
OVERHEAD_BYTES = int(0.135 * GIB)

# The engine profiles its sampler on max_num_seqs rows with top-k and top-p: logits in bf16 and fp32, sorted values and
# int64 order, probabilities, running sums, masks and the scattered copy. Measured: 38.4 to 38.9 bytes a logit over
# four models (1024 rows each), of which 0.2 to 1.1 are the hidden states below.
SAMPLER_BYTES_PER_LOGIT = 38


def activation_bytes(model: Model, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Peak of the profiling step: the widest layer or the sampler, beside two copies of the hidden states."""
    hidden = 2 * max_num_batched_tokens * model.hidden_size * model.dtype_bytes  # layer output and residual
    # gate and up side by side (2 * intermediate) while their product (1) is written
    mlp = 3 * max_num_batched_tokens * model.intermediate_size * model.dtype_bytes
    # normed input, fused QKV, and the attention output
    heads = model.hidden_size + model.qkv_size + model.num_heads * model.head_dim
    attention = max_num_batched_tokens * heads * model.dtype_bytes
    sampler = min(max_num_seqs, max_num_batched_tokens) * model.vocab_size * SAMPLER_BYTES_PER_LOGIT
    return hidden + max(mlp, attention, sampler)


def usable_bytes(device: Device, gpu_memory_utilization: float) -> int:
    if not 0.0 < gpu_memory_utilization <= 1.0:
        raise ValueError(f"gpu_memory_utilization ({gpu_memory_utilization}) must be above 0 and at most 1")
    return int(gpu_memory_utilization * VISIBLE_SHARE * device.memory_gb * GIB)


def kv_bytes(
    model: Model,
    device: Device,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 128,
) -> int:
    """Bytes left for KV; zero or negative where the model does not fit."""
    activations = activation_bytes(model, max_num_batched_tokens, max_num_seqs)
    return usable_bytes(device, gpu_memory_utilization) - model.weight_bytes - activations - OVERHEAD_BYTES


def kv_blocks(
    model: Model,
    device: Device,
    block_size: int,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 128,
) -> int:
    """Whole blocks of `block_size` tokens. Raises ValueError when not one fits."""
    if block_size < 1:
        raise ValueError(f"block_size ({block_size}) must be at least 1")
    left = kv_bytes(model, device, gpu_memory_utilization, max_num_batched_tokens, max_num_seqs)
    num_blocks = left // (block_size * model.kv_bytes_per_token)
    if num_blocks < 1:
        activations = activation_bytes(model, max_num_batched_tokens, max_num_seqs)
        raise ValueError(
            f"no room for KV: {gpu_memory_utilization} of {device.name}'s {VISIBLE_SHARE * device.memory_gb:.1f} GiB "
            f"less {model.name}'s weights ({model.weight_bytes / GIB:.1f}), activations ({activations / GIB:.1f}) and "
            f"overhead ({OVERHEAD_BYTES / GIB:.1f}) is {left / GIB:.1f} GiB; raise gpu_memory_utilization, lower "
            f"max_num_batched_tokens ({max_num_batched_tokens}) or max_num_seqs ({max_num_seqs}), or take a larger GPU"
        )
    return num_blocks

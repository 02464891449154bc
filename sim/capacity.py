"""How many KV blocks fit, and how many a workload wants: memory, less weights, peak activations and overhead.

Room for KV is within 0.08 GiB of what vLLM reported for dense models in bf16 and fp8 on one and two H100s
(llm-d-planner's memory profiles). All sizes are those of one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from sim.hardware import Device
from sim.models import Model
from sim.models.shape import ACTIVATION_BYTES

GIB = 1024**3

# A GPU sold with "80 GB" has 80 GiB, less what ECC and the driver take before any process sees it: an H100 shows
# 79.18 GiB to vLLM = 80 * 0.98975, an H200 sold as 141 GB about 139.8 = 141 * 0.991. So the number on the box is
# read as GiB and the device's `visible_share` of it is there.

# CUDA context, cuBLAS workspaces and what else torch does not see: 0.13 or 0.14 GiB in each profile on one GPU, 0.54 or
# 0.55 on two, with NCCL's buffers (aiconfigurator has 50 MB more for four and eight).
# CUDA graphs are not charged unless said: in the same profiles they came to -0.9..+0.1 GiB for dense models, noise of
# the allocator, and vLLM let them live in the share of memory that gpu_memory_utilization leaves out. From 0.21 it
# takes an estimate of its own off (0.36 GiB for 16 captures of one model): give that as `cuda_graph_bytes`.
OVERHEAD_BYTES = int(0.135 * GIB)
NCCL_BYTES = int(0.41 * GIB)

# The engine profiles its sampler on max_num_seqs rows with top-k and top-p: logits in bf16 and fp32, sorted values and
# int64 order, probabilities, running sums, masks and the scattered copy. Measured: 38.4 to 38.9 bytes a logit over
# four models (1024 rows each), of which 0.2 to 1.1 are the hidden states below.
SAMPLER_BYTES_PER_LOGIT = 38


def overhead_bytes(tensor_parallel: int = 1) -> int:
    return OVERHEAD_BYTES + (NCCL_BYTES if tensor_parallel > 1 else 0)


def activation_bytes(model: Model, max_num_batched_tokens: int, max_num_seqs: int, tensor_parallel: int = 1) -> int:
    """Peak of the profiling step: the widest layer or the sampler, beside two copies of the hidden states."""
    part, tokens = model.shard(tensor_parallel), max_num_batched_tokens
    hidden = 2 * model.hidden_size  # layer output and residual
    # gate and up side by side (2 * intermediate) while their product (1) is written
    mlp = 3 * part.intermediate_size
    if part.experts:
        each = part.experts  # gate and up, or later the outputs, of all chosen experts, beside their products
        chosen = max(2 * each.intermediate_size, model.hidden_size) + each.intermediate_size
        mlp = max(mlp, each.num_experts_per_token * chosen + 3 * each.shared_intermediate_size)
    # normed input, fused QKV, and the attention output
    heads = model.hidden_size + part.qkv_size + part.num_heads * part.head_dim
    # every GPU samples over the whole vocabulary
    sampler = min(max_num_seqs, tokens) * model.vocab_size * SAMPLER_BYTES_PER_LOGIT
    return tokens * hidden * ACTIVATION_BYTES + max(tokens * max(mlp, heads) * ACTIVATION_BYTES, sampler)


def usable_bytes(device: Device, gpu_memory_utilization: float) -> int:
    if not 0.0 < gpu_memory_utilization <= 1.0:
        raise ValueError(f"gpu_memory_utilization ({gpu_memory_utilization}) must be above 0 and at most 1")
    return int(gpu_memory_utilization * device.visible_share * device.memory_gb * GIB)


def kv_bytes(
    model: Model,
    device: Device,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 128,
    tensor_parallel: int = 1,
    cuda_graph_bytes: int = 0,
) -> int:
    """Bytes left for KV; zero or negative where the model does not fit."""
    weights = model.shard(tensor_parallel).weight_bytes
    activations = activation_bytes(model, max_num_batched_tokens, max_num_seqs, tensor_parallel)
    taken = weights + activations + overhead_bytes(tensor_parallel) + cuda_graph_bytes
    return usable_bytes(device, gpu_memory_utilization) - taken


def kv_blocks(
    model: Model,
    device: Device,
    block_size: int,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 128,
    tensor_parallel: int = 1,
    cuda_graph_bytes: int = 0,
) -> int:
    """Whole blocks of `block_size` tokens, all layers. Raises ValueError when not one fits.

    A layer with a sliding window is given as many blocks as any other: nothing is given back before a request ends.
    """
    if block_size < 1:
        raise ValueError(f"block_size ({block_size}) must be at least 1")
    if cuda_graph_bytes < 0:
        raise ValueError(f"cuda_graph_bytes ({cuda_graph_bytes}) must be 0 or more")
    limits = (max_num_batched_tokens, max_num_seqs, tensor_parallel)
    left = kv_bytes(model, device, gpu_memory_utilization, *limits, cuda_graph_bytes)
    part = model.shard(tensor_parallel)
    num_blocks = left // (block_size * part.kv_bytes_per_token)
    if num_blocks < 1:
        activations = activation_bytes(model, *limits)
        overhead = overhead_bytes(tensor_parallel) + cuda_graph_bytes
        raise ValueError(
            f"no room for KV: {gpu_memory_utilization} of {device.name}'s "
            f"{device.visible_share * device.memory_gb:.1f} GiB less {model.name}'s weights "
            f"({part.weight_bytes / GIB:.1f}), activations ({activations / GIB:.1f}) and overhead "
            f"({overhead / GIB:.1f}) is {left / GIB:.1f} GiB; raise gpu_memory_utilization, lower "
            f"max_num_batched_tokens ({max_num_batched_tokens}) or max_num_seqs ({max_num_seqs}), or take a larger GPU "
            f"or more of them (tensor_parallel is {tensor_parallel})"
        )
    return num_blocks


# -- demand -----------------------------------------------------------------------------------------------------------

P99_DEVIATIONS = 2.326  # where 99 % of a normal distribution lies below


@dataclass(frozen=True, slots=True)
class Demand:
    """What `num_requests` running at once want of one GPU: weights, and resident KV tokens three ways."""

    num_requests: int
    weight_bytes: int
    kv_bytes_per_token: int
    worst_tokens: int  # each request as long as the context limit
    mean_tokens: float
    p99_tokens: float

    def num_bytes(self, num_tokens: float) -> float:
        """With the weights."""
        return self.weight_bytes + num_tokens * self.kv_bytes_per_token


def demand(
    model: Model,
    prompts: Sequence[int],
    outputs: Sequence[int],
    max_num_seqs: int,
    max_model_len: int | None = None,
    tensor_parallel: int = 1,
) -> Demand:
    """What requests of these prompt and output lengths keep while `max_num_seqs` of them run.

    Seen at any step, a long answer is there more often than a short one: lengths weigh by their number of steps. p99
    takes requests as independent and their sum as normal, and is at most all of them at their longest. A shared
    prefix is counted for each request, as without prefix caching.
    """
    if not prompts or len(prompts) != len(outputs):
        raise ValueError(f"each request needs a prompt and an output: {len(prompts)} prompts, {len(outputs)} outputs")
    if min(prompts) < 1 or min(outputs) < 1 or max_num_seqs < 1:
        raise ValueError("prompts, outputs and max_num_seqs must be at least 1")
    part, limit = model.shard(tensor_parallel), max_model_len or model.max_model_len
    lengths = [
        (min(prompt, limit), min(prompt + output, limit)) for prompt, output in zip(prompts, outputs, strict=True)
    ]
    mean, variance = _resident(lengths)
    most = max_num_seqs * max(longest for _, longest in lengths)
    return Demand(
        num_requests=max_num_seqs,
        weight_bytes=part.weight_bytes,
        kv_bytes_per_token=part.kv_bytes_per_token,
        worst_tokens=max_num_seqs * limit,
        mean_tokens=max_num_seqs * mean,
        p99_tokens=min(most, max_num_seqs * mean + P99_DEVIATIONS * sqrt(max_num_seqs * variance)),
    )


def _resident(lengths: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Mean and variance of one running request's tokens, which grow by one a step from its prompt to its end."""
    num_steps = total = squares = 0
    for prompt, end in lengths:
        steps = end - prompt + 1
        num_steps += steps
        total += steps * (prompt + end) // 2
        squares += _sum_of_squares(end) - _sum_of_squares(prompt - 1)
    mean = total / num_steps
    return mean, max(0.0, squares / num_steps - mean * mean)


def _sum_of_squares(n: int) -> int:
    return n * (n + 1) * (2 * n + 1) // 6

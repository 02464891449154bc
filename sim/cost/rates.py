"""What a model's operations cost on a GPU, per step and per count: seconds from peaks, shares of them and floors."""

from __future__ import annotations

from typing import NamedTuple

from sim.cost.formulas import (
    all_reduce_bytes,
    decode_attention_bytes,
    experts_touched,
    gemm_bytes,
    gemm_flops,
    latent_attention_bytes,
    latent_attention_flops,
    prefill_attention_flops,
    sampling_bytes,
    small_kernel_bytes,
)
from sim.cost.graphs import LARGEST_CAPTURE, PIECE_TIME
from sim.hardware import Device
from sim.models.shape import ACTIVATION_BYTES, DTYPE_BYTES, Matrix, Model

# Kernels in a captured graph, per layer. Attention of one short sequence takes 8.5 to 11.5 us on an H200 (FA3, vLLM
# and SGLang). 512 sequences of 128 tokens with 8 KV heads take 123 to 144 us, though their bytes and the floor take
# 68 + 9: about 10 ns for each sequence and KV head. A memory-bound kernel takes 3 us and its bytes (aiconfigurator's
# constant for H100 and H200).
ATTENTION_FLOOR = 9e-6
DECODE_ITEM_TIME = 10e-9
SMALL_KERNEL_FLOOR = 3e-6
SMALL_KERNELS_PER_LAYER = 5  # two norms with the residual added, RoPE, KV write, SiLU times up
EXPERT_KERNELS_PER_LAYER = 4  # choice of experts, sorting by expert, SiLU times up, sum
LATENT_KERNELS_PER_LAYER = 3  # norms of both latents, joining the rotated part

# Beside its bytes or flops a GEMM takes 3.1 us on H100 and H200, 2.0 to 3.7 on L40S and A100 (fits to the kernel tables
# over weights of 0.1 MB to 1 GB, m up to 16); in fp8 5.7, its inputs being quantised on the way. Without it a weight of
# 4 to 8 MB would take a third of what was measured: what tensor parallelism and small models have many of.
GEMM_FLOOR = 3e-6
FP8_GEMM_FLOOR = 5.7e-6


class Speeds(NamedTuple):
    """Of one GPU, in flops and bytes a second; a GEMM's floor in seconds."""

    gemm: float
    weights: float
    gemm_floor: float
    attention: float
    kv: float


def speeds_of(device: Device, dtype: str = "bf16") -> Speeds:
    """With weights of this type; a GPU without fp8 units computes on them in bf16."""
    shares, bandwidth = device.efficiency, device.bandwidth_gb_s * 1e9
    attention, kv = shares.prefill_attention * device.bf16_tflops * 1e12, shares.decode_bandwidth * bandwidth
    if dtype == "fp8" and device.fp8_tflops:
        weights = shares.fp8_weight_bandwidth * bandwidth
        return Speeds(shares.fp8_gemm * device.fp8_tflops * 1e12, weights, FP8_GEMM_FLOOR, attention, kv)
    return Speeds(
        shares.gemm * device.bf16_tflops * 1e12, shares.weight_bandwidth * bandwidth, GEMM_FLOOR, attention, kv
    )


class Gemm(NamedTuple):
    """m rows take max(m * compute, stream + m * move) seconds beside the floor."""

    compute: float
    stream: float
    move: float


def gemm_of(matrix: Matrix, speeds: Speeds, dtype_bytes: int = ACTIVATION_BYTES, num_rows: int = 1) -> Gemm:
    """All layers' GEMMs with such a weight, `num_rows` of each token; rows move in 2 bytes whatever its type."""
    n, k, layers = matrix
    moved = gemm_bytes(num_rows, n, k, ACTIVATION_BYTES) - gemm_bytes(0, n, k, ACTIVATION_BYTES)
    return Gemm(
        compute=layers * gemm_flops(num_rows, n, k) / speeds.gemm,
        stream=layers * gemm_bytes(0, n, k, dtype_bytes) / speeds.weights,
        move=layers * moved / speeds.weights,
    )


class Gemms(NamedTuple):
    """Of all layers: weights that every token passes, and weights of experts, of which it passes some."""

    dense: tuple[Gemm, ...]
    experts: tuple[Gemm, ...]
    touched: list[float]  # experts of one layer that are read, by number of tokens; the last holds beyond

    def time(self, m: int) -> float:
        time = 0.0
        for compute, stream, move in self.dense:
            arithmetic, memory = compute * m, stream + move * m
            time += arithmetic if arithmetic > memory else memory
        if self.experts:
            touched = self.touched[m] if m < len(self.touched) else self.touched[-1]
            for compute, stream, move in self.experts:
                time += max(compute * m, stream * touched + move * m)
        return time


def gemms_of(part: Model, device: Device) -> Gemms:
    """`part` is one GPU's share of a model."""
    speeds, dtype_bytes, experts = speeds_of(device, part.dtype), DTYPE_BYTES[part.dtype], part.experts
    dense = [gemm_of(matrix, speeds, dtype_bytes) for matrix in part.attention_matrices + part.mlp_matrices]
    if not experts:
        return Gemms(tuple(dense), (), [])
    dense.append(gemm_of(Matrix(experts.num_experts, part.hidden_size, part.num_expert_layers), speeds_of(device)))
    chosen = experts.num_experts_per_token
    grouped = [gemm_of(matrix, speeds, dtype_bytes, num_rows=chosen) for matrix in part.expert_matrices]
    # after 16 * E / k tokens a share of e^-16 is untouched: none
    num_tokens = max(LARGEST_CAPTURE, 16 * experts.num_experts // chosen)
    return Gemms(tuple(dense), tuple(grouped), experts_touched(experts.num_experts, chosen, num_tokens))


class Rates(NamedTuple):
    """Seconds, all layers together: a step's floor and the price of each count."""

    step: float
    token: float
    row: float  # of a GEMM's output, through the all-reduces
    head: Gemm
    sample: float
    attention: float
    decode: float
    kv_token: float  # of the layers without a window, as `pair`
    pair: float
    window: int  # 0: none
    window_kv_token: float
    window_pair: float
    launches: float  # of all kernels, one by one
    pieces: float  # of all layers


def num_kernels(model: Model) -> tuple[int, int]:
    """GEMMs and small kernels of all layers."""
    matrices = model.attention_matrices + model.mlp_matrices + model.expert_matrices
    num_gemms = sum(matrix.num_layers for matrix in matrices) + model.num_expert_layers  # with the router
    num_small = model.num_layers * (SMALL_KERNELS_PER_LAYER + (LATENT_KERNELS_PER_LAYER if model.latent else 0))
    return num_gemms, num_small + model.num_expert_layers * EXPERT_KERNELS_PER_LAYER


def attention_times(part: Model, speeds: Speeds) -> tuple[float, float]:
    """Seconds of a KV token and of a pair, one layer."""
    kv_dtype_bytes = DTYPE_BYTES[part.kv_dtype]
    if not (latent := part.latent):
        kv_bytes = decode_attention_bytes(1, part.num_kv_heads, part.head_dim, kv_dtype_bytes)
        pair_flops = prefill_attention_flops(1, part.num_heads, part.head_dim)
        return kv_bytes / speeds.kv, pair_flops / speeds.attention
    kept = (latent.kv_lora_rank, latent.qk_rope_head_dim)
    kv_bytes = latent_attention_bytes(1, *kept, kv_dtype_bytes)
    kv_flops = latent_attention_flops(1, part.num_heads, *kept)  # 128 heads on one latent: may outlast its bytes
    pair_flops = prefill_attention_flops(1, part.num_heads, latent.qk_head_dim, latent.v_head_dim)
    return max(kv_bytes / speeds.kv, kv_flops / speeds.attention), pair_flops / speeds.attention


def rates_of(model: Model, device: Device, tensor_parallel: int, launch_time: float) -> Rates:
    part, layers, sliding, link = model.shard(tensor_parallel), model.num_layers, model.num_sliding_layers, device.link
    speeds, bf16 = speeds_of(device, part.dtype), speeds_of(device)
    num_gemms, num_small = num_kernels(part)
    num_all_reduces = 2 * layers if tensor_parallel > 1 else 0  # after attention and after the MLP
    all_reduce_floor = link.latency + link.latency_per_gpu * tensor_parallel
    sent = all_reduce_bytes(1, model.hidden_size, ACTIVATION_BYTES, tensor_parallel)
    kv_token, pair = attention_times(part, speeds)
    return Rates(
        step=num_gemms * speeds.gemm_floor + num_small * SMALL_KERNEL_FLOOR + num_all_reduces * all_reduce_floor,
        token=small_kernel_bytes(part) / bf16.weights,
        row=num_all_reduces * sent / (link.efficiency * link.gb_s * 1e9),
        head=gemm_of(Matrix(part.vocab_size, part.hidden_size, 1), bf16),
        sample=sampling_bytes(model) / bf16.weights,
        attention=layers * ATTENTION_FLOOR,
        decode=layers * (1 if part.latent else part.num_kv_heads) * DECODE_ITEM_TIME,
        kv_token=(layers - sliding) * kv_token,
        pair=(layers - sliding) * pair,
        window=(model.sliding_window or 0) if sliding else 0,
        window_kv_token=sliding * kv_token,
        window_pair=sliding * pair,
        launches=(num_gemms + num_small + num_all_reduces + layers) * launch_time,
        pieces=layers * PIECE_TIME,
    )

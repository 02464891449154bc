"""How long a step takes: a roofline over its operations, from a datasheet and measured efficiencies.

step = host(step, requests) and device = GEMMs + attention of decodes + attention of prefills + small kernels. The two
attentions add and have no max between them: they are separate launches, and additive fits extrapolated best.
Cascade attention, tensor parallelism and multi-step scheduling are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from sim.hardware import Device
from sim.models import Model

DATASHEET_BAND = 1.35  # 1 sigma of the log ratio on GPUs predicted from their datasheets: 0.2 to 0.45

# Kernels in a captured graph, per layer. Attention of one short sequence takes 8.5 to 11.5 us on an H200 (FA3, vLLM
# and SGLang). 512 sequences of 128 tokens with 8 KV heads take 123 to 144 us, though their bytes and the floor take
# 68 + 9: about 10 ns for each sequence and KV head. A memory-bound kernel takes 3 us and its bytes (aiconfigurator's
# constant for H100 and H200).
ATTENTION_FLOOR = 9e-6
DECODE_ITEM_TIME = 10e-9
SMALL_KERNEL_FLOOR = 3e-6
SMALL_KERNELS_PER_LAYER = 5  # two norms with the residual added, RoPE, KV write, SiLU times up


class StepWork(NamedTuple):
    """What one step computes, as counts; all that a cost may depend on."""

    num_tokens: int = 0  # through the GEMMs, padding included
    num_requests: int = 0  # running, each handled by the host
    num_sampled: int = 0  # rows of the LM head
    num_decodes: int = 0
    decode_context: int = 0  # sum of context lengths, the new token included
    num_prefills: int = 0
    prefill_pairs: int = 0  # twice the query-key pairs: sum of q * (2 * start + q + 1)
    prefill_context: int = 0  # sum of start + q: KV read


class StepCost(Protocol):
    """Prices a step in seconds. The executor adds host and device, or takes the larger when they overlap."""

    @property
    def provenance(self) -> str:
        """measured | fitted from server records | public tables | datasheet, or a name of its own."""

    @property
    def band(self) -> float:
        """Times multiplied and divided by it cover 68 %."""

    def host_time(self, work: StepWork) -> float: ...
    def device_time(self, work: StepWork) -> float: ...


# -- bytes and flops: the kernels state the same numbers ------------------------------------------------------------


def gemm_flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def gemm_bytes(m: int, n: int, k: int, dtype_bytes: int) -> int:
    """Input and output of m rows and the weight [n, k], each moved once."""
    return (m * k + n * k + m * n) * dtype_bytes


def decode_attention_bytes(context: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """K and V of `context` tokens in all, one layer."""
    return 2 * context * num_kv_heads * head_dim * dtype_bytes


def prefill_attention_flops(pairs: int, num_heads: int, head_dim: int) -> int:
    """Scores and values of one layer. `pairs` counts each query-key pair twice, as in StepWork: (4 / 2) * pairs."""
    return 2 * pairs * num_heads * head_dim


def layer_gemms(model: Model) -> tuple[tuple[int, int], ...]:
    """(n, k) of a layer's weights: QKV, output, gate and up, down."""
    attention_size = model.num_heads * model.head_dim
    return (
        (model.qkv_size, model.hidden_size),
        (model.hidden_size, attention_size),
        (2 * model.intermediate_size, model.hidden_size),
        (model.hidden_size, model.intermediate_size),
    )


def small_kernel_bytes(model: Model) -> int:
    """Memory traffic of one token in the small kernels of one layer."""
    norms = 2 * 4 * model.hidden_size  # each reads and writes the stream and the residual
    rope = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    kv_write = 2 * 2 * model.num_kv_heads * model.head_dim
    activation = 3 * model.intermediate_size  # reads gate and up, writes their product
    return (norms + rope + kv_write + activation) * model.dtype_bytes


def sampling_bytes(model: Model) -> int:
    """Traffic of one sampled row: logits read and widened to fp32 (dtype + 4), and read once more (4)."""
    return model.vocab_size * (model.dtype_bytes + 8)


# -- costs ----------------------------------------------------------------------------------------------------------


class _Gemm(NamedTuple):
    """A GEMM of m rows takes max(m * compute, stream + m * move) seconds."""

    compute: float
    stream: float
    move: float


def _gemm(n: int, k: int, layers: int, model: Model, device: Device) -> _Gemm:
    flops_per_second = device.gemm_efficiency * device.bf16_tflops * 1e12
    bytes_per_second = device.weight_bandwidth_efficiency * device.bandwidth_gb_s * 1e9
    weight = gemm_bytes(0, n, k, model.dtype_bytes)
    return _Gemm(
        compute=layers * gemm_flops(1, n, k) / flops_per_second,
        stream=layers * weight / bytes_per_second,
        move=layers * (gemm_bytes(1, n, k, model.dtype_bytes) - weight) / bytes_per_second,
    )


class _Rates(NamedTuple):
    """Seconds, all layers together: a step's floor and the price of each count."""

    gemms: tuple[_Gemm, ...]
    head: _Gemm
    step: float
    token: float
    sample: float
    attention: float
    decode: float
    kv_token: float
    pair: float


def _rates_of(model: Model, device: Device) -> _Rates:
    layers = model.num_layers
    bytes_per_second = device.weight_bandwidth_efficiency * device.bandwidth_gb_s * 1e9
    kv_bytes_per_second = device.decode_bandwidth_efficiency * device.bandwidth_gb_s * 1e9
    flops_per_second = device.prefill_attention_efficiency * device.bf16_tflops * 1e12
    kv_bytes = decode_attention_bytes(1, model.num_kv_heads, model.head_dim, model.dtype_bytes)
    pair_flops = prefill_attention_flops(1, model.num_heads, model.head_dim)
    return _Rates(
        gemms=tuple(_gemm(n, k, layers, model, device) for n, k in layer_gemms(model)),
        head=_gemm(model.vocab_size, model.hidden_size, 1, model, device),
        step=layers * SMALL_KERNELS_PER_LAYER * SMALL_KERNEL_FLOOR,
        token=layers * small_kernel_bytes(model) / bytes_per_second,
        sample=sampling_bytes(model) / bytes_per_second,
        attention=layers * ATTENTION_FLOOR,
        decode=layers * model.num_kv_heads * DECODE_ITEM_TIME,
        kv_token=layers * kv_bytes / kv_bytes_per_second,
        pair=layers * pair_flops / flops_per_second,
    )


@dataclass(frozen=True, slots=True)
class DatasheetCost:
    """Where nothing is measured. `scale` multiplies every time: 1.35 and 1 / 1.35 are the ends of the band.

    Host defaults are public measurements of vLLM V1's loop on a CPU build: 540 us a step, 12.7 us a running request.
    """

    provenance: ClassVar[str] = "datasheet"
    band: ClassVar[float] = DATASHEET_BAND

    model: Model
    device: Device
    host_time_per_step: float = 540e-6
    host_time_per_request: float = 12.7e-6
    scale: float = 1.0
    _rates: _Rates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.scale <= 0.0:
            raise ValueError(f"scale ({self.scale}) must be above 0: it multiplies every time")
        for name in ("host_time_per_step", "host_time_per_request"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 0 or more seconds")
        object.__setattr__(self, "_rates", _rates_of(self.model, self.device))

    def host_time(self, work: StepWork) -> float:
        return self.scale * (self.host_time_per_step + self.host_time_per_request * work.num_requests)

    def device_time(self, work: StepWork) -> float:
        """Plain float arithmetic: the same bits on every machine, and a run asks about 100,000 times."""
        num_tokens, _, num_sampled, num_decodes, decode_context, num_prefills, pairs, prefill_context = work
        if num_tokens == 0:
            return 0.0
        rates = self._rates
        time = rates.step + rates.token * num_tokens
        for compute, stream, move in rates.gemms:
            arithmetic, memory = compute * num_tokens, stream + move * num_tokens
            time += arithmetic if arithmetic > memory else memory
        if num_sampled:
            compute, stream, move = rates.head
            arithmetic, memory = compute * num_sampled, stream + move * num_sampled
            time += (arithmetic if arithmetic > memory else memory) + rates.sample * num_sampled
        if num_decodes:
            time += rates.attention + rates.decode * num_decodes + rates.kv_token * decode_context
        if num_prefills:
            time += rates.attention + rates.pair * pairs + rates.kv_token * prefill_context
        return self.scale * time


@dataclass(frozen=True, slots=True)
class AffineCost:
    """A straight line, for tests and theory: no host time, no band."""

    provenance: ClassVar[str] = "affine"
    band: ClassVar[float] = 1.0

    per_step: float
    per_token: float = 0.0
    per_request: float = 0.0

    def host_time(self, work: StepWork) -> float:
        return 0.0

    def device_time(self, work: StepWork) -> float:
        num_chunks = work.num_decodes + work.num_prefills
        return self.per_step + self.per_token * work.num_tokens + self.per_request * num_chunks

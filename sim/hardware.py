"""What a GPU can do: datasheet peaks, and the share of them that kernels were measured to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks are the vendor's, without sparsity; an efficiency is the share of its peak that kernels reach."""

    name: str
    bf16_tflops: float
    bandwidth_gb_s: float  # 1e9 bytes a second
    memory_gb: float  # as sold; see sim/capacity.py for what an engine finds
    l2_mb: float
    num_sms: int
    decode_bandwidth_efficiency: float
    gemm_efficiency: float
    weight_bandwidth_efficiency: float
    prefill_attention_efficiency: float
    aliases: tuple[str, ...] = ()


# Peaks: the GPU description files of NVIDIA's aiconfigurator (@095f58a); L2 and SMs: the vendor's data sheets.
# Efficiencies: medians over that project's measured kernel tables (vLLM, SGLang, TensorRT-LLM; bf16, head_dim 128),
# rows above the peak left out. Where they give a range over engines, its middle stands here:
#                       H100       H200       A100
#   decode attention    .86        .82        .75          [p10-p90 H200 .63-.89: small batches sit at the floor]
#   GEMM, compute       .75-.82    .76-.79    .78-.85
#   GEMM, weights       .80-.87    .80-.87    .75
#   prefill attention   .56-.67    .55-.63    .54-.63      [grouped-query heads, 2k tokens and more]
DEVICES = (
    Device(
        name="a100",
        bf16_tflops=312.0,
        bandwidth_gb_s=2039.0,
        memory_gb=80.0,
        l2_mb=40.0,
        num_sms=108,
        decode_bandwidth_efficiency=0.75,
        gemm_efficiency=0.81,
        weight_bandwidth_efficiency=0.75,
        prefill_attention_efficiency=0.58,
        aliases=("a100-sxm", "a100-80gb", "a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB"),
    ),
    Device(
        name="h100",
        bf16_tflops=989.0,
        bandwidth_gb_s=3350.0,
        memory_gb=80.0,
        l2_mb=50.0,
        num_sms=132,
        decode_bandwidth_efficiency=0.86,
        gemm_efficiency=0.79,
        weight_bandwidth_efficiency=0.85,
        prefill_attention_efficiency=0.61,
        aliases=("h100-sxm", "h100-80gb", "h100-sxm5-80gb", "NVIDIA H100 80GB HBM3"),
    ),
    Device(
        name="h200",
        bf16_tflops=989.0,
        bandwidth_gb_s=4800.0,
        memory_gb=141.0,
        l2_mb=50.0,
        num_sms=132,
        decode_bandwidth_efficiency=0.82,
        gemm_efficiency=0.78,
        weight_bandwidth_efficiency=0.85,
        prefill_attention_efficiency=0.59,
        aliases=("h200-sxm", "h200-141gb", "NVIDIA H200"),
    ),
)


def look_up(kind: str, name: str, entries: Mapping[str, Entry], aliases: Mapping[str, Entry]) -> Entry:
    """The entry of that name or alias, whatever its case; `entries` are keyed in lower case.

    Raises ValueError that lists the names and suggests the nearest name or alias.
    """
    known = {alias.lower(): entry for alias, entry in aliases.items()} | dict(entries)
    if name.strip().lower() in known:
        return known[name.strip().lower()]
    message = f"unknown {kind} {name!r}; known: {', '.join(sorted(entries))}."
    nearest = get_close_matches(name.strip().lower(), known, n=1)
    raise ValueError(f"{message} Did you mean {nearest[0]!r}?" if nearest else message)


_BY_NAME = {each.name: each for each in DEVICES}
_BY_ALIAS = {alias: each for each in DEVICES for alias in each.aliases}


def device(name: str) -> Device:
    """Raises ValueError for a name nobody has measured here."""
    return look_up("GPU", name, _BY_NAME, _BY_ALIAS)

"""What a GPU can do: datasheet peaks, and the share of them that kernels were measured to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TypeVar

Entry = TypeVar("Entry")

# 1 sigma of the log ratio was 0.2 to 0.45 on GPUs predicted from their datasheets. Its middle where the kernels of
# this very GPU were measured, its upper end (e^0.45) where their shares are those of another.
MEASURED_BAND = 1.35
ASSUMED_BAND = 1.57


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of its peak that each kind of kernel reaches once it runs; what starting costs is in sim/cost."""

    source: str
    decode_bandwidth: float
    gemm: float
    weight_bandwidth: float
    prefill_attention: float
    fp8_gemm: float  # of the fp8 peak; these two are not asked of a GPU without fp8 units
    fp8_weight_bandwidth: float
    band: float = MEASURED_BAND


@dataclass(frozen=True, slots=True)
class Link:
    """Between the GPUs of one server. A small all-reduce takes latency + latency_per_gpu * GPUs."""

    gb_s: float  # 1e9 bytes a second, each direction
    latency: float
    latency_per_gpu: float
    efficiency: float = 0.8  # NCCL's rings move 365 to 370 of 450 GB/s on H100s (nccl#1455); elsewhere assumed


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks are the vendor's, without sparsity."""

    name: str
    bf16_tflops: float
    bandwidth_gb_s: float  # 1e9 bytes a second
    memory_gb: float  # as sold
    l2_mb: float
    num_sms: int
    efficiency: Efficiency
    link: Link
    fp8_tflops: float | None = None
    visible_share: float = 0.99  # of `memory_gb`, read as GiB; see sim/capacity.py
    aliases: tuple[str, ...] = ()

    @property
    def efficiency_source(self) -> str:
        return self.efficiency.source

    @property
    def band(self) -> float:
        """A time from this datasheet, multiplied and divided by it, covers 68 %."""
        return self.efficiency.band


# Peaks: the GPU description files of NVIDIA's aiconfigurator (@095f58a); L2, SMs, A10G and MI300X: the vendors' data
# sheets. Shares: medians over that project's measured kernel tables (vLLM, SGLang, TensorRT-LLM; head_dim 128), rows
# above the peak left out. Where they give a range over engines, its middle stands here:
#                       H100       H200       A100       L40S       B200
#   decode attention    .86        .82        .75        .81        .82-.87
#   GEMM, compute       .75-.82    .76-.79    .78-.85    .55-.68    .60-.69
#   GEMM, weights       .80-.87    .80-.87    .75        .80-.87    .80-.87    [rows above 256 MB: .87 .83 .75 .83]
#   prefill attention   .56-.67    .55-.63    .54-.63    .45-.55    .48-.57    [grouped-query heads, 2k tokens and more]
#   fp8 GEMM, compute   .50-.61    .55-.62    none       .42-.50    not had
#   fp8 GEMM, weights   .78        .76        none       .71        not had    [vLLM, above 256 MB; others .67-.77]
MEASURED = "measured: aiconfigurator's kernel tables"
#                                    decode GEMM  weights prefill fp8 GEMM, weights
H100_SHARES = Efficiency(MEASURED, 0.86, 0.79, 0.85, 0.61, 0.55, 0.78)
H200_SHARES = Efficiency(MEASURED, 0.82, 0.78, 0.85, 0.59, 0.58, 0.76)
A100_SHARES = Efficiency(MEASURED, 0.75, 0.81, 0.75, 0.58, 0.81, 0.75)
L40S_SHARES = Efficiency(MEASURED, 0.81, 0.62, 0.84, 0.50, 0.47, 0.71)
RTX_PRO_6000_SHARES = Efficiency(MEASURED + " of vLLM", 0.82, 0.83, 0.83, 0.59, 0.72, 0.80)
B200_SHARES = Efficiency(MEASURED + "; fp8 as on H200", 0.85, 0.65, 0.84, 0.53, 0.58, 0.76)


def _assumed(source: str, shares: Efficiency) -> Efficiency:
    return replace(shares, source=f"assumed: {source}", band=ASSUMED_BAND)


# Not measured: the same chip on another board, else the nearest board that was, else what others assume.
A100_BOARD_SHARES = _assumed("as on A100 SXM 80 GB, the same chip", A100_SHARES)
H100_BOARD_SHARES = _assumed("as on H100 SXM, the same chip", H100_SHARES)
L4_SHARES = _assumed("as on L40S, the same generation", L40S_SHARES)
A10G_SHARES = _assumed("as on L40S, the nearest GDDR6 board", L40S_SHARES)
MI300X_SHARES = _assumed("InferSim's 0.8 of bandwidth and 0.4 of FLOPs", Efficiency("", 0.8, 0.4, 0.8, 0.4, 0.4, 0.8))

# All-reduces of 512 KB in a CUDA graph on H100s took 7 us on 2 GPUs and 10 on 4 (vLLM's own kernel, vllm#24111 and
# #24532), 11 on 8 (vllm#42324); their bytes take 1.5 to 2.5 of it. NCCL over PCIe took 40 to 42 us on 8 GPUs
# (nccl#1530).
NVLINK_LATENCY, NVLINK_LATENCY_PER_GPU = 5.5e-6, 0.5e-6
PCIE_LATENCY, PCIE_LATENCY_PER_GPU = 10e-6, 4e-6
NVLINK_3 = Link(300.0, NVLINK_LATENCY, NVLINK_LATENCY_PER_GPU)
NVLINK_4 = Link(450.0, NVLINK_LATENCY, NVLINK_LATENCY_PER_GPU)
NVLINK_5 = Link(900.0, NVLINK_LATENCY, NVLINK_LATENCY_PER_GPU)
XGMI = Link(448.0, NVLINK_LATENCY, NVLINK_LATENCY_PER_GPU)  # 7 links of 64; latency assumed as on NVLink
PCIE_4 = Link(32.0, PCIE_LATENCY, PCIE_LATENCY_PER_GPU)
PCIE_5 = Link(64.0, PCIE_LATENCY, PCIE_LATENCY_PER_GPU)

# GDDR6 keeps its error correction in the same chips: torch finds 44.4 to 44.5 GiB on an L40S sold as 48 GB, and about
# 22.1 on an L4 or A10G sold as 24.
GDDR_SHARE = 0.925

# fmt: off
DEVICES = (
    Device("a100", 312.0, 2039.0, 80.0, 40.0, 108, A100_SHARES, NVLINK_3,
           aliases=("a100-sxm", "a100-80gb", "a100-80", "a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB")),
    Device("a100-40gb", 312.0, 1555.0, 40.0, 40.0, 108, A100_BOARD_SHARES, NVLINK_3,
           aliases=("a100-40", "a100-sxm4-40gb", "NVIDIA A100-SXM4-40GB")),
    Device("a100-pcie", 312.0, 1935.0, 80.0, 40.0, 108, A100_BOARD_SHARES, PCIE_4,
           aliases=("a100-80gb-pcie", "NVIDIA A100 80GB PCIe")),
    Device("h100", 989.0, 3350.0, 80.0, 50.0, 132, H100_SHARES, NVLINK_4, fp8_tflops=1979.0,
           aliases=("h100-sxm", "h100-80gb", "h100-sxm5-80gb", "NVIDIA H100 80GB HBM3")),
    Device("h100-pcie", 756.0, 2000.0, 80.0, 50.0, 114, H100_BOARD_SHARES, PCIE_5, fp8_tflops=1513.0,
           aliases=("h100-80gb-pcie", "NVIDIA H100 PCIe")),
    Device("h200", 989.0, 4800.0, 141.0, 50.0, 132, H200_SHARES, NVLINK_4, fp8_tflops=1979.0,
           aliases=("h200-sxm", "h200-141gb", "NVIDIA H200")),
    Device("b200", 2250.0, 7700.0, 180.0, 126.0, 148, B200_SHARES, NVLINK_5, fp8_tflops=4500.0,
           aliases=("b200-sxm", "b200-180gb", "NVIDIA B200")),
    Device("l4", 121.0, 300.0, 24.0, 48.0, 58, L4_SHARES, PCIE_4, fp8_tflops=242.0, visible_share=GDDR_SHARE,
           aliases=("l4-24gb", "NVIDIA L4")),
    Device("l40s", 362.0, 864.0, 48.0, 96.0, 142, L40S_SHARES, PCIE_4, fp8_tflops=733.0, visible_share=GDDR_SHARE,
           aliases=("l40s-48gb", "NVIDIA L40S")),
    Device("rtx-pro-6000", 467.8, 1792.0, 96.0, 128.0, 188, RTX_PRO_6000_SHARES, PCIE_5, fp8_tflops=935.6,
           aliases=("rtxpro6000", "rtx-pro-6000-server", "NVIDIA RTX PRO 6000 Blackwell Server Edition")),
    Device("a10g", 70.0, 600.0, 24.0, 6.0, 80, A10G_SHARES, PCIE_4, visible_share=GDDR_SHARE,
           aliases=("a10g-24gb", "NVIDIA A10G")),
    Device("mi300x", 1307.0, 5300.0, 192.0, 256.0, 304, MI300X_SHARES, XGMI, fp8_tflops=2615.0, visible_share=0.998,
           aliases=("mi300", "AMD Instinct MI300X")),
)
# fmt: on


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
    """Raises ValueError for a name whose datasheet is not here."""
    return look_up("GPU", name, _BY_NAME, _BY_ALIAS)

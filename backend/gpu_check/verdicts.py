"""The goals, and whether the measurements meet them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backend.gpu_check.bench import LLAMA_8B, LLAMA_8B_FP8, LLAMA_70B_TP8, QWEN_30B, Point, name_of
from backend.gpu_check.correctness import Check
from backend.gpu_check.speed import Ceilings

# Decode attention on an NVIDIA H200, bf16: vLLM 0.24 with FA3, us. Source: public per-kernel tables (aiconfigurator
# 095f58a, 2026-08-21, systems/data/h200_sxm). Their loop reads one buffer again and again: what fits the L2 cache
# is compared with our own warm time.
PUBLIC_FA3_US = {
    (name_of(LLAMA_8B), "1 x 128"): 11.7,
    (name_of(LLAMA_8B), "1 x 4096"): 16.6,
    (name_of(LLAMA_8B), "1 x 65536"): 84.3,
    (name_of(LLAMA_8B), "8 x 4096"): 49.4,
    (name_of(LLAMA_8B), "32 x 1024"): 46.8,
    (name_of(LLAMA_8B), "32 x 4096"): 135.5,
    (name_of(LLAMA_8B), "128 x 1024"): 148.6,
    (name_of(LLAMA_8B), "128 x 4096"): 492.6,
    (name_of(LLAMA_8B), "512 x 128"): 143.7,
    (name_of(QWEN_30B), "32 x 4096"): 74.8,
    (name_of(LLAMA_70B_TP8), "32 x 4096"): 31.3,
    (name_of(LLAMA_70B_TP8), "128 x 4096"): 76.4,
}
LARGE, MIDDLE = 10**9, 2**27  # bytes of KV


@dataclass(frozen=True, slots=True)
class Verdict:
    goal: str
    found: float
    wanted: float
    met: bool

    def __str__(self) -> str:
        return f"{'met' if self.met else 'NOT MET'}: {self.goal}: {self.found:.4g} (wanted {self.wanted:g})"


def judge(checks: Sequence[Check], points: Sequence[Point], ceilings: Sequence[Ceilings]) -> list[Verdict]:
    """Goals for which something was measured; a goal that nothing speaks to is not listed as met."""
    return [*_correct(checks), *_decode(points), *_prefill(points), *_mixed(points), *_kv_write(points, ceilings),
            *_steady(ceilings)]  # fmt: skip


def _least(goal: str, values: Sequence[float], wanted: float) -> Iterator[Verdict]:
    if values:
        yield Verdict(goal, min(values), wanted, min(values) >= wanted)


def _most(goal: str, values: Sequence[float], wanted: float) -> Iterator[Verdict]:
    if values:
        yield Verdict(goal, max(values), wanted, max(values) <= wanted)


def _correct(checks: Sequence[Check]) -> Iterator[Verdict]:
    if checks:
        wrong = sum(not check.passed for check in checks)
        yield Verdict(f"kernels of {len(checks)} that are wrong or differ from run to run", wrong, 0, wrong == 0)


def _decode(points: Sequence[Point]) -> Iterator[Verdict]:
    cold = [point for point in points if point.kernel == "decode" and "longest" not in point.case]
    bf16 = [point for point in cold if "bfloat16" in point.layer]
    yield from _least("decode, KV of 1 GB and more, TB/s", [p.gb_s / 1e3 for p in bf16 if p.num_bytes >= LARGE], 4.0)
    middle = [point.gb_s / 1e3 for point in bf16 if point.case == "32 x 1024" and point.num_bytes >= MIDDLE]
    yield from _least("decode, KV of 128 MiB, TB/s", middle, 3.0)
    yield from _most("decode, 1 x 128, us", [p.time * 1e6 for p in bf16 if p.case == "1 x 128"], 12.0)
    ratios = _against_fa3(points)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        yield Verdict(f"public FA3 time over ours, geometric mean of {len(ratios)}", mean, 0.92, mean >= 0.92)
    pairs = [(p, q) for p in cold for q in cold
             if (p.layer, q.layer) == (name_of(LLAMA_8B), name_of(LLAMA_8B_FP8)) and p.case == q.case]  # fmt: skip
    large = [bf16.time / fp8.time for bf16, fp8 in pairs if bf16.num_bytes >= LARGE]
    yield from _least("decode, KV of 1 GB and more, fp8 over bf16", large, 1.6)


def _against_fa3(points: Sequence[Point]) -> list[float]:
    times = {(p.layer, p.case): p.time for p in points if p.kernel == "decode"}
    times |= {(p.layer, p.case): p.time for p in points if p.kernel == "decode, warm"}
    return [us / 1e6 / times[key] for key, us in PUBLIC_FA3_US.items() if key in times]


def _prefill(points: Sequence[Point]) -> Iterator[Verdict]:
    whole = [p for p in points if p.kernel == "prefill" and p.layer == name_of(LLAMA_8B) and p.case.endswith("after 0")]
    long = [point.tflop_s for point in whole if int(point.case.split()[2]) >= 4096]
    yield from _least("prefill, 4k tokens and more, TFLOP/s", long, 400.0)
    yield from _least("prefill, 4k tokens and more, TFLOP/s (stretch)", long, 480.0)


def _kv_write(points: Sequence[Point], ceilings: Sequence[Ceilings]) -> Iterator[Verdict]:
    copy = max((each.copy_gb_s for each in ceilings), default=math.inf)
    rates = [p.gb_s / copy for p in points if p.kernel == "kv write" and "fp8" not in p.layer and int(p.case) >= 4096]
    yield from _least("KV write of 4k tokens and more, share of copy", rates, 0.75)


def _mixed(points: Sequence[Point]) -> Iterator[Verdict]:
    times = {(point.kernel, point.case): point.time for point in points}
    cases = [point.case for point in points if point.kernel == "mixed: both"]
    parts = {case: times["mixed: decode alone", case] + times["mixed: prefill alone", case] for case in cases}
    off = [abs(times["mixed: both", case] / parts[case] - 1) for case in cases]
    yield from _most("mixed step against the sum of its parts, difference", off, 0.05)


def _steady(ceilings: Sequence[Ceilings]) -> Iterator[Verdict]:
    if len(ceilings) > 1:
        first, last = ceilings[0], ceilings[-1]
        drift = max(abs(last.copy_gb_s / first.copy_gb_s - 1), abs(last.gemm_tflop_s / first.gemm_tflop_s - 1))
        yield from _most("drift of the ceilings from start to end", [drift], 0.03)

"""The datasheet cost against public measurements: kernels, one server under load, and closed loops of three engines."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

import pytest

from sim.cost import DATASHEET_BAND, DatasheetCost, StepWork
from sim.cost.best import Cost, cost_of
from sim.cost.formulas import prefill_attention_flops
from sim.cost.rates import GEMM_FLOOR, gemm_of, speeds_of
from sim.hardware import device
from sim.models import Model, from_config, model, stored_as
from tests.configs import DEEPSEEK_V3, QWEN3_235B_FP8

LLAMA = model("llama-3-8b")
H100 = DatasheetCost(LLAMA, device("h100"))
H200 = DatasheetCost(LLAMA, device("h200"))


def within(predicted: float, low: float, high: float, band: float = DATASHEET_BAND) -> bool:
    return low / band <= predicted <= high * band


def layer_attention_time(cost: DatasheetCost, work: StepWork) -> float:
    """One layer's attention: the step less the same step without it."""
    without = StepWork(work.num_tokens, work.num_requests, work.num_sampled)
    return (cost.device_time(work) - cost.device_time(without)) / cost.model.num_layers


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_one_decode_streams_the_weights() -> None:
    # Without the embedding table 7.5 B weights * 2 bytes = 15.0 GB, at 0.85 * 3350 GB/s: 5.27 ms; the rest are floors.
    assert 5.27e-3 < H100.device_time(StepWork(1, 1, 1, 1, 300)) < 5.27e-3 * 1.25


@pytest.mark.parametrize(
    ("batch", "context", "low_us", "high_us"),
    [
        (1, 128, 8.7, 11.7),
        (1, 4096, 13.5, 16.6),
        (1, 65536, 75.2, 84.3),
        (8, 4096, 41.4, 49.4),
        (32, 1024, 41.9, 46.8),
        (32, 4096, 131.0, 135.5),
        (128, 1024, 143.9, 148.6),
        (128, 4096, 490.7, 520.6),
        (512, 128, 123.3, 143.7),
    ],
)
def test_decode_attention_on_an_h200_is_near_vllm_and_sglang(
    batch: int, context: int, low_us: float, high_us: float
) -> None:
    predicted = layer_attention_time(H200, StepWork(batch, batch, batch, batch, batch * context)) * 1e6
    assert within(predicted, low_us, high_us, band=1.15)


@pytest.mark.parametrize(
    ("cost", "length", "num_prompts", "low_tflops", "high_tflops"),
    [
        (H200, 1024, 1, 244, 314),
        (H200, 2048, 1, 393, 474),
        (H200, 4096, 1, 513, 576),
        (H200, 4096, 8, 532, 637),
        (H200, 16384, 8, 576, 698),
        (H100, 4096, 1, 520, 520),
        (H100, 4096, 8, 554, 554),
    ],
)
def test_prefill_attention_is_near_vllm_and_sglang(
    cost: DatasheetCost, length: int, num_prompts: int, low_tflops: float, high_tflops: float
) -> None:
    total, pairs = num_prompts * length, num_prompts * length * (length + 1)
    flops = prefill_attention_flops(pairs, LLAMA.num_heads, LLAMA.head_dim)
    work = StepWork(total, num_prompts, num_prompts, 0, 0, num_prompts, pairs, total)
    assert within(flops / layer_attention_time(cost, work) / 1e12, low_tflops, high_tflops)


@pytest.mark.parametrize(
    ("gpu", "num_rows", "qkv_us", "output_us"),
    [
        ("h100", 1, 19.9, 15.0),
        ("h100", 64, 23.1, 14.8),
        ("h100", 512, 35.8, 24.1),
        ("h100", 2048, 128.6, 86.7),
        ("h200", 1, 16.1, 12.6),
        ("h200", 64, 17.8, 12.0),
        ("h200", 512, 35.8, 23.4),
        ("a100", 1, 38.2, 24.1),
        ("a100", 512, 103.3, 91.0),
        ("l40s", 1, 65.7, 50.3),
        ("l40s", 2048, 420.8, 273.8),
    ],
)
def test_gemms_are_near_vllms(gpu: str, num_rows: int, qkv_us: float, output_us: float) -> None:
    """Llama-3-8B's fused QKV and output projections, from aiconfigurator's tables (vLLM 0.24, A100 0.14)."""
    times = []
    for matrix in LLAMA.attention_matrices:
        gemm = gemm_of(matrix._replace(num_layers=1), speeds_of(device(gpu)))
        times.append(GEMM_FLOOR + max(gemm.compute * num_rows, gemm.stream + gemm.move * num_rows))
    assert within(sum(times) * 1e6, qkv_us + output_us, qkv_us + output_us, band=1.3)


# -- one server under load --------------------------------------------------------------------------------------------


def served_step(prompts_a_step: float, prompt_length: int, output_length: int, num_cached: int = 0) -> StepWork:
    """The mean step of a steady server: as many requests decode as start in the steps that an answer takes."""
    batch = max(1, round(prompts_a_step * output_length))
    num_new = prompt_length - num_cached
    num_prefilled = round(prompts_a_step * num_new)
    return StepWork(
        num_tokens=batch + num_prefilled,
        num_requests=batch,
        num_sampled=batch,
        num_decodes=batch,
        decode_context=batch * (prompt_length + output_length // 2),
        num_prefills=min(1, num_prefilled),
        prefill_pairs=num_prefilled * (2 * num_cached + num_new + 1),
        prefill_context=round(prompts_a_step * prompt_length),
    )


# Predicted over measured: 1.01, 0.94, 0.85, 0.80, 0.84, 0.95.
@pytest.mark.parametrize(
    ("requests_per_second", "tpot", "num_cached"),
    [
        (1.0, 7.23e-3, 0),
        (31.2, 8.42e-3, 0),
        (61.2, 10.50e-3, 0),
        (91.4, 15.83e-3, 0),
        (103.1, 19.54e-3, 0),  # saturated: 128 requests at once
        (176.0, 11.9e-3, 192),  # saturated with the prefix cache: whole blocks of 16 of 100 prompts that recur
    ],
)
def test_tpot_is_near_vllm_on_an_h100(requests_per_second: float, tpot: float, num_cached: int) -> None:
    """vLLM 0.11 at KubeCon 2025 (kubernetes-sigs/inference-perf), prompts of 204 tokens, answers of 62."""
    work = served_step(requests_per_second * tpot, prompt_length=204, output_length=62, num_cached=num_cached)
    assert within(H100.host_time(work) + H100.device_time(work), tpot, tpot)


# -- closed loops -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silicon() -> list[dict[str, str]]:
    """End-to-end measurements of a closed loop each: median TTFT and TPOT."""
    path = Path(__file__).resolve().parents[2].parent / "shared/data/kernel-tables/aiconfigurator/silicon_sample.csv"
    if not path.exists():
        pytest.skip("published end-to-end measurements are not at hand (../shared)")
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tpot_is_near_tensorrt_llm_on_an_h100(silicon: list[dict[str, str]]) -> None:
    """Llama-3.1-8B in bf16, closed loops of 8 to 128 requests: 42 published points."""
    wanted = {"model_path": "meta-llama/Llama-3.1-8B-Instruct", "system": "h100_sxm", "backend": "trtllm"}
    rows = [row for row in silicon if row["tp_size"] == "1" and wanted.items() <= row.items()]
    ratios = []
    for row in rows:
        output_length = int(row["osl"])
        work = served_step(int(row["batch_size"]) / output_length, int(row["isl"]), output_length)
        ratios.append((H100.host_time(work) + H100.device_time(work)) * 1e3 / float(row["silicon_tpot_ms"]))
    assert len(ratios) == 42
    assert all(within(ratio, 1.0, 1.0) for ratio in ratios)
    assert 0.85 <= median(ratios) <= 1.15


def closed_loop_tpot(cost: Cost, batch: int, prompt: int, output: int, max_num_batched_tokens: int) -> float:
    """While one answer is written, each of the others ends once and its successor's prompt is computed beside it."""

    def time(work: StepWork) -> float:
        return cost.host_time(work) + cost.device_time(work)

    context = prompt + output // 2
    decode_time = time(StepWork(batch, batch, batch, batch, batch * context))
    waited, start = 0.0, 0
    while start < prompt:
        num = min(prompt - start, max_num_batched_tokens - batch)
        beside = StepWork(batch - 1 + num, batch, batch, batch - 1, (batch - 1) * context)
        chunk = beside._replace(num_prefills=1, prefill_pairs=num * (2 * start + num + 1), prefill_context=start + num)
        waited, start = waited + time(chunk) - decode_time, start + num
    return decode_time + (batch - 1) / output * waited


LLAMA_8B, LLAMA_70B, QWEN_32B = model("llama-3.1-8b"), model("llama-3.1-70b"), model("qwen3-32b")
LLAMA_70B_FP8, QWEN_32B_FP8 = stored_as(LLAMA_70B, "fp8"), stored_as(QWEN_32B, "fp8")
QWEN_235B_FP8, DEEPSEEK = from_config(QWEN3_235B_FP8, "qwen3-235b"), from_config(DEEPSEEK_V3, "deepseek-v3")

# Predicted over measured, the median for so many GPUs. Loops that wait for memory (a TTFT above 4 s) are left out, and
# engines with data or expert parallelism. Where all medians are within 1.2, 79 to 100 % of the points are within the
# band. TensorRT-LLM's 70B was faster than vLLM's, whose fp8 kernels the shares are of (its KV may be in fp8 too);
# on the mixture vLLM 0.12 took nearly twice as long as SGLang.
CLOSED_LOOPS = [
    ("meta-llama/Llama-3.1-8B-Instruct", "h100_sxm", "trtllm", LLAMA_8B, {1: 1.04, 2: 1.03, 4: 1.04, 8: 1.01}),
    ("Qwen/Qwen3-32B", "h100_sxm", "vllm", QWEN_32B, {2: 0.96, 4: 0.92, 8: 0.89}),
    ("Qwen/Qwen3-32B", "h100_sxm", "sglang", QWEN_32B, {2: 1.16, 4: 1.17, 8: 1.20}),
    (
        "meta-llama/Llama-3.1-8B-Instruct",
        "h200_sxm",
        "sglang",
        stored_as(LLAMA_8B, "fp8"),
        {1: 1.03, 2: 1.03, 4: 1.04, 8: 0.97},
    ),
    ("Qwen/Qwen3-32B", "h100_sxm", "trtllm", QWEN_32B_FP8, {1: 1.08, 2: 1.07, 4: 1.06, 8: 0.99}),
    ("meta-llama/Llama-3.1-70B", "h100_sxm", "vllm", LLAMA_70B_FP8, {2: 1.11, 4: 1.08, 8: 1.02}),
    ("meta-llama/Llama-3.1-70B", "h200_sxm", "vllm", LLAMA_70B_FP8, {1: 1.13, 2: 1.12, 4: 1.09, 8: 1.06}),
    ("meta-llama/Llama-3.1-70B", "h200_sxm", "trtllm", LLAMA_70B_FP8, {1: 1.27, 2: 1.34, 4: 1.34, 8: 1.22}),
    ("meta-llama/Llama-3.1-70B", "b200_sxm", "vllm", LLAMA_70B_FP8, {1: 1.11, 2: 1.12, 4: 1.10, 8: 1.11}),
    ("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", "sglang", QWEN_235B_FP8, {2: 0.96, 4: 1.11}),
    ("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", "vllm", QWEN_235B_FP8, {2: 0.62, 4: 0.72}),
    ("deepseek-ai/DeepSeek-V3", "h200_sxm", "sglang", DEEPSEEK, {8: 1.13}),
]


def ratios_of(
    rows: list[dict[str, str]], shape: Model, gpu: str, num_gpus: int, costs: str = "datasheet"
) -> list[float]:
    cost = cost_of(costs, DatasheetCost(shape, device(gpu), tensor_parallel=num_gpus))
    return [
        closed_loop_tpot(cost, int(row["batch_size"]), int(row["isl"]), int(row["osl"]), max_num_batched_tokens=8192)
        * 1e3
        / float(row["silicon_tpot_ms"])
        for row in rows
        if int(row["tp_size"]) == num_gpus and float(row["silicon_ttft_ms"]) < 4000
    ]


def rows_of(silicon: list[dict[str, str]], name: str, system: str, engine: str, shape: Model) -> list[dict[str, str]]:
    wanted = {"model_path": name, "system": system, "backend": engine, "moe_ep_size": "1", "mode": "agg"}
    precision = ("fp8",) if shape.dtype == "fp8" else ("", "bf16")
    return [row for row in silicon if wanted.items() <= row.items() and row["precision"] in precision]


@pytest.mark.parametrize(
    ("name", "system", "engine", "shape", "expected"),
    CLOSED_LOOPS,
    ids=[f"{row[3].name}-{row[1]}-{row[2]}" for row in CLOSED_LOOPS],
)
def test_tpot_is_near_what_engines_reach_in_closed_loops(
    silicon: list[dict[str, str]], name: str, system: str, engine: str, shape: Model, expected: dict[int, float]
) -> None:
    rows = rows_of(silicon, name, system, engine, shape)
    ratios = {n: ratios_of(rows, shape, system.split("_")[0], n) for n in expected}
    assert {n: round(median(each), 2) for n, each in ratios.items()} == pytest.approx(expected, abs=0.02)
    if all(within(each, 1.0, 1.0, band=1.2) for each in expected.values()):
        pooled = [ratio for each in ratios.values() for ratio in each]
        assert sum(within(ratio, 1.0, 1.0) for ratio in pooled) >= 0.68 * len(pooled)


def test_whole_steps_are_within_the_band_of_public_tables(silicon: list[dict[str, str]]) -> None:
    """Kernels within 2 % do not make steps within 2 %: engines differ by more, and the host is the datasheet's."""
    ratios: list[float] = []
    for name, system, engine, shape, expected in CLOSED_LOOPS:
        gpu = system.split("_")[0]
        if gpu != "b200" and shape.experts is None:
            rows = rows_of(silicon, name, system, engine, shape)
            ratios += [ratio for n in expected for ratio in ratios_of(rows, shape, gpu, n, "public-tables")]
    off = sorted(max(ratio, 1 / ratio) for ratio in ratios)
    assert len(off) == 706 and median(ratios) == pytest.approx(1.089, abs=0.01)
    assert off[int(0.68 * len(off))] == pytest.approx(1.148, abs=0.005)  # the profiles' band is 1.15
    assert off[int(0.95 * len(off))] == pytest.approx(1.405, abs=0.01)

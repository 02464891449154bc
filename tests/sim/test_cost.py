"""The datasheet cost: worked numbers, monotonicity, and the published measurements it must come near."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost import (
    DATASHEET_BAND,
    AffineCost,
    DatasheetCost,
    StepCost,
    StepWork,
    decode_attention_bytes,
    gemm_bytes,
    gemm_flops,
    layer_gemms,
    prefill_attention_flops,
)
from sim.hardware import DEVICES, Device, device
from sim.models import MODELS, Model, model

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
SERVED = SHARED / "data" / "kernel-tables" / "aiconfigurator" / "silicon_sample.csv"

LLAMA = model("llama-3-8b")
H100 = DatasheetCost(LLAMA, device("h100"))
H200 = DatasheetCost(LLAMA, device("h200"))


def decode_step(batch: int, context: int) -> StepWork:
    return StepWork(batch, batch, batch, batch, batch * context)


def prefill_step(num_tokens: int, start: int = 0, num_prefills: int = 1) -> StepWork:
    pairs = num_tokens * (2 * start + num_tokens + 1)
    total = num_prefills * num_tokens
    context = num_prefills * (start + num_tokens)
    return StepWork(total, num_prefills, num_prefills, 0, 0, num_prefills, num_prefills * pairs, context)


def layer_attention_time(cost: DatasheetCost, work: StepWork) -> float:
    """One layer's attention: the step less the same step without it."""
    without = work._replace(num_decodes=0, num_prefills=0)
    return (cost.device_time(work) - cost.device_time(without)) / cost.model.num_layers


# -- bytes and flops --------------------------------------------------------------------------------------------------


def test_a_gemm_moves_inputs_weights_and_outputs_once() -> None:
    assert gemm_flops(3, 5, 7) == 2 * 3 * 5 * 7
    assert gemm_bytes(3, 5, 7, dtype_bytes=2) == 2 * (3 * 7 + 5 * 7 + 3 * 5)


def test_decode_attention_reads_keys_and_values() -> None:
    assert decode_attention_bytes(32 * 4096, 8, 128, 2) == 512 * 1024**2


def test_prefill_attention_counts_the_causal_half() -> None:
    # 4 tokens see 1 + 2 + 3 + 4 = 10 keys: 10 pairs * 4 flops * 128 dims * 32 heads
    assert prefill_attention_flops(prefill_step(4).prefill_pairs, 32, 128) == 10 * 4 * 128 * 32


def test_chunks_of_a_prompt_add_up_to_its_pairs() -> None:
    chunks = [prefill_step(1024, start).prefill_pairs for start in (0, 1024, 2048, 3072)]
    assert sum(chunks) == prefill_step(4096).prefill_pairs


@pytest.mark.parametrize("shape", MODELS, ids=lambda each: each.name)
def test_the_gemms_hold_nearly_all_weights(shape: Model) -> None:
    matrices = shape.num_layers * sum(n * k for n, k in layer_gemms(shape)) + 2 * shape.vocab_size * shape.hidden_size
    assert 0.9999 < matrices / shape.num_parameters < 1.0  # the rest are norms


# -- worked by hand ---------------------------------------------------------------------------------------------------

TOY = Model("toy", 1, 64, 4, 2, 16, 128, 256, 512)
UNIT = Device("unit", 1.0, 1.0, 1.0, 1.0, 1, 1.0, 1.0, 1.0, 1.0)  # 1e12 flops and 1e9 bytes a second


def test_a_decode_costs_its_bytes_and_floors() -> None:
    # GEMMs      (36864 weights + 320 in + 512 out) * 2 bytes           75.392 us
    # LM head    (16384 weights + 64 in + 256 out) * 2 bytes            33.408
    # sampling   256 logits * 10 bytes                                   2.560
    # small      (8 * 64 + 2 * 6 * 16 + 4 * 2 * 16 + 3 * 128) * 2        2.432 + 5 * 3
    # attention  10 tokens * 2 * 2 heads * 16 dims * 2 bytes             1.280 + 9 + 2 * 0.01
    assert DatasheetCost(TOY, UNIT).device_time(decode_step(1, 10)) == pytest.approx(139.092e-6, rel=1e-12)


def test_a_long_prefill_costs_its_flops() -> None:
    fast_memory = Device("flops", 1.0, 1e9, 1.0, 1.0, 1, 1.0, 1.0, 1.0, 1.0)
    # GEMMs 2 * 36864 * 1000 = 73.728e6, LM head 2 * 16384 = 0.033e6, attention 2 * 1000 * 1001 * 4 * 16 = 128.128e6
    # flops at 1e12 a second: 201.889 us; floors 9 + 5 * 3
    work = prefill_step(1000)
    assert DatasheetCost(TOY, fast_memory).device_time(work) == pytest.approx(225.889e-6, rel=1e-5)


def test_the_host_pays_for_the_step_and_each_request() -> None:
    assert H100.host_time(decode_step(128, 300)) == pytest.approx(540e-6 + 128 * 12.7e-6)


def test_attentions_of_decodes_and_prefills_add() -> None:
    decodes, prefill = decode_step(32, 4096), prefill_step(2048)
    mixed = StepWork(2080, 33, 33, 32, 32 * 4096, 1, prefill.prefill_pairs, prefill.prefill_context)
    apart = layer_attention_time(H200, decodes) + layer_attention_time(H200, prefill)
    assert layer_attention_time(H200, mixed) == pytest.approx(apart)


def test_scale_multiplies_every_time() -> None:
    doubled, work = DatasheetCost(LLAMA, device("h100"), scale=2.0), decode_step(8, 100)
    assert doubled.device_time(work) == 2.0 * H100.device_time(work)
    assert doubled.host_time(work) == 2.0 * H100.host_time(work)


def test_a_step_without_tokens_costs_the_device_nothing() -> None:
    assert H100.device_time(StepWork()) == 0.0


def test_a_straight_line_is_one() -> None:
    cost: StepCost = AffineCost(per_step=1.0, per_token=0.5, per_request=0.25)
    assert cost.device_time(StepWork(num_tokens=10, num_decodes=2, num_prefills=1)) == 1.0 + 5.0 + 0.75
    assert cost.host_time(decode_step(8, 100)) == 0.0
    assert (cost.provenance, cost.band) == ("affine", 1.0)


def test_a_datasheet_says_so() -> None:
    cost: StepCost = H100
    assert (cost.provenance, cost.band) == ("datasheet", 1.35)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scale_must_be_positive(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        DatasheetCost(LLAMA, device("h100"), scale=scale)


def test_host_times_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match=r"host_time_per_step \(-1.0\)"):
        DatasheetCost(LLAMA, device("h100"), host_time_per_step=-1.0)


# -- laws -------------------------------------------------------------------------------------------------------------

COUNTS = st.tuples(*[st.integers(0, 5000)] * 4, st.integers(0, 10**7), st.integers(0, 64), *[st.integers(0, 10**9)] * 2)
COSTS = [DatasheetCost(shape, gpu) for shape in MODELS for gpu in DEVICES]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(COUNTS, st.integers(0, 7), st.integers(1, 5000), st.sampled_from(COSTS))
def test_no_count_makes_a_step_cheaper(counts: tuple[int, ...], grown: int, by: int, cost: DatasheetCost) -> None:
    less, more = StepWork(*counts), StepWork(*(n + by * (i == grown) for i, n in enumerate(counts)))
    assert cost.device_time(less) <= cost.device_time(more)
    assert cost.host_time(less) <= cost.host_time(more)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(COUNTS, st.sampled_from(COSTS))
def test_a_step_with_tokens_takes_time(counts: tuple[int, ...], cost: DatasheetCost) -> None:
    assert cost.device_time(StepWork(*counts)._replace(num_tokens=1 + counts[0])) > 0.0


# -- published measurements -------------------------------------------------------------------------------------------


def within(predicted: float, low: float, high: float, band: float = DATASHEET_BAND) -> bool:
    return low / band <= predicted <= high * band


def test_one_decode_streams_the_weights() -> None:
    # Without the embedding table 7.5 B weights * 2 bytes = 15.0 GB, at 0.85 * 3350 GB/s: 5.27 ms; the rest are floors.
    assert 5.27e-3 < H100.device_time(decode_step(1, 300)) < 5.27e-3 * 1.25


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
    predicted = layer_attention_time(H200, decode_step(batch, context)) * 1e6
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
    work = prefill_step(length, num_prefills=num_prompts)
    flops = prefill_attention_flops(work.prefill_pairs, LLAMA.num_heads, LLAMA.head_dim)
    assert within(flops / layer_attention_time(cost, work) / 1e12, low_tflops, high_tflops)


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


def test_tpot_is_near_tensorrt_llm_on_an_h100() -> None:
    """Llama-3.1-8B in bf16, closed loops of 8 to 128 requests: 42 published points."""
    if not SERVED.exists():
        pytest.skip("published end-to-end measurements are not at hand (../shared)")
    wanted = {"model_path": "meta-llama/Llama-3.1-8B-Instruct", "system": "h100_sxm", "backend": "trtllm"}
    with SERVED.open() as file:
        rows = [row for row in csv.DictReader(file) if row["tp_size"] == "1" and wanted.items() <= row.items()]
    ratios = []
    for row in rows:
        output_length = int(row["osl"])
        work = served_step(int(row["batch_size"]) / output_length, int(row["isl"]), output_length)
        ratios.append((H100.host_time(work) + H100.device_time(work)) * 1e3 / float(row["silicon_tpot_ms"]))
    assert len(ratios) == 42
    assert all(within(ratio, 1.0, 1.0) for ratio in ratios)
    assert 0.85 <= median(ratios) <= 1.15

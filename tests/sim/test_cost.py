"""The datasheet cost: worked numbers, laws, and what CUDA graphs, experts, latents and more GPUs change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost import AffineCost, DatasheetCost, StepCost, StepWork
from sim.cost.formulas import (
    decode_attention_bytes,
    experts_touched,
    gemm_bytes,
    gemm_flops,
    latent_attention_bytes,
    latent_attention_flops,
    prefill_attention_flops,
)
from sim.cost.graphs import MODES, capture_sizes, largest_capture, padded_sizes
from sim.hardware import DEVICES, Device, Efficiency, Link, device
from sim.models import MODELS, Experts, Model, from_config, model, stored_as
from tests.configs import DEEPSEEK_V3

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
    without = work._replace(num_decodes=0, num_prefills=0, decode_context=0, prefill_context=0, prefill_pairs=0)
    return (cost.device_time(work) - cost.device_time(without)) / cost.model.num_layers


# -- bytes and flops --------------------------------------------------------------------------------------------------


def test_a_gemm_moves_inputs_weights_and_outputs_once() -> None:
    assert gemm_flops(3, 5, 7) == 2 * 3 * 5 * 7
    assert gemm_bytes(3, 5, 7, dtype_bytes=2) == 2 * (3 * 7 + 5 * 7 + 3 * 5)


def test_decode_attention_reads_keys_and_values() -> None:
    assert decode_attention_bytes(32 * 4096, 8, 128, 2) == 512 * 1024**2


def test_decode_attention_on_latents_reads_them_once_for_all_heads() -> None:
    assert latent_attention_bytes(4096, 512, 64, 2) == 4096 * 576 * 2
    # each of 128 heads: 576 products for a score, 512 for the value, 2 flops each
    assert latent_attention_flops(4096, 128, 512, 64) == 4096 * 128 * (576 + 512) * 2


def test_prefill_attention_counts_the_causal_half() -> None:
    # 4 tokens see 1 + 2 + 3 + 4 = 10 keys: 10 pairs * 4 flops * 128 dims * 32 heads
    assert prefill_attention_flops(prefill_step(4).prefill_pairs, 32, 128) == 10 * 4 * 128 * 32
    assert prefill_attention_flops(prefill_step(4).prefill_pairs, 32, 192, 128) == 10 * 2 * (192 + 128) * 32


def test_chunks_of_a_prompt_add_up_to_its_pairs() -> None:
    chunks = [prefill_step(1024, start).prefill_pairs for start in (0, 1024, 2048, 3072)]
    assert sum(chunks) == prefill_step(4096).prefill_pairs


def test_experts_touched_is_the_expected_number() -> None:
    touched = experts_touched(128, 8, num_tokens=300)
    assert touched[:2] == [0.0, 8.0]
    assert touched[32] == pytest.approx(128 * (1 - (1 - 8 / 128) ** 32))
    assert touched[300] == pytest.approx(128, rel=1e-6)


@pytest.mark.parametrize("shape", [*MODELS, from_config(DEEPSEEK_V3, "v3")], ids=lambda each: each.name)
def test_the_gemms_hold_nearly_all_weights(shape: Model) -> None:
    num_embeddings = 1 if shape.tied_embeddings else 2
    matrices = shape.num_layer_weights + num_embeddings * shape.vocab_size * shape.hidden_size
    least = 0.999 if shape.hidden_size >= 512 else 0.99  # the rest are norms, biases and routers: a toy's weigh more
    assert least < matrices / shape.num_parameters < 1.0


# -- worked by hand ---------------------------------------------------------------------------------------------------

ALL = Efficiency("made up", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
TOY = Model("toy", 1, 64, 4, 2, 16, 128, 256, 512)
UNIT = Device("unit", 1.0, 1.0, 1.0, 1.0, 1, ALL, Link(1.0, 1e-6, 2e-6, 1.0))  # 1e12 flops and 1e9 bytes a second
FAST_MEMORY = replace(UNIT, bandwidth_gb_s=1e9)


def test_a_decode_costs_its_bytes_and_floors() -> None:
    # GEMMs      (36864 weights + 320 in + 512 out) * 2 bytes           75.392 us + 4 * 3
    # LM head    (16384 weights + 64 in + 256 out) * 2 bytes            33.408    + 3
    # sampling   256 logits * 10 bytes                                   2.560
    # small      (8 * 64 + 2 * 6 * 16 + 4 * 2 * 16 + 3 * 128) * 2        2.432    + 5 * 3
    # attention  10 tokens * 2 * 2 heads * 16 dims * 2 bytes             1.280    + 9 + 2 * 0.01
    assert DatasheetCost(TOY, UNIT).device_time(decode_step(1, 10)) == pytest.approx(154.092e-6, rel=1e-12)


def test_a_long_prefill_costs_its_flops() -> None:
    # GEMMs 2 * 36864 * 1000 = 73.728e6, LM head 2 * 16384 = 0.033e6, attention 2 * 1000 * 1001 * 4 * 16 = 128.128e6
    # flops at 1e12 a second: 201.889 us; floors 9 + 10 * 3
    work = prefill_step(1000)
    assert DatasheetCost(TOY, FAST_MEMORY).device_time(work) == pytest.approx(240.889e-6, rel=1e-5)


def test_two_gpus_halve_the_work_and_reduce_twice_a_layer() -> None:
    # Of the 240.889 us: 100.944 of flops. Two all-reduces of 1000 * 64 * 2 bytes, of which each GPU sends
    # 2 * 1/2: 128 us at 1e9 bytes a second and 1 + 2 * 2 of latency.
    cost = DatasheetCost(TOY, FAST_MEMORY, tensor_parallel=2)
    assert cost.device_time(prefill_step(1000)) == pytest.approx((139.944 + 2 * (128 + 5)) * 1e-6, rel=1e-4)


def test_each_expert_streams_once_it_is_touched() -> None:
    # One token, 2 of 4 experts of 3 * 64 * 32 weights: 2 * 6144 * 2 bytes. In and out 2 * (2 * 64 + 3 * 32) * 2 bytes.
    # Router: 4 * 64 weights, 64 in, 4 out. Small kernels: 2 * 3 * 32 of products, 3 * 64 of sums, 2 * 4 of choices.
    # Floors: router and 4 small kernels. Instead of an MLP of the size of one expert.
    mixture = replace(TOY, intermediate_size=32, experts=Experts(4, 2, 32))
    dense = replace(TOY, intermediate_size=32)
    experts, mlp = 2 * 6144 + 2 * 224 + 256 + 68 + (192 + 192 + 8), 6144 + 224 + 96
    took = [DatasheetCost(shape, UNIT).device_time(decode_step(1, 10)) for shape in (mixture, dense)]
    assert took[0] - took[1] == pytest.approx((experts - mlp) * 2e-9 + 5 * 3e-6, rel=1e-9)


def test_fp8_weights_stream_half_the_bytes_and_compute_twice_as_fast() -> None:
    # 36864 weights: a byte less each at 1e9 bytes a second, or 5000 * 36864 flops less; floors of 5.7 instead of 3 us
    for gpu, num_tokens, saved in ((UNIT, 1, 36.864e-6), (FAST_MEMORY, 5000, 5000 * 36864e-12)):
        costs = [DatasheetCost(replace(TOY, dtype=dtype), replace(gpu, fp8_tflops=2.0)) for dtype in ("bf16", "fp8")]
        slow, fast = (cost.device_time(StepWork(num_tokens)) for cost in costs)
        assert slow - fast == pytest.approx(saved - 4 * 2.7e-6, rel=1e-4)


def test_without_fp8_units_fp8_weights_are_only_smaller() -> None:
    for gpu, num_tokens, saved in ((UNIT, 1, 36.864e-6), (FAST_MEMORY, 5000, 0.0)):
        slow, fast = (DatasheetCost(replace(TOY, dtype=dtype), gpu) for dtype in ("bf16", "fp8"))
        assert slow.device_time(StepWork(num_tokens)) - fast.device_time(StepWork(num_tokens)) == pytest.approx(saved)


def test_fp8_kv_is_read_in_half_the_time() -> None:
    cost = DatasheetCost(stored_as(LLAMA, kv_dtype="fp8"), device("h100"))
    floors = layer_attention_time(H100, decode_step(32, 0))
    whole = layer_attention_time(H100, decode_step(32, 4096)) - floors
    assert layer_attention_time(cost, decode_step(32, 4096)) - floors == pytest.approx(whole / 2)


def test_beyond_its_window_a_context_costs_no_more() -> None:
    mistral = DatasheetCost(model("mistral-7b"), device("h100"))
    full = DatasheetCost(replace(model("mistral-7b"), sliding_window=None, num_sliding_layers=0), device("h100"))
    assert mistral.device_time(decode_step(8, 4096)) == pytest.approx(full.device_time(decode_step(8, 4096)))
    assert mistral.device_time(decode_step(8, 32768)) == mistral.device_time(decode_step(8, 4096))
    assert mistral.device_time(prefill_step(2048, 16384)) < full.device_time(prefill_step(2048, 16384))


def test_many_heads_on_one_latent_outlast_its_bytes() -> None:
    deepseek = from_config(DEEPSEEK_V3, "v3")
    whole, eighth = (DatasheetCost(deepseek, device("h200"), tensor_parallel=n) for n in (1, 8))
    grown = [
        layer_attention_time(cost, decode_step(8, 8192)) - layer_attention_time(cost, decode_step(8, 4096))
        for cost in (whole, eighth)
    ]
    # 128 heads: 2 * 128 * 1088 flops at 0.59 * 989e12; 16 heads: 1152 bytes at 0.82 * 4.8e12
    assert grown[0] == pytest.approx(8 * 4096 * 278528 / (0.59 * 989e12), rel=1e-6)
    assert grown[1] == pytest.approx(8 * 4096 * 1152 / (0.82 * 4800e9), rel=1e-6)


# -- the host ---------------------------------------------------------------------------------------------------------


def test_the_host_pays_for_the_step_and_each_request() -> None:
    assert H100.host_time(decode_step(128, 300)) == pytest.approx(540e-6 + 128 * 12.7e-6)


def test_the_host_pays_for_keys_and_lookups() -> None:
    work = decode_step(128, 300)
    more = H100.host_time(work._replace(num_blocks_hashed=100, num_lookups=40)) - H100.host_time(work)
    assert more == pytest.approx(100 * 2e-6 + 40 * 0.5e-6)
    assert H100.device_time(work._replace(num_blocks_hashed=100, num_lookups=40)) == H100.device_time(work)


# -- CUDA graphs ------------------------------------------------------------------------------------------------------


def test_capture_sizes_are_vllms() -> None:
    sizes = capture_sizes()
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[-18:-15] == [248, 256, 272] and sizes[-1] == 512
    assert len(sizes) == 51
    assert largest_capture(max_num_seqs=128, max_num_batched_tokens=8192) == 256
    assert largest_capture(max_num_seqs=1024, max_num_batched_tokens=8192) == 512
    assert capture_sizes(20) == [1, 2, 4, 8, 16]
    assert capture_sizes(3) == [1, 2]


def test_a_step_is_padded_to_the_next_size() -> None:
    padded = padded_sizes([1, 2, 4, 8])
    assert padded == [0, 1, 2, 4, 4, 8, 8, 8, 8]


def test_padding_goes_into_the_gemms_alone() -> None:
    slow = replace(UNIT, bandwidth_gb_s=0.1)  # kernels that hide their launches
    graphs, eager = (DatasheetCost(TOY, slow, cuda_graphs=mode) for mode in ("full", "eager"))
    in_small_kernels, in_gemms = 7 * 24.32e-6, 7 * (320 + 512) * 2e-8
    assert graphs.device_time(StepWork(16)) - graphs.device_time(StepWork(9)) == pytest.approx(in_small_kernels)
    assert eager.device_time(StepWork(16)) - eager.device_time(StepWork(9)) == pytest.approx(
        in_small_kernels + in_gemms
    )
    assert graphs.device_time(StepWork(16)) == eager.device_time(StepWork(16))


def test_steps_without_a_graph_are_not_padded() -> None:
    cost = DatasheetCost(TOY, FAST_MEMORY, largest_capture=8)
    same = DatasheetCost(TOY, FAST_MEMORY)
    assert cost.device_time(StepWork(2001)) == same.device_time(StepWork(2001))


def test_short_kernels_wait_for_their_launches() -> None:
    small = model("smollm2-135m")
    full, pieces, eager = (DatasheetCost(small, device("h100"), cuda_graphs=mode) for mode in MODES)
    decodes = decode_step(8, 100)
    assert full.device_time(decodes) < 1.2e-3
    assert pieces.device_time(decodes) == pytest.approx(30 * 100e-6)
    assert eager.device_time(decodes) == pytest.approx(30 * 10 * 25e-6)  # 4 GEMMs, 5 small kernels, attention
    assert full.device_time(prefill_step(64)) == pieces.device_time(decodes)


def test_long_kernels_hide_their_launches() -> None:
    full, pieces, eager = (DatasheetCost(LLAMA, device("h100"), cuda_graphs=mode) for mode in MODES)
    assert full.device_time(decode_step(8, 300)) == pieces.device_time(decode_step(8, 300))
    assert full.device_time(prefill_step(4096)) == eager.device_time(prefill_step(4096))
    # Llama-3.1-8B on an H100, a token at a time: 8.4 ms eagerly, 5.1 ms with a graph
    assert 8.4e-3 / 1.35 < eager.device_time(decode_step(1, 300)) < 8.4e-3 * 1.35
    assert 5.1e-3 / 1.35 < full.device_time(decode_step(1, 300)) < 5.1e-3 * 1.35


# -- laws -------------------------------------------------------------------------------------------------------------


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
    assert DatasheetCost(LLAMA, device("mi300x")).band == 1.57


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scale", 0.0, r"scale \(0.0\) must be above 0"),
        ("scale", -1.0, r"scale \(-1.0\)"),
        ("host_time_per_step", -1.0, r"host_time_per_step \(-1.0\)"),
        ("host_time_per_lookup", -1.0, r"host_time_per_lookup \(-1.0\)"),
        ("cuda_graphs", "none", r"unknown cuda_graphs 'none'; known: full, piecewise, eager"),
        ("largest_capture", 0, r"largest_capture \(0\)"),
        ("tensor_parallel", 5, r"tensor_parallel \(5\) must divide llama-3-8b's 32 attention heads"),
    ],
)
def test_nonsense_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(H100, **{name: value})


COUNTS = st.tuples(
    *[st.integers(0, 5000)] * 4,
    st.integers(0, 10**7),
    st.integers(0, 64),
    *[st.integers(0, 10**9)] * 2,
    *[st.integers(0, 1000)] * 2,
)
SHAPES = [
    *MODELS,
    stored_as(LLAMA, "fp8", "fp8"),
    replace(model("mistral-7b"), num_sliding_layers=16),
    from_config(DEEPSEEK_V3, "v3"),
]
COSTS = [DatasheetCost(shape, gpu) for shape in MODELS[:3] for gpu in DEVICES]
COSTS += [DatasheetCost(shape, device("h100"), cuda_graphs=mode) for shape in SHAPES for mode in MODES]
COSTS += [DatasheetCost(shape, device("b200"), tensor_parallel=4) for shape in SHAPES if shape.num_heads % 4 == 0]


@settings(derandomize=True, max_examples=400, deadline=None)
@given(COUNTS, st.integers(0, 9), st.one_of(st.just(1), st.integers(1, 5000)), st.sampled_from(COSTS))
def test_no_count_makes_a_step_cheaper(counts: tuple[int, ...], grown: int, by: int, cost: DatasheetCost) -> None:
    less, more = StepWork(*counts), StepWork(*(n + by * (i == grown) for i, n in enumerate(counts)))
    assert cost.device_time(less) <= cost.device_time(more)
    assert cost.host_time(less) <= cost.host_time(more)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(0, 1100), st.integers(0, 600), st.booleans(), st.sampled_from(COSTS))
def test_no_token_makes_a_step_cheaper(num_tokens: int, num_sampled: int, prefill: bool, cost: DatasheetCost) -> None:
    """Where graphs begin and end."""
    less, more = (StepWork(num_tokens + n, num_sampled=num_sampled, num_prefills=prefill) for n in (0, 1))
    assert cost.device_time(less) <= cost.device_time(more)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(COUNTS, st.sampled_from(COSTS))
def test_a_step_with_tokens_takes_time(counts: tuple[int, ...], cost: DatasheetCost) -> None:
    assert cost.device_time(StepWork(*counts)._replace(num_tokens=1 + counts[0])) > 0.0


@settings(derandomize=True, max_examples=100, deadline=None)
@given(COUNTS, st.sampled_from(SHAPES))
def test_graphs_never_slow_a_full_step_down(counts: tuple[int, ...], shape: Model) -> None:
    full, pieces, eager = (DatasheetCost(shape, device("h100"), cuda_graphs=mode) for mode in MODES)
    work = StepWork(*counts)._replace(num_tokens=max(capture_sizes()[-1], counts[0]))
    assert full.device_time(work) <= pieces.device_time(work) <= eager.device_time(work)

"""KV blocks that fit, against what vLLM reported, and the KV that a workload wants."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.capacity import GIB, activation_bytes, demand, kv_blocks, kv_bytes, overhead_bytes
from sim.hardware import device
from sim.models import Experts, Model, from_config, model, stored_as
from tests.configs import DEEPSEEK_V3

LLAMA, H100 = model("llama-3-8b"), device("h100")


def test_blocks_are_what_memory_leaves() -> None:
    # 0.9 * 79.2 GiB = 71.280; weights 14.957; activations: 2 hidden states of 2048 * 4096 * 2 bytes = 0.031 and
    # 128 rows * 128256 logits * 38 bytes = 0.581; overhead 0.135. 55.575 GiB / (16 * 128 KiB) = 28454.7
    assert kv_blocks(LLAMA, H100, block_size=16) == 28454
    assert kv_blocks(LLAMA, H100, block_size=32) == 28454 // 2


def test_two_gpus_hold_more_than_twice_as_much() -> None:
    # 71.280; weights 7.479; activations 0.612; overhead 0.545: 62.644 GiB / (16 * 64 KiB) = 64147.6
    assert kv_blocks(LLAMA, H100, 16, tensor_parallel=2) == 64147


def test_fp8_kv_doubles_the_blocks() -> None:
    assert kv_blocks(stored_as(LLAMA, kv_dtype="fp8"), H100, 16) == 2 * 28454 + 1


def test_cuda_graphs_are_charged_where_they_are_given() -> None:
    # 28454.7 blocks less 1 GiB / 2 MiB
    assert kv_blocks(LLAMA, H100, 16, cuda_graph_bytes=GIB) == 28454 - 512


def test_a_latent_fills_each_gpu_alike() -> None:
    deepseek, h200 = from_config(DEEPSEEK_V3, "v3"), device("h200")
    left = kv_bytes(deepseek, h200, tensor_parallel=8)
    assert kv_blocks(deepseek, h200, 64, tensor_parallel=8) == left // (64 * 61 * 576 * 2)


def test_a_large_batch_of_tokens_makes_the_mlp_the_peak() -> None:
    # 16384 tokens * (3 * 14336 + 2 * 4096) * 2 bytes, more than one row's sampler
    assert activation_bytes(LLAMA, 16384, 1) == 16384 * (3 * 14336 + 2 * 4096) * 2


def test_chosen_experts_hold_their_outputs_side_by_side() -> None:
    # 8 experts a token: 2048 outputs (more than 2 * 768 of gate and up) and 768 products; 2 hidden states
    assert activation_bytes(model("qwen3-30b-a3b"), 16384, 1) == 16384 * (8 * (2048 + 768) + 2 * 2048) * 2


def test_a_model_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"llama-3-8b's weights \(15.0\).*raise gpu_memory_utilization"):
        kv_blocks(LLAMA, H100, block_size=16, gpu_memory_utilization=0.15)


@pytest.mark.parametrize("utilization", [0.0, 1.5, -0.1])
def test_utilization_is_a_share(utilization: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        kv_blocks(LLAMA, H100, 16, utilization)


def test_a_block_holds_tokens() -> None:
    with pytest.raises(ValueError, match=r"block_size \(0\)"):
        kv_blocks(LLAMA, H100, block_size=0)


# -- what vLLM reported -----------------------------------------------------------------------------------------------

QWEN3_SMALL = Model("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, 40960, tied_embeddings=True, qk_norm=True)
GPT_OSS = Model("gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201088, 131072, experts=Experts(32, 4, 2880))
GPT_OSS_LARGE = replace(GPT_OSS, name="gpt-oss-120b", num_layers=36, experts=Experts(128, 4, 2880))

# GiB, ours less theirs. Not expressed: weights in MXFP4 (gpt-oss: its activations are), a vision tower and another
# max_num_seqs (Mistral-Small-3.2).
#                         GPUs  weights  activations  outside torch   KV
# Llama-3.1-8B            1      -0.03     +0.01         +0.01       +0.03
# Qwen3-0.6B              1      -0.01     -0.02         +0.01       +0.05
# Qwen3-32B               1      -0.01     +0.02         -0.01       +0.01
# Qwen3-32B               2      -0.08     +0.02         +0.01       +0.07
# Llama-3.3-70B-FP8       2      -0.05     +0.06         -0.01       +0.00
# gpt-oss-20b, -120b      1                +0.00         +0.00
EXPRESSED = [
    ("Llama-3.1-8B", "1", model("llama-3.1-8b")),
    ("Qwen3-0.6B", "1", QWEN3_SMALL),
    ("Qwen3-32B", "1", model("qwen3-32b")),
    ("Qwen3-32B", "2", model("qwen3-32b")),
    ("Llama-3.3-70B-FP8", "2", stored_as(model("llama-3.1-70b"), dtype="fp8")),
]


def reported(shared: Path, name: str, tensor_parallel: str) -> dict[str, float]:
    path = shared / "data" / "published" / "vllm_h100_memory_profile_llm-d-planner.csv"
    with path.open() as file:
        row = next(row for row in csv.DictReader(file) if row["model"] == name and row["tp"] == tensor_parallel)
    return {key: float(value) for key, value in row.items() if key != "model"}


@pytest.mark.parametrize(("name", "gpus", "shape"), EXPRESSED, ids=[f"{name}-{gpus}" for name, gpus, _ in EXPRESSED])
def test_room_for_kv_is_what_vllm_reported(shared: Path, name: str, gpus: str, shape: Model) -> None:
    row, num = reported(shared, name, gpus), int(gpus)
    # vLLM's defaults on an H100: 8192 tokens a step, 1024 requests
    left = kv_bytes(shape, H100, row["gpu_memory_utilization"], 8192, 1024, num)
    assert shape.shard(num).weight_bytes / GIB == pytest.approx(row["weights_gib"], abs=0.09)
    assert activation_bytes(shape, 8192, 1024, num) / GIB == pytest.approx(row["activation_gib"], abs=0.07)
    assert overhead_bytes(num) / GIB == pytest.approx(row["non_torch_gib"], abs=0.02)
    assert left / GIB == pytest.approx(row["kv_cache_gib"], abs=0.08)


@pytest.mark.parametrize("shape", [GPT_OSS, GPT_OSS_LARGE], ids=lambda each: each.name)
def test_activations_of_experts_are_what_vllm_reported(shared: Path, shape: Model) -> None:
    row = reported(shared, shape.name, "1")
    assert activation_bytes(shape, 8192, 1024) / GIB == pytest.approx(row["activation_gib"], abs=0.02)


# -- demand -----------------------------------------------------------------------------------------------------------


def test_demand_of_equal_requests_is_their_mean_life() -> None:
    # 10 tokens after the prompt, 11, ... 14 at the end
    wanted = demand(LLAMA, prompts=[10], outputs=[4], max_num_seqs=100)
    assert wanted.mean_tokens == 1200.0
    assert wanted.worst_tokens == 100 * 8192
    assert wanted.p99_tokens == pytest.approx(1200 + 2.326 * (100 * 2.0) ** 0.5)  # variance of 10..14 is 2
    assert wanted.weight_bytes == LLAMA.weight_bytes
    assert wanted.num_bytes(wanted.worst_tokens) == LLAMA.weight_bytes + 100 * 8192 * 128 * 1024


def test_long_answers_are_seen_more_often() -> None:
    # 2 steps at 1, 2 tokens and 100 at 1, ..., 100: (3 + 5050) / 102, not the mean of both lives' means
    wanted = demand(LLAMA, prompts=[1, 1], outputs=[1, 99], max_num_seqs=1)
    assert wanted.mean_tokens == pytest.approx((3 + 5050) / 102)


def test_demand_on_each_gpu_falls_with_their_number() -> None:
    one, four = (demand(LLAMA, [100], [100], 8, tensor_parallel=n) for n in (1, 4))
    assert four.mean_tokens == one.mean_tokens
    assert four.kv_bytes_per_token == one.kv_bytes_per_token // 4


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 9000)), min_size=1), st.integers(1, 500))
def test_demand_is_ordered(lengths: list[tuple[int, int]], max_num_seqs: int) -> None:
    prompts, outputs = [prompt for prompt, _ in lengths], [output for _, output in lengths]
    wanted = demand(LLAMA, prompts, outputs, max_num_seqs)
    assert 0 < wanted.mean_tokens <= wanted.p99_tokens <= wanted.worst_tokens


@pytest.mark.parametrize(("prompts", "outputs"), [([], []), ([1], []), ([0], [1]), ([1], [0])])
def test_lengths_must_be_lengths(prompts: list[int], outputs: list[int]) -> None:
    with pytest.raises(ValueError, match=r"each request needs|at least 1"):
        demand(LLAMA, prompts, outputs, 1)

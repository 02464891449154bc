"""GPUs and models by name, their sizes, and the KV blocks that fit, against what vLLM reported."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from sim.capacity import GIB, activation_bytes, kv_blocks, kv_bytes
from sim.hardware import DEVICES, device
from sim.models import MODELS, Model, model

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
PROFILES = SHARED / "data" / "published" / "vllm_h100_memory_profile_llm-d-planner.csv"


@pytest.mark.parametrize("name", ["h100", "H100", " h100 ", "H100-SXM", "nvidia h100 80gb hbm3"])
def test_a_gpu_is_found_by_any_of_its_names(name: str) -> None:
    assert device(name).bandwidth_gb_s == 3350.0


def test_an_unknown_gpu_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError) as error:
        device("h1000")
    assert str(error.value) == "unknown GPU 'h1000'; known: a100, h100, h200. Did you mean 'h100'?"


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    with pytest.raises(ValueError) as error:
        device("tpu")
    assert str(error.value) == "unknown GPU 'tpu'; known: a100, h100, h200."


def test_efficiencies_are_shares() -> None:
    for each in DEVICES:
        shares = (
            each.decode_bandwidth_efficiency,
            each.gemm_efficiency,
            each.weight_bandwidth_efficiency,
            each.prefill_attention_efficiency,
        )
        assert all(0.5 < share < 0.95 for share in shares)


def test_no_two_entries_share_a_name() -> None:
    for entries in (DEVICES, MODELS):
        names = [name.lower() for each in entries for name in (each.name, *each.aliases)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "num_parameters", "kv_bytes_per_token"),
    [
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248, 128 * 1024),
        ("META-LLAMA/Llama-2-7b-hf", 6_738_415_616, 512 * 1024),  # no grouped queries: four times as much
        ("qwen/qwen3-8b", 8_190_735_360, 144 * 1024),
    ],
)
def test_sizes_are_the_published_ones(name: str, num_parameters: int, kv_bytes_per_token: int) -> None:
    assert model(name).num_parameters == num_parameters
    assert model(name).weight_bytes == 2 * num_parameters
    assert model(name).kv_bytes_per_token == kv_bytes_per_token


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError) as error:
        model("qwen-3-8b")
    assert str(error.value) == (
        "unknown model 'qwen-3-8b'; known: llama-2-7b, llama-3-8b, qwen3-8b. Did you mean 'qwen3-8b'?"
    )


def test_blocks_are_what_memory_leaves() -> None:
    # 0.9 * 79.2 GiB = 71.280; weights 14.957; activations: 2 hidden states of 2048 * 4096 * 2 bytes = 0.031 and
    # 128 rows * 128256 logits * 38 bytes = 0.581; overhead 0.135. 55.575 GiB / (16 * 128 KiB) = 28454.7
    assert kv_blocks(model("llama-3-8b"), device("h100"), block_size=16) == 28454
    assert kv_blocks(model("llama-3-8b"), device("h100"), block_size=32) == 28454 // 2


def test_a_large_batch_of_tokens_makes_the_mlp_the_peak() -> None:
    llama = model("llama-3-8b")
    # 16384 tokens * (3 * 14336 + 2 * 4096) * 2 bytes, more than one row's sampler
    assert activation_bytes(llama, 16384, 1) == 16384 * (3 * 14336 + 2 * 4096) * 2


def test_a_model_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"llama-3-8b's weights \(15.0\).*raise gpu_memory_utilization"):
        kv_blocks(model("llama-3-8b"), device("h100"), block_size=16, gpu_memory_utilization=0.15)


@pytest.mark.parametrize("utilization", [0.0, 1.5, -0.1])
def test_utilization_is_a_share(utilization: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        kv_blocks(model("llama-3-8b"), device("h100"), 16, utilization)


def test_a_block_holds_tokens() -> None:
    with pytest.raises(ValueError, match=r"block_size \(0\)"):
        kv_blocks(model("llama-3-8b"), device("h100"), block_size=0)


QWEN3_SMALL = Model("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, 40960, tied_embeddings=True, qk_norm=True)
QWEN3_LARGE = Model("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, 40960, qk_norm=True)


@pytest.mark.parametrize(
    ("row_name", "shape"),
    [
        ("Llama-3.1-8B", replace(model("llama-3-8b"), max_model_len=131072)),
        ("Qwen3-0.6B", QWEN3_SMALL),
        ("Qwen3-32B", QWEN3_LARGE),
    ],
)
def test_room_for_kv_is_what_vllm_reported(row_name: str, shape: Model) -> None:
    if not PROFILES.exists():
        pytest.skip("published memory profiles are not at hand (../shared)")
    with PROFILES.open() as file:
        row = next(row for row in csv.DictReader(file) if row["model"] == row_name and row["tp"] == "1")
    # vLLM's defaults on an H100: 8192 tokens a step, 1024 requests
    left = kv_bytes(shape, device("h100"), float(row["gpu_memory_utilization"]), 8192, 1024)
    assert left / GIB == pytest.approx(float(row["kv_cache_gib"]), abs=0.05)
    assert activation_bytes(shape, 8192, 1024) / GIB == pytest.approx(float(row["activation_gib"]), abs=0.05)

"""Models by name and from config.json: their sizes are the published ones, and a bad config is refused in a line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.models import MODELS, Model, from_config, model, stored_as
from tests.configs import DEEPSEEK_V3, LLAMA_3_8B, MISTRAL_7B, PUBLIC, QWEN3_30B_A3B, QWEN25_7B, Config

KIB = 1024


def test_no_two_models_share_a_name() -> None:
    names = [name.lower() for each in MODELS for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "num_parameters", "kv_bytes_per_token"),
    [
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248, 128 * KIB),
        ("meta-llama/Meta-Llama-3-70B", 70_553_706_496, 320 * KIB),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 128 * KIB),
        ("META-LLAMA/Llama-2-7b-hf", 6_738_415_616, 512 * KIB),  # no grouped queries: four times as much
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096, 128 * KIB),
        ("qwen/qwen3-8b", 8_190_735_360, 144 * KIB),
        ("Qwen/Qwen3-32B", 32_762_123_264, 256 * KIB),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624, 96 * KIB),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008, 22.5 * KIB),
    ],
)
def test_sizes_are_the_published_ones(name: str, num_parameters: int, kv_bytes_per_token: float) -> None:
    assert model(name).num_parameters == num_parameters
    assert model(name).weight_bytes == 2 * num_parameters
    assert model(name).kv_bytes_per_token == kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "num_parameters", "kv_bytes_per_token"),
    [
        ("llama-3-8b", 8_030_261_248, 2 * 32 * 8 * 128 * 2),
        ("llama-3.2-1b", 1_235_814_400, 2 * 16 * 8 * 64 * 2),
        ("mistral-7b", 7_241_732_096, 2 * 32 * 8 * 128 * 2),
        ("mixtral-8x7b", 46_702_792_704, 2 * 32 * 8 * 128 * 2),
        ("qwen2.5-7b", 7_615_616_512, 2 * 28 * 4 * 128 * 2),  # its Q, K and V have biases
        ("qwen3-30b-a3b", 30_532_122_624, 2 * 48 * 4 * 128 * 2),
        ("qwen3-235b-fp8", 235_093_634_560, 2 * 94 * 4 * 128 * 2),
        ("deepseek-v2-lite", 15_706_484_224, 27 * (512 + 64) * 2),
        ("deepseek-v3", 671_026_419_200, 61 * (512 + 64) * 2),  # without its multi-token prediction
    ],
)
def test_a_config_gives_the_published_sizes(name: str, num_parameters: int, kv_bytes_per_token: int) -> None:
    shape = from_config(PUBLIC[name], name)
    assert shape.num_parameters == num_parameters
    assert shape.kv_bytes_per_token == kv_bytes_per_token


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "qwen3-30b-a3b"])
def test_listed_models_are_what_their_configs_say(name: str) -> None:
    assert replace(from_config(PUBLIC[name], name), name=name) == replace(model(name), aliases=())


def test_a_config_is_found_by_its_path_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    for path in (folder, folder / "config.json"):
        assert model(str(path)).num_parameters == 8_030_261_248
        assert model(str(path)).name == "my-llama"


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError) as error:
        model("qwen-3-8b")
    assert str(error.value) == (
        "unknown model 'qwen-3-8b'; known: llama-2-7b, llama-3-70b, llama-3-8b, llama-3.1-70b, llama-3.1-8b, "
        "mistral-7b, qwen3-30b-a3b, qwen3-32b, qwen3-8b, small, smollm2-135m, tiny. Did you mean 'qwen3-8b'? "
        "The path of a model's config.json will do as well."
    )


# -- weights and KV in other types ------------------------------------------------------------------------------------


def test_fp8_halves_the_layers_and_leaves_the_embeddings() -> None:
    llama = model("llama-3-8b")
    embeddings = 2 * 128256 * 4096
    norms = 32 * 2 * 4096 + 4096
    in_layers = llama.num_parameters - embeddings - norms
    assert stored_as(llama, dtype="fp8").weight_bytes == in_layers + 2 * (embeddings + norms)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_kv_takes_half_the_bytes(kv_dtype: str) -> None:
    assert stored_as(model("llama-3-8b"), kv_dtype=kv_dtype).kv_bytes_per_token == 64 * KIB


def test_types_are_spelled_as_in_vllm() -> None:
    llama = model("llama-3-8b")
    assert stored_as(llama) == stored_as(llama, "bfloat16", "auto") == llama
    assert stored_as(llama, "half").dtype == "fp16"
    with pytest.raises(ValueError, match="unknown kv_dtype 'int4'; known: auto, bf16"):
        stored_as(llama, kv_dtype="int4")


def test_a_model_published_in_fp8_stays_so() -> None:
    assert stored_as(from_config(DEEPSEEK_V3, "v3"), dtype="bfloat16").dtype == "fp8"


# -- windows and tensor parallelism -----------------------------------------------------------------------------------


def test_a_sliding_window_bounds_what_a_request_keeps() -> None:
    mistral = model("mistral-7b")
    assert mistral.kv_bytes(1000) == 1000 * 128 * KIB
    assert mistral.kv_bytes(32768) == mistral.kv_bytes(4096) == 4096 * 128 * KIB
    half = replace(mistral, num_sliding_layers=16)
    assert half.kv_bytes(32768) == (16 * 32768 + 16 * 4096) * 4 * KIB


def test_a_window_that_is_switched_off_is_none() -> None:
    assert from_config(QWEN25_7B, "q").sliding_window is None
    on = from_config({**QWEN25_7B, "use_sliding_window": True, "max_window_layers": 21}, "q")
    assert (on.sliding_window, on.num_sliding_layers) == (131072, 7)


def test_layer_types_say_which_layers_have_the_window() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 29
    assert from_config({**MISTRAL_7B, "layer_types": kinds}, "m").num_sliding_layers == 3


@pytest.mark.parametrize("tensor_parallel", [2, 4, 8])
def test_tensor_parallelism_divides_kv(tensor_parallel: int) -> None:
    llama = model("llama-3-70b")
    assert llama.shard(tensor_parallel).kv_bytes_per_token == 320 * KIB // tensor_parallel
    parts = tensor_parallel * llama.shard(tensor_parallel).weight_bytes
    assert 1.0 < parts / llama.weight_bytes < 1.001  # norms are repeated


def test_too_few_kv_heads_are_repeated() -> None:
    assert model("qwen3-30b-a3b").shard(8).kv_bytes_per_token == 96 * KIB // 4


def test_a_latent_is_not_divided() -> None:
    deepseek = from_config(DEEPSEEK_V3, "v3")
    assert deepseek.shard(8).kv_bytes_per_token == deepseek.kv_bytes_per_token
    # nor are the projections to it, (1536 + 576) * 7168 a layer in fp8, and the routers, 256 * 7168 in bf16
    repeated = 61 * 2112 * 7168 + 58 * 256 * 7168 * 2
    assert (8 * deepseek.shard(8).weight_bytes - deepseek.weight_bytes) / 7 == pytest.approx(repeated, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "message"),
    [
        ("llama-3-8b", 3, "tensor_parallel (3) must divide llama-3-8b's 32 attention heads"),
        ("llama-3-8b", 0, "tensor_parallel (0) must divide llama-3-8b's 32 attention heads"),
        ("smollm2-135m", 9, "tensor_parallel (9) must divide smollm2-135m's 1536 MLP columns"),
    ],
)
def test_what_does_not_divide_is_refused(name: str, tensor_parallel: int, message: str) -> None:
    with pytest.raises(ValueError) as error:
        model(name).shard(tensor_parallel)
    assert str(error.value) == message


# -- configs that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size ('4096') must be a whole number from 1 to 16,777,216"),
        ({"hidden_size": 4096.5}, "hidden_size (4096.5) must be"),
        ({"hidden_size": float("nan")}, "hidden_size (nan) must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers (1000000000) must be a whole number from 1 to 4,096"),
        ({"vocab_size": True}, "vocab_size (True) must be"),
        ({"vocab_size": 10**40}, "vocab_size (10000000000000000000000000000000000000000) must be"),
        ({"num_attention_heads": 33}, "hidden_size (4096) must be a multiple of num_attention_heads (33), or head_dim"),
        ({"num_key_value_heads": 5}, "num_heads (32) must be a multiple of num_kv_heads (5)"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings ('no') must be true or false"),
        ({"torch_dtype": "int8"}, "torch_dtype ('int8') must be one of bfloat16, float16, float32"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantisation by 'awq' is not modelled; known: fp8,"),
        ({"architectures": []}, "architectures must name the model's class, as in ['LlamaForCausalLM']"),
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not modelled; known: DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, "
            "LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
            "Qwen3MoeForCausalLM",
        ),
    ],
)
def test_a_bad_config_is_refused_in_a_line(change: Config, message: str) -> None:
    with pytest.raises(ValueError) as error:
        from_config({**LLAMA_3_8B, **change}, "c.json")
    assert str(error.value).startswith(f"c.json: {message}")
    assert "\n" not in str(error.value)


def test_experts_must_be_fewer_chosen_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"c.json: num_experts_per_token \(8\) must be 1 to num_experts \(4\)"):
        from_config({**QWEN3_30B_A3B, "num_experts": 4}, "c.json")


def test_dense_layers_must_be_layers() -> None:
    with pytest.raises(ValueError, match=r"layers without experts \(99\) must be 0 to 61"):
        from_config({**DEEPSEEK_V3, "first_k_dense_replace": 99}, "c.json")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"name"', "[" * 100_000, '{"hidden_size": 1' + "0" * 5000])
def test_a_file_that_holds_no_config_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        model(str(path))
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "binary.json", Path("x" * 5000 + ".json")):
        with pytest.raises(ValueError) as error:
            model(str(path))
        assert "\n" not in str(error.value)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.integers(-1, 300),
    st.floats(),
    st.text(max_size=20),
    st.just([]),
    st.just({}),
    st.lists(st.integers(0, 5), max_size=3),
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.data())
def test_any_config_gives_a_model_or_one_line(data: st.DataObject) -> None:
    config: dict[str, Any] = dict(PUBLIC[data.draw(st.sampled_from(sorted(PUBLIC)))])
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[name] = data.draw(JUNK)
    try:
        shape = from_config(config, "c.json")
    except ValueError as error:
        assert str(error).startswith("c.json: ") and "\n" not in str(error)
    else:
        assert isinstance(shape, Model) and shape.num_parameters > 0 and shape.kv_bytes(1) > 0

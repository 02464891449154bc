"""Weights from files: what is whole loads, what is not is refused in one line and nothing of it is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from backend.config import PRESETS, ModelConfig, Rope
from backend.gguf_weights import stored_name
from backend.load import load_model
from backend.model import Decoder
from backend.tokenizer import Tokenizer
from backend.weights import assemble, expected_shapes, random_model

SMALL = ModelConfig("toy", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64,
                    vocab_size=96, max_model_len=64, rms_norm_eps=1e-5, eos_token_ids=(3,))  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
}


def drawn(config: ModelConfig = SMALL) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config).items()}


def save(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def same(one: Decoder, other: Decoder) -> bool:
    ours, theirs = one.weights, other.weights
    pairs = [(ours.embedding, theirs.embedding), (ours.norm, theirs.norm), (ours.lm_head, theirs.lm_head)]
    for layer, twin in zip(ours.layers, theirs.layers, strict=True):
        pairs += [(getattr(layer, name), getattr(twin, name)) for name in type(layer).__dataclass_fields__]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_model(str(path))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# -- Hugging Face folders ------------------------------------------------------------------------------------------


def test_a_folder_loads_as_it_was_saved(tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path, drawn())))
    assert loaded.tokenizer is None
    assert loaded.decoder.config == replace(SMALL, name=tmp_path.name)
    assert same(loaded.decoder, assemble(SMALL, drawn().__getitem__))


def test_old_buffers_and_a_second_copy_of_the_embedding_are_passed_over(tmp_path: Path) -> None:
    tied = replace(SMALL, tied_embeddings=True)
    tensors = drawn(tied)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(96, 32)}
    loaded = load_model(str(save(tmp_path, tensors | extra, tie_word_embeddings=True)))
    assert same(loaded.decoder, assemble(tied, tensors.__getitem__))


def test_end_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    save(tmp_path, drawn())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert load_model(str(tmp_path)).decoder.config.eos_token_ids == (3, 5)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("'GPT2LMHeadModel' is not known", "LlamaForCausalLM")),
        ({"architectures": None}, ("architecture None is not known",)),
        ({"hidden_size": "32"}, ("hidden_size ('32') must be a whole number",)),
        ({"num_hidden_layers": None}, ("num_hidden_layers (None)",)),
        ({"num_key_value_heads": 3}, ("num_heads (4) must be a multiple of num_kv_heads (3)",)),
        ({"rms_norm_eps": -1}, ("rms_norm_eps (-1) must be a number above 0",)),
        ({"head_dim": 7}, ("head_dim (7) must be even",)),
        ({"mlp_bias": True}, ("mlp_bias (True) must be false",)),
        ({"hidden_act": "gelu"}, ("hidden_act ('gelu') must be 'silu'",)),
        ({"sliding_window": 16}, ("sliding_window (16) must be null",)),
        ({"quantization_config": {"quant_method": "awq"}}, ("quantization_config",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ("rope scaling 'yarn' is not known",)),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, ("original_max_position_embeddings (None)",)),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings (1) must be true or false",)),
        ({"eos_token_id": 96}, ("end token 96 is outside the vocabulary of 96",)),
        ({"eos_token_id": "x"}, ("eos_token_id ('x') must be a token id",)),
        ({"intermediate_size": 65}, ("'model.layers.0.mlp.gate_proj.weight' has shape [64, 32]", "needs [65, 32]")),
        ({"num_hidden_layers": 3}, ("'model.layers.2.self_attn.q_proj.weight' is missing",)),
        ({"num_hidden_layers": 1}, ("'model.layers.1.input_layernorm.weight' is not one of the model's",)),
        ({"attention_bias": True}, ("'model.layers.0.self_attn.q_proj.bias' is missing",)),
        ({"vocab_size": 2**40}, ("vocab_size (1099511627776) must be a whole number from 1",)),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, settings: dict[str, Any], parts: tuple[str]) -> None:
    refused(save(tmp_path, drawn(), **settings), str(tmp_path), *parts)


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    save(tmp_path, drawn(), sliding_window=16, use_sliding_window=False)
    assert load_model(str(tmp_path)).decoder.config.num_layers == 2


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "config.json: cannot be read")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "holds neither model.safetensors nor model.safetensors.index.json")
    for text, part in (("{", "not a readable JSON file"), ("[]", "expected an object"), ("[" * 9999, "not a readable")):
        (tmp_path / "config.json").write_text(text)
        refused(tmp_path, part)


def test_shards_are_refused_if_one_is_missing_or_lies_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, part in (
        ({"model.norm.weight": "one.safetensors"}, "one.safetensors: is missing"),
        ({"model.norm.weight": "../one.safetensors"}, "'../one.safetensors' is not a file of this folder"),
        (None, "weight_map must name"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(tmp_path, part)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_weights_are_refused(tmp_path: Path, keep: float) -> None:
    path = save(tmp_path, drawn()) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep >= 1 else keep * len(content))])
    refused(tmp_path, "model.safetensors: damaged or truncated")


def test_a_name_that_is_nothing_is_refused_with_what_there_is() -> None:
    refused(Path("smollm"), "unknown model 'smollm'", "smollm2-135m", "random:llama-3-8b")


# -- GGUF files ------------------------------------------------------------------------------------------------------


def pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a head from halves to neighbours, as llama.cpp stores Q and K."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    architecture: str = "llama",
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    packing: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length(64)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(3)
    writer.add_name("toy")
    more(writer)
    for name, tensor in tensors.items():
        kind = packing if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {stored_name(name): tensor for name, tensor in tensors.items()}


def test_a_gguf_file_loads_as_it_was_written(tmp_path: Path) -> None:
    """Under interleaved positions, with the head's size and the norms of Q and K where there are some."""
    loaded = load_model(str(write_gguf(tmp_path / "toy.gguf", stored(drawn()))))
    assert loaded.tokenizer is None
    found = loaded.decoder.config
    assert found == replace(SMALL, rope=Rope(interleaved=True), rms_norm_eps=found.rms_norm_eps)
    assert found.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)  # stored in fp32
    assert same(loaded.decoder, assemble(SMALL, drawn().__getitem__))


def test_qwen3_keeps_halves_and_norms(tmp_path: Path) -> None:
    qwen = replace(SMALL, qk_norm=True)
    loaded = load_model(str(write_gguf(tmp_path / "toy.gguf", stored(drawn(qwen)), "qwen3")))
    assert loaded.decoder.config.qk_norm and not loaded.decoder.config.rope.interleaved
    assert same(loaded.decoder, assemble(qwen, drawn(qwen).__getitem__))


@pytest.mark.parametrize("packing", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_0"])
def test_packed_numbers_are_unpacked(tmp_path: Path, packing: str) -> None:
    kind = gguf.GGMLQuantizationType[packing]
    decoder = load_model(str(write_gguf(tmp_path / "toy.gguf", stored(drawn()), packing=kind))).decoder
    rows = drawn()["model.embed_tokens.weight"].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    np.testing.assert_array_equal(decoder.weights.embedding.numpy(), expected)
    assert np.abs(expected - rows).max() < 0.5


def test_frequency_factors_and_a_second_end_are_read(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": torch.tensor([1.0, 2.0, 4.0, 8.0])}
    path = write_gguf(tmp_path / "toy.gguf", stored(drawn()) | factors, more=lambda writer: writer.add_eot_token_id(5))
    found = load_model(str(path)).decoder.config
    assert found.rope.factors == (1.0, 2.0, 4.0, 8.0)
    assert found.eos_token_ids == (3, 5)


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in stored(drawn()).items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "architecture", "part"),
    [
        (stored(drawn()), "gpt2", "architecture 'gpt2' is not known; known: llama"),
        (without("token_embd.weight"), "llama", "tensor 'token_embd.weight' is missing"),
        (without("blk.1.ffn_up.weight"), "llama", "tensor 'blk.1.ffn_up.weight' is missing"),
        (stored(drawn()) | {"blk.0.ffn_up.weight": torch.ones(63, 32)}, "llama", "has shape [63, 32]"),
        (stored(drawn()) | {"rope_freqs.weight": torch.ones(3)}, "llama", "'rope_freqs.weight' has shape [3]"),
        (stored(drawn()) | {"blk.2.ffn_up.weight": torch.ones(64, 32)}, "llama", "is not one of the model's"),
    ],
)
def test_a_gguf_file_that_does_not_fit_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], architecture: str, part: str
) -> None:
    refused(write_gguf(tmp_path / "toy.gguf", tensors, architecture), "toy.gguf: ", part)


def test_scaled_positions_and_experts_are_refused(tmp_path: Path) -> None:
    yarn = write_gguf(
        tmp_path / "yarn.gguf", stored(drawn()), more=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    )
    refused(yarn, "rope scaling 'yarn' is not known")
    refused(
        write_gguf(tmp_path / "moe.gguf", stored(drawn()), more=lambda w: w.add_expert_count(8)), "mixture of experts"
    )


def test_a_file_cut_anywhere_or_with_a_byte_changed_raises_nothing_but_a_line(tmp_path: Path) -> None:
    """Whatever is read, or refused: no other error, no endless loop, no memory claimed that a count invents."""
    path = write_gguf(tmp_path / "toy.gguf", stored(drawn()))
    content = path.read_bytes()
    random, header = Random(0), len(content) - 4 * sum(t.numel() for t in drawn().values())
    for at in (*range(0, header, 37), len(content) - 1):
        path.write_bytes(content[:at])
        refused(path, "toy.gguf")
    for _ in range(200):
        spoilt = bytearray(content)
        spoilt[random.randrange(header)] = random.randrange(256)
        path.write_bytes(spoilt)
        try:
            load_model(str(path))
        except ValueError as error:
            assert "\n" not in str(error)


def test_a_tokenizer_of_another_kind_is_none_and_one_of_bytes_is_read(tmp_path: Path) -> None:
    letters = ["<e>", *map(chr, range(33, 127)), "ab"]

    def bpe(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(letters)
        writer.add_token_types([3] + [1] * 95)
        writer.add_token_merges(["a b"])

    def unigram(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(letters)

    found = load_model(str(write_gguf(tmp_path / "bpe.gguf", stored(drawn()), more=bpe))).tokenizer
    assert isinstance(found, Tokenizer)
    assert found.encode("ab<e>ba") == (95, 0, letters.index("b"), letters.index("a"))
    assert found.decode((95, 0, 65)) == "aba"
    assert load_model(str(write_gguf(tmp_path / "uni.gguf", stored(drawn()), more=unigram))).tokenizer is None


def test_a_first_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    def bpe(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["<s>", "a", "b", "ab"])
        writer.add_token_types([3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)

    found = load_model(str(write_gguf(tmp_path / "bpe.gguf", stored(drawn()), more=bpe))).tokenizer
    assert found is not None and found.encode("aab") == (0, 1, 3)


TEMPLATE = "{{ messages[0].content }}!"


@pytest.mark.parametrize(
    ("name", "content"),
    [("chat_template.jinja", TEMPLATE), ("tokenizer_config.json", json.dumps({"chat_template": TEMPLATE}))],
)
def test_a_folder_has_its_tokenizer_and_template(tmp_path: Path, name: str, content: str) -> None:
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    engine.save(str(save(tmp_path, drawn()) / "tokenizer.json"))
    (tmp_path / name).write_text(content)
    found = load_model(str(tmp_path)).tokenizer
    assert found is not None and found.encode("aba") == (2, 0)
    assert found.chat([{"role": "user", "content": "ab"}]) == "ab!"


def test_a_folder_with_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (save(tmp_path, drawn()) / "tokenizer.json").write_text("{}")
    refused(tmp_path, "tokenizer.json: not a readable tokenizer")


# -- seeded weights --------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_weights_and_another_gives_others() -> None:
    tiny = load_model("tiny").decoder
    assert same(tiny, random_model(PRESETS["tiny"], seed=0))
    assert not same(tiny, load_model("tiny", seed=1).decoder)


def test_every_shape_known_by_name_can_be_drawn() -> None:
    """On the meta device: shapes without memory."""
    for config in PRESETS.values():
        tensors = {name: torch.empty(shape, device="meta") for name, shape in expected_shapes(config).items()}
        assert assemble(config, tensors.__getitem__).config == config

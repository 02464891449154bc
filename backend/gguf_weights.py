"""A decoder from a GGUF file: llama.cpp's names and settings told as Hugging Face's.

llama.cpp stores Q and K of the llama architecture permuted, so that rotary positions turn neighbouring dimensions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from backend.config import ModelConfig, Rope
from backend.gguf_file import GgufFile
from backend.model import Decoder
from backend.weights import assemble, check_shapes, expected_shapes

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_FREQUENCY_FACTORS = "rope_freqs.weight"  # what Llama 3.1's scaling comes to, a dimension pair each


def stored_name(name: str) -> str:
    """Of a tensor known by its Hugging Face name."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_PARTS[part]}.{kind}"


def load_gguf(file: GgufFile, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """Raises ValueError, one line, for a model of another kind, and for tensors that are missing or do not belong."""
    config = gguf_config(file)
    names = {stored_name(name): shape for name, shape in expected_shapes(config).items()}
    if config.rope.factors:
        names[_FREQUENCY_FACTORS] = (config.head_dim // 2,)
    found = {name: stored.shape for name, stored in file.tensors.items()}
    check_shapes(str(file.path), names, found)

    def read(name: str) -> Tensor:
        return torch.from_numpy(file.read(stored_name(name))).to(device=device, dtype=dtype)

    return assemble(config, read)


def gguf_config(file: GgufFile) -> ModelConfig:
    """The model's sizes. Raises ValueError for an architecture or a setting that is not known here."""
    settings = _Settings(file)
    architecture = settings.architecture
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"{file.path}: architecture {architecture!r} is not known; known: llama, qwen2, qwen3")
    if settings.get("expert_count", 0):
        raise ValueError(f"{file.path}: a mixture of experts is not known")
    if settings.get("rope.scaling.type", "none") != "none":
        raise ValueError(f"{file.path}: rope scaling {settings.get('rope.scaling.type', '')!r} is not known")
    hidden, num_heads = settings.need("embedding_length"), settings.need("attention.head_count")
    ends = (file.settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    try:
        return ModelConfig(
            name=str(file.settings.get("general.name", file.path.stem)),
            num_layers=settings.need("block_count"),
            hidden_size=hidden,
            num_heads=num_heads,
            num_kv_heads=settings.need("attention.head_count_kv", num_heads),
            head_dim=settings.need("attention.key_length", hidden // num_heads),
            intermediate_size=settings.need("feed_forward_length"),
            vocab_size=_num_rows(file, "token_embd.weight"),
            max_model_len=settings.need("context_length"),
            rms_norm_eps=settings.need("attention.layer_norm_rms_epsilon"),
            rope=Rope(settings.need("rope.freq_base", 10_000.0), architecture == "llama", factors=_factors(file)),
            tied_embeddings="output.weight" not in file.tensors,
            qk_norm=architecture == "qwen3",
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            eos_token_ids=tuple(sorted({token_id for token_id in ends if token_id is not None})),
        )
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None


class _Settings:
    """Settings of the file's architecture, under their short names."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = file.settings.get("general.architecture")

    def get(self, name: str, default: Any) -> Any:
        return self._file.settings.get(f"{self.architecture}.{name}", default)

    def need(self, name: str, default: float | None = None) -> Any:
        value = self.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{self._file.path}: {self.architecture}.{name} ({value!r}) must be a number above 0")
        return value


def _num_rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise ValueError(f"{file.path}: tensor {name!r} is missing")
    return file.tensors[name].shape[0]


def _factors(file: GgufFile) -> tuple[float, ...]:
    return tuple(file.read(_FREQUENCY_FACTORS).flatten().tolist()) if _FREQUENCY_FACTORS in file.tensors else ()

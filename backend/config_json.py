"""A decoder's sizes from its Hugging Face config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.config import ModelConfig, Rope, RopeScaling

# Class -> (Q and K normalised, Q, K and V biased whatever the config says)
ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (False, True),
    "Qwen3ForCausalLM": (True, False),
}
_DEFAULT_THETA = 10_000.0


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError, one line, for a file that is missing or holds no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object of settings")
    return content


def to_config(values: Mapping[str, Any], source: str, name: str) -> ModelConfig:
    """Raises ValueError for an architecture or a setting whose arithmetic is not known here."""
    settings = _Settings(values, source)
    architectures = values.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(f"{source}: architecture {architecture!r} is not known; known: {', '.join(ARCHITECTURES)}")
    qk_norm, always_biased = ARCHITECTURES[architecture]
    biased = settings.flag("attention_bias")
    settings.refuse_others()
    hidden, num_heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    try:
        return ModelConfig(
            name=name,
            num_layers=settings.size("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=num_heads,
            num_kv_heads=settings.size("num_key_value_heads", num_heads),
            head_dim=settings.size("head_dim", hidden // num_heads),
            intermediate_size=settings.size("intermediate_size"),
            vocab_size=settings.size("vocab_size"),
            max_model_len=settings.size("max_position_embeddings"),
            rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
            rope=settings.rope(),
            tied_embeddings=settings.flag("tie_word_embeddings"),
            qk_norm=qk_norm,
            qkv_bias=biased or always_biased,
            output_bias=biased,
            eos_token_ids=settings.end_tokens(),
        )
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(source) else f"{source}: {message}") from None


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings, each checked as it is read; null counts as not given."""

    values: Mapping[str, Any]
    source: str

    def _wrong(self, name: str, rule: str) -> ValueError:
        return ValueError(f"{self.source}: {name} ({self.values.get(name)!r:.60}) must be {rule}")

    def size(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self._wrong(name, "a whole number above 0")
        return value

    def number(self, name: str, default: float) -> float:
        return _number(self.values, name, self.source, default)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is not None and type(value) is not bool:
            raise self._wrong(name, "true or false")
        return bool(value)

    def refuse_others(self) -> None:
        """What would change the arithmetic, and is not done here."""
        if self.flag("mlp_bias"):
            raise self._wrong("mlp_bias", "false: biases in the MLP are not known")
        if self.values.get("hidden_act", "silu") != "silu":
            raise self._wrong("hidden_act", "'silu'")
        if self.values.get("quantization_config") is not None:
            raise self._wrong("quantization_config", "absent: give the weights in bf16, fp16 or fp32")
        slides = self.values.get("use_sliding_window", True)  # Qwen states a window and switches it off
        if self.values.get("sliding_window") is not None and slides:
            raise self._wrong("sliding_window", "null: attention windows are not known")

    def end_tokens(self) -> tuple[int, ...]:
        value = self.values.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(each) is not int for each in ids):
            raise self._wrong("eos_token_id", "a token id, or a list of them")
        return tuple(ids)

    def rope(self) -> Rope:
        """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older ones."""
        stated = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(stated, dict):
            raise self._wrong("rope_scaling", "an object of settings")
        theta = _number(stated, "rope_theta", self.source, self.number("rope_theta", _DEFAULT_THETA))
        kind = stated.get("rope_type", stated.get("type", "default"))
        if kind == "default":
            return Rope(theta)
        if kind != "llama3":
            raise ValueError(f"{self.source}: rope scaling {kind!r} is not known; known: default, llama3")
        original = stated.get("original_max_position_embeddings")
        if type(original) is not int:
            raise ValueError(f"{self.source}: original_max_position_embeddings ({original!r}) must be a whole number")
        factor, low, high = (
            _number(stated, name, self.source) for name in ("factor", "low_freq_factor", "high_freq_factor")
        )
        return Rope(theta, scaling=RopeScaling(factor, low, high, original))


def _number(values: Mapping[str, Any], name: str, source: str, default: float | None = None) -> float:
    value: Any = values.get(name)
    if value is None and default is not None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{source}: {name} ({value!r:.60}) must be a number above 0")
    return float(value)

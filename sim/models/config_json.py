"""A model's shape from its Hugging Face config.json.

Weights of further heads (multi-token prediction) are not counted: an engine that does not speculate leaves them out.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.models.shape import LARGEST, Experts, LatentAttention, Model

LARGEST_NUM_LAYERS = LARGEST_NUM_EXPERTS = 4096
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "bf16"}  # vLLM's "auto" serves float32 in 2 bytes
_FP8_METHODS = ("fp8", "fbgemm_fp8")


def read_config(path: Path) -> Model:
    """Of a config.json, or of the folder that holds one. Raises ValueError, one line, for whatever is wrong with it."""
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a readable JSON file ({str(error).splitlines()[0]})") from None
    return from_config(config, str(file))


def from_config(config: object, source: str) -> Model:
    """`source` names the config in errors, and the model where the config does not."""
    if not isinstance(config, dict):
        raise ValueError(f"{source}: expected a model's config, an object of settings")
    fields = _Fields(config, source)
    architecture = fields.architecture()
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{source}: {architecture!r} is not modelled; known: {', '.join(sorted(ARCHITECTURES))}")
    try:
        return ARCHITECTURES[architecture](fields)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(source) else f"{source}: {message}") from None


@dataclass(frozen=True, slots=True)
class _Fields:
    """Settings, each checked as it is read."""

    config: Mapping[str, Any]
    source: str

    def wrong(self, name: str, rule: str) -> ValueError:
        value = repr(self.config[name])
        return ValueError(f"{self.source}: {name} ({value if len(value) < 60 else value[:60] + '...'}) must be {rule}")

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        if not self.has(name):
            if default is None:
                raise ValueError(f"{self.source}: {name} is missing")
            return default
        value = self.config[name]
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most:,}")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def integers(self, name: str) -> list[int]:
        value = self.config.get(name) or []
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            raise self.wrong(name, "a list of whole numbers")
        return value

    def architecture(self) -> str:
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise ValueError(f"{self.source}: architectures must name the model's class, as in ['LlamaForCausalLM']")
        return names[0]

    def name(self) -> str:
        """As on the hub where the config says so, else of the folder or file."""
        given = self.config.get("_name_or_path")
        if isinstance(given, str) and given:
            return given
        path = Path(self.source)
        return path.parent.name if path.name == "config.json" and path.parent.name else path.stem

    def dtype(self) -> str:
        """Of the weights in the layers: quantisation to fp8 is known, others are refused."""
        quantization = self.config.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            if method not in _FP8_METHODS:
                raise ValueError(
                    f"{self.source}: quantisation by {method!r} is not modelled; known: {', '.join(_FP8_METHODS)}"
                )
            return "fp8"
        name = "torch_dtype" if self.has("torch_dtype") else "dtype"
        value = self.config.get(name, "bfloat16")
        if not isinstance(value, str) or value not in _DTYPES:
            raise self.wrong(name, f"one of {', '.join(_DTYPES)}")
        return _DTYPES[value]

    def sliding(self, default_layers: int) -> dict[str, Any]:
        """The window, if there is one, and how many layers have it."""
        if not self.has("sliding_window"):
            return {}
        window, layers = self.integer("sliding_window"), default_layers
        if self.has("layer_types"):
            kinds = self.config["layer_types"]
            known = ("full_attention", "sliding_attention")
            if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
                raise self.wrong("layer_types", f"a list of {' and '.join(known)}")
            layers = kinds.count("sliding_attention")
        return {"sliding_window": window, "num_sliding_layers": layers} if layers else {}


def _common(fields: _Fields) -> dict[str, Any]:
    """What every architecture has."""
    return {
        "name": fields.name(),
        "num_layers": fields.integer("num_hidden_layers", most=LARGEST_NUM_LAYERS),
        "hidden_size": fields.integer("hidden_size"),
        "num_heads": fields.integer("num_attention_heads"),
        "vocab_size": fields.integer("vocab_size"),
        "max_model_len": fields.integer("max_position_embeddings"),
        "tied_embeddings": fields.boolean("tie_word_embeddings"),
        "dtype": fields.dtype(),
    }


def _grouped(fields: _Fields) -> dict[str, Any]:
    """Grouped-query attention: a head's size is the hidden size's share where it is not said."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({heads}), or head_dim given")
    return {
        **_common(fields),
        "num_kv_heads": fields.integer("num_key_value_heads", default=heads),
        "head_dim": fields.integer("head_dim", default=hidden // heads),
    }


def _llama(fields: _Fields) -> Model:
    bias = fields.boolean("attention_bias")
    return Model(
        **_grouped(fields),
        intermediate_size=fields.integer("intermediate_size"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias"),
    )


def _mistral(fields: _Fields) -> Model:
    grouped = _grouped(fields)
    sliding = fields.sliding(default_layers=grouped["num_layers"])
    return Model(**grouped, **sliding, intermediate_size=fields.integer("intermediate_size"))


def _qwen_sliding(fields: _Fields, num_layers: int) -> dict[str, Any]:
    """Qwen's configs state a window and switch it off; where it is on, the first layers are without."""
    if not fields.boolean("use_sliding_window"):
        return {}
    without = fields.integer("max_window_layers", default=num_layers, least=0)
    return fields.sliding(default_layers=max(0, num_layers - without))


def _qwen2(fields: _Fields) -> Model:
    grouped = _grouped(fields)
    sliding = _qwen_sliding(fields, grouped["num_layers"])
    return Model(**grouped, **sliding, intermediate_size=fields.integer("intermediate_size"), qkv_bias=True)


def _qwen3(fields: _Fields) -> Model:
    grouped, bias = _grouped(fields), fields.boolean("attention_bias")
    return Model(
        **grouped,
        **_qwen_sliding(fields, grouped["num_layers"]),
        intermediate_size=fields.integer("intermediate_size"),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        experts=_qwen3_experts(fields) if fields.has("num_experts") else None,
    )


def _qwen3_experts(fields: _Fields) -> Experts:
    layers = fields.integer("num_hidden_layers", most=LARGEST_NUM_LAYERS)
    every = fields.integer("decoder_sparse_step", default=1)
    dense = {layer for layer in range(layers) if (layer + 1) % every} | set(fields.integers("mlp_only_layers"))
    return Experts(
        num_experts=fields.integer("num_experts", most=LARGEST_NUM_EXPERTS),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_dense_layers=len(dense.intersection(range(layers))),
    )


def _mixtral(fields: _Fields) -> Model:
    grouped, size = _grouped(fields), fields.integer("intermediate_size")
    num_experts = fields.integer("num_local_experts", most=LARGEST_NUM_EXPERTS)
    experts = Experts(num_experts, fields.integer("num_experts_per_tok"), size)
    sliding = fields.sliding(default_layers=grouped["num_layers"])
    return Model(**grouped, **sliding, intermediate_size=size, experts=experts)


def _deepseek(fields: _Fields) -> Model:
    """DeepSeek-V2 and -V3 (R1, Kimi K2): latent attention, shared and routed experts after the first layers."""
    latent = LatentAttention(
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        q_lora_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
    )
    common = _common(fields)
    return Model(
        **common,
        num_kv_heads=common["num_heads"],
        head_dim=latent.qk_head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        latent=latent,
        experts=_deepseek_experts(fields) if fields.has("n_routed_experts") else None,
    )


def _deepseek_experts(fields: _Fields) -> Experts:
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.wrong("moe_layer_freq", "1: experts in every layer after the first dense ones")
    size = fields.integer("moe_intermediate_size")
    return Experts(
        num_experts=fields.integer("n_routed_experts", most=LARGEST_NUM_EXPERTS),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=size,
        shared_intermediate_size=size * fields.integer("n_shared_experts", default=0, least=0),
        num_dense_layers=fields.integer("first_k_dense_replace", default=0, least=0),
        router_bias=fields.config.get("topk_method") == "noaux_tc",
    )


ARCHITECTURES: dict[str, Callable[[_Fields], Model]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
}

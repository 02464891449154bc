"""Weights into a decoder: every tensor is expected by name and shape, and all are there before one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from backend.config import ModelConfig
from backend.model import Decoder, LayerWeights, ModelWeights

Shape = tuple[int, ...]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model under its Hugging Face name."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config)}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    outputs = {"q": config.num_heads * head, "k": config.num_kv_heads * head, "v": config.num_kv_heads * head}
    for name, size in outputs.items():
        yield f"self_attn.{name}_proj.weight", (size, hidden)
        if config.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (size,)
    yield "self_attn.o_proj.weight", (hidden, outputs["q"])
    if config.output_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def check_shapes(source: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """Raises ValueError naming the first tensor that is missing, misshapen, or not the model's."""
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"{source}: tensor {name!r} is missing")
        if found[name] != shape:
            raise ValueError(f"{source}: tensor {name!r} has shape {list(found[name])}, the model needs {list(shape)}")
    for name in found:
        if name not in expected:
            raise ValueError(f"{source}: tensor {name!r} is not one of the model's: its architecture differs")


def assemble(config: ModelConfig, read: Callable[[str], Tensor]) -> Decoder:
    """Build the model from tensors read by name, one after another."""
    embedding = read("model.embed_tokens.weight")
    layers = tuple(_layer(config, read, f"model.layers.{index}.") for index in range(config.num_layers))
    lm_head = embedding if config.tied_embeddings else read("lm_head.weight")
    return Decoder(config, ModelWeights(embedding, layers, read("model.norm.weight"), lm_head))


def _layer(config: ModelConfig, read: Callable[[str], Tensor], prefix: str) -> LayerWeights:
    def stack(*names: str) -> Tensor:
        return torch.cat([read(prefix + name) for name in names])

    def optional(present: bool, *names: str) -> Tensor | None:
        return stack(*names) if present else None

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=stack(*(f"{name}.weight" for name in qkv)),
        qkv_bias=optional(config.qkv_bias, *(f"{name}.bias" for name in qkv)),
        q_norm=optional(config.qk_norm, "self_attn.q_norm.weight"),
        k_norm=optional(config.qk_norm, "self_attn.k_norm.weight"),
        output=read(prefix + "self_attn.o_proj.weight"),
        output_bias=optional(config.output_bias, "self_attn.o_proj.bias"),
        post_attention_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=stack("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=read(prefix + "mlp.down_proj.weight"),
    )


def random_model(
    config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """The same weights for the same seed, device and dtype; spread so that activations keep their size."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = expected_shapes(config)

    def read(name: str) -> Tensor:
        shape = shapes[name]
        drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        if name.endswith("norm.weight"):
            return 1.0 + 0.1 * drawn
        return drawn if name == "model.embed_tokens.weight" else drawn * shape[-1] ** -0.5

    return assemble(config, read)

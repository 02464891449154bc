"""Shapes of dense decoder models, and the bytes their weights and KV take."""

from __future__ import annotations

from dataclasses import dataclass

from sim.hardware import look_up


@dataclass(frozen=True, slots=True)
class Model:
    """A Llama-like decoder: grouped-query attention, gated MLP, two RMS norms a layer, no biases."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    tied_embeddings: bool = False
    dtype_bytes: int = 2  # weights, activations and KV alike
    qk_norm: bool = False  # Qwen3 normalises each head of Q and K
    aliases: tuple[str, ...] = ()

    @property
    def qkv_size(self) -> int:
        """Outputs of the fused Q, K and V projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)
        mlp = 3 * self.hidden_size * self.intermediate_size  # gate, up, down
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * (attention + mlp + norms) + embeddings + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


# From each model's published config.json; `max_model_len` is its max_position_embeddings.
MODELS = (
    Model(
        name="llama-2-7b",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=32000,
        max_model_len=4096,
        aliases=("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
    ),
    Model(
        name="llama-3-8b",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        max_model_len=8192,
        aliases=("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
    ),
    Model(
        name="qwen3-8b",
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        max_model_len=40960,
        qk_norm=True,
        aliases=("Qwen/Qwen3-8B",),
    ),
)

_BY_NAME = {each.name: each for each in MODELS}
_BY_ALIAS = {alias: each for each in MODELS for alias in each.aliases}


def model(name: str) -> Model:
    """Raises ValueError for a model whose shape is not listed."""
    return look_up("model", name, _BY_NAME, _BY_ALIAS)

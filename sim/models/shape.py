"""What a decoder's shape says: its parameters, and the bytes that its weights and KV take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

ACTIVATION_BYTES = 2  # bf16 or fp16, whatever the weights are stored in
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
LARGEST = 2**24  # of any size here: the longest context published is 10,485,760 tokens


class Matrix(NamedTuple):
    """A weight [n, k] that so many layers have, each token passing all of it."""

    n: int
    k: int
    num_layers: int

    @property
    def num_parameters(self) -> int:
        return self.n * self.k * self.num_layers


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): a token leaves one latent and one rotated key for all heads."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries are projected in one step

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def width(self) -> int:
        """Elements kept of a token in one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture in place of the MLP: a router picks `num_experts_per_token` gated MLPs for each token."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    shared_intermediate_size: int = 0  # of the experts that every token passes, side by side
    num_dense_layers: int = 0  # layers that keep the ordinary MLP
    router_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_token ({self.num_experts_per_token}) must be 1 to num_experts ({self.num_experts})"
            )


_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_model_len")


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder: in each layer attention, then a gated MLP or experts, and two RMS norms.

    `dtype` is that of the matrices in the layers; embeddings, router and norms stay in 2 bytes. Of the layers,
    `num_sliding_layers` see the last `sliding_window` tokens only.
    """

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
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    qk_norm: bool = False  # Qwen3 normalises each head of Q and K
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    num_sliding_layers: int = 0
    latent: LatentAttention | None = None
    experts: Experts | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 1 to {LARGEST:,}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be one of {', '.join(DTYPE_BYTES)}")
        num_windowed = self.num_layers if self.sliding_window else 0
        for what, num, most in (
            ("with a sliding window", self.num_sliding_layers, num_windowed),
            ("without experts", self.num_dense_layers, self.num_layers),
        ):
            if not 0 <= num <= most:
                raise ValueError(f"layers {what} ({num}) must be 0 to {most}")

    # -- layers -----------------------------------------------------------------------------------------------------

    @property
    def qkv_size(self) -> int:
        """Outputs of the fused Q, K and V projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_dense_layers(self) -> int:
        return self.experts.num_dense_layers if self.experts else self.num_layers

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        layers, hidden, heads = self.num_layers, self.hidden_size, self.num_heads
        if not (latent := self.latent):
            return Matrix(self.qkv_size, hidden, layers), Matrix(hidden, heads * self.head_dim, layers)
        queries, kept = heads * latent.qk_head_dim, latent.width
        up = Matrix(heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank, layers)
        output = Matrix(hidden, heads * latent.v_head_dim, layers)
        if latent.q_lora_rank is None:
            return Matrix(queries + kept, hidden, layers), up, output
        down = Matrix(latent.q_lora_rank + kept, hidden, layers)
        return down, Matrix(queries, latent.q_lora_rank, layers), up, output

    @property
    def mlp_matrices(self) -> tuple[Matrix, ...]:
        """Gate and up side by side, then down; of the shared experts too."""
        shared = self.experts.shared_intermediate_size if self.experts else 0
        mlps = ((self.intermediate_size, self.num_dense_layers), (shared, self.num_expert_layers))
        return tuple(
            matrix
            for size, layers in mlps
            if size and layers
            for matrix in (Matrix(2 * size, self.hidden_size, layers), Matrix(self.hidden_size, size, layers))
        )

    @property
    def expert_matrices(self) -> tuple[Matrix, ...]:
        """Of one expert; each layer has `num_experts` of them."""
        if not self.experts:
            return ()
        size, layers = self.experts.intermediate_size, self.num_expert_layers
        return Matrix(2 * size, self.hidden_size, layers), Matrix(self.hidden_size, size, layers)

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def num_layer_weights(self) -> int:
        """The parameters that quantisation stores smaller."""
        num_experts = self.experts.num_experts if self.experts else 0
        every_token = self.attention_matrices + self.mlp_matrices
        return sum(m.num_parameters for m in every_token) + num_experts * sum(
            m.num_parameters for m in self.expert_matrices
        )

    @property
    def num_parameters(self) -> int:
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        router = self.num_expert_layers * self._router_size
        return self.num_layer_weights + router + self.num_layers * self._small_size + embeddings + self.hidden_size

    @property
    def _router_size(self) -> int:
        return self.experts.num_experts * (self.hidden_size + self.experts.router_bias) if self.experts else 0

    @property
    def _small_size(self) -> int:
        """Norms and biases of one layer."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        if self.latent:
            norms += self.latent.kv_lora_rank + (self.latent.q_lora_rank or 0)
        mlp = 2 * self.intermediate_size + self.hidden_size
        return norms + self.qkv_bias * self.qkv_size + self.output_bias * self.hidden_size + self.mlp_bias * mlp

    @property
    def weight_bytes(self) -> int:
        others = self.num_parameters - self.num_layer_weights
        return self.num_layer_weights * DTYPE_BYTES[self.dtype] + others * ACTIVATION_BYTES

    # -- KV ---------------------------------------------------------------------------------------------------------

    @property
    def kv_width(self) -> int:
        """Elements kept of a token in one layer."""
        return self.latent.width if self.latent else 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """All layers, within any window."""
        return self.num_layers * self.kv_width * DTYPE_BYTES[self.kv_dtype]

    def kv_bytes(self, num_tokens: int) -> int:
        """What one request of this length must keep: a layer with a window forgets what lies outside."""
        kept = (self.num_layers - self.num_sliding_layers) * num_tokens
        kept += self.num_sliding_layers * min(num_tokens, self.sliding_window or 0)
        return kept * self.kv_width * DTYPE_BYTES[self.kv_dtype]

    # -- tensor parallelism -----------------------------------------------------------------------------------------

    def shard(self, tensor_parallel: int) -> Model:
        """One GPU's part, as a model: heads, MLPs and vocabulary divided; KV heads repeated where there are too few.

        A latent is kept whole by each GPU. Raises ValueError where heads or MLPs do not divide.
        """
        if tensor_parallel == 1:
            return self
        parts = {"attention heads": self.num_heads, "MLP columns": self.intermediate_size}
        if self.experts:
            parts["expert columns"] = self.experts.intermediate_size
            parts["shared expert columns"] = self.experts.shared_intermediate_size
        for what, num in parts.items():
            if tensor_parallel < 1 or num % tensor_parallel:
                raise ValueError(f"tensor_parallel ({tensor_parallel}) must divide {self.name}'s {num} {what}")
        if self.num_kv_heads % tensor_parallel and tensor_parallel % self.num_kv_heads:
            raise ValueError(
                f"tensor_parallel ({tensor_parallel}) must divide {self.name}'s {self.num_kv_heads} KV heads, "
                f"or be a multiple of them"
            )
        return replace(
            self,
            num_heads=self.num_heads // tensor_parallel,
            num_kv_heads=max(1, self.num_kv_heads // tensor_parallel),
            intermediate_size=self.intermediate_size // tensor_parallel,
            vocab_size=-(-self.vocab_size // tensor_parallel),
            experts=self.experts and _expert_shard(self.experts, tensor_parallel),
        )


def _expert_shard(experts: Experts, tensor_parallel: int) -> Experts:
    return replace(
        experts,
        intermediate_size=experts.intermediate_size // tensor_parallel,
        shared_intermediate_size=experts.shared_intermediate_size // tensor_parallel,
    )

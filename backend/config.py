"""What a decoder is made of: its sizes, its rotary positions, and the shapes known by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

LARGEST = 2**24  # of any size here


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of low frequencies, as config.json's rope_scaling states it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor or self.factor < 1 or self.original_max_position < 1:
            raise ValueError(
                f"rope scaling by {self.factor} between frequency factors {self.low_freq_factor} and "
                f"{self.high_freq_factor} is not possible: low must be below high, and the factor at least 1"
            )


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `interleaved` rotates dimensions (0, 1), (2, 3), ...; else (0, D/2), (1, D/2 + 1), ..."""

    theta: float = 10_000.0
    interleaved: bool = False
    scaling: RopeScaling | None = None
    factors: tuple[float, ...] = ()  # each pair's frequency is divided by its own, as GGUF files state scaling


_SIZES = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
    "max_model_len",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder: RMS norms, grouped-query attention under rotary positions, a gated MLP."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float = 1e-5
    rope: Rope = Rope()
    tied_embeddings: bool = False
    qk_norm: bool = False  # Qwen3 normalises each head of Q and K
    qkv_bias: bool = False
    output_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LARGEST:
                raise ValueError(f"{name} ({value!r}) must be a whole number from 1 to {LARGEST:,}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary positions turn pairs of dimensions")
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"end token {token_id} is outside the vocabulary of {self.vocab_size}")

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Outputs of the fused Q, K and V projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


_LLAMA_3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
_TINY = ModelConfig("tiny", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
                    intermediate_size=128, vocab_size=512, max_model_len=4096)  # fmt: skip

# fmt: off
PRESETS = {each.name: each for each in (
    _TINY,
    # Decodes 64 sequences in about 25 ms on one CPU core: small enough to serve, large enough to measure.
    replace(_TINY, name="small", num_layers=4, hidden_size=256, num_kv_heads=2, head_dim=64, intermediate_size=704,
            vocab_size=4096),
    ModelConfig("llama-3-8b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
                intermediate_size=14336, vocab_size=128256, max_model_len=8192, rope=Rope(500_000.0)),
    ModelConfig("llama-3.1-8b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
                intermediate_size=14336, vocab_size=128256, max_model_len=131072,
                rope=Rope(500_000.0, scaling=_LLAMA_3)),
    ModelConfig("qwen3-8b", num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
                intermediate_size=12288, vocab_size=151936, max_model_len=40960, rms_norm_eps=1e-6,
                rope=Rope(1_000_000.0), qk_norm=True),
)}
# fmt: on

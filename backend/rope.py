"""Rotary position embedding (Su et al., 2021), both conventions, with Llama 3's frequency scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backend.config import Rope, RopeScaling


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32, radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.factors:
        frequencies = frequencies / torch.tensor(rope.factors)
    return frequencies if rope.scaling is None else _scaled(frequencies, rope.scaling)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended (Llama 3.1, 2024)."""
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_max_position / wavelengths
    share = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = share.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


class RotaryTable:
    """Cosines and sines of all positions, [num_positions, head_dim / 2] fp32."""

    def __init__(self, rope: Rope, head_dim: int, num_positions: int, device: torch.device | str = "cpu") -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        self.interleaved = rope.interleaved
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def turns(self, positions: Tensor) -> Tensor:
        """[n] -> [n, 1, head_dim / 2] complex: what turns each pair of dimensions of these tokens."""
        return torch.complex(self.cos[positions], self.sin[positions]).unsqueeze(1)

    def rotate(self, heads: Tensor, turns: Tensor) -> Tensor:
        """`heads` [n, num_heads, head_dim], each token turned by its position."""
        if self.interleaved:
            pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns).flatten(-2).to(heads.dtype)
        first, second = heads.float().chunk(2, dim=-1)
        cos, sin = turns.real, turns.imag
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)

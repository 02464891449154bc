"""Requests that both attentions answer: a hit, a preemption, chunks, steps of decodes only, a prompt of one token."""

from __future__ import annotations

from dataclasses import replace

from backend.config import PRESETS, ModelConfig, Rope
from policies.prompt import TokenPrompt
from policies.types import Request

# Groups of three: the kernels must pad them. Pairs side by side, and normalised heads.
MODEL: ModelConfig = replace(PRESETS["tiny"], num_heads=6, rope=Rope(interleaved=True), qk_norm=True)
_LENGTHS = (30, 18, 30, 1)


def asked() -> list[Request]:
    """Those of one length share their prompt."""
    return [
        Request(str(index), 0.0, TokenPrompt(tuple((length + at * at) % 512 for at in range(length))), max_tokens=6)
        for index, length in enumerate(_LENGTHS)
    ]

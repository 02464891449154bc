"""Arithmetic shared by the allocation policies."""

from __future__ import annotations

from policies.interfaces import View


def blocks_for(num_tokens: int, view: View) -> int:
    """No table is longer than `max_model_len` tokens."""
    return -(-min(num_tokens, view.max_model_len) // view.block_size)


def checked_watermark(watermark: float) -> float:
    if not 0 <= watermark < 1:
        raise ValueError(f"watermark ({watermark}) must be a share of the pool: 0 or more, below 1")
    return watermark


def slack_blocks(watermark: float, view: View) -> int:
    """Blocks that stay free when a request enters; none are asked of the only one, which must be able to run."""
    # vLLM counts its null block in the pool.
    return int(watermark * (view.num_blocks + 1)) if view.running else 0

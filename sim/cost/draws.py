"""Draws of what is not known about costs: the same for a seed, so that settings are compared under the same luck."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DATASHEET = "datasheet"
PARTS = ("decode attention", "prefill attention", "gemm", DATASHEET)  # each is off as a whole, in its own way


@dataclass(frozen=True, slots=True)
class Draw:
    """`number` picks the bootstrap draw of each fit; `scores` are standard normal, by part."""

    number: int
    scores: Mapping[str, float] = field(default_factory=dict)

    def score(self, part: str) -> float:
        return self.scores.get(part, 0.0)


def draws(num: int, seed: int) -> list[Draw]:
    """Raises ValueError where `num` is too small to give an interval. The first of more are those of fewer."""
    import numpy as np

    if num < 4:
        raise ValueError(f"draws ({num}) must be at least 4: an interval is read from them")
    rows = np.random.default_rng([seed, 0xC057]).standard_normal((num, len(PARTS))).tolist()
    return [Draw(number, dict(zip(PARTS, row, strict=True))) for number, row in enumerate(rows)]

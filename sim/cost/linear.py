"""A straight line in the counts of a step: what a running server's records can tell of its costs.

    step + token * (tokens beyond the free ones) + decode * decodes + prompt * prompts completed
         + kv_token * contexts of decodes + pair * pairs of prefills

The first tokens are free where they ride along with the weights, which a step reads once. Host and device are one time:
records do not tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from sim.cost.work import StepWork


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Prices in seconds. `band`: times multiplied and divided by it cover 68 %. `scale` multiplies every time."""

    provenance: ClassVar[str] = "fitted from server records"

    per_step: float
    per_token: float = 0.0
    free_tokens: float = 0.0
    per_decode: float = 0.0
    per_prompt: float = 0.0
    per_kv_token: float = 0.0
    per_pair: float = 0.0
    scale: float = 1.0
    band: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{each.name} ({value}) of a linear cost must be finite, 0 or more")
        if not self.scale or self.band < 1.0:
            raise ValueError(f"scale ({self.scale}) must be above 0 and band ({self.band}) at least 1")

    def host_time(self, work: StepWork) -> float:
        return 0.0

    def device_time(self, work: StepWork) -> float:
        num_tokens, _, num_sampled, num_decodes, context, _, pairs, _, _, _ = work
        if not num_tokens:
            return 0.0
        time = self.per_step + self.per_decode * num_decodes + self.per_kv_token * context + self.per_pair * pairs
        if num_tokens > self.free_tokens:
            time += self.per_token * (num_tokens - self.free_tokens)
        if num_sampled > num_decodes:
            time += self.per_prompt * (num_sampled - num_decodes)
        return self.scale * time

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LinearCost:
        """Raises ValueError naming an unknown or missing price."""
        known = {each.name for each in fields(cls)}
        if unknown := [name for name in values if name not in known]:
            raise ValueError(f"unknown price {unknown[0]!r} of a linear cost; known: {', '.join(sorted(known))}")
        if "per_step" not in values:
            raise ValueError("a linear cost needs per_step: seconds of a step without work")
        return cls(**values)

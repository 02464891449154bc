"""What a built-in workload must say: how often requests come unless told, and what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from policies.prompt import Prompt
from policies.types import Context


@dataclass(frozen=True, slots=True)
class Draw:
    """One entry a request in each; without contexts nobody in particular asks."""

    prompts: Sequence[Prompt]
    outputs: Sequence[int]
    contexts: Sequence[Context] | None = None


class Recipe(Protocol):
    @property
    def default_rate(self) -> float:
        """Requests a second."""

    def draw(self, num_requests: int, seed: int) -> Draw: ...

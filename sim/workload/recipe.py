"""What a built-in workload must say: how often requests come unless told, what they are, and which wait for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from policies.prompt import Prompt
from policies.types import Context


@dataclass(frozen=True, slots=True)
class Link:
    """A request waits for the answers to those of `after`, by index and all before it, and `delay` seconds more."""

    after: tuple[int, ...]
    delay: float


@dataclass(frozen=True, slots=True)
class Draw:
    """One entry a request in each; without contexts nobody in particular asks.

    `links`: None begins a session, whose other requests follow it without a gap; without links all come by the clock.
    """

    prompts: Sequence[Prompt]
    outputs: Sequence[int]
    contexts: Sequence[Context] | None = None
    class_names: Sequence[str] | None = None
    links: Sequence[Link | None] | None = None


class Recipe(Protocol):
    @property
    def default_rate(self) -> float:
        """Requests a second; sessions where requests wait for each other."""

    @property
    def default_arrivals(self) -> str:
        """As `parse_arrivals` reads it."""

    def draw(self, num_requests: int, seed: int) -> Draw: ...

"""A closed loop: so many users, each with one request or session at a time and a think time before the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.workload.recipe import Link
from sim.workload.streams import stream


@dataclass(frozen=True, slots=True)
class Users:
    """Think times are exponential with mean `think`, in seconds; each user's first request comes after one, too.

    Sessions are dealt out beforehand, the next to each user in turn, so that no policy changes who asks what.
    """

    users: int
    think: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.users <= 10**6:
            raise ValueError(f"users ({self.users}) of closed arrivals must be from 1 to 1000000")
        if not 0 <= self.think <= 1e9:
            raise ValueError(f"think ({self.think:g}) of closed arrivals must be a number of seconds from 0 to 1e9")

    def __str__(self) -> str:
        return f"those of {self.users} users, who ask again {self.think:g} s on average after an answer"

    def starts(self, num_sessions: int, seed: int) -> list[float]:
        """When those sessions begin that come first to their users."""
        first: list[float] = sorted(self._thinks(self.users, seed))
        return first[:num_sessions]

    def links(self, ends: Sequence[tuple[int, ...]], seed: int) -> list[Link | None]:
        """What each session waits for: the last answers of the one its user had before, `ends` by session."""
        thinks = self._thinks(len(ends), seed)
        before = range(-self.users, len(ends) - self.users)
        return [Link(ends[i], think) if i >= 0 else None for i, think in zip(before, thinks, strict=True)]

    def _thinks(self, num: int, seed: int) -> list[float]:
        thinks: list[float] = (self.think * stream(seed, "think").standard_exponential(num)).tolist()
        return thinks

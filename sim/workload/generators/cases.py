"""Loads in which nothing is drawn, so that what a cache or a scheduler must do with them can be counted beforehand.

`repeated-prefix`: every caller asks behind every prefix, in turn. `cycle`: the same few kinds of request, in turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from policies.prompt import ContentPrompt, LengthPrompt
from policies.types import Context
from sim.workload.generators.prompts import prompt_after
from sim.workload.recipe import Draw

_TURN = re.compile(r"([^:+/,=]+):(\d+)\+(\d+)")


@dataclass(frozen=True, slots=True)
class RepeatedPrefix:
    """Lengths in tokens. An application is a prefix: request i is behind prefix i mod `num_prefixes`.

    Callers take turns from round to round, one user of each tenant after the other.
    """

    default_arrivals: ClassVar[str] = "poisson"
    default_rate: float = 4.0
    num_prefixes: int = 1
    num_tenants: int = 1
    users_per_tenant: int = 1
    prefix_tokens: int = 2048
    own_tokens: int = 64
    output_tokens: int = 32
    content_size: int = 16  # tokens a content id

    def __post_init__(self) -> None:
        if self.prefix_tokens % self.content_size:
            raise ValueError(f"prefix_tokens ({self.prefix_tokens}) must be a multiple of {self.content_size}")

    def draw(self, num_requests: int, seed: int) -> Draw:
        prefixes = [index % self.num_prefixes for index in range(num_requests)]
        return Draw(
            prompts=[self._prompt(index, prefix) for index, prefix in enumerate(prefixes)],
            outputs=[self.output_tokens] * num_requests,
            contexts=[self._context(index, prefix) for index, prefix in enumerate(prefixes)],
        )

    def _prompt(self, index: int, prefix: int) -> ContentPrompt:
        num = self.prefix_tokens // self.content_size
        shared = tuple(range(prefix * num, (prefix + 1) * num))
        return prompt_after(shared, self.prefix_tokens, self.prefix_tokens + self.own_tokens, index, self.content_size)

    def _context(self, index: int, prefix: int) -> Context:
        turn = index // self.num_prefixes
        tenant, user = turn % self.num_tenants, turn // self.num_tenants % self.users_per_tenant
        return Context(f"tenant-{tenant}", f"tenant-{tenant}-user-{user}", f"app-{prefix}", f"session-{index}")


class Turn(NamedTuple):
    """One kind of request: tokens of its prompt, which shares nothing, and of its answer."""

    class_name: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Cycle:
    """`turns`: `class:prompt+output`, divided by slashes; as often as one stands there, so often it comes."""

    default_arrivals: ClassVar[str] = "poisson"
    default_rate: float = 4.0
    turns: str = "short:128+64/short:128+64/short:128+64/long:2048+256"

    def __post_init__(self) -> None:
        if min((each for turn in self.kinds for each in turn[1:]), default=1) < 1:
            raise ValueError(f"turns ({self.turns}) of cycle must have lengths of at least 1 token")

    @property
    def kinds(self) -> list[Turn]:
        found = [_TURN.fullmatch(text.strip()) for text in self.turns.split("/")]
        if not all(found):
            raise ValueError(f"turns ({self.turns}) of cycle must read class:prompt+output/class:prompt+output")
        return [Turn(each[1], int(each[2]), int(each[3])) for each in found if each]

    def draw(self, num_requests: int, seed: int) -> Draw:
        kinds = self.kinds
        turns = [kinds[index % len(kinds)] for index in range(num_requests)]
        return Draw(
            prompts=[LengthPrompt(turn.num_prompt_tokens) for turn in turns],
            outputs=[turn.num_output_tokens for turn in turns],
            class_names=[turn.class_name for turn in turns],
        )

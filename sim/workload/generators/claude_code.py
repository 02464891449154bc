"""`claude-code`: coding agents that ask again and again with a prompt that grows, is rewritten, and is cut when full.

Imitates 692 Claude Code sessions of 46,218 requests (kv-cache-tester, Apache-2.0): percentiles of first prompts, turns,
what a turn adds, answers and think times; how often a prompt is rewritten, and what of it stays; the size at which it
is compacted, and what is left; sub-agents, one in 720 turns, that the next turn waits for. Ids stand for 512 tokens (64
there), and nothing is shared between sessions, as their ids tell nothing of each other.
Distances over 46,000 requests, ten seeds: reuse within a session 0.957 to 0.960 (trace 0.962); prompts at p10 to p75 up
to 10 % shorter, p90 within 26 %, p99 up to 34 % longer, mean within 9 %; answers within 5 %; think times within 6 % at
p10 to p99, up to 15 % longer in the mean; 65 to 75 requests a session (67). Left out: several sub-agents at once, and
sessions prone to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from policies.prompt import ContentPrompt
from policies.types import Context
from sim.workload.generators.prompts import prompt_after
from sim.workload.quantiles import Percentiles
from sim.workload.recipe import Draw, Link
from sim.workload.streams import stream

CONTENT_SIZE = 512

_FRESH = Percentiles({0: 6343, 5: 11744, 10: 13279, 25: 16777, 50: 19020, 75: 20835, 90: 24334, 100: 39406})
_RESUMED = Percentiles(  # first prompts of sessions that go on from an earlier one
    {0: 40442, 5: 48205, 10: 60700, 25: 71359, 50: 118554, 75: 251985, 90: 414478, 95: 521574, 99: 798463, 100: 851858}
)
_FRESH_SHARE = 0.558
_FRESH_TURNS = Percentiles({0: 3, 5: 7, 10: 12, 25: 29, 50: 68, 75: 119, 90: 178, 95: 245, 99: 357, 100: 514})
_RESUMED_TURNS = Percentiles({0: 4, 10: 12, 25: 19, 50: 38, 75: 76, 90: 130, 95: 170, 100: 242})
_LONG_TURNS = Percentiles({0: 3, 10: 5, 25: 7, 50: 20, 75: 36, 90: 56, 100: 150})  # first prompts above 100,000 tokens
_ADDED = Percentiles(  # tokens of a turn beyond the prompt and the answer before
    {0: 1, 10: 5, 20: 27, 30: 75, 40: 170, 50: 283, 60: 449, 70: 749, 75: 988, 80: 1360, 85: 1890, 90: 2914, 95: 5636,
     98: 9971, 99: 14500, 99.5: 20000, 100: 50000}
)  # fmt: skip
_ADDED_EARLY = Percentiles(  # the same while a prompt is below 30,000 tokens: files are read
    {0: 1, 10: 7, 25: 45, 50: 360, 75: 3300, 90: 12500, 95: 22000, 99: 66000, 100: 100000}
)
_OUTPUTS = Percentiles(
    {0: 1, 1: 57, 5: 88, 10: 104, 20: 126, 30: 149, 40: 178, 50: 217, 60: 274, 70: 363, 75: 429, 80: 515, 85: 643,
     90: 894, 95: 1528, 98: 2682, 99: 3678, 99.5: 5038, 99.9: 8175, 100: 18195}
)  # fmt: skip
_THINKS = Percentiles(  # s
    {0: 0, 1: 0, 2: 1, 5: 3, 10: 4, 20: 5, 30: 6, 40: 8, 50: 10, 60: 14, 70: 24, 75: 35, 80: 55, 85: 97, 90: 168,
     95: 465, 98: 1409, 99: 2971, 99.5: 3509, 99.9: 15050, 99.95: 20000, 100: 77589}
)  # fmt: skip
_LIMITS = Percentiles({0: 107018, 5: 127746, 25: 146642, 50: 153104, 75: 161202, 95: 168823, 100: 196860})
_COMPACTED = Percentiles({0: 12852, 5: 22087, 25: 28119, 50: 36587, 75: 52886, 95: 75585, 100: 109601})
_KEPT = Percentiles({0: 0.0, 10: 0.03, 25: 0.09, 50: 0.14, 75: 0.3, 90: 0.5, 100: 0.9})  # of a rewritten prompt
_TOOLS_AND_SYSTEM = 14_848  # tokens that a compacted prompt keeps: 29 ids

_WIDE_LIMIT = 900_000  # tokens, of sessions on a model with a million
_AGENT_FIRST = Percentiles({0: 8868, 25: 9847, 50: 10335, 75: 11695, 100: 18259})
_AGENT_TURNS = Percentiles({0: 2, 25: 7, 50: 11, 75: 13, 100: 24})
_AGENT_ADDED = Percentiles({0: 10, 10: 250, 25: 650, 50: 2250, 75: 5500, 90: 13000, 95: 22000, 100: 60000})
_AGENT_THINKS = Percentiles({0: 1, 5: 2, 25: 3, 50: 4, 75: 6, 95: 45, 100: 60})  # s


@dataclass(frozen=True, slots=True)
class _Step:
    """Who makes a request: the session's main thread or a sub-agent; `before` is its own request before this one."""

    session: int
    before: int | None
    after: int | None
    is_agent: bool


@dataclass(frozen=True, slots=True)
class ClaudeCode:
    """`default_rate`: sessions a second; one has 66 requests in two and a half hours on average."""

    default_arrivals: ClassVar[str] = "poisson"
    default_rate: float = 0.01
    agent_share: float = 1 / 720  # of turns that start a sub-agent
    rewrite_share: float = 0.012  # of turns whose prompt is not what was said before
    wide_share: float = 0.06  # of sessions not compacted, beside those that begin above any limit

    def draw(self, num_requests: int, seed: int) -> Draw:
        outputs = _OUTPUTS.lengths(stream(seed, "outputs"), num_requests)
        firsts = self._firsts(num_requests, seed)
        steps = list(islice(self._steps(firsts, num_requests, seed), num_requests))
        return Draw(
            prompts=self._prompts(steps, firsts, outputs, seed),
            outputs=outputs,
            contexts=[Context(user=f"user-{step.session}", session=f"session-{step.session}") for step in steps],
            links=_links(steps, seed),
        )

    def _firsts(self, num: int, seed: int) -> list[int]:
        """Tokens of each session's first prompt."""
        fresh = stream(seed, "fresh").random(num) < _FRESH_SHARE
        uniforms = stream(seed, "prompts").random(num)
        firsts: list[int] = np.where(fresh, _FRESH.at(uniforms), _RESUMED.at(uniforms)).astype(int).tolist()
        return firsts

    def _steps(self, firsts: list[int], num: int, seed: int) -> Iterator[_Step]:
        uniforms = stream(seed, "turns").random(num)
        first = np.array(firsts)
        resumed = np.where(first < 100_000, _RESUMED_TURNS.at(uniforms), _LONG_TURNS.at(uniforms))
        turns = np.where(first < 40_000, _FRESH_TURNS.at(uniforms), resumed)
        starts_agent = stream(seed, "agents").random(num) < self.agent_share
        agent_turns = _AGENT_TURNS.lengths(stream(seed, "agent turns"), num)
        index = 0
        for session, num_turns in enumerate(np.rint(turns).astype(int).tolist()):
            main = last = None
            for _ in range(num_turns):
                yield _Step(session, main, last, False)
                main = last = index
                index += 1
                before = None
                for _ in range(agent_turns[main] if starts_agent[main] else 0):
                    yield _Step(session, before, last, True)
                    before = last = index
                    index += 1

    def _prompts(self, steps: list[_Step], firsts: list[int], outputs: list[int], seed: int) -> list[ContentPrompt]:
        growth = _Growth(len(steps), firsts, self.rewrite_share, self._limits(firsts, seed), seed)
        prompts: list[ContentPrompt] = []
        for index, step in enumerate(steps):
            if step.before is None:
                prompts.append(prompt_after((), 0, growth.first(index, step), index, CONTENT_SIZE))
                continue
            before = prompts[step.before]
            prompts.append(growth.next(index, step, before, outputs[step.before]))
            prompts[step.before] = before.followed_by(prompts[index])
        return prompts

    def _limits(self, firsts: list[int], seed: int) -> list[float]:
        """Tokens at which each session is compacted."""
        limits = _LIMITS.draw(stream(seed, "limits"), len(firsts))
        wide = stream(seed, "wide").random(len(firsts)) < self.wide_share
        wide |= np.array(firsts) > limits
        limit: list[float] = np.where(wide, _WIDE_LIMIT, limits).tolist()
        return limit


class _Growth:
    """How long each prompt is, and how much of the one before it repeats."""

    def __init__(self, num: int, firsts: list[int], rewrite_share: float, limits: list[float], seed: int) -> None:
        self._firsts, self._limits = firsts, limits
        self._agent_firsts = _AGENT_FIRST.lengths(stream(seed, "agent prompts"), num)
        added = stream(seed, "added").random(num)
        self._added = np.rint(_ADDED.at(added)).astype(int).tolist()
        self._added_early = np.rint(_ADDED_EARLY.at(added)).astype(int).tolist()
        self._agent_added = np.rint(_AGENT_ADDED.at(added)).astype(int).tolist()
        rewritten = stream(seed, "rewritten").random(num) < rewrite_share
        self._kept = np.where(rewritten, _KEPT.draw(stream(seed, "kept"), num), 1.0).tolist()
        self._compacted = _COMPACTED.lengths(stream(seed, "compacted"), num)

    def first(self, index: int, step: _Step) -> int:
        return self._agent_firsts[index] if step.is_agent else self._firsts[step.session]

    def next(self, index: int, step: _Step, before: ContentPrompt, answer: int) -> ContentPrompt:
        said = before.num_tokens
        early = self._agent_added if step.is_agent else self._added_early
        added = (early if said < 30_000 else self._added)[index]
        num_tokens = said + answer + added
        kept = round(said * self._kept[index])
        if num_tokens > self._limits[step.session]:
            num_tokens = self._compacted[index]
            kept = _TOOLS_AND_SYSTEM
        return prompt_after(before.content_ids, kept, num_tokens, index, CONTENT_SIZE)


def _links(steps: list[_Step], seed: int) -> list[Link | None]:
    """The time to think before each request; with a sub-agent at either end it is an agent's."""
    uniforms = stream(seed, "think").random(len(steps))
    thinks, agent_thinks = _THINKS.at(uniforms).tolist(), _AGENT_THINKS.at(uniforms).tolist()
    links: list[Link | None] = []
    for index, step in enumerate(steps):
        if step.after is None:
            links.append(None)
            continue
        of_agent = step.is_agent or steps[step.after].is_agent
        links.append(Link((step.after,), agent_thinks[index] if of_agent else thinks[index]))
    return links

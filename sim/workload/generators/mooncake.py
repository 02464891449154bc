"""`mooncake-conversation`: long prompts that share a block, and conversations that come back among thousands of others.

Imitates Mooncake's conversation trace (Apache-2.0; FAST 2025): 12,031 requests of an hour, ids of 512 tokens, every
request behind block 0. From the trace: percentiles of first prompts, of what a turn adds, of answers, of how many
requests pass between two turns, and how often a conversation goes on or goes back to an earlier point of itself.
Distances over 12,031 requests, ten seeds: reuse 0.359 to 0.378 (trace 0.374); under LRU within 0.015 at every capacity
measured, from 0.1 to 26 million tokens; prompts within 13 % at p25, 10 % at p10 and from p50 to p99, 5 % in the mean;
answers within 5 %.
As in the trace nothing waits for answers, and answers are in no prompt's ids before the next turn. Arrivals are
Poisson, as the trace is once its 3 s ticks are spread, without its slow rise (by a third over the hour).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np

from policies.prompt import ContentPrompt
from sim.workload.generators.prompts import prompt_after
from sim.workload.quantiles import Percentiles
from sim.workload.recipe import Draw
from sim.workload.streams import stream

CONTENT_SIZE = 512

_FIRST = Percentiles(  # tokens of a conversation's first prompt
    {0: 891, 5: 897, 10: 904, 15: 940, 20: 1075, 25: 1300, 30: 1700, 40: 3750, 50: 5150, 60: 7100, 70: 10350, 75: 12600,
     80: 15300, 85: 19000, 90: 25200, 95: 37500, 98: 65000, 99: 88000, 100: 126195}
)  # fmt: skip
_ADDED = Percentiles(  # tokens of a turn beyond the prompt and the answer before
    {0: 1, 20: 7, 30: 11, 40: 16, 50: 26, 60: 52, 70: 172, 75: 356, 80: 694, 85: 2543, 90: 4194, 95: 6921, 98: 11727,
     99: 16705, 100: 40000}
)  # fmt: skip
_OUTPUTS = Percentiles(
    {0: 1, 2: 3, 5: 10, 10: 24, 15: 46, 20: 100, 25: 157, 30: 213, 40: 291, 50: 350, 60: 399, 70: 447, 80: 504, 90: 597,
     95: 698, 98: 892, 99: 1119, 99.5: 1568, 99.9: 2000, 100: 2000}
)  # fmt: skip
# Requests until the next turn, somewhat more than the trace shows: turns that came after its end are missing in it.
_GAPS = Percentiles(
    {0: 10, 1: 45, 5: 105, 10: 155, 25: 270, 50: 500, 75: 1070, 90: 2000, 95: 2800, 100: 10000}, log=True
)
_KEPT = Percentiles({0: 0.02, 5: 0.054, 25: 0.117, 50: 0.222, 75: 0.468, 95: 0.944, 100: 1.0})  # where one goes back

_GOES_ON = (0.45, 0.49, 0.6, 0.68, 0.73)  # how probably, by turn; the last one for all later
_SHORT = 1000  # tokens: a system prompt and a word or two, after which nothing comes
_LONG = 24_000  # tokens beyond which another turn is rarer
_LONG_FACTOR = 0.65


@dataclass(frozen=True, slots=True)
class MooncakeConversation:
    """`back_share`: of the turns that follow, those that keep only the head of what was said."""

    default_arrivals: ClassVar[str] = "poisson"
    default_rate: float = 3.4
    back_share: float = 0.15

    def draw(self, num_requests: int, seed: int) -> Draw:
        outputs = _OUTPUTS.lengths(stream(seed, "outputs"), num_requests)
        return Draw(self._prompts(outputs, seed), outputs)

    def _prompts(self, outputs: list[int], seed: int) -> list[ContentPrompt]:
        num = len(outputs)
        first, added = _FIRST.lengths(stream(seed, "prompts"), num), _ADDED.lengths(stream(seed, "added"), num)
        gaps, kept = _GAPS.lengths(stream(seed, "gaps"), num), self._kept(num, seed)
        goes_on = stream(seed, "goes on").random(num).tolist()
        prompts: list[ContentPrompt] = []
        due: list[tuple[int, int, int]] = []  # from when on, after which request, as which turn
        for index in range(num):
            turn = 0
            if due and due[0][0] <= index:
                _, before, turn = heappop(due)
                beyond = added[index] if kept[index] == 1.0 else first[index]
                prompts.append(_next(prompts[before], outputs[before], kept[index], beyond, index))
            else:
                prompts.append(prompt_after((0,), CONTENT_SIZE, first[index], index, CONTENT_SIZE))
            if goes_on[index] < _goes_on(turn, prompts[index].num_tokens):
                heappush(due, (index + gaps[index], index, turn + 1))
        return prompts

    def _kept(self, num: int, seed: int) -> list[float]:
        """The share of a conversation that its next turn repeats."""
        goes_back = stream(seed, "goes back").random(num) < self.back_share
        kept: list[float] = np.where(goes_back, _KEPT.draw(stream(seed, "kept"), num), 1.0).tolist()
        return kept


def _next(before: ContentPrompt, output: int, kept: float, beyond: int, index: int) -> ContentPrompt:
    """`beyond`: tokens after what is kept, or after the answer where all is."""
    if kept == 1.0:
        said = before.num_tokens
        return prompt_after(before.content_ids, said, said + output + beyond, index, CONTENT_SIZE)
    said = max(CONTENT_SIZE, round(kept * before.num_tokens))
    return prompt_after(before.content_ids, said, said + beyond, index, CONTENT_SIZE)


def _goes_on(turn: int, num_tokens: int) -> float:
    """How probably another turn follows."""
    if num_tokens < _SHORT:
        return 0.0
    return _GOES_ON[min(turn, len(_GOES_ON) - 1)] * (_LONG_FACTOR if num_tokens > _LONG else 1.0)

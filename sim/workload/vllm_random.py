"""The random data set of `vllm bench serve`, as that tool draws it from a seed: same lengths, same arrivals.

Lengths are uniform around their means. A prompt is a run of consecutive tokens that begins anywhere in the vocabulary,
so two prompts that begin alike share a prefix: with a vocabulary of some thousand tokens that happens. Gaps are drawn
one by one and then stretched so that the last request comes at num_requests / rate.

The tool turns tokens into text and back, by which some prompts lose or gain a few tokens: that is not followed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from policies.prompt import ContentPrompt
from policies.types import Request
from sim.workload.workload import WorkItem, Workload


@dataclass(frozen=True, slots=True)
class VllmRandom:
    """Lengths in tokens. `prefix_tokens` open every prompt, and are beside `prompt_tokens`.

    `num_beginnings`: how many ways a prompt can begin after them. `content_size`: tokens a block whose content is told
    apart; a prefix must be whole blocks.
    """

    num_requests: int
    rate: float
    seed: int = 0
    prompt_tokens: int = 1024
    output_tokens: int = 128
    range_ratio: float = 0.0
    prefix_tokens: int = 0
    vocab_size: int = 32000
    num_beginnings: int = 32000
    content_size: int = 16

    def __post_init__(self) -> None:
        if self.prefix_tokens % self.content_size:
            raise ValueError(f"prefix_tokens ({self.prefix_tokens}) must be a multiple of {self.content_size}")

    def workload(self, name: str = "vllm-random") -> Workload:
        draw = np.random.default_rng(self.seed)
        prompts = draw.integers(*self._range(self.prompt_tokens), size=self.num_requests).tolist()
        outputs = draw.integers(*self._range(self.output_tokens), size=self.num_requests).tolist()
        offsets = draw.integers(0, self.vocab_size, size=self.num_requests).tolist()
        beginnings = [(offset + index) % self.num_beginnings for index, offset in enumerate(offsets)]
        items = [
            WorkItem(Request(f"request-{index}", arrival, self._prompt(*prompt), output), output)
            for index, (arrival, prompt, output) in enumerate(
                zip(self.arrivals(), zip(prompts, beginnings, strict=True), outputs, strict=True)
            )
        ]
        return Workload(name, items, ("max_tokens is each answer's own length, as the tool asks for it",), repr(self))

    def _range(self, mean: int) -> tuple[int, int]:
        """Least, and one above the most."""
        low, high = math.floor(mean * (1 - self.range_ratio)), math.ceil(mean * (1 + self.range_ratio))
        return max(1, low), max(1, high) + 1

    def arrivals(self) -> list[float]:
        """Seconds from the first request."""
        gaps = np.random.RandomState(self.seed).gamma(1.0, 1.0 / self.rate, size=self.num_requests)
        times = np.cumsum(gaps)
        times *= self.num_requests / self.rate / times[-1]
        found: list[float] = (times - times[0]).tolist()
        return found

    def _prompt(self, own: int, beginning: int) -> ContentPrompt:
        """Blocks of the prefix, which all have, then of the beginning, each with its place."""
        size, num_prefix = self.content_size, self.prefix_tokens // self.content_size
        num = -(-(self.prefix_tokens + own) // size)
        ids = [-1 - place for place in range(num_prefix)]
        ids += [beginning * (1 << 20) + place for place in range(num - num_prefix)]
        return ContentPrompt(self.prefix_tokens + own, tuple(ids), size)

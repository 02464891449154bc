"""`conversation`: chats whose every turn repeats all that was said, behind one system prompt, and waits for the answer.

Turns per conversation imitate WildChat (mean 2.35, median 1, p99 13; known at second hand): mean within 3 %, median 1
or 2 by seed, p99 within 1. Lengths of questions and answers, and think times, are assumed: lognormal, independent. What
is said again is found, the answers too: reuse is near 0.8 by prompts alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from policies.prompt import ContentPrompt
from policies.types import Context
from sim.workload.generators.prompts import prompt_after
from sim.workload.recipe import Draw, Link
from sim.workload.streams import lognormal_lengths, stream

CONTENT_SIZE = 16


@dataclass(frozen=True, slots=True)
class Conversation:
    """Lengths in tokens, think times in seconds; `turns_sigma` is that of the logarithm of the number of turns."""

    default_arrivals: ClassVar[str] = "poisson"
    default_rate: float = 2.0
    turns_sigma: float = 1.1
    system_tokens: int = 256
    question_median: int = 64
    question_sigma: float = 1.0
    question_most: int = 4096
    output_median: int = 192
    output_sigma: float = 0.7
    output_most: int = 1024
    think_median: float = 20.0
    think_sigma: float = 1.0

    def draw(self, num_requests: int, seed: int) -> Draw:
        questions = lognormal_lengths(
            stream(seed, "prompts"), num_requests, self.question_median, self.question_sigma, self.question_most
        )
        outputs = lognormal_lengths(
            stream(seed, "outputs"), num_requests, self.output_median, self.output_sigma, self.output_most
        )
        begins = self._begins(num_requests, seed)
        return Draw(
            prompts=self._prompts(questions, outputs, begins),
            outputs=outputs,
            contexts=_contexts(begins),
            links=self._links(begins, seed),
        )

    def _begins(self, num: int, seed: int) -> NDArray[np.bool_]:
        """Whether a request is the first of its conversation."""
        turns = np.ceil(np.exp(self.turns_sigma * stream(seed, "turns").standard_normal(num))).astype(int)
        begins = np.zeros(num + 1, dtype=bool)
        begins[np.minimum(np.cumsum(turns), num)] = True
        begins[0] = True
        return begins[:num]

    def _prompts(self, questions: list[int], outputs: list[int], begins: NDArray[np.bool_]) -> list[ContentPrompt]:
        prompts: list[ContentPrompt] = []
        system = tuple(range(self.system_tokens // CONTENT_SIZE))
        for index, (question, begin) in enumerate(zip(questions, begins.tolist(), strict=True)):
            if begin:
                prompts.append(
                    prompt_after(system, self.system_tokens, self.system_tokens + question, index, CONTENT_SIZE)
                )
                continue
            said, before = prompts[-1].num_tokens, prompts[-1]
            now = prompt_after(before.content_ids, said, said + outputs[index - 1] + question, index, CONTENT_SIZE)
            prompts[-1] = before.followed_by(now)
            prompts.append(now)
        return prompts

    def _links(self, begins: NDArray[np.bool_], seed: int) -> list[Link | None]:
        thinks = self.think_median * np.exp(self.think_sigma * stream(seed, "think").standard_normal(len(begins)))
        return [
            None if begin else Link((index - 1,), think)
            for index, (begin, think) in enumerate(zip(begins.tolist(), thinks.tolist(), strict=True))
        ]


def _contexts(begins: NDArray[np.bool_]) -> list[Context]:
    """A user a conversation."""
    conversations = (np.cumsum(begins) - 1).tolist()
    return [Context(user=f"user-{each}", session=f"session-{each}") for each in conversations]

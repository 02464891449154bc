"""Prompts to text, as it comes: all run in one batch, and are shown in order, the first one live."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from secrets import token_bytes
from typing import TextIO

from backend.device import LiveExecutor
from backend.front import Answer, Front
from backend.start import Body
from policies.catalogue import build
from policies.journal import Write
from policies.prompt import TokenPrompt
from policies.types import FinishReason, Request, RequestRecord, Sampling


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of every prompt."""

    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)


def generate(body: Body, prompts: Sequence[str], wish: Wish, journal: Write | None = None) -> None:
    """Print each prompt with its answer, and on standard error what it took.

    Raises ValueError, before anything runs, for a prompt that is empty or can never be held, and for bad sampling.
    """
    executor = body.executor()
    requests = [_request(body, str(index), prompt, wish) for index, prompt in enumerate(prompts)]
    scratch = build(body.config)
    for request in requests:
        executor.check(request)
        if not (outcome := scratch.add(request, 0.0)).accepted:
            raise ValueError(outcome.reason)
    answers = asyncio.run(_generate(body, executor, prompts, requests, journal))
    print(_told([answer.record for answer in answers if answer.record is not None]), file=sys.stderr)


async def _generate(
    body: Body, executor: LiveExecutor, prompts: Sequence[str], requests: Sequence[Request], journal: Write | None
) -> list[Answer]:
    began = time.monotonic()
    secret = token_bytes(32)  # nobody who reads the journal can try out what was asked
    async with Front(build(body.config, journal, secret), executor) as front:
        answers = [front.ask(replace(request, arrival_time=began)) for request in requests]
        for prompt, answer in zip(prompts, answers, strict=True):
            await _show(body, prompt, answer, sys.stdout)
    return answers


async def _show(body: Body, prompt: str, answer: Answer, out: TextIO) -> None:
    """The answer behind its prompt; a model without a tokenizer says numbers."""
    tokenizer = body.loaded.tokenizer
    text = None if tokenizer is None else tokenizer.stream()
    out.write(prompt)
    async for token in answer:
        out.write(f" {token}" if text is None else text.push(token))
        out.flush()
    out.write("\n" if text is None else text.finish() + "\n")


def _request(body: Body, name: str, prompt: str, wish: Wish) -> Request:
    """Without a tokenizer, the prompt's tokens are the bytes of its text."""
    tokenizer = body.loaded.tokenizer
    token_ids = tuple(prompt.encode()) if tokenizer is None else tokenizer.encode(prompt)
    return Request(name, 0.0, TokenPrompt(token_ids), wish.max_tokens, sampling=wish.sampling)


def _told(records: Sequence[RequestRecord]) -> str:
    num_prompt, num_cached = (sum(r.num_prompt_tokens for r in records), sum(r.num_cached_tokens for r in records))
    num_output = sum(record.num_output_tokens for record in records)
    began = min(record.arrival_time for record in records)
    first = min(r.first_token_time for r in records if r.first_token_time is not None) - began
    seconds = max(record.finish_time for record in records) - began
    num_cut = sum(record.reason is FinishReason.LENGTH for record in records)
    return (
        f"{num_prompt} tokens in, {num_cached} of them found in the cache; {num_output} out in {seconds:.2f} s, the "
        f"first after {first:.3f} s; {num_cut} of {len(records)} answers cut at the limit"
    )

"""What the executor knows of each request: its tokens, how it draws, and in experiments how its answer goes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from backend.sampling import Draw, check_sampling, default_seed
from policies.prompt import ContentPrompt, LengthPrompt, Prompt, TokenPrompt
from policies.types import FinishReason, Request


def prompt_tokens(prompt: Prompt, request_id: str, vocab_size: int) -> list[int]:
    """Token ids of a prompt: its own, or the ones its content stands for, so that equal content is equal tokens."""
    if isinstance(prompt, TokenPrompt):
        return _checked(prompt.token_ids, request_id, vocab_size)
    if isinstance(prompt, ContentPrompt):
        return _content_tokens(_known_ids(prompt), prompt.content_size, vocab_size)[: prompt.num_tokens]
    if isinstance(prompt, LengthPrompt):
        return _stream(f"own {request_id}", prompt.num_tokens, vocab_size)
    raise ValueError(f"request {request_id} has a {type(prompt).__name__}: its tokens cannot be told")


def known_answer(prompt: Prompt, vocab_size: int) -> list[int]:
    """Tokens of the answer that a later turn of the session repeats: keys of answers are made from them."""
    if not isinstance(prompt, ContentPrompt) or not prompt.continuation:
        return []
    tokens = _content_tokens(_known_ids(prompt), prompt.content_size, vocab_size)
    return tokens[prompt.num_tokens : prompt.num_known_tokens]


def _known_ids(prompt: ContentPrompt) -> tuple[int, ...]:
    """As its keys are made: what a later turn calls the tokens of its last, unfilled id is what they are."""
    if not prompt.continuation:
        return prompt.content_ids
    return prompt.content_ids[: prompt.num_tokens // prompt.content_size] + prompt.continuation


def _checked(token_ids: Sequence[int], request_id: str, vocab_size: int) -> list[int]:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"request {request_id} has token {token_id}, outside the vocabulary of {vocab_size}")
    return list(token_ids)


def _content_tokens(ids: Sequence[int], size: int, vocab_size: int) -> list[int]:
    tokens: list[int] = []
    for content in ids:
        tokens.extend(_stream(f"content {content}", size, vocab_size))
    return tokens


def _stream(name: str, num_tokens: int, vocab_size: int) -> list[int]:
    """Tokens that the name stands for; a longer stream begins with the shorter."""
    seed = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
    bits = np.random.Generator(np.random.PCG64(seed)).random(num_tokens)
    tokens: list[int] = (bits * vocab_size).astype(np.int64).tolist()
    return tokens


class LiveSequence:
    """Tokens of one request, prompt and answer, and what comes next."""

    __slots__ = ("_answer", "_length", "_seed", "num_prompt_tokens", "sampling", "stops", "tokens")

    def __init__(
        self,
        request: Request,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        length: int | None = None,
        answer: Sequence[int] = (),
    ) -> None:
        """`length` ends the answer there whatever the model says; `answer` says its first tokens.

        Raises ValueError for tokens outside the vocabulary and for bad sampling.
        """
        self.sampling = check_sampling(request, vocab_size)
        self.tokens = prompt_tokens(request.prompt, request.request_id, vocab_size)
        self.num_prompt_tokens = len(self.tokens)
        self.stops = frozenset(() if length is not None else (*eos_token_ids, *self.sampling.stop_token_ids))
        self._answer = _checked(answer, request.request_id, vocab_size) or known_answer(request.prompt, vocab_size)
        self._length = length
        self._seed = default_seed(request.request_id) if self.sampling.seed is None else self.sampling.seed

    def draw(self, position: int) -> Draw | None:
        """How the token at this position is chosen; None: the likeliest."""
        if self.sampling.temperature == 0.0:
            return None
        return Draw(self.sampling, self._seed, position)

    def says(self, position: int, token_id: int) -> tuple[int, FinishReason | None]:
        """The token at `position`, which the model proposes, as it is said; and why it is the last, if it is.

        A position that comes again, after outputs were dropped, is overwritten.
        """
        index = position - self.num_prompt_tokens
        if index < len(self._answer):
            token_id = self._answer[index]
        self.tokens[position:] = [token_id]
        is_last = index + 1 >= self._length if self._length is not None else token_id in self.stops
        return token_id, FinishReason.STOP if is_last else None

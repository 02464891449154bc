"""From logits to tokens: greedy, or drawn with a temperature from the likeliest ones.

Chance is a function of (seed, position): what a request draws does not depend on who shares its step, or on how often
it was preempted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from policies.types import Request, Sampling


def check_sampling(request: Request, vocab_size: int) -> Sampling:
    """The request's sampling, greedy if it has none. Raises ValueError for values no sampler can use."""
    sampling = request.sampling or Sampling()
    name = f"request {request.request_id}"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0.0):
        raise ValueError(f"{name} has temperature {sampling.temperature}: give 0 (greedy) or more")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"{name} has top_p {sampling.top_p}: give more than 0 and at most 1")
    if not 0 <= sampling.top_k <= vocab_size:
        raise ValueError(f"{name} has top_k {sampling.top_k}: give 0 (off) to {vocab_size}, the vocabulary")
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**64:
        raise ValueError(f"{name} has seed {sampling.seed}: give one of 64 bits")
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} stops at token {token_id}, outside the vocabulary of {vocab_size}")
    return sampling


def default_seed(request_id: str) -> int:
    """Of a request that names none: the same id draws the same."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the same for the same seed and position, unrelated otherwise."""
    content = seed.to_bytes(32, "little", signed=True) + position.to_bytes(8, "little")
    return int.from_bytes(blake2b(content, digest_size=8).digest()[:7], "little") / 2**56


class Draw(NamedTuple):
    """How one row becomes a token that is not simply the likeliest."""

    sampling: Sampling
    seed: int
    position: int


def sample(logits: Tensor, is_finite: Tensor, draws: Sequence[Draw | None]) -> list[int]:
    """[rows, vocab_size] -> a token a row; None takes the likeliest. One transfer from the device for all of these.

    Raises FloatingPointError if the step that gave the logits holds values that are no numbers.
    """
    highest, likeliest = logits.max(dim=-1)  # NaN counts as the highest
    is_finite = is_finite & torch.isfinite(highest).all()
    *tokens, finite = torch.cat((likeliest, is_finite.long().view(1))).tolist()
    if not finite:
        raise FloatingPointError("the model's values are not finite: the step is void")
    for row, draw in enumerate(draws):
        if draw is not None:
            tokens[row] = _drawn(logits[row].cpu(), draw)
    return tokens


def _drawn(logits: Tensor, draw: Draw) -> int:
    """Walk down the tokens, likeliest first, until their weight passes the share that chance picked."""
    sampling = draw.sampling
    scores, order = logits.double().sort(descending=True, stable=True)
    if sampling.top_k:
        scores = scores[: sampling.top_k]
    reached = torch.softmax((scores - scores[0]) / sampling.temperature, dim=-1).cumsum(0)
    if sampling.top_p < 1.0:  # the fewest tokens that weigh top_p together
        reached = reached[: int(torch.searchsorted(reached, sampling.top_p).item()) + 1]
    target = uniform(draw.seed, draw.position) * float(reached[-1])
    picked = int(torch.searchsorted(reached, target, right=True).item())
    return int(order[min(picked, len(reached) - 1)].item())

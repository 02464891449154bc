"""Which requests no engine of this configuration could ever serve."""

from __future__ import annotations

import math

from policies.config import EngineConfig
from policies.types import Request


def check(request: Request) -> None:
    """Raises ValueError for what is a mistake of the caller, whatever the configuration."""
    if request.prompt.num_tokens < 1:
        raise ValueError(f"request {request.request_id} has an empty prompt: send at least one token")
    if request.max_tokens < 1:
        raise ValueError(f"request {request.request_id} has max_tokens {request.max_tokens}: ask for at least 1")
    if not math.isfinite(request.arrival_time):
        raise ValueError(f"request {request.request_id} has arrival_time {request.arrival_time}: give finite seconds")


def token_limit(request: Request, config: EngineConfig) -> int:
    """Output tokens at which a request ends for length."""
    return min(request.max_tokens, config.max_model_len - request.prompt.num_tokens)


def misfit(request: Request, config: EngineConfig, num_blocks: int) -> str:
    """Why a request can never run, with the numbers; empty if it can. `num_blocks` is all that it may use."""
    prompt = request.prompt.num_tokens
    if prompt >= config.max_model_len:
        return (
            f"request {request.request_id} has a prompt of {prompt} tokens, but max_model_len is "
            f"{config.max_model_len}, the answer included: shorten it or raise max_model_len"
        )
    most = prompt + token_limit(request, config) - 1  # the last token's KV is never computed
    capacity = num_blocks * config.block_size
    if most > capacity:
        return (
            f"request {request.request_id} needs {most} tokens of KV cache, but the cache holds {capacity} "
            f"({num_blocks} blocks of {config.block_size}): lower max_tokens or enlarge the cache"
        )
    return ""


def unpromised(request: Request, num_promised: int, config: EngineConfig, num_blocks: int) -> str:
    """Why an allocation policy that asks for more than there is will never let a request in."""
    return (
        f"request {request.request_id} would be promised {num_promised} blocks by {config.allocation!r}, but the cache "
        f"has {num_blocks}: lower max_model_len ({config.max_model_len}) or enlarge the cache"
    )

"""Whose content ids are: those that one request alone brings, and those of the prompt that it goes on from."""

from __future__ import annotations

from policies.prompt import ContentPrompt

IDS_PER_REQUEST = 2**20  # more than any prompt has: no two requests' own ids can meet, nor any with those below


def own_ids(index: int, num: int) -> range:
    """Ids that no request but this one brings; ids below IDS_PER_REQUEST are free to be shared."""
    first = (index + 1) * IDS_PER_REQUEST
    return range(first, first + num)


def prompt_after(
    before: tuple[int, ...], num_kept_tokens: int, num_tokens: int, index: int, size: int
) -> ContentPrompt:
    """A prompt that begins with as many whole ids of `before` as `num_kept_tokens` fill; the rest is its own."""
    kept = before[: min(num_kept_tokens, num_tokens) // size]
    return ContentPrompt(num_tokens, (*kept, *own_ids(index, -(-num_tokens // size) - len(kept))), size)

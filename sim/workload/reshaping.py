"""What is left of a prompt that is cut short, or that carries something no other prompt does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from policies.prompt import ContentPrompt, LengthPrompt, Prompt, TokenPrompt


def shortened(prompt: Prompt, num_tokens: int) -> Prompt:
    """Its first tokens, and what is known of the answer as far as it fits."""
    if isinstance(prompt, ContentPrompt):
        return _shortened_content(prompt, num_tokens)
    if prompt.num_tokens <= num_tokens:
        return prompt
    if isinstance(prompt, LengthPrompt):
        return LengthPrompt(num_tokens)
    if isinstance(prompt, TokenPrompt):
        return TokenPrompt(prompt.token_ids[:num_tokens])
    raise ValueError(f"a {type(prompt).__name__} of {prompt.num_tokens} tokens cannot be cut to {num_tokens}")


def _shortened_content(prompt: ContentPrompt, num_tokens: int) -> ContentPrompt:
    size = prompt.content_size
    known = _known_up_to(prompt, num_tokens)
    if prompt.num_tokens <= num_tokens:
        return known
    return replace(known, num_tokens=num_tokens, content_ids=prompt.content_ids[: -(-num_tokens // size)])


def _known_up_to(prompt: ContentPrompt, num_tokens: int) -> ContentPrompt:
    """Nothing is known of the answer beyond so many tokens of prompt and answer."""
    if prompt.num_known_tokens <= num_tokens:
        return prompt
    if num_tokens <= prompt.num_tokens:
        return replace(prompt, continuation=(), num_known_tokens=0)
    size = prompt.content_size
    kept = -(-num_tokens // size) - prompt.num_tokens // size
    return replace(prompt, continuation=prompt.continuation[:kept], num_known_tokens=num_tokens)


class Volatile:
    """Gives each prompt ids of its own from the one on that holds the token at `position`."""

    def __init__(self, prompts: Iterable[Prompt], position: int) -> None:
        self._position = position
        self._next = 1 + max(
            (max((*each.content_ids, *each.continuation)) for each in prompts if isinstance(each, ContentPrompt)),
            default=0,
        )

    def changed(self, prompt: Prompt) -> Prompt:
        """Those without content, or too short, stay; real token ids are refused."""
        if isinstance(prompt, TokenPrompt):
            raise ValueError("a volatile token cannot be put among real token ids: use a workload of content ids")
        if not isinstance(prompt, ContentPrompt):
            return prompt
        kept = self._position // prompt.content_size
        known = _known_up_to(prompt, kept * prompt.content_size)
        num_own = len(prompt.content_ids) - kept
        if num_own <= 0 or self._position >= prompt.num_tokens:
            return known
        own = range(self._next, self._next + num_own)
        self._next += num_own
        return replace(known, content_ids=(*prompt.content_ids[:kept], *own))

"""How much of all prompts a prefix cache could find, by tokens: an endless one, or one of a size.

The cache is fed in order, each request at once, by prompts alone: the content of answers is no trace's business. Equal
ids are equal content only behind equal ids. A prompt's last id may be partial; where it was seen, its tokens count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from policies.prompt import ContentPrompt, Prompt


def reuse(prompts: Iterable[Prompt]) -> float:
    """The share of prompt tokens that a cache finds which forgets nothing."""
    names: dict[tuple[int, int], int] = {}
    found = total = 0
    for prompt in prompts:
        total += prompt.num_tokens
        if isinstance(prompt, ContentPrompt):
            num_names = len(names)
            num_found = sum(each <= num_names for each in named_chain(prompt.content_ids, names))
            found += min(num_found * prompt.content_size, prompt.num_tokens)
    return found / total if total else 0.0


def lru_reuse(prompts: Sequence[Prompt], sizes: Sequence[int]) -> list[float]:
    """The same of caches of so many content ids, where the least recently used go first.

    Of one prompt's ids the last is the first to go, so that no head is lost before what hangs on it.
    """
    names: dict[tuple[int, int], int] = {}
    shared = [prompt for prompt in prompts if isinstance(prompt, ContentPrompt)]
    chains = [named_chain(prompt.content_ids, names) for prompt in shared]
    total = sum(prompt.num_tokens for prompt in prompts)
    return [_found(shared, chains, size) / total if total else 0.0 for size in sizes]


def _found(prompts: Sequence[ContentPrompt], chains: Sequence[list[int]], size: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for prompt, blocks in zip(prompts, chains, strict=True):
        num_found = sum(1 for _ in takewhile(cache.__contains__, blocks))
        found += min(num_found * prompt.content_size, prompt.num_tokens)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size:
            cache.popitem(last=False)
    return found


def named_chain(content_ids: Iterable[int], names: dict[tuple[int, int], int]) -> list[int]:
    """A number for each id together with all before it."""
    parent, blocks = 0, list[int]()
    for content in content_ids:
        parent = names.setdefault((parent, content), len(names) + 1)
        blocks.append(parent)
    return blocks

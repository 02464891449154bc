"""What keeps prompts from being found again: a token of its own early in each, a shared beginning shorter than a block.

Counted for a cache that forgets nothing and that all may share, request after request: what is found is a bound. Only
full blocks have keys and the last token is always computed, so of `shared` tokens in a prompt of `p` a cache with
blocks of `b` finds min(shared // b, (p - 1) // b) * b. A token at position k that differs from request to request
leaves of this what lies in the blocks before its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policies.prompt import ContentPrompt
from sim.workload.every import every_item
from sim.workload.workload import WorkItem, Workload

CAVEAT = (
    "What varies (a time, an id, a name) costs what is shared behind it. Move it back only where the answers stay "
    "right and the prompt stays plain: an instruction that must come first, or a rule that is clear where it stands, "
    "is worth more than its hits."
)
BLOCK_SIZE = 16  # the engine's default
BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)


class VolatileToken(NamedTuple):
    """What is still found with a token at `position` that no two prompts have alike."""

    position: int
    num_found_tokens: int


class Blocks(NamedTuple):
    """What is found in blocks of a size; `num_short` requests share a beginning, but not a whole block."""

    block_size: int
    num_found_tokens: int
    num_short: int


@dataclass(frozen=True, slots=True)
class Lint:
    """Tokens are those of all prompts. `shared_p50`: of the requests that share a beginning with an earlier one."""

    block_size: int
    num_requests: int
    num_prompt_tokens: int
    num_sharing: int
    shared_p50: int
    num_found_tokens: int
    volatile: tuple[VolatileToken, ...]
    blocks: tuple[Blocks, ...]

    def num_computed(self, num_found_tokens: int) -> float:
        """Prompt tokens a request that are left to compute."""
        return (self.num_prompt_tokens - num_found_tokens) / self.num_requests


class Shared(NamedTuple):
    """Of a prompt of `num_tokens`, how many stand at the head of an earlier one, or of it and its answer."""

    num_tokens: int
    num_shared: int

    def found(self, block_size: int, before: int | None = None) -> int:
        """Tokens in whole blocks, before the one that holds position `before`."""
        num_blocks = min(self.num_shared, self.num_tokens - 1) // block_size
        return block_size * (num_blocks if before is None else min(num_blocks, before // block_size))


def lint(workload: Workload, block_size: int | None = None) -> Lint | None:
    """None where prompts have no content: nothing can be said of them.

    Blocks are of 16 tokens unless given, or as long as a content id where that fits none. Raises ValueError for blocks
    that neither divide nor are a multiple of the content ids.
    """
    items = every_item(workload)
    sizes = {each.content_size for item in items if isinstance(each := item.request.prompt, ContentPrompt)}
    if not sizes:
        return None
    size = block_size or (BLOCK_SIZE if _fits(BLOCK_SIZE, sizes) else max(sizes))
    if not _fits(size, sizes):
        told = ", ".join(map(str, sorted(sizes)))
        raise ValueError(
            f"block_size {size} neither divides nor is a multiple of the content ids' {told} tokens: "
            "choose one that does"
        )
    beginnings = shared_beginnings(items)
    sharing = sorted(each.num_shared for each in beginnings if each.num_shared)
    return Lint(
        block_size=size,
        num_requests=len(items),
        num_prompt_tokens=sum(each.num_tokens for each in beginnings),
        num_sharing=len(sharing),
        shared_p50=sharing[len(sharing) // 2] if sharing else 0,
        num_found_tokens=sum(each.found(size) for each in beginnings),
        volatile=_volatile(beginnings, size),
        blocks=tuple(_blocks(beginnings, each) for each in sorted({*BLOCK_SIZES, size}) if _fits(each, sizes)),
    )


def _fits(block_size: int, content_sizes: Iterable[int]) -> bool:
    return all(size % block_size == 0 or block_size % size == 0 for size in content_sizes)


def _volatile(beginnings: Sequence[Shared], block_size: int) -> tuple[VolatileToken, ...]:
    """At the start, at the end of the first block and on in steps of four, until nothing is lost any more."""
    found: list[VolatileToken] = []
    position = 0
    most = max(each.found(block_size) for each in beginnings)
    while not found or position < most:
        found.append(VolatileToken(position, sum(each.found(block_size, position) for each in beginnings)))
        position = 4 * position or block_size
    return tuple(found)


def _blocks(beginnings: Sequence[Shared], block_size: int) -> Blocks:
    num_short = sum(0 < each.num_shared < block_size for each in beginnings)
    return Blocks(block_size, sum(each.found(block_size) for each in beginnings), num_short)


def shared_beginnings(items: Sequence[WorkItem]) -> list[Shared]:
    """Each with those before it, in the order given; content is known to the length of its ids."""
    seen = Heads()
    return [seen.share(item) for item in items]


class Heads:
    """All beginnings so far: content ids, each with all before it, and how far the last one has been filled."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._extents: dict[int, int] = {}  # tokens up to and in a node

    def share(self, item: WorkItem) -> Shared:
        prompt = item.request.prompt
        if not isinstance(prompt, ContentPrompt):
            return Shared(prompt.num_tokens, 0)
        ids = _known_ids(prompt)
        shared, node = 0, prompt.content_size  # ids of another size are other content
        for content in ids[: -(-prompt.num_tokens // prompt.content_size)]:
            found = self._nodes.get((node, content))
            if found is None:
                break
            node, shared = found, self._extents[found]
        self._add(prompt, ids, item.num_output_tokens)
        return Shared(prompt.num_tokens, min(shared, prompt.num_tokens))

    def _add(self, prompt: ContentPrompt, ids: Sequence[int], num_output_tokens: int) -> None:
        """The prompt and what is known of its answer, but for the last token, whose KV is never computed."""
        size = prompt.content_size
        known = max(prompt.num_tokens, min(prompt.num_known_tokens, prompt.num_tokens + num_output_tokens - 1))
        node = size
        for index, content in enumerate(ids[: -(-known // size)]):
            node = self._nodes.setdefault((node, content), -len(self._nodes) - 1)  # negative: sizes are roots
            self._extents[node] = max(self._extents.get(node, 0), min((index + 1) * size, known))


def _known_ids(prompt: ContentPrompt) -> tuple[int, ...]:
    """With what a later turn tells of the rest of its last id and of the answer."""
    if not prompt.continuation:
        return prompt.content_ids
    return (*prompt.content_ids[: prompt.num_tokens // prompt.content_size], *prompt.continuation)

"""Equal steps at once: how often a decode step may repeat with every decision the same, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence

from policies.kv import KVCache
from policies.types import RequestState


def repeat_limit(states: Sequence[RequestState], kv: KVCache, may_evict: bool) -> int:
    """For a step in which all the running decode, and nobody entered or left.

    The waiting, if any, were not let in: slots do not free themselves and memory only shrinks, so the next step would
    not let them in either. What ends it is an answer at its limit, or a block that somebody would have to yield. Where
    an eviction would matter to those who wait, the first one ends it too: whoever loses the head of a long cached
    prefix asks for less.
    """
    limit = min([state.token_limit - state.num_output_tokens for state in states])
    free = kv.num_free if may_evict else kv.num_without_key
    while limit > 1 and not _fits(states, kv.block_size, free - kv.num_held_back, limit - 1):
        limit //= 2
    return limit


def _fits(states: Sequence[RequestState], size: int, free: int, num_more: int) -> bool:
    """Whether each can grow by `num_more` tokens with so many blocks that are free and held back for nobody."""
    if len(states) * (num_more // size + 1) <= free:
        return True
    need = 0
    for state in states:
        over = state.num_computed_tokens + num_more - len(state.block_ids) * size
        if over > 0:
            need += max(0, -(-over // size) - state.num_held_blocks)
    return need <= free


def grow(states: Sequence[RequestState], kv: KVCache, num_more: int, caches: bool, now: float) -> None:
    """Take the blocks of `num_more` further steps in the order in which single steps would take them."""
    size = kv.block_size
    takes: list[tuple[int, int]] = []
    filled: list[RequestState] = []
    for index, state in enumerate(states):
        computed = state.num_computed_tokens
        state.num_computed_tokens = computed + num_more
        room = len(state.block_ids) * size - computed
        if room <= num_more:
            filled.append(state)
            takes.extend((at, index) for at in range(room, num_more, size))
    takes.sort()
    for _, index in takes:
        kv.allocate(states[index], 1, now)
    if caches:
        for state in filled:
            kv.cache(state, state.num_computed_tokens)

"""A step that threw: who cannot be trusted any more, and which blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.types import Block, Flight, RequestState, Status


def poisoned(
    flight: Flight, later: Sequence[Flight], running: Sequence[RequestState], blocks: Sequence[Block]
) -> tuple[list[RequestState], list[int]]:
    """Requests of a failed step and of those who read its blocks, and the blocks, to the fixed point.

    A block is bad while it carries the key under which a failed request was to fill it: since then it may have been
    given to somebody else. Who left in the meantime fails no more, but what it wrote is as bad.
    """
    spoilt = dict(zip(flight.states, flight.lives, strict=True))
    while True:
        bad: dict[int, int] = {}
        for each in (flight, *later):
            bad |= _written(each, spoilt, blocks)
        tables: list[tuple[RequestState, int, Sequence[int]]]
        tables = [(state, state.num_preemptions, state.block_ids) for state in running]
        for each in later:
            tables += zip(each.states, each.lives, each.plan.tables, strict=True)
        readers = {state: life for state, life, table in tables if state not in spoilt and _reads(state, table, bad)}
        if not readers:
            return [state for state in spoilt if state.status is not Status.FINISHED], list(bad)
        spoilt |= readers


def _reads(state: RequestState, table: Sequence[int], bad: Mapping[int, int]) -> bool:
    return any(bad.get(block_id) == key for block_id, key in zip(table, state.chain.keys, strict=False))


def _written(flight: Flight, writers: Mapping[RequestState, int], blocks: Sequence[Block]) -> dict[int, int]:
    """Block -> key, of the blocks that a step was to fill for these requests and that are still known by that key.

    Each writer with its life: what it computed after it had lost its blocks is not built on them.
    """
    written: dict[int, int] = {}
    size, restored = flight.block_size, {each.request_id: each.num_blocks for each in flight.plan.transfers}
    for state, life, chunk in zip(flight.states, flight.lives, flight.plan.chunks, strict=True):
        if writers.get(state) != life:
            continue
        first = chunk.start // size
        if chunk.request_id in restored:  # from host memory, before the step
            first = -(-chunk.start // size) - restored[chunk.request_id]
        last = chunk.start + chunk.num_tokens + flight.plan.repeat - 2
        for depth in range(first, min(last // size + 1, len(state.chain.keys))):
            block = blocks[chunk.block_ids[depth]]
            if block.key is not None and block.key == state.chain.keys[depth]:
                written[block.block_id] = block.key
    return written

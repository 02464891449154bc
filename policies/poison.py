"""A step that threw: who cannot be trusted any more, and which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.types import Flight, RequestState, Status


def poisoned(
    flight: Flight, later: Sequence[Flight], running: Sequence[RequestState], block_size: int
) -> tuple[list[RequestState], set[int]]:
    """Requests of a failed step and of those who read its blocks, and the blocks, to the fixed point."""
    failed = {state: None for state in flight.states if state.status is not Status.FINISHED}
    bad = _written(flight, failed, block_size)
    grown = True
    while grown:
        readers = [state for state in running if state not in failed and not bad.isdisjoint(state.block_ids)]
        grown = bool(readers)
        failed.update(dict.fromkeys(readers))
        for each in (flight, *later):
            bad |= _written(each, failed, block_size)
    return list(failed), bad


def _written(flight: Flight, writers: Iterable[RequestState], block_size: int) -> set[int]:
    """Blocks that a step writes for these requests."""
    wanted, written = set(writers), set[int]()
    for state, chunk in zip(flight.states, flight.plan.chunks, strict=True):
        if state in wanted:
            last = chunk.start + chunk.num_tokens + flight.plan.repeat - 2
            written.update(chunk.block_ids[chunk.start // block_size : last // block_size + 1])
    return written

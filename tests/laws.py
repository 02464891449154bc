"""Laws that an engine's state obeys after every event, whoever looks at it."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import islice

from policies.catalogue import make
from policies.engine import EngineCore
from policies.interfaces import AllocationPolicy
from policies.kv import KVCache
from policies.types import Block, RequestState, Status


def check_blocks(engine: EngineCore) -> None:
    """T21: each block is in one place, and references and promises add up."""
    kv, running = engine.kv, engine.running
    free = list(kv.free_order())
    tables = [state.block_ids for state in running]
    refs = Counter(block_id for table in tables for block_id in table)
    assert all(len(set(table)) == len(table) for table in tables), "a block is twice in one table"
    assert len({block.block_id for block in free}) == len(free) == kv.num_free, "a block is free twice"
    assert all(block.ref_count == 0 for block in free), "a block is free and referenced"
    assert all(kv.blocks[i].ref_count == refs[i] for i in range(1, kv.num_blocks + 1)), "references are miscounted"
    assert len(free) + len(refs) == kv.num_blocks, "T21: free + cached + held is not the whole pool"
    waiting = [state for state in engine.states if state.status is not Status.RUNNING]
    assert not any(state.block_ids for state in waiting), "somebody holds blocks while waiting"
    held_back = sum(state.num_held_blocks for state in running)
    assert kv.num_held_back == held_back, "what is held back is not what was promised to the running"
    assert kv.num_free >= kv.num_held_back, "more is held back than is free"
    if engine.config.unhashed_first:
        keyed = [block.key is not None for block in free]
        assert keyed == sorted(keyed), "blocks without a key are reused first"
        assert kv.num_idle_cached == sum(keyed), "cached blocks are miscounted"


def check_index(kv: KVCache) -> None:
    """A key leads to a block that has it, and every block that has one can be found or stands behind one that can."""
    found = {id(block) for block in kv._index.values()}
    for key, block in kv._index.items():
        assert block.key == key and kv.blocks[block.block_id] is block, "the index leads to a block without the key"
    for key, copies in kv._copies.items():
        assert copies and key in kv._index and kv._index[key] not in copies, "a copy without an original"
        assert all(copy.key == key for copy in copies), "a copy without the key"
        found.update(id(copy) for copy in copies)
    assert all((block.key is not None) == (id(block) in found) for block in kv.blocks), "a key nobody can find"
    assert kv.caching or not found, "caching is off, but a block can be found"


def check_drained(engine: EngineCore) -> None:
    """T28."""
    assert not engine.has_work and not list(engine.states), "T28: somebody never left"
    assert engine.kv.num_free == engine.kv.num_blocks, "T28: nobody is left, but blocks are held"
    assert engine.kv.num_held_back == 0, "T28: nobody is left, but blocks are held back"


def first_that_could_enter(engine: EngineCore, now: float, budget: int, cut: bool = True) -> str | None:
    """The first of those who may be asked that a step with so many tokens left could let in (T26).

    `cut`: a prompt may be cut to what is left. One that may not ends the step, whoever stands behind it.
    """
    config = engine.config
    if budget <= 0 or len(engine.running) == config.max_num_seqs:
        return None
    for state in islice(engine.scheduling.candidates(engine.view, now), config.hol_skip + 1):
        hit = engine.find_cached(state)
        num_new = state.num_tokens - len(hit) * config.block_size
        if config.batching == "chunked":
            num_new = min(num_new, config.long_prefill_token_threshold or num_new)
        if num_new > budget and not cut:
            return None
        if _has_room(engine, state, hit, min(num_new, budget)):
            return state.request_id
    return None


@cache
def _allocation(spec: str) -> AllocationPolicy:
    policy: AllocationPolicy = make("allocation", spec)
    return policy


def _has_room(engine: EngineCore, state: RequestState, hit: list[Block], num_new: int) -> bool:
    promise = _allocation(engine.config.allocation).promise(
        state, len(hit) * engine.config.block_size, num_new, engine.view
    )
    fresh = max(promise.num_blocks_required, promise.num_blocks_held)
    fresh -= sum(block.ref_count > 0 for block in hit)
    return fresh + promise.num_blocks_slack <= engine.kv.num_free - engine.kv.num_held_back

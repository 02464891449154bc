"""Laws that an engine's state obeys after every event, whoever looks at it."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from operator import attrgetter

from policies.engine import EngineCore
from policies.kv import KVCache
from policies.totals import TotalsBy
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


def check_totals(engine: EngineCore) -> None:
    """What is kept by class and by client is what a count of all gives."""
    for name in ("class_name", "client_id"):
        kept, counted = engine.totals_by(name), TotalsBy(attrgetter(name), engine.config.block_size, engine.states)
        assert kept.all() == counted.all(), f"totals by {name} are miscounted"


def check_host(engine: EngineCore) -> None:
    """Host memory holds what the preempted left there, and no more than it can."""
    states, size = list(engine.states), engine.config.block_size
    assert not any(state.num_swapped_tokens for state in states if state.status is not Status.PREEMPTED)
    used = sum(-(-state.num_swapped_tokens // size) for state in states)
    assert engine.host.num_free == engine.config.num_host_blocks - used >= 0, "host memory is miscounted"


def check_drained(engine: EngineCore) -> None:
    """T28."""
    assert engine.host.num_free == engine.config.num_host_blocks, "T28: nobody is left, but host memory is held"
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
        num_there = max(len(hit) * config.block_size, state.num_swapped_tokens)
        num_new = state.num_tokens - num_there
        if config.batching == "chunked":
            num_new = min(num_new, config.long_prefill_token_threshold or num_new)
        if num_new > budget and not cut:
            return None
        if _has_room(engine, state, hit, num_there, min(num_new, budget)):
            return state.request_id
    return None


def _has_room(engine: EngineCore, state: RequestState, hit: list[Block], num_there: int, num_new: int) -> bool:
    promise = engine.promise(state, num_there, num_new)
    fresh = max(promise.num_blocks_required, promise.num_blocks_held)
    fresh -= sum(block.ref_count > 0 for block in hit)
    return fresh + promise.num_blocks_slack <= engine.kv.num_available(state)

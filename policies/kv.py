"""KVCache: the pool of blocks, the prefix index, reference counts, and the order in which free blocks are reused.

A block is in one of three states: referenced by block tables, free with a key (cached, idle: the eviction policy owns
it), or free without one. Free blocks without a key are reused first, newest first, as in vLLM; so cached blocks and
running requests compete for one pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from policies.interfaces import EvictionPolicy
from policies.types import Block, RequestState


@dataclass(frozen=True, slots=True)
class BlocksStored:
    keys: tuple[int, ...]
    parent: int | None
    request_id: str
    first_index: int  # of the first key in its request's chain


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KVEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class KVCache:
    """Block ids run from 1 to `num_blocks`; 0 is left to bodies that need a null block."""

    def __init__(
        self, num_blocks: int, block_size: int, eviction: EvictionPolicy, caching: bool, unhashed_first: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.num_held_back = 0  # promised to running requests, not yet taken
        self.num_evicted = 0
        self.events: list[KVEvent] | None = None  # a list here asks for events
        self.blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self._eviction = eviction
        self._unhashed_first = unhashed_first
        self._plain = list(range(num_blocks, 0, -1))  # free without a key; the next one is last
        self._index: dict[int, Block] = {}
        self._copies: dict[int, list[Block]] = {}  # later blocks of a key that is taken

    # -- what is there ------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._plain) + len(self._eviction)

    @property
    def num_idle_cached(self) -> int:
        """Free blocks that can still be found."""
        if self._unhashed_first:
            return len(self._eviction)
        return sum(block.key is not None for block in self._eviction)

    def num_available(self, state: RequestState) -> int:
        """Free blocks this request may take: all but what is held back for others."""
        return len(self._plain) + len(self._eviction) - self.num_held_back + state.num_held_blocks

    def free_order(self) -> Iterator[Block]:
        """Free blocks, the next to be reused first."""
        for block_id in reversed(self._plain):
            yield self.blocks[block_id]
        yield from self._eviction

    def lookup(self, keys: Sequence[int], limit: int) -> list[Block]:
        """The longest cached chain of at most `limit` blocks. Nothing is touched."""
        found: list[Block] = []
        if not self.caching:
            return found
        get = self._index.get
        for key in keys[:limit]:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found

    # -- taking -------------------------------------------------------------------------------------------------

    def reuse(self, state: RequestState, hit: Iterable[Block]) -> None:
        """Put blocks found in the cache at the head of an empty table."""
        assert not state.block_ids, f"request {state.request_id} already holds blocks"
        for block in hit:
            self._eviction.touch(block)
            if block.ref_count == 0:
                self._eviction.discard(block)
            block.ref_count += 1
            state.block_ids.append(block.block_id)
        state.num_keyed_blocks = len(state.block_ids)

    def allocate(self, state: RequestState, num: int, now: float) -> None:
        """Append `num` fresh blocks to the table; the caller has seen that they are available."""
        assert num <= self.num_available(state), f"{num} blocks asked, {self.num_available(state)} available"
        blocks, plain, table = self.blocks, self._plain, state.block_ids
        num_plain = min(num, len(plain))
        if num_plain:
            reused = plain[: -num_plain - 1 : -1]  # from the end, where the next one is
            del plain[-num_plain:]
            for block_id in reused:
                blocks[block_id].ref_count = 1
            table.extend(reused)
        if num > num_plain:
            self._evict(state, num - num_plain, now)
        if state.num_held_blocks:
            taken = min(num, state.num_held_blocks)
            state.num_held_blocks -= taken
            self.num_held_back -= taken

    def hold_back(self, state: RequestState, num: int) -> None:
        """Keep `num` blocks for this request's growth."""
        state.num_held_blocks += num
        self.num_held_back += num

    def _evict(self, state: RequestState, num: int, now: float) -> None:
        """Append blocks that the eviction policy gives up."""
        pop, index, table = self._eviction.pop, self._index, state.block_ids
        is_simple = not self._copies and self.events is None  # no other copy, nobody listens
        for _ in range(num):
            block = pop(state, now)
            assert block.ref_count == 0, f"the eviction policy gave up block {block.block_id}, which is held"
            if block.key is not None:
                self.num_evicted += 1
                if is_simple:
                    del index[block.key]
                    block.key = None
                else:
                    self._forget(block)
            block.ref_count = 1
            table.append(block.block_id)

    # -- keys ---------------------------------------------------------------------------------------------------

    def cache(self, state: RequestState, num_tokens: int) -> None:
        """Give keys to the blocks that are full once `num_tokens` tokens are in the table."""
        full, keyed = min(num_tokens // self.block_size, len(state.block_ids)), state.num_keyed_blocks
        if full <= keyed or not self.caching:
            return
        chain, table, index, blocks = state.chain, state.block_ids, self._index, self.blocks
        if full > len(chain.keys):
            chain.extend(full)
        keys = chain.keys
        for depth in range(keyed, full):
            block, key = blocks[table[depth]], keys[depth]
            block.key = key
            block.depth = depth
            if index.setdefault(key, block) is not block:
                self._copies.setdefault(key, []).append(block)
        state.num_keyed_blocks = full
        if self.events is not None:
            parent = keys[keyed - 1] if keyed else None
            self.events.append(BlocksStored(tuple(keys[keyed:full]), parent, state.request_id, keyed))

    def _forget(self, block: Block) -> None:
        """Take the key off a block; the oldest other copy answers for it from now on."""
        key = block.key
        assert key is not None
        block.key = None
        copies = self._copies.get(key) if self._copies else None
        if copies is None:
            del self._index[key]
        else:
            if self._index[key] is block:
                self._index[key] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[key]
        if self.events is not None:
            self.events.append(BlocksRemoved((key,)))

    def drop_keys(self, block_ids: Iterable[int]) -> None:
        """Nobody may find these blocks any more: what is in them cannot be trusted."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.key is None:
                continue
            if block.ref_count == 0:
                self._eviction.discard(block)
                self._plain.append(block_id)
            self._forget(block)

    def reset(self) -> bool:
        """Forget every key; refused, with nothing changed, while any block is referenced. The order of reuse stays."""
        if self.num_free != self.num_blocks:
            return False
        idle = [block.block_id for block in self._eviction]
        for block_id in idle:
            self._eviction.discard(self.blocks[block_id])
            self.blocks[block_id].key = None
        self._plain = idle[::-1] + self._plain
        self._index.clear()
        self._copies.clear()
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        return True

    # -- giving back --------------------------------------------------------------------------------------------

    def release(self, state: RequestState) -> int:
        """Give up the table, tail first: a shared head must outlive what hangs on it. Returns blocks now free."""
        num_free, blocks = self.num_free, self.blocks
        add, plain, plain_first = self._eviction.add, self._plain, self._unhashed_first
        unhashed: list[int] = []
        for block_id in reversed(state.block_ids):
            block = blocks[block_id]
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.key is None and plain_first:
                unhashed.append(block_id)
            else:
                add(block)
        unhashed.reverse()
        plain.extend(unhashed)
        self.num_held_back -= state.num_held_blocks
        state.num_held_blocks = 0
        state.num_keyed_blocks = 0
        state.block_ids = []  # a new list: a plan in flight still reads the old one
        return self.num_free - num_free

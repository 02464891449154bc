"""KVCache: the pool of blocks, the prefix index, reference counts, and the order in which free blocks are reused.

A block is in one of three states: referenced by block tables, free with a key (cached, idle: the eviction policy owns
it), or free without one. Free blocks without a key are reused first, newest first, as in vLLM; so cached blocks and
running requests compete for one pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass

from policies.interfaces import EvictionPolicy, Expires, Sized
from policies.parts import ByPart, Parts
from policies.prompt import Content, KeyChain
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
        self.parts = Parts(num_blocks, eviction) if isinstance(eviction, ByPart) else None
        self._expires = eviction if isinstance(eviction, Expires) else None
        if isinstance(eviction, Sized):
            eviction.fit(num_blocks, block_size)

    # -- what is there ------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._plain) + len(self._eviction)

    @property
    def quota(self) -> int:
        """Blocks that one request could have if it were alone."""
        return self.num_blocks if self.parts is None else self.parts.quota

    @property
    def num_idle_cached(self) -> int:
        """Free blocks that can still be found."""
        if self._unhashed_first:
            return len(self._eviction)
        return sum(block.key is not None for block in self._eviction)

    @property
    def num_without_key(self) -> int:
        """Free blocks that are reused before any that is cached."""
        return len(self._plain)

    @property
    def known_keys(self) -> KeysView[int]:
        """Keys that can be found now."""
        return self._index.keys()

    def num_available(self, state: RequestState) -> int:
        """Free blocks this request may take: all but what is held back for others, or is another part's."""
        if self.parts is not None:
            return self.parts.num_available(state)
        return len(self._plain) + len(self._eviction) - self.num_held_back + state.num_held_blocks

    def free_order(self) -> Iterator[Block]:
        """Free blocks, the next to be reused first."""
        for block_id in reversed(self._plain):
            yield self.blocks[block_id]
        yield from self._eviction

    def lookup(self, chain: KeyChain, limit: int) -> list[Block]:
        """The longest cached run of at most `limit` blocks at the head of a chain. Nothing is touched.

        Where the chain knows its contents, they are compared: equal keys alone make no hit.
        """
        found: list[Block] = []
        if not self.caching:
            return found
        get = self._index.get
        for key in chain.keys[:limit]:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return _truly(found, chain.marks) if chain.marks else found

    # -- taking -------------------------------------------------------------------------------------------------

    def reuse(self, state: RequestState, hit: Iterable[Block]) -> None:
        """Put blocks found in the cache at the head of an empty table."""
        assert not state.block_ids, f"request {state.request_id} already holds blocks"
        for block in hit:
            self._eviction.touch(block)
            if block.ref_count == 0:
                self._eviction.discard(block)
                if self.parts is not None:
                    self.parts.num_held[state.part] += 1
            block.ref_count += 1
            state.block_ids.append(block.block_id)
        state.num_keyed_blocks = len(state.block_ids)

    def allocate(self, state: RequestState, num: int, now: float) -> None:
        """Append `num` fresh blocks to the table; the caller has seen that they are available."""
        assert num <= self.num_available(state), f"{num} blocks asked, {self.num_available(state)} available"
        blocks, plain, table = self.blocks, self._plain, state.block_ids
        num_plain = min(num, len(plain))
        if self.parts is not None:
            num_plain = min(num, self.parts.num_unused(state.part))
            self.parts.num_held[state.part] += num
        if num_plain:
            reused = plain[: -num_plain - 1 : -1]  # from the end, where the next one is
            del plain[-num_plain:]
            for block_id in reused:
                blocks[block_id].ref_count = 1
            table.extend(reused)
        if num > num_plain:
            self._evict(state, num - num_plain, now)
        if state.num_held_blocks:
            self.hold_back(state, -min(num, state.num_held_blocks))

    def hold_back(self, state: RequestState, num: int) -> None:
        """Keep `num` blocks more, or fewer, for this request's growth."""
        state.num_held_blocks += num
        self.num_held_back += num
        if self.parts is not None:
            self.parts.num_held_back[state.part] += num

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
                    block.key = block.content = block.note = None
                else:
                    self._forget(block)
            else:
                block.note = None
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
        first_parent = parent = keys[keyed - 1] if keyed else None
        for depth in range(keyed, full):
            block, key = blocks[table[depth]], keys[depth]
            block.key = key
            block.depth = depth
            block.parent = parent
            parent = key
            if index.setdefault(key, block) is not block:
                self._copies.setdefault(key, []).append(block)
        state.num_keyed_blocks = full
        if chain.marks:
            self._write_down(state, keyed, full)
        if self.events is not None:
            self.events.append(BlocksStored(tuple(keys[keyed:full]), first_parent, state.request_id, keyed))

    def _write_down(self, state: RequestState, first: int, end: int) -> None:
        """What these blocks of a table hold, each behind the one before it."""
        before = self.blocks[state.block_ids[first - 1]].content if first else None
        for depth in range(first, end):
            block = self.blocks[state.block_ids[depth]]
            block.content = before = Content(state.chain.marks[depth], before)

    def _forget(self, block: Block) -> None:
        """Take the key off a block; the oldest other copy answers for it from now on."""
        key = block.key
        assert key is not None
        block.key = block.content = block.note = None
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
            block = self.blocks[block_id]
            self._eviction.discard(block)
            block.key = block.content = block.note = None
        self._plain = idle[::-1] + self._plain
        self._index.clear()
        self._copies.clear()
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        return True

    # -- giving back --------------------------------------------------------------------------------------------

    def release(self, state: RequestState, now: float) -> int:
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
                add(block, state, now)
        unhashed.reverse()
        plain.extend(unhashed)
        self.hold_back(state, -state.num_held_blocks)
        if self.parts is not None:
            self.parts.num_held[state.part] -= self.num_free - num_free
        state.num_keyed_blocks = 0
        state.block_ids = []  # a new list: a plan in flight still reads the old one
        self.expire(now)
        return self.num_free - num_free

    def expire(self, now: float) -> None:
        """Forget the keys of blocks that the eviction policy keeps no longer, though there is room."""
        if self._expires is None:
            return
        for block in self._expires.expired(now):
            assert block.ref_count == 0, f"the eviction policy let block {block.block_id} go, which is held"
            if block.key is not None:
                self._forget(block)
            self._plain.append(block.block_id)


def _truly(found: list[Block], marks: Sequence[bytes]) -> list[Block]:
    """Of blocks with the right keys, the leading ones that hold what they should."""
    before: Content | None = None
    for depth, block in enumerate(found):
        content = block.content
        if content is None or content.mark != marks[depth] or not content.follows(before):
            return found[:depth]
        before = content
    return found

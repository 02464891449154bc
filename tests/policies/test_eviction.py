"""Which cached block goes: as libCacheSim decides, never more hits than the optimum, children before parents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from policies.catalogue import EVICTION, make
from policies.engine import EngineCore
from policies.eviction._leaves import LeafHeap
from policies.eviction.belady import Belady, recorded_string
from policies.interfaces import EvictionPolicy, Sized
from policies.prompt import ContentPrompt, CountedChain
from policies.types import Block, RequestState
from tests.caches import PATHS, cache_of, cached_tokens, numbered
from tests.worlds import finish, request, run_to_end, step, tiny_engine, waiting_state

# -- as libCacheSim decides -------------------------------------------------------------------------------------------

CACHES = {"lru": "LRU", "lru_leaf": "LRU", "fifo": "FIFO", "lfu": "LFU", "slru": "SLRU", "s3fifo": "S3FIFO",
          "sieve": "Sieve", "gdsf": "GDSF", "belady": "Belady"}  # fmt: skip
ANYBODY = waiting_state(request("anybody"))


class FlatCache:
    """Single blocks under one policy, as caches of objects are: asked for one by one, each there afterwards.

    `inserts_first`: a newcomer comes before another goes, and may be the one to go, as libCacheSim's GDSF has it.
    """

    def __init__(self, name: str, size: int, string: Sequence[int], inserts_first: bool = False) -> None:
        self.policy: EvictionPolicy = make("eviction", name)
        if isinstance(self.policy, Sized):
            self.policy.fit(size, 1)
        if isinstance(self.policy, Belady):
            self.policy.know([(str(turn), [key]) for turn, key in enumerate(string)])
        self._free = [Block(number) for number in range(size + inserts_first)]
        self._inserts_first = inserts_first
        self._where: dict[int, Block] = {}

    def ask(self, turn: int, key: int) -> bool:
        """Whether it was there."""
        asker = replace(ANYBODY, request_id=str(turn), chain=CountedChain([key], 0))
        found = self._where.get(key)
        if found is not None:
            self.policy.touch(found)
            self.policy.discard(found)
        block = found or (self._free.pop() if self._free else self._evict(asker, turn))
        block.key, self._where[key] = key, block
        self.policy.add(block, asker, float(turn))
        if self._inserts_first and not self._free:
            self._free.append(self._evict(asker, turn))
        return found is not None

    def _evict(self, asker: RequestState, turn: int) -> Block:
        block = self.policy.pop(asker, float(turn))
        assert block.key is not None
        del self._where[block.key]
        block.key = block.note = None
        return block


def by_libcachesim(name: str, size: int, string: Sequence[int]) -> list[bool]:
    libcachesim = pytest.importorskip("libcachesim", reason="needs libcachesim, which only tests use")
    theirs, next_use = getattr(libcachesim, name)(size, hashpower=8), dict[int, int]()
    uses = []
    for turn, key in reversed(list(enumerate(string))):
        uses.append(next_use.get(key, 2**62))
        next_use[key] = turn
    found = []
    for key, use in zip(string, reversed(uses), strict=True):
        asked = libcachesim.Request()
        asked.obj_id, asked.obj_size, asked.next_access_vtime = key, 1, use
        found.append(theirs.get(asked))
    return found


@pytest.mark.parametrize("name", CACHES)
def test_hits_are_those_of_libcachesim_on_the_same_string(name: str) -> None:
    """Twenty strings of 600, popular keys and a scan mixed. Pools hold a whole number of SLRU's segments, and of a size
    at which S3-FIFO's small queue is one."""
    for seed in range(20):
        random = Random(seed)
        size, num_keys = random.choice((20, 24, 40)), random.choice((30, 60, 150))
        string = [
            min(int(random.paretovariate(0.7)), num_keys) if random.random() < 0.7 else random.randint(1, num_keys)
            for _ in range(600)
        ]
        ours = FlatCache(name, size, string, inserts_first=name == "gdsf")
        assert [ours.ask(turn, key) for turn, key in enumerate(string)] == by_libcachesim(CACHES[name], size, string)


# -- the optimum ------------------------------------------------------------------------------------------------------

Path_ = tuple[int, ...]


def found_blocks(paths: Sequence[Path_], capacity: int, eviction: str) -> int:
    """Blocks that the paths find in a cache of `capacity`; see tests/sim/test_cache_laws.py."""
    engine = cache_of(capacity + 1, block_size=2, eviction=eviction)
    prompts = [ContentPrompt(2 * len(path) + 1, (*numbered(path), -1 - index), 2) for index, path in enumerate(paths)]
    policy = engine.kv._eviction
    if isinstance(policy, Belady):
        chains = [prompt.chain(2, {}, b"", index).keys for index, prompt in enumerate(prompts)]
        policy.know([(str(index), keys) for index, keys in enumerate(chains)])
    return sum(cached_tokens(engine, prompts)) // 2


def best_by_trying_all(paths: Sequence[Path_], capacity: int) -> int:
    """Each way to make room for each path, whole or not: the most blocks that can be found."""

    @cache
    def most(turn: int, there: frozenset[int]) -> int:
        if turn == len(paths):
            return 0
        path = numbered(paths[turn])
        num_found = next((depth for depth, node in enumerate(path) if node not in there), len(path))
        kept = there - set(path)
        num_gone = max(0, len(kept) + len(path) - capacity)
        ways = combinations(sorted(kept), num_gone)
        return num_found + max(most(turn + 1, (kept - set(gone)) | set(path)) for gone in ways)

    return most(0, frozenset())


def test_belady_finds_as_much_as_the_best_of_all_ways() -> None:
    """T32, on 300 strings."""
    differ = 0
    for seed in range(300):
        random = Random(seed)
        paths = [tuple(random.randrange(2) for _ in range(random.randint(1, 3))) for _ in range(random.randint(4, 9))]
        capacity = random.randint(3, 5)
        best = best_by_trying_all(paths, capacity)
        assert found_blocks(paths, capacity, "belady") == best, paths
        differ += found_blocks(paths, capacity, "lru") < best
    assert differ > 50, "strings on which anything is optimal prove nothing"


@settings(max_examples=40, deadline=None)
@given(paths=PATHS)
def test_no_policy_finds_more_than_belady_nor_belady_more_than_there_is(paths: list[Path_]) -> None:
    """T32."""
    for capacity in (5, 9):
        optimum = found_blocks(paths, capacity, "belady")
        assert optimum <= found_blocks(paths, 1000, "lru")
        for name in EVICTION:
            assert found_blocks(paths, capacity, name) <= optimum, name


def cached(engine: EngineCore, *prompts: Sequence[int], **fields: Any) -> list[int]:
    """Tokens that each prompt finds, one a second and each for one token."""
    for now, prompt in enumerate(prompts):
        engine.add(request(now, prompt, max_tokens=1, **fields), engine.now + 1.0 if engine.now >= 0 else 0.0)
        step(engine, engine.now)
    return [record.num_cached_tokens for record in engine.drain_records()]


A, B, C, D = (0, 0, 9), (1, 1, 9), (2, 2, 9), (3, 3, 9)  # a block of two tokens, and one that is never cached


def test_belady_learns_the_string_from_a_journal(tmp_path: Path) -> None:
    """Room for two blocks, and A B C A: only who knows that A returns gives up B."""
    journal, lines = tmp_path / "run.jsonl", list[str]()
    assert cached(tiny_engine(lines.append, num_blocks=3, block_size=2), A, B, C, A) == [0, 0, 0, 0]
    journal.write_text("\n".join(lines) + "\n")
    knowing = tiny_engine(num_blocks=3, block_size=2, eviction=f"belady,journal={journal}")
    assert cached(knowing, A, B, C, A) == [0, 0, 0, 2]
    assert [name for name, _ in recorded_string(str(journal))] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("text", [None, "{", "[]", json.dumps({"admitted": [["x", 0, False]]}), "7"])
def test_what_is_no_journal_is_refused_in_a_line(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "no.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"no\.jsonl: not the journal of a run") as error:
        make("eviction", f"belady,journal={path}")
    assert "\n" not in str(error.value)


# -- children before parents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unhashed_first", [True, False])
@pytest.mark.parametrize("eviction", [*EVICTION, "class_quota,shares=a:0.3,mode=hard", "class_quota,mode=protect",
                                      "ttl,seconds=3", "queue_informed,lookahead=1", "slru,segments=2"])  # fmt: skip
def test_no_block_outlives_the_one_before_it(eviction: str, unhashed_first: bool) -> None:
    """Requests of branching prompts come, run together, are cancelled and preempted, in a pool that is too small."""
    random, num_evicted = Random(eviction), 0
    for _ in range(6):
        engine = tiny_engine(
            num_blocks=12, block_size=2, max_model_len=20, eviction=eviction, unhashed_first=unhashed_first
        )
        for now in range(60):
            prompt = [random.randrange(2) for _ in range(random.randint(1, 12))]
            if random.random() < 0.7:
                name, class_name = f"r{now}", random.choice("ab")
                engine.add(request(name, prompt, max_tokens=random.randint(1, 8), class_name=class_name), float(now))
            if random.random() < 0.1:
                engine.abort(f"r{now - 3}", float(now))
            plan = engine.schedule(float(now))
            if plan is not None:
                finish(engine, plan, float(now))
            check_chains(engine)
        run_to_end(engine, now=60.0)
        check_chains(engine)
        num_evicted += engine.kv.num_evicted
    assert num_evicted > 100, "no pressure, no proof"


def check_chains(engine: EngineCore) -> None:
    """Each key is behind a parent that is cached too; every free block is listed once."""
    kv = engine.kv
    for block in kv.blocks:
        assert block.key is None or block.parent is None or block.parent in kv._index, "a child outlived its parent"
    free = [block.block_id for block in kv.free_order()]
    assert len(set(free)) == len(free) == kv.num_free, "the policy lists other blocks than it counts"


def chain_of(num: int) -> list[Block]:
    return [Block(i, key=100 + i, depth=i, parent=99 + i if i else None) for i in range(num)]


def test_a_heap_gives_up_leaves_in_the_order_of_rank_though_parents_rank_lower() -> None:
    heap, (head, middle, tail), other = LeafHeap(), chain_of(3), Block(9, key=1)
    for block, rank in ((tail, 30), (middle, 20), (head, 10), (other, 25)):
        heap.add(block, rank)
    assert [*heap] == [other, tail, middle, head]
    assert heap.pop() is other and heap.peek() == 30
    heap.discard(tail)
    heap.rerank(head, 40)
    assert [heap.pop(), heap.pop(), heap.pop()] == [middle, head, None]


def test_heaps_of_one_cache_know_each_others_children() -> None:
    first, (head, tail) = LeafHeap(), chain_of(2)
    second = LeafHeap(first.tree)
    first.add(head, 1)
    second.add(tail, 2)
    assert first.pop() is None and first.peek() is None
    assert second.pop() is tail and first.pop() is head


def test_a_heap_does_not_grow_with_comings_and_goings() -> None:
    heap, blocks = LeafHeap(), chain_of(10)
    for rank in range(1000):
        for block in reversed(blocks):
            heap.add(block, rank)
        for block in blocks if rank % 2 else reversed(blocks):
            heap.discard(block)
    assert len(heap._heap) <= 64 and not heap.tree.num_children
    for block in blocks[:1]:
        heap.add(block, 0)
        for rank in range(1000):
            heap.rerank(block, rank)
    assert len(heap._heap) <= 66 and heap.pop() is blocks[0]


# -- what each is for -------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"num_blocks": 3, "block_size": 2}


@pytest.mark.parametrize(
    "eviction, found",
    [
        ("lru", [0, 0, 2, 0, 2, 0]),  # C takes the place of B, and B that of C
        ("fifo", [0, 0, 2, 0, 0, 0]),  # A came first
        ("lfu", [0, 0, 2, 0, 2, 0]),
        ("sieve", [0, 0, 2, 0, 2, 0]),
    ],
)
def test_a_block_found_again_is_kept_but_by_fifo(eviction: str, found: list[int]) -> None:
    assert cached(tiny_engine(**SMALL, eviction=eviction), A, B, A, C, A, B) == found


def test_lfu_keeps_what_was_popular_and_lru_what_is_new() -> None:
    string = (A, A, A, B, C, D, A)
    assert cached(tiny_engine(**SMALL, eviction="lfu"), *string)[-1] == 2
    assert cached(tiny_engine(**SMALL), *string)[-1] == 0


def test_gdsf_keeps_what_costs_most_seconds_to_recompute() -> None:
    """The second block of a chain attends to the first, so it outlives a newer first block; unless that is free."""
    long, other = (0, 0, 1, 1, 9), (5, 5, 9)
    for knobs, found in ((",ns_per_context_token=0", [0, 0, 0, 2]), ("", [0, 0, 0, 4])):
        engine = tiny_engine(num_blocks=4, block_size=2, eviction=f"gdsf{knobs}")
        assert cached(engine, long, other, (6, 6, 9), long) == found
    policy = make("eviction", "gdsf,ns_per_token=100,ns_per_context_token=2")
    policy.fit(64, 16)
    assert [policy.cost(Block(1, depth=depth)) for depth in (0, 1, 3)] == [100, 132, 196]


def test_queue_informed_keeps_what_a_waiting_request_will_look_for() -> None:
    """`a` runs alone and takes the last free blocks while `b` waits for its prefix, the oldest there is."""
    hits = {}
    for eviction in ("lru", "queue_informed", "queue_informed,lookahead=1"):
        engine = tiny_engine(num_blocks=5, block_size=2, max_num_seqs=1, eviction=eviction)
        cached(engine, A, B)
        now = engine.now + 1.0
        for name, prompt in (("a", (7, 7, 8, 8, 9, 9)), ("x", (5,)), ("b", A)):
            engine.add(request(name, prompt, max_tokens=2), now)
        run_to_end_records = run_to_end(engine, now)
        hits[eviction] = run_to_end_records["b"].num_cached_tokens
    assert hits == {"lru": 0, "queue_informed": 2, "queue_informed,lookahead=1": 0}


def test_ttl_forgets_what_lay_unused_and_not_before() -> None:
    engine = tiny_engine(eviction="ttl,seconds=4")
    engine.add(request("first", prompt=range(9), max_tokens=1), now=0.0)
    step(engine, now=0.0)
    assert engine.next_wakeup(1.0) == 5.0, "released at 1, when the step was over"
    engine.add(request("in time", prompt=range(9), max_tokens=1), now=4.0)
    assert step(engine, now=4.0).admitted[0].num_cached_tokens == 8
    assert engine.next_wakeup(5.0) == 9.0, "its time began anew"
    engine.add(request("late", prompt=range(9), max_tokens=1), now=9.0)
    assert step(engine, now=9.0).admitted[0].num_cached_tokens == 0
    assert engine.kv.num_evicted == 0 and engine.next_wakeup(10.0) == 14.0


CLASS_STRINGS = {  # batch sends five prompts after one of chat's: which of them are found again?
    "lru": (0, 3),
    "class_quota": (0, 3),
    "class_quota,shares=chat:0.34/batch:0.34": (2, 2),
    "class_quota,shares=chat:0.34/batch:0.34,mode=protect": (2, 2),
    "class_quota,shares=chat:0.34/batch:0.34,mode=hard": (2, 1),
}


@pytest.mark.parametrize("eviction", CLASS_STRINGS)
def test_a_class_keeps_its_share_whatever_another_sends(eviction: str) -> None:
    """Of 4 blocks one is for what runs. With shares of a block each, chat's prefix outlives five of batch; hard
    quotas leave batch one block though a third is free."""
    engine = tiny_engine(num_blocks=4, block_size=2, eviction=eviction)
    batch = [(number, number, 9) for number in range(20, 25)]
    cached(engine, A, class_name="chat")
    cached(engine, *batch, class_name="batch")
    names = {block.key for block in engine.kv.free_order() if block.key is not None}
    chat_key = ContentPrompt(3, A, 1).chain(2, {}, b"", 0).keys[0]
    assert (2 * (chat_key in names), len(names - {chat_key})) == CLASS_STRINGS[eviction]


WRONG_KNOBS = {
    "slru,segments=1": "segments (1) must be at least 2: one alone is lru",
    "s3fifo,small=1": "small (1.0) must be a share of the pool between 0 and 1",
    "s3fifo,ghost=-1": "ghost (-1.0) must be 0 (nothing is remembered) to 10 times the pool",
    "s3fifo,threshold=0": "threshold (0) must be at least 1 hit",
    "gdsf,ns_per_token=0,ns_per_context_token=0": "ns_per_token (0) and ns_per_context_token (0) must be 0 or more, "
    "and not both 0",
    "queue_informed,lookahead=0": "lookahead (0) must be at least 1 request; lru looks at none",
    "ttl,seconds=inf": "seconds (inf) must be a finite time above 0; lru never forgets",
    "class_quota,mode=sfot": "mode ('sfot') must be one of: soft, hard, protect",
    "class_quota,shares=chat": "shares ('chat') must read class:share/class:share, each class once, shares from 0 to 1",
    "class_quota,shares=a:1/b:0.1": "shares ('a:1/b:0.1') add up to 1.1: the pool is only 1",
}


@pytest.mark.parametrize("spec", WRONG_KNOBS)
def test_a_knob_that_makes_no_sense_is_refused(spec: str) -> None:
    with pytest.raises(ValueError) as error:
        make("eviction", spec)
    assert str(error.value) == WRONG_KNOBS[spec]

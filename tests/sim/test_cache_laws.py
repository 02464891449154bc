"""The prefix cache on fixed reference strings: requests come one after another, and no time passes.

What was published of two traces is met to the last bit.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalogue import EVICTION
from policies.config import EngineConfig
from policies.engine import EngineCore
from policies.prompt import ContentPrompt, Prompt, RecordedPrompt
from policies.types import Request
from sim.cost import AffineCost
from sim.simulate import Run, simulate
from sim.workload.read import read_trace
from sim.workload.workload import WorkItem, Workload
from tests.caches import PATHS, cache_of, cached_tokens, numbered

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
SIZE = 512  # tokens a content id of the traces


def cached_keys(engine: EngineCore) -> set[int]:
    return {block.key for block in engine.kv.free_order() if block.key is not None}


# -- least recently used ----------------------------------------------------------------------------------------------


def found_blocks(paths: Sequence[Sequence[int]], capacity: int) -> tuple[list[int], EngineCore]:
    """Blocks of two tokens that each path finds in a cache of `capacity`.

    A last token of its own lets the whole path be looked up; it takes half a block, which is never cached and is one
    more than the capacity.
    """
    engine = cache_of(capacity + 1, block_size=2)
    prompts = [ContentPrompt(2 * len(path) + 1, (*numbered(path), -1 - index), 2) for index, path in enumerate(paths)]
    return [tokens // 2 for tokens in cached_tokens(engine, prompts)], engine


@settings(max_examples=100, deadline=None)
@given(paths=PATHS, capacity=st.integers(5, 20))
def test_the_least_recently_used_leaf_goes_first(paths: list[tuple[int, ...]], capacity: int) -> None:
    """The textbook's list, each path moved to its end from leaf to root."""
    recent, expected = OrderedDict[int, None](), []
    for path in map(numbered, paths):
        num_found = next((depth for depth, content in enumerate(path) if content not in recent), len(path))
        expected.append(num_found)
        for content in reversed(path):
            recent[content] = None
            recent.move_to_end(content)
        while len(recent) > capacity:
            recent.popitem(last=False)
    found, engine = found_blocks(paths, capacity)
    assert found == expected
    assert len(cached_keys(engine)) == len(recent)


@settings(max_examples=100, deadline=None)
@given(paths=PATHS)
def test_a_larger_cache_holds_what_a_smaller_one_holds(paths: list[tuple[int, ...]]) -> None:
    """T31, inclusion: so no request finds less in it."""
    runs = [found_blocks(paths, capacity) for capacity in (5, 6, 8, 11, 20, 363)]
    for (few, small), (many, large) in pairwise(runs):
        assert cached_keys(small) <= cached_keys(large)
        assert all(less <= more for less, more in zip(few, many, strict=True))


def characteristic_time(rates: Sequence[float], capacity: int) -> float:
    """Che's: the time in which, on average, as many keys are asked for as there is room for."""
    low, high = 0.0, 1e9
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if sum(1 - math.exp(-rate * middle) for rate in rates) > capacity else (middle, high)
    return high


@pytest.mark.parametrize(("eviction", "agrees"), [("lru", True), ("fifo", False)])
def test_keys_asked_for_at_random_are_found_as_che_says(eviction: str, agrees: bool) -> None:
    """T33: one block a prompt, drawn by Zipf's law; h_i = 1 - exp(-rate_i * T). The ten most popular, each within four
    standard errors and half a percent, and all together; a cache that is not LRU is found out."""
    random, num_keys, capacity, num = Random(33), 100, 25, 6_000
    rates = [1 / rank for rank in range(1, num_keys + 1)]
    rates = [rate / sum(rates) for rate in rates]
    keys = random.choices(range(num_keys), rates, k=num)
    prompts = [ContentPrompt(3, (key, -1 - index), 2) for index, key in enumerate(keys)]
    found = cached_tokens(cache_of(capacity + 1, block_size=2, eviction=eviction), prompts)
    time = characteristic_time(rates, capacity)
    expected = [1 - math.exp(-rate * time) for rate in rates]
    hits, asked = Counter[int](), Counter(keys[1000:])
    for key, tokens in zip(keys[1000:], found[1000:], strict=True):
        hits[key] += tokens > 0
    close = []
    for key in range(10):
        error = 4 * math.sqrt(expected[key] * (1 - expected[key]) / asked[key]) + 0.005
        close.append(abs(hits[key] / asked[key] - expected[key]) < error)
    overall = sum(rate * hit for rate, hit in zip(rates, expected, strict=True))
    close.append(abs(hits.total() / asked.total() - overall) < 4 * math.sqrt(0.25 / asked.total()) + 0.005)
    assert all(close) is agrees


@settings(max_examples=60, deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=12))
def test_larger_blocks_never_find_more(prompts: list[list[int]]) -> None:
    """T52: sizes that divide each other, and room for all."""
    found = [
        cached_tokens(cache_of(600, size), [ContentPrompt(len(each), tuple(each), 1) for each in prompts])
        for size in (1, 2, 4, 8, 16)
    ]
    for small, large in pairwise(found):
        assert all(more >= less for more, less in zip(small, large, strict=True))


# -- other evictions --------------------------------------------------------------------------------------------------

MOST_RECENT = '''
from policies.eviction.lru import LeastRecentlyUsed


class MostRecentlyUsed(LeastRecentlyUsed):
    """As wrong as can be."""

    def pop(self, beneficiary, now):
        return self._blocks.popitem()[0]
'''

BOUNDED = ("ttl", "quota", "partition")  # these evict though there is room


@pytest.fixture
def evictions(tmp_path: Path) -> list[str]:
    path = tmp_path / "most_recent.py"
    path.write_text(MOST_RECENT)
    return [*(name for name in EVICTION if name not in BOUNDED), f"{path}:MostRecentlyUsed"]


def families(num: int = 60) -> Workload:
    """Prompts of a few families, each beginning like its others."""
    random, items = Random(34), []
    for index in range(num):
        family, num_shared, length = random.randrange(4), random.randint(0, 8), random.randint(8, 64)
        content = tuple(family * 1000 + i if i < num_shared else -100 * index - i for i in range(-(-length // 8)))
        request = Request(str(index), index / 16, ContentPrompt(length, content, 8), max_tokens=40)
        items.append(WorkItem(request, random.randint(1, 40)))
    return Workload("families", items)


def decisions(eviction: str, num_blocks: int) -> list[str]:
    config = EngineConfig(num_blocks=num_blocks, block_size=8, max_num_seqs=4, max_model_len=128, eviction=eviction)
    lines = list[str]()
    simulate(config, families(), AffineCost(per_step=1 / 32, per_token=1 / 1024), lines.append)
    return lines[1:]  # the first holds the configuration


def test_with_room_for_every_block_all_evictions_decide_alike(evictions: list[str]) -> None:
    """T34: room for all blocks ever allocated, equal ones counted each time."""
    first, *others = (decisions(eviction, num_blocks=60 * 13) for eviction in evictions)
    for each in others:
        assert each == first


def test_without_that_room_evictions_differ(evictions: list[str]) -> None:
    assert decisions(evictions[0], num_blocks=100) != decisions(evictions[-1], num_blocks=100)


# -- what is shared ---------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    num=st.integers(1, 6), prompt=st.integers(1, 60), shared=st.integers(0, 60), block_size=st.sampled_from([1, 4, 16])
)
def test_each_follower_finds_the_whole_blocks_of_what_is_shared(
    num: int, prompt: int, shared: int, block_size: int
) -> None:
    """T35: (N - 1) * min(P // size, (p - 1) // size) * size tokens."""
    shared = min(shared, prompt)
    own = prompt - shared
    prompts = [
        ContentPrompt(prompt, (*range(shared), *range(-own * (index + 1), -own * index)), 1) for index in range(num)
    ]
    found = cached_tokens(cache_of(1024, block_size), prompts)
    assert sum(found) == (num - 1) * min(shared // block_size, (prompt - 1) // block_size) * block_size


class Bill(NamedTuple):
    num_hit_tokens: int
    num_prefilled_tokens: int
    prefill_time: float


def bill(num_shared_blocks: int) -> Bill:
    """Twenty requests, each alone, whose prompts of ten blocks begin alike."""
    items = []
    for index in range(20):
        content = (*range(num_shared_blocks), *(-100 * index - i for i in range(num_shared_blocks, 10)))
        items.append(WorkItem(Request(str(index), 16.0 * index, ContentPrompt(160, content, 16), max_tokens=8), 8))
    run: Run = simulate(EngineConfig(), Workload("alike", items), AffineCost(per_step=1 / 32, per_token=1 / 1024))
    num_tokens = sum(sample.num_tokens * sample.num_steps for sample in run.samples)
    return Bill(
        sum(record.num_cached_tokens for record in run.records),
        num_tokens - sum(record.num_output_tokens - 1 for record in run.records),
        sum(record.prefill_time for record in run.records),
    )


def test_every_hit_token_is_taken_off_the_bill() -> None:
    """T36: at a fixed schedule, in tokens and in seconds, exactly."""
    bills = [bill(num_shared_blocks) for num_shared_blocks in range(10)]
    assert [each.num_hit_tokens for each in bills] == [19 * 16 * num_shared_blocks for num_shared_blocks in range(10)]
    for each in bills:
        assert each.num_prefilled_tokens == 20 * 160 - each.num_hit_tokens
        assert each.prefill_time == 20 / 32 + each.num_prefilled_tokens / 1024


# -- the published figures --------------------------------------------------------------------------------------------

TRACES = ("conversation_trace", "synthetic_trace")


class Visit(NamedTuple):
    """A request of the trace. `begun` has each block begun as a whole one, and a last token of its own."""

    num_tokens: int
    num_blocks: int
    prompt: Prompt
    begun: RecordedPrompt


@cache
def visits(name: str) -> list[Visit]:
    path = SHARED / "data" / "traces" / "mooncake-fast25" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"needs the Mooncake traces beside the repository: ../shared has no {name}.jsonl")
    found = []
    for index, row in enumerate(read_trace(path).rows):
        num_blocks = len(row.content_ids)
        begun = ContentPrompt(num_blocks * SIZE + 1, (*row.content_ids, -1 - index), SIZE)
        chain = begun.chain(SIZE, {}, b"", index)  # hashed once for all capacities
        recorded = RecordedPrompt(begun.num_tokens, tuple(chain.keys), chain.counts_from)
        prompt = ContentPrompt(row.num_prompt_tokens, row.content_ids, SIZE)
        found.append(Visit(row.num_prompt_tokens, num_blocks, prompt, recorded))
    return found


def published(name: str) -> dict[str, Any]:
    path = SHARED / "data" / "traces" / "stats.json"
    if not path.exists():
        pytest.skip("needs the figures beside the repository: ../shared has no data/traces/stats.json")
    figures: dict[str, Any] = json.loads(path.read_text())[f"mooncake_{name}"]
    return figures


def found_tokens(trace: Sequence[Visit], capacity: int) -> tuple[list[int], EngineCore]:
    """Of each request's tokens, those found in a cache of `capacity` blocks; a prompt that is longer fills it."""
    engine = cache_of(capacity + 1, SIZE)
    cut = capacity * SIZE + 1
    prompts = [
        visit.begun
        if visit.num_blocks <= capacity
        else RecordedPrompt(cut, visit.begun.keys[:capacity], visit.begun.counts_from)
        for visit in trace
    ]
    cached = cached_tokens(engine, prompts)
    return [min(tokens, visit.num_tokens) for tokens, visit in zip(cached, trace, strict=True)], engine


@pytest.mark.parametrize("name", TRACES)
def test_an_endless_cache_of_full_blocks_finds_what_was_published(name: str) -> None:
    """`hit_token_frac_vllm_fullblock`, by the core alone on the prompts as they are: full blocks, never the last
    token."""
    trace, prefix = visits(name), published(name)["prefix"]
    engine = cache_of(sum(visit.num_blocks for visit in trace), SIZE)
    found = cached_tokens(engine, [visit.prompt for visit in trace])
    num_tokens = sum(visit.num_tokens for visit in trace)
    assert num_tokens == prefix["prompt_tokens"]
    assert sum(found) / num_tokens == prefix["hit_token_frac_vllm_fullblock"]
    assert engine.prefix_stats.num_hit_tokens / engine.prefix_stats.num_query_tokens == sum(found) / num_tokens


@pytest.mark.parametrize("name", TRACES)
def test_an_endless_cache_of_begun_blocks_finds_what_was_published(name: str) -> None:
    """The other figures count a last block that is only begun, which no engine caches. Prompts rounded up to whole
    blocks, with a token more so that the last of them may be found, have the core count it too."""
    trace, prefix = visits(name), published(name)["prefix"]
    num_blocks = sum(visit.num_blocks for visit in trace)
    found, engine = found_tokens(trace, capacity=num_blocks)
    cached_blocks = sum(-(-tokens // SIZE) for tokens in found)
    assert sum(found) / prefix["prompt_tokens"] == prefix["hit_token_frac"]
    assert cached_blocks / num_blocks == prefix["hit_block_frac"]
    assert sum(tokens > 0 for tokens in found) / len(trace) == prefix["req_with_any_hit_frac"]
    assert len(cached_keys(engine)) == prefix["unique_blocks"]


@pytest.mark.parametrize("num_tokens", [102400, 512000, 1024000, 2048000, 5120000, 10240000, 25600000])
@pytest.mark.parametrize("name", TRACES)
def test_a_bounded_cache_finds_what_was_published(name: str, num_tokens: int) -> None:
    """`lru`, with begun blocks as above: the least recently used goes, tails before heads."""
    trace, expected = visits(name), published(name)["lru"]
    assert len(expected) == 7
    found, _ = found_tokens(trace, capacity=num_tokens // SIZE)
    assert sum(found) / sum(visit.num_tokens for visit in trace) == expected[str(num_tokens)]

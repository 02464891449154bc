"""Where prefix hits go: what an endless cache would find, and step by step what keeps this run from finding it.

The string of requests is the run's own, in the order in which they were first admitted. It is played through caches
that are ever more like the run's: endless and exact to the token; of whole blocks; with the setup's isolation; one a
replica; of the pool's size under the best eviction there is (Belady's, which knows the string); under the setup's
eviction. There each request comes alone and takes no time. What is left to the run is scheduling: what was still being
computed when it was asked for, what was held by others, and what a changed order lost or gained.

In tokens, and in seconds of prefill: of each prompt computed alone, in chunks as large as a step, at the setup's costs.
Both add up exactly, as seconds are counted in whole nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from policies.catalogue import make
from policies.config import EngineConfig
from policies.eviction.belady import Belady
from policies.interfaces import EvictionPolicy, IsolationPolicy, Partitions
from policies.isolation.global_pool import GlobalPool
from policies.kv import KVCache
from policies.parts import ByPart
from policies.prompt import ContentPrompt, KeyChain, Namespace, Prompt, TokenPrompt, seals
from policies.types import Request, RequestRecord, RequestState
from sim.commands import Prepared
from sim.cost import StepCost, StepWork
from sim.setup import Setup
from sim.simulate import Run
from sim.workload.every import every_item


@dataclass(frozen=True, slots=True)
class Level:
    """What is found under some conditions: prompt tokens, and nanoseconds of prefill that they save."""

    name: str
    num_tokens: int
    nanoseconds: int

    @property
    def seconds(self) -> float:
        return self.nanoseconds * 1e-9


@dataclass(frozen=True, slots=True)
class Waterfall:
    """From the endless cache down to the run; `losses` are the differences, and may be gains (below 0)."""

    num_requests: int  # that were admitted: who never was had nothing to find
    num_prompt_tokens: int
    prefill: Level  # all prompts computed whole
    levels: tuple[Level, ...]

    @property
    def losses(self) -> tuple[Level, ...]:
        return tuple(
            Level(after.name, before.num_tokens - after.num_tokens, before.nanoseconds - after.nanoseconds)
            for before, after in pairwise(self.levels)
        )

    @property
    def ceiling(self) -> Level:
        return self.levels[0]

    @property
    def found(self) -> Level:
        return self.levels[-1]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's first admission, and what came of it."""

    request: Request
    record: RequestRecord
    replica: int

    @property
    def num_tokens(self) -> int:
        """That get KV: of an answer all but the last."""
        return self.request.prompt.num_tokens + max(0, self.record.num_output_tokens - 1)


Found = list[int]  # tokens, a turn each


def waterfall(setup: Setup) -> Waterfall:
    """Plays the setup once. Raises ValueError for one that cannot be, or whose prefix cache is off."""
    prepared = Prepared.of(setup)
    if not prepared.config.enable_prefix_caching:
        raise ValueError("prefix caching is off: nothing is found, and nothing is lost on the way; leave it on")
    heard = [Admissions() for _ in range(setup.num_replicas)]
    run = prepared.run(journal=heard)
    turns = list(_turns(prepared, run, heard))
    price = Price(prepared.cost, prepared.config)
    found = list(_levels(prepared.config, turns, setup.num_replicas))
    return Waterfall(
        len(turns),
        sum(turn.request.prompt.num_tokens for turn in turns),
        Level("prefill", 0, sum(price.of(turn.request.prompt.num_tokens, 0) for turn in turns)),
        tuple(Level(name, sum(tokens), price.saved(turns, tokens)) for name, tokens in found),
    )


class Admissions:
    """A journal that keeps who was admitted, in order; who comes back after a preemption is not told again."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []

    def __call__(self, line: str) -> None:
        if '"admitted"' in line:
            told = json.loads(line).get("admitted", ())
            self.request_ids += [request_id for request_id, _, resumed in told if not resumed]


def _turns(prepared: Prepared, run: Run, heard: Sequence[Admissions]) -> Iterator[Turn]:
    """In order of admission, over all replicas. Raises ValueError where an id is not one request's."""
    requests = {item.request.request_id: item.request for item in every_item(prepared.workload)}
    records = {record.request_id: record for record in run.records}
    told = [(name, replica) for replica, each in enumerate(heard) for name in each.request_ids]
    if len({name for name, _ in told}) < len(told):
        raise ValueError("request ids come back: the waterfall tells requests apart by them; give each its own")
    turns = [Turn(requests[name], records[name], replica) for name, replica in told if name in records]
    return iter(sorted(turns, key=lambda turn: turn.record.first_scheduled_time or 0.0))


def _levels(config: EngineConfig, turns: Sequence[Turn], num_replicas: int) -> Iterator[tuple[str, Found]]:
    isolation = make("isolation", config.isolation)
    yield "an endless cache", by_token(turns)
    everybody = Strings.of(turns, config, GlobalPool())
    yield f"whole blocks of {config.block_size}", everybody.endless()
    string = Strings.of(turns, config, isolation)
    yield f"isolation {config.isolation}", string.endless()
    if num_replicas > 1:
        yield f"routing to {num_replicas} replicas", string.of_each_replica(Strings.endless)
    yield f"capacity of {config.num_blocks:,} blocks", string.of_each_replica(Strings.best)
    yield f"eviction {config.eviction}", string.of_each_replica(Strings.evicted)
    yield "scheduling", [turn.record.num_cached_tokens for turn in turns]


# -- an endless cache -------------------------------------------------------------------------------------------------


def by_token(turns: Sequence[Turn]) -> Found:
    """Exact to the token, as far as the trace tells contents: of a content id as many tokens as have been seen."""
    seen: dict[tuple[int, int], list[int]] = {}  # of an id behind another: its number, and tokens of it that were seen
    return [_found_by_token(turn, seen) for turn in turns]


def _found_by_token(turn: Turn, seen: dict[tuple[int, int], list[int]]) -> int:
    ids, size = _contents(turn.request.prompt)
    num_prompt, found, parent, goes_on = turn.request.prompt.num_tokens, 0, 0, True
    for position, content in enumerate(ids):
        known = seen.setdefault((parent, content), [len(seen) + 1, 0])
        if goes_on:
            here = min(known[1], size, num_prompt - position * size)
            found += max(0, here)
            goes_on = here == size
        known[1] = max(known[1], min(size, turn.num_tokens - position * size))
        parent = known[0]
    return found


def _contents(prompt: Prompt) -> tuple[Sequence[int], int]:
    """Ids of a prompt and of what is known of its answer, and tokens an id; nothing where only lengths are known."""
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids, 1
    if not isinstance(prompt, ContentPrompt):
        return (), 1
    if not prompt.continuation:
        return prompt.content_ids, prompt.content_size
    full = prompt.num_tokens // prompt.content_size
    return prompt.content_ids[:full] + prompt.continuation, prompt.content_size


@dataclass(frozen=True, slots=True)
class Strings:
    """Turns with the keys that an isolation gives them: what caches of blocks are fed."""

    config: EngineConfig
    isolation: IsolationPolicy
    turns: tuple[Turn, ...]
    chains: tuple[KeyChain, ...]
    sequences: tuple[int, ...]

    @classmethod
    def of(cls, turns: Sequence[Turn], config: EngineConfig, isolation: IsolationPolicy) -> Strings:
        chains = tuple(_chain(turn.request, sequence, config, isolation) for sequence, turn in enumerate(turns))
        return cls(config, isolation, tuple(turns), chains, tuple(range(len(turns))))

    def of_each_replica(self, cached: Callable[[Strings], Found]) -> Found:
        """Each replica with its own cache; in the order of all turns."""
        found = [0] * len(self.turns)
        for replica in sorted({turn.replica for turn in self.turns}):
            places = [place for place, turn in enumerate(self.turns) if turn.replica == replica]
            part = replace(
                self,
                turns=tuple(self.turns[place] for place in places),
                chains=tuple(self.chains[place] for place in places),
                sequences=tuple(places),
            )
            for place, tokens in zip(places, cached(part), strict=True):
                found[place] = tokens
        return found

    def looked_for(self) -> list[tuple[str, Sequence[int]]]:
        """By each request: the keys of its prompt but for the last token, which must be computed."""
        size = self.config.block_size
        return [
            (turn.request.request_id, chain.keys[: (turn.request.prompt.num_tokens - 1) // size])
            for turn, chain in zip(self.turns, self.chains, strict=True)
        ]

    def endless(self) -> Found:
        size, known, found = self.config.block_size, set[int](), []
        for turn, chain, (_, keys) in zip(self.turns, self.chains, self.looked_for(), strict=True):
            num = next((index for index, key in enumerate(keys) if key not in known), len(keys))
            found.append(num * size)
            full = turn.num_tokens // size
            chain.extend(full)
            known.update(chain.keys[:full])
        return found

    def best(self) -> Found:
        """Under Belady's eviction, which is told the string."""
        return self._cached("belady")

    def evicted(self) -> Found:
        return self._cached(self.config.eviction)

    def _cached(self, spec: str) -> Found:
        """By the pool itself, each request alone in it and gone before the next one comes."""
        kv = KVCache(self.config.num_blocks, self.config.block_size, self._eviction(spec), True)
        return [self._visit(kv, *each) for each in zip(self.turns, self.chains, self.sequences, strict=True)]

    def _visit(self, kv: KVCache, turn: Turn, chain: KeyChain, sequence: int) -> int:
        state, size = self._state(turn, chain, sequence), kv.block_size
        now = turn.record.first_scheduled_time or 0.0
        hit = kv.lookup(chain, (state.num_prompt_tokens - 1) // size)
        kv.reuse(state, hit)
        kv.allocate(state, -(-turn.num_tokens // size) - len(hit), now)
        kv.cache(state, turn.num_tokens)
        kv.release(state, now)
        return len(hit) * size

    def _eviction(self, spec: str) -> EvictionPolicy:
        parts = getattr(self.isolation, "parts", 1)
        made = [make("eviction", spec) for _ in range(parts)]
        for each in made:
            if isinstance(each, Belady):
                each.know(self.looked_for())
        return ByPart(made) if isinstance(self.isolation, Partitions) else made[0]

    def _state(self, turn: Turn, chain: KeyChain, sequence: int) -> RequestState:
        request, part = turn.request, 0
        if isinstance(self.isolation, Partitions):
            part = self.isolation.part(request.context) or 0
        return RequestState(
            request, request.request_id, sequence, request.prompt.num_tokens, request.max_tokens, chain,
            request.arrival_time, request.priority, num_tokens=request.prompt.num_tokens, part=part,
            num_cached_tokens=turn.record.num_cached_tokens,
        )  # fmt: skip


def _chain(request: Request, sequence: int, config: EngineConfig, isolation: IsolationPolicy) -> KeyChain:
    """As the engine makes it; who shares with nobody is alone in a namespace."""
    namespaces = isolation.namespaces(request.context)
    if namespaces is None:
        namespaces = (Namespace(0, ("request", str(sequence))),)
    return request.prompt.chain(config.block_size, seals(namespaces, config.block_size, b""), b"", sequence)


# -- prefill ----------------------------------------------------------------------------------------------------------


class Price:
    """Nanoseconds to compute a prompt alone, when so much of it is found."""

    def __init__(self, cost: StepCost, config: EngineConfig) -> None:
        self._cost, self._config = cost, config
        self._known: dict[tuple[int, int], int] = {}

    def saved(self, turns: Sequence[Turn], found: Sequence[int]) -> int:
        """Over all turns, by what each finds; a hit of every token still leaves the last to be computed."""
        return sum(
            self.of(turn.request.prompt.num_tokens, 0) - self.of(turn.request.prompt.num_tokens, num)
            for turn, num in zip(turns, found, strict=True)
        )

    def of(self, num_tokens: int, num_found: int) -> int:
        pair = (num_tokens, min(num_found, num_tokens - 1))
        if pair not in self._known:
            self._known[pair] = round(1e9 * sum(map(self._step, self._chunks(*pair))))
        return self._known[pair]

    def _chunks(self, num_tokens: int, start: int) -> Iterator[StepWork]:
        config, size = self._config, self._config.block_size
        hashed, lookups = num_tokens // size, start // size + 1
        most = config.max_num_batched_tokens if config.enable_chunked_prefill else num_tokens
        while start < num_tokens:
            q = min(most, num_tokens - start)
            end = start + q
            kind = {"num_decodes": 1, "decode_context": end} if q == 1 else {
                "num_prefills": 1, "prefill_pairs": q * (2 * start + q + 1), "prefill_context": end
            }  # fmt: skip
            yield StepWork(q, 1, int(end == num_tokens), **kind, num_blocks_hashed=hashed, num_lookups=lookups)
            start, hashed, lookups = end, 0, 0

    def _step(self, work: StepWork) -> float:
        host, device = self._cost.host_time(work), self._cost.device_time(work)
        return max(host, device) if self._config.async_depth > 1 else host + device

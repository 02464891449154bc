"""What one run costs under its scope: hits, the device's time for prompts, latency, and content kept more than once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from policies.config import EngineConfig
from policies.engine import EngineCore
from policies.kv import BlocksStored, KVCache
from sim.commands import Prepared
from sim.cost import StepCost, StepWork
from sim.cost.best import Cost
from sim.setup import Setup
from sim.sharing import check_sharing
from sim.simulate import Simulation
from sim.workload.every import every_item
from sim.workload.workload import Workload

NUM_LOOKS = 100  # at the pools, over a run


class PrefillBill:
    """A cost that adds up, in seconds of the device, what steps take longer for the prompts in them."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self.provenance, self.band = cost.provenance, cost.band
        self.total = 0.0

    def host_time(self, work: StepWork) -> float:
        return self._cost.host_time(work)

    def device_time(self, work: StepWork) -> float:
        time = self._cost.device_time(work)
        if work.num_prefills:
            num = work.num_decodes
            rest = StepWork(num, work.num_requests, min(num, work.num_sampled), num, work.decode_context)
            self.total += time - (self._cost.device_time(rest) if num else 0.0)
        return time


class Census:
    """Counts blocks that can be found, beyond the first of each content: what sharing would have spared.

    Content is a prompt's, up to and with the block; the same behind two namespaces, or on two replicas, lies there
    twice. It looks at the pools each time a hundredth of the requests has left.
    """

    def __init__(self, workload: Workload, block_size: int) -> None:
        self.looks: list[int] = []
        items = every_item(workload)
        self._every = max(1, len(items) // NUM_LOOKS)
        self._num_left = 0
        self._block_size = block_size
        self._prompts = {item.request.request_id: (i, item.request.prompt) for i, item in enumerate(items)}
        self._contents: dict[int, int] = {}  # of every key there was
        self._present: set[tuple[int, int]] = set()  # replica and key
        self._num_of: Counter[int] = Counter()  # by content

    def watch(self, engines: Sequence[EngineCore]) -> None:
        self._engines = engines
        for engine in engines:
            engine.kv.events = []

    def left(self, *_: object) -> None:
        self._num_left += 1
        if self._num_left % self._every == 0:
            for index, engine in enumerate(self._engines):
                self._hear(index, engine.kv)
            self.looks.append(len(self._present) - len(self._num_of))

    def _hear(self, index: int, kv: KVCache) -> None:
        """What changed since the last look, by what can be found now."""
        events, kv.events = kv.events or [], []
        for event in events:
            if isinstance(event, BlocksStored):
                self._contents.update(zip(event.keys, self._content(event), strict=False))
        for key in {key for event in events for key in getattr(event, "keys", ())}:
            if key in self._contents and (key in kv.known_keys) is not ((index, key) in self._present):
                self._count(index, key, key in kv.known_keys)

    def _count(self, index: int, key: int, is_there: bool) -> None:
        content = self._contents[key]
        self._num_of[content] += 1 if is_there else -1
        if is_there:
            self._present.add((index, key))
        else:
            self._present.discard((index, key))
            if not self._num_of[content]:
                del self._num_of[content]

    def _content(self, stored: BlocksStored) -> Sequence[int]:
        """Of each block, keys that know of no namespace; of answers none."""
        owner, prompt = self._prompts[stored.request_id]
        first, end = stored.first_index, prompt.num_tokens // self._block_size
        return prompt.chain(self._block_size, {}, b"", owner).keys[first:end] if first < end else ()


HARDWARE = ("model", "gpu", "tensor_parallel", "dtype", "kv_dtype", "costs", "cuda_graphs")


def prepared(setup: Setup, workload: Workload | None = None) -> Prepared:
    """As Prepared.of has it; what steps cost is built once for all loads."""
    config, workload = setup.config(), workload or setup.load()
    check_sharing(config, workload)
    cost = _cost(tuple((name, getattr(setup, name)) for name in HARDWARE), config)
    return Prepared(workload.name, setup, config, workload, cost)


@lru_cache(maxsize=8)
def _cost(hardware: tuple[tuple[str, Any], ...], config: EngineConfig) -> Cost:
    return Setup(**dict(hardware)).cost(config)


@dataclass(frozen=True, slots=True)
class Price:
    """One run. Times in seconds; nan where there is none, as no run that is overloaded has percentiles."""

    token_hit_rate: float
    prefill_gpu_seconds_per_hour: float
    ttft_p50: float
    ttft_p99: float
    duplicate_blocks_mean: float
    duplicate_blocks_max: float
    share_completed: float


def price(setup: Setup) -> Price:
    """In the simulator."""
    what = prepared(setup)
    bill, census = PrefillBill(what.cost), Census(what.workload, what.config.block_size)
    simulation = Simulation(
        what.config,
        what.workload,
        bill,
        [None] * setup.num_replicas,
        on_record=census.left,
        front_end=setup.front_end_model(),
        routing=setup.routing,
        load_staleness=setup.load_staleness,
        block_transfer_time=setup.block_transfer_time(what.config),
    )
    census.watch([replica.engine for replica in simulation.cluster.replicas])
    found = what.summary(simulation.run())
    is_steady, caches = not found.saturation.is_saturated, found.prefix_caching and bool(census.looks)
    return Price(
        token_hit_rate=found.token_hit_rate,
        prefill_gpu_seconds_per_hour=3600 * bill.total * setup.tensor_parallel / found.duration,
        ttft_p50=found.ttft.p50 if is_steady else math.nan,
        ttft_p99=found.ttft.p99 if is_steady else math.nan,
        duplicate_blocks_mean=sum(census.looks) / len(census.looks) if caches else math.nan,
        duplicate_blocks_max=max(census.looks) if caches else math.nan,
        share_completed=found.num_completed / found.num_requests,
    )

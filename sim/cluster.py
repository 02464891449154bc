"""Replicas behind a router, which picks one for each request by what it last heard of their loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import simpy

from policies.engine import EngineCore
from policies.interfaces import ReadsCaches, ReplicaLoad, RoutingPolicy
from policies.types import Outcome, Request, RequestRecord, StepPlan
from sim.cache_index import CacheIndex
from sim.cost import StepCost
from sim.executor import SimulatedExecutor
from sim.replica import Late, Replica
from sim.workload.workload import WorkItem


class Router:
    """Asks the policy. The loads it shows are renewed when they are `staleness` seconds old and somebody asks."""

    def __init__(
        self,
        policy: RoutingPolicy,
        staleness: float,
        loads: Callable[[], Sequence[ReplicaLoad]],
        index: CacheIndex | None = None,
    ) -> None:
        if not 0.0 <= staleness < math.inf:
            raise ValueError(f"load_staleness ({staleness}) must be a finite number of seconds, 0 or more")
        self._policy = policy
        self._staleness = staleness
        self._look = loads
        self._index = index
        self._seen: Sequence[ReplicaLoad] = ()
        self._seen_at = -math.inf

    def choose(self, request: Request, now: float) -> int:
        if now - self._seen_at >= self._staleness:
            self._seen, self._seen_at = self._look(), now
        replicas = self._seen
        if self._index is not None:
            matched = self._index.matched_tokens(request, now)
            replicas = [load._replace(num_matched_tokens=num) for load, num in zip(replicas, matched, strict=True)]
        index = self._policy.choose_replica(request, replicas, now)
        if not 0 <= index < len(self._seen):
            raise ValueError(f"a routing policy chose replica {index}; there are {len(self._seen)}")
        return index


class Listener(Protocol):
    """Hears what engines do; `index` is the replica's."""

    def added(self, index: int, request: Request, outcome: Outcome) -> None: ...
    def stepped(self, index: int, plan: StepPlan, ends: Sequence[float]) -> None:
        """A plan is done, and these are the ends of its steps."""

    def left(self, index: int, record: RequestRecord) -> None: ...


class Door(Protocol):
    """Where clients knock."""

    def send(self, item: WorkItem) -> None: ...
    def hang_up(self, request_id: str) -> bool:
        """The client gives up; False if it has its answer."""


class Cluster:
    """Equal replicas, each with its engine. A request counts as its replica's load from the routing until it leaves.

    `is_open`: nothing that happens at one replica brings work to another, so that none heeds the others' steps.
    """

    def __init__(
        self,
        env: simpy.Environment,
        engines: Sequence[EngineCore],
        cost: StepCost,
        policy: RoutingPolicy,
        listener: Listener,
        *,
        load_staleness: float = 0.0,
        jumps: bool = True,
        is_open: bool = True,
        block_transfer_time: float = 0.0,
    ) -> None:
        if not engines:
            raise ValueError("num_replicas (0) must be at least 1")
        self.env = env
        self.replicas = [
            Replica(
                env,
                engine,
                SimulatedExecutor(
                    cost,
                    overlap=engine.config.async_depth > 1,
                    block_size=engine.config.block_size if engine.config.enable_prefix_caching else 0,
                    block_transfer_time=block_transfer_time,
                ),
                partial(self._left, index),
                jumps,
                rank=index,
                on_add=partial(listener.added, index),
                on_step=partial(listener.stepped, index),
                horizon=partial(next_besides_steps, env) if is_open and len(engines) > 1 else None,
            )
            for index, engine in enumerate(engines)
        ]
        self._listener = listener
        index = CacheIndex(engines, policy.index_staleness) if isinstance(policy, ReadsCaches) else None
        self._router = Router(policy, load_staleness, self.loads, index)
        self._num_present = [0] * len(engines)
        self._num_prompt_tokens = [0] * len(engines)

    # -- in and out -----------------------------------------------------------------------------------------------

    def choose(self, request: Request) -> int:
        index = self._router.choose(request, self.env.now)
        self._count(index, 1, request.prompt.num_tokens)
        return index

    def submit(self, index: int, item: WorkItem) -> None:
        """A request reaches the inbox of the replica that was chosen for it."""
        self.replicas[index].executor.expect(item.request, item.num_output_tokens)
        self.replicas[index].submit(item.request)

    def cancel(self, index: int, request_id: str) -> None:
        self.replicas[index].cancel(request_id)

    def withdraw(self, index: int, request: Request) -> None:
        """It will not come: it was dropped after the routing."""
        self._count(index, -1, -request.prompt.num_tokens)

    def _left(self, index: int, record: RequestRecord) -> None:
        self._count(index, -1, -record.num_prompt_tokens)
        self._listener.left(index, record)

    # -- loads ----------------------------------------------------------------------------------------------------

    def loads(self) -> list[ReplicaLoad]:
        """The same with jumps on or off: within a jump nobody comes, enters or leaves."""
        running = [len(replica.engine.running) for replica in self.replicas]
        present = zip(running, self._num_present, self._num_prompt_tokens, strict=True)
        return [ReplicaLoad(num_running, num - num_running, tokens) for num_running, num, tokens in present]

    def _count(self, index: int, num_requests: int, num_prompt_tokens: int) -> None:
        self._num_present[index] += num_requests
        self._num_prompt_tokens[index] += num_prompt_tokens


class NoFrontEnd:
    """Requests go straight to an engine, and answers straight back; a Door, and the cluster's Listener."""

    def __init__(
        self, on_record: Callable[[int, RequestRecord], object], on_answer: Callable[[RequestRecord], object]
    ) -> None:
        self._on_record = on_record
        self._on_answer = on_answer
        self._places: dict[str, int] = {}  # of those who wait for an answer

    def connect(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def send(self, item: WorkItem) -> None:
        index = self._cluster.choose(item.request)
        self._places[item.request.request_id] = index
        self._cluster.submit(index, item)

    def hang_up(self, request_id: str) -> bool:
        index = self._places.get(request_id)
        if index is not None:
            self._cluster.cancel(index, request_id)
        return index is not None

    def added(self, index: int, request: Request, outcome: Outcome) -> None:
        pass

    def stepped(self, index: int, plan: StepPlan, ends: Sequence[float]) -> None:
        pass

    def left(self, index: int, record: RequestRecord) -> None:
        del self._places[record.request_id]
        self._on_record(index, record)
        self._on_answer(record)

    @property
    def unfinished(self) -> Iterable[str]:
        return self._places


def next_besides_steps(env: simpy.Environment) -> float:
    """When the first event comes that is not the end of a step, or a replica's waking: a walk down SimPy's heap."""
    queue, places, found = env._queue, [0], math.inf
    while places:
        place = places.pop()
        if place < len(queue) and queue[place][0] < found:
            if isinstance(queue[place][3], Late):
                places += (2 * place + 1, 2 * place + 2)
            else:
                found = queue[place][0]
    return found

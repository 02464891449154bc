"""One simulated run: engines, a workload, a cost and perhaps a front end in; records, samples and a summary out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import simpy

from policies.catalogue import build, make
from policies.config import EngineConfig
from policies.engine import EngineCore
from policies.journal import Write
from policies.types import Request, RequestRecord, Sample
from sim.cluster import Cluster, Door, NoFrontEnd
from sim.cost import StepCost
from sim.frontend import FrontEnd, FrontEndTimes
from sim.metrics import Summary, summarise
from sim.replica import Moment, Process
from sim.stream import Deliveries
from sim.visit import ClientRecord, abandoned, client_records
from sim.workload.sessions import ANSWERED
from sim.workload.workload import WorkItem, Workload

OnRecord = Callable[[RequestRecord], object]
Journals = Write | Sequence[Write | None] | None


@dataclass(frozen=True, slots=True)
class Run:
    """What happened. `unfinished` names requests that were never answered: only a wedged engine leaves any.

    Of several replicas, samples and ends of steps stand one after the other, and records count their steps so; means
    of the summary are then per replica. A front end adds `clients`, in order of arrival, and the `deliveries` of tokens
    to those who were answered.
    """

    records: list[RequestRecord]
    samples: list[Sample]
    step_ends: array[float]
    unfinished: tuple[str, ...]
    num_evicted_blocks: int
    num_plans: int
    engine: EngineCore  # of the first replica
    engines: tuple[EngineCore, ...] = ()
    clients: Sequence[ClientRecord] = ()
    deliveries: Deliveries | None = None

    @property
    def summary(self) -> Summary:
        return summarise(self)


def simulate(
    config: EngineConfig,
    workload: Workload,
    cost: StepCost,
    journal: Journals = None,
    jumps: bool = True,
    on_record: OnRecord | None = None,
    *,
    front_end: FrontEndTimes | None = None,
    num_replicas: int = 1,
    routing: str = "round_robin",
    load_staleness: float = 0.0,
    block_transfer_time: float = 0.0,
) -> Run:
    """Play the workload to its end. `on_record` hears of each request that leaves, for progress.

    `journal`: one a replica. `load_staleness`: how old, in seconds, what the router knows of the replicas may be.
    `block_transfer_time`: seconds to move a KV block to host memory or back, where the preempted are swapped.
    """
    simulation = Simulation(
        config, workload, cost, _journals(journal, num_replicas), jumps, on_record, front_end, routing, load_staleness,
        block_transfer_time,
    )  # fmt: skip
    return simulation.run()


def _journals(journal: Journals, num_replicas: int) -> Sequence[Write | None]:
    if num_replicas < 1:
        raise ValueError(f"num_replicas ({num_replicas}) must be at least 1")
    journals = [None] * num_replicas if journal is None else [journal] if callable(journal) else journal
    if len(journals) != num_replicas:
        raise ValueError(f"{len(journals)} journals for {num_replicas} replicas: each writes one of its own")
    return journals


class Simulation:
    """The world of one run, before it is played: everything that lives, under one clock."""

    def __init__(
        self,
        config: EngineConfig,
        workload: Workload,
        cost: StepCost,
        journals: Sequence[Write | None] = (None,),
        jumps: bool = True,
        on_record: OnRecord | None = None,
        front_end: FrontEndTimes | None = None,
        routing: str = "round_robin",
        load_staleness: float = 0.0,
        block_transfer_time: float = 0.0,
    ) -> None:
        self.env = simpy.Environment()
        self.records: list[tuple[int, RequestRecord]] = []  # with the index of the replica
        self._on_record = on_record
        clients = Clients(self.env, workload)
        is_open = type(workload).on_outcome is Workload.on_outcome  # nothing follows from an answer
        self.front_end: FrontEnd | NoFrontEnd
        if front_end is None:
            self.front_end = NoFrontEnd(self._heard, clients.answered)
        else:
            answers_whole = make("batching", config.batching).returns_together
            on_answer = None if is_open else clients.answered
            self.front_end = FrontEnd(self.env, front_end, len(journals), answers_whole, self._heard, on_answer)
        self.cluster = Cluster(
            self.env,
            [build(config, journal) for journal in journals],
            cost,
            make("routing", routing),
            self.front_end,
            load_staleness=load_staleness,
            block_transfer_time=block_transfer_time,
            jumps=jumps,
            is_open=is_open and (front_end is None or front_end.max_concurrency is None),
        )
        self.front_end.connect(self.cluster)
        clients.start(self.front_end)

    def _heard(self, index: int, record: RequestRecord) -> None:
        self.records.append((index, record))
        if self._on_record is not None:
            self._on_record(record)

    def run(self) -> Run:
        self.env.run()
        return self.outcome()

    def outcome(self) -> Run:
        replicas = self.cluster.replicas
        engines = tuple(replica.engine for replica in replicas)
        run = Run(
            records=[self._placed(*each) for each in self.records],
            samples=[sample for replica in replicas for sample in replica.samples],
            step_ends=array("d", chain.from_iterable(replica.step_ends for replica in replicas)),
            unfinished=tuple(self.front_end.unfinished),
            num_evicted_blocks=sum(engine.kv.num_evicted for engine in engines),
            num_plans=sum(replica.num_plans for replica in replicas),
            engine=engines[0],
            engines=engines,
        )
        return run if isinstance(self.front_end, NoFrontEnd) else self._with_clients(run, self.front_end)

    def _placed(self, index: int, record: RequestRecord) -> RequestRecord:
        """Its steps counted among those of all replicas."""
        if not index:
            return record
        shift = sum(len(replica.step_ends) for replica in self.cluster.replicas[:index])
        return replace(record, token_spans=tuple((step + shift, num) for step, num in record.token_spans))

    def _with_clients(self, run: Run, front_end: FrontEnd) -> Run:
        deliveries = front_end.deliveries()
        clients = client_records(front_end.visits, deliveries, self._placed)
        answered = np.zeros(len(front_end.visits), dtype=bool)
        answered[[client.number for client in clients if client.reason in ANSWERED]] = True
        return replace(run, clients=clients, deliveries=deliveries.only(answered))


class Clients:
    """Send the workload, each request at its time, and what follows from answers; some give up waiting for theirs."""

    def __init__(self, env: simpy.Environment, workload: Workload) -> None:
        self._env = env
        self._workload = workload
        self._gone: set[str] = set()  # who gave up

    def start(self, door: Door) -> None:
        self._door = door
        self._env.process(self._arrive(self._workload.initial()))

    def answered(self, record: RequestRecord) -> None:
        """A request is over, however it ended; no news to who has left."""
        if record.request_id not in self._gone:
            self._go_on(record)

    def _go_on(self, record: RequestRecord) -> None:
        following = self._workload.on_outcome(record, self._env.now)
        if following:
            self._env.process(self._arrive(following))

    def _arrive(self, items: Sequence[WorkItem]) -> Process:
        for item in items:
            arrival = item.request.arrival_time
            if arrival > self._env.now:
                yield Moment(self._env, arrival)
            self._gone.discard(item.request.request_id)
            self._door.send(item)
            if item.patience is not None:
                self._env.process(self._wait(item.request, arrival + item.patience))

    def _wait(self, request: Request, until: float) -> Process:
        """Give up at a time, unless the answer has come."""
        if until > self._env.now:
            yield Moment(self._env, until)
        if self._door.hang_up(request.request_id):
            self._gone.add(request.request_id)
            self._go_on(abandoned(request, self._env.now))

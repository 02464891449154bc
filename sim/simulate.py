"""One simulated run: an engine, a workload and a cost in; records, samples and a summary out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import simpy

from policies.catalogue import build
from policies.config import EngineConfig
from policies.engine import EngineCore
from policies.journal import Write
from policies.types import RequestRecord
from sim.cost import StepCost
from sim.executor import SimulatedExecutor, delay_until
from sim.metrics import Summary, summarise
from sim.replica import Process, Replica, Sample
from sim.workload.workload import WorkItem, Workload


@dataclass(frozen=True, slots=True)
class Run:
    """What happened. `unfinished` names requests that were never answered: only a wedged engine leaves any."""

    records: list[RequestRecord]
    samples: list[Sample]
    step_ends: array[float]
    unfinished: tuple[str, ...]
    num_evicted_blocks: int
    num_plans: int
    engine: EngineCore

    @property
    def summary(self) -> Summary:
        return summarise(self.records, self.samples, self.step_ends, self.num_evicted_blocks, len(self.unfinished))


def simulate(
    config: EngineConfig,
    workload: Workload,
    cost: StepCost,
    journal: Write | None = None,
    jumps: bool = True,
    on_record: Callable[[RequestRecord], object] | None = None,
) -> Run:
    """Play the workload to its end. `on_record` hears of each request that leaves, for progress."""
    env = simpy.Environment()
    engine = build(config, journal)
    executor = SimulatedExecutor(cost, overlap=config.async_depth > 1)
    player = _Player(env, workload, executor, on_record)
    replica = Replica(env, engine, executor, player.heard, jumps)
    player.start(replica)
    env.run()
    return Run(
        records=player.records,
        samples=replica.samples,
        step_ends=replica.step_ends,
        unfinished=tuple(state.request_id for state in engine.states),
        num_evicted_blocks=engine.kv.num_evicted,
        num_plans=replica.num_plans,
        engine=engine,
    )


class _Player:
    """Sends the workload to the replica, each request at its time."""

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        executor: SimulatedExecutor,
        on_record: Callable[[RequestRecord], object] | None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._env = env
        self._workload = workload
        self._executor = executor
        self._on_record = on_record

    def start(self, replica: Replica) -> None:
        self._replica = replica
        self._env.process(self._arrive(self._workload.initial()))

    def heard(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self._on_record is not None:
            self._on_record(record)
        following = self._workload.on_outcome(record, self._env.now)
        if following:
            self._env.process(self._arrive(following))

    def _arrive(self, items: Sequence[WorkItem]) -> Process:
        for item in items:
            arrival = item.request.arrival_time
            if arrival > self._env.now:
                yield self._env.timeout(delay_until(self._env.now, arrival))
            self._executor.expect(item.request, item.num_output_tokens)
            self._replica.submit(item.request)

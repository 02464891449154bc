"""A workload on a live body: each request at its time, and of what came back the same records as a simulation keeps."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from backend.device import LiveExecutor
from backend.front import Answer, Front
from backend.start import Body
from policies.catalogue import build
from policies.journal import Write
from policies.types import FinishReason, RequestRecord, StepPlan
from sim.simulate import Run
from sim.stream import Deliveries, merged
from sim.timings import COMPLETED
from sim.visit import Visit, abandoned, client_records
from sim.workload.workload import WorkItem, Workload

OnRecord = Callable[[RequestRecord], object]
LEAD = 0.05  # seconds between the start of the clock and the first arrival


@dataclass(frozen=True, slots=True)
class Pace:
    """How much later than intended arrivals were sent, in seconds: latencies count it, as it is not the server's."""

    p99: float
    max: float

    @classmethod
    def of(cls, visits: Sequence[Visit]) -> Pace:
        sent = np.array([visit.api_in_time for visit in visits] or [0.0], dtype=np.float64)
        late = sent - np.array([visit.request.arrival_time for visit in visits] or [0.0])
        return cls(float(np.percentile(late, 99)), float(late.max()))

    def __str__(self) -> str:
        p99, most = 1e3 * self.p99, 1e3 * self.max
        return f"arrivals were sent up to {most:.3g} ms late, p99 {p99:.3g} ms; latencies count from the intended times"


class Clock:
    """Seconds as the workload counts them: it stands `LEAD` before the first arrival when it starts."""

    def __init__(self, workload: Workload) -> None:
        first = workload.items[0].request.arrival_time if workload.items else 0.0
        self._origin = time.monotonic() + LEAD - first

    def __call__(self) -> float:
        return time.monotonic() - self._origin


def play(
    body: Body,
    workload: Workload,
    journal: Write | None = None,
    on_record: OnRecord | None = None,
    executor: LiveExecutor | None = None,
) -> tuple[Run, Pace]:
    """Play the workload to its end, in its own time. `on_record` hears of each request that leaves; `executor`: another
    than a new one of the body's."""
    return asyncio.run(_play(body, workload, journal, on_record, executor or body.executor()))


async def _play(
    body: Body, workload: Workload, journal: Write | None, on_record: OnRecord | None, executor: LiveExecutor
) -> tuple[Run, Pace]:
    engine = build(body.config, journal)
    clients = Clients(workload, on_record)
    async with Front(engine, executor, Clock(workload), clients.stepped, clients.give_up) as front:
        await clients.run(front)
    replica = front.replica
    deliveries = clients.deliveries(front.delivered)
    seen = client_records(clients.visits, deliveries, lambda _, record: record)
    answered = np.zeros(len(clients.visits), dtype=bool)
    answered[[client.number for client in seen if client.reason in COMPLETED]] = True
    run = Run(
        records=clients.records,
        samples=replica.samples,
        step_ends=replica.step_ends,
        unfinished=tuple(visit.request.request_id for visit in clients.visits if visit.record is None),
        num_evicted_blocks=engine.kv.num_evicted,
        num_plans=len(replica.samples),
        engine=engine,
        engines=(engine,),
        clients=seen,
        deliveries=deliveries.only(answered),
    )
    return run, Pace.of(clients.visits)


class Clients:
    """Send the workload, each request at its time, and what follows from answers; some give up waiting for theirs."""

    def __init__(self, workload: Workload, on_record: OnRecord | None) -> None:
        self.visits: list[Visit] = []
        self.records: list[RequestRecord] = []
        self._workload = workload
        self._on_record = on_record
        self._latest: dict[str, tuple[Visit, Answer]] = {}  # by request id
        self._num_to_act = 0  # clients that will still send, or may lose patience

    async def run(self, front: Front) -> None:
        self._front = front
        try:
            async with asyncio.TaskGroup() as self._group:
                self._expect(self._workload.initial())
        except* Exception as errors:
            raise errors.exceptions[0] from None

    def _expect(self, items: Sequence[WorkItem]) -> None:
        self._num_to_act += len(items)
        if items:
            self._group.create_task(self._arrive(items))

    async def _arrive(self, items: Sequence[WorkItem]) -> None:
        """In their order, those of one instant too."""
        for item in items:
            while (wait := item.request.arrival_time - self._front.clock()) > 0.0:
                await asyncio.sleep(wait)
            self._group.create_task(self._wait(item, *self._send(item)))

    async def _wait(self, item: WorkItem, visit: Visit, answer: Answer) -> None:
        """Until it is answered, or its client has had enough."""
        if item.patience is not None:
            await self._be_patient(answer, item.request.arrival_time + item.patience - self._front.clock())
        self._num_to_act -= 1
        await answer.end()
        self._close(visit, answer)

    def give_up(self) -> None:
        """Nobody can be served any more. If nobody does anything about it either, the run is over."""
        if not self._num_to_act:
            self._front.replica.stop()

    def _send(self, item: WorkItem) -> tuple[Visit, Answer]:
        visit = Visit(len(self.visits), item, replica=0, api=0, api_in_time=self._front.clock())
        answer = self._front.ask(item.request, item.num_output_tokens)
        self.visits.append(visit)
        self._latest[item.request.request_id] = visit, answer
        return visit, answer

    async def _be_patient(self, answer: Answer, seconds: float) -> None:
        try:
            await asyncio.wait_for(answer.end(), max(0.0, seconds))
        except TimeoutError:
            answer.hang_up()
            self._go_on(abandoned(answer.request, self._front.clock()))

    def _go_on(self, record: RequestRecord) -> None:
        self._expect(self._workload.on_outcome(record, self._front.clock()))

    def _close(self, visit: Visit, answer: Answer) -> None:
        record = answer.record
        if record is None:
            return  # the engine stopped before it could answer, and says why itself
        visit.record = record
        visit.added_time = answer.added_time
        visit.retry_after = None if answer.outcome is None else answer.outcome.retry_after
        visit.answer_time = self._answer_time(answer, record)
        visit.left_time = visit.api_cancel_time = answer.hung_up_time
        if record.reason is FinishReason.ABORT:
            visit.engine_cancel_time = record.finish_time
        self.records.append(record)
        if self._on_record is not None:
            self._on_record(record)
        if answer.hung_up_time is None:
            self._go_on(record)

    def _answer_time(self, answer: Answer, record: RequestRecord) -> float | None:
        """Of its last token, if it was streamed."""
        if record.reason in COMPLETED and record.token_spans:
            first, num = record.token_spans[-1]
            return self._front.delivered[first + num - 1]
        return answer.finish_time

    # -- tokens ---------------------------------------------------------------------------------------------------

    def stepped(self, plan: StepPlan, tokens: Mapping[str, Sequence[int]]) -> None:
        """Some sampled in vain, their clients having hung up."""
        for name in compress(plan.request_ids, plan.samples):
            visit, answer = self._latest[name]
            visit.num_zombie_tokens += name not in tokens and answer.hung_up_time is not None

    def deliveries(self, delivered: array[float]) -> Deliveries:
        """All tokens of a step come at once; an answer that is handed over as a whole counts as one."""
        spans = [(visit.number, *span) for visit in self.visits if visit.record for span in visit.record.token_spans]
        streamed = _deliveries(spans, np.array(delivered))
        whole = [visit for visit in self.visits if visit.record and _came_whole(visit.record)]
        times = np.array([visit.answer_time for visit in whole], dtype=np.float64)
        rows = [(visit.number, index, 1) for index, visit in enumerate(whole)]
        return merged((streamed, _deliveries(rows, times))) if whole else streamed


def _came_whole(record: RequestRecord) -> bool:
    return record.reason in COMPLETED and not record.token_spans


def _deliveries(rows: Sequence[tuple[int, int, int]], starts: np.typing.NDArray[np.float64]) -> Deliveries:
    """Of (answer, first step, tokens)."""
    answers, steps, nums = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Deliveries(answers, steps, nums, np.zeros(len(rows)), starts)

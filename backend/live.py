"""One replica under the wall clock: the loop of the simulator's, on a thread of its own, with a device that takes time.

Order at one instant: update, aborts, arrivals, schedule. The inbox is emptied before a schedule and, for aborts,
between a step and its update. The device is another thread: with `async_depth` 2 a step is decided while it is busy.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from backend.device import Device, LiveExecutor
from policies.engine import EngineCore
from policies.types import Outcome, Request, RequestRecord, Sample, StepOutput, StepPlan
from policies.view import sample


class Listener(Protocol):
    """Hears, on the engine's thread, what becomes of requests."""

    def added(self, request: Request, outcome: Outcome) -> None: ...
    def stepped(self, plan: StepPlan, tokens: Mapping[str, Sequence[int]]) -> None:
        """A step is over, and these tokens count; whoever else sampled in it had left."""

    def left(self, record: RequestRecord, error: BaseException | None) -> None:
        """`error`: what its step threw."""

    def stuck(self, num_taken: int) -> None:
        """Work is left, nobody can run, and of itself nothing will change; of the messages sent, so many were taken."""

    def ended(self, error: BaseException | None) -> None:
        """Nothing comes any more. With an error the run is void."""


class Arrival(NamedTuple):
    request: Request
    length: int | None
    answer: Sequence[int]


class Cancel(NamedTuple):
    request_id: str


class Stop(NamedTuple):
    """No more arrivals."""


Message = Arrival | Cancel | Stop


class Flight(NamedTuple):
    plan: StepPlan
    output: Future[StepOutput]


class LiveReplica:
    """Drives an engine. `submit`, `cancel` and `stop` are for one other thread; all else is the engine's.

    `clock` gives seconds. An executor that throws loses its step, whose requests fail; a fault of the engine ends the
    run.
    """

    def __init__(
        self,
        engine: EngineCore,
        executor: LiveExecutor,
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.step_ends = array("d")  # by step id
        self.samples: list[Sample] = []
        self.num_sent = 0  # messages to the inbox
        self._num_taken = 0
        self._listener = listener
        self._clock = clock
        self._device = Device(executor)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._arrivals: deque[Arrival] = deque()
        self._in_flight: deque[Flight] = deque()
        self._first_steps: dict[str, int] = {}  # of each request in the engine, the first that can be for it
        self._errors: dict[str, BaseException] = {}
        self._is_stopping = False

    def submit(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        """A request reaches the engine's inbox."""
        self._send(Arrival(request, length, answer))

    def cancel(self, request_id: str) -> None:
        """Its caller is gone."""
        self._send(Cancel(request_id))

    def stop(self) -> None:
        """Nobody else comes: the run ends when all have left."""
        self._send(Stop())

    def _send(self, message: Message) -> None:
        self.num_sent += 1
        self._inbox.put(message)

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until stopped and drained; on the thread that becomes the engine's."""
        error: BaseException | None = None
        try:
            self._run()
        except BaseException as fault:
            error = fault
        self._device.close()
        self._listener.ended(error)

    def _run(self) -> None:
        in_flight, depth = self._in_flight, self.engine.config.async_depth
        while True:
            self._drain_inbox()
            plan = self.engine.schedule(self._clock())
            if plan is not None:
                self.samples.append(sample(self.engine, plan))
                in_flight.append(Flight(plan, self._device.execute(plan)))
            elif not in_flight:
                if self._is_over():
                    return
                self._sleep()
                continue
            if len(in_flight) == depth or plan is None:
                self._finish(*in_flight.popleft())

    def _finish(self, plan: StepPlan, output: Future[StepOutput]) -> None:
        error = output.exception()  # waits
        self._drain_aborts()
        now, tokens = self._clock(), dict[str, Sequence[int]]()
        if error is None:
            tokens = self._counted(plan, output.result())
            self.engine.update(plan, output.result(), now)
        else:
            self._fail(plan, error, now)
        self.step_ends.append(now)
        self._listener.stepped(plan, tokens)
        self._collect()

    def _counted(self, plan: StepPlan, output: StepOutput) -> dict[str, Sequence[int]]:
        """Tokens of those who are still there; a returned id does not inherit from its last bearer."""
        names = compress(plan.request_ids, plan.samples)
        return {name: output.token_ids[name] for name in names if self._is_bearer(name, plan)}

    def _is_bearer(self, request_id: str, plan: StepPlan) -> bool:
        first_step = self._first_steps.get(request_id)
        return first_step is not None and first_step <= plan.step_id

    def _sleep(self) -> None:
        """Until somebody comes or leaves, or the engine changes its mind by itself."""
        now = self._clock()
        wakeup = self.engine.next_wakeup(now)
        if wakeup is None and self.engine.has_work:
            self._listener.stuck(self._num_taken)
        with suppress(Empty):
            self._take(self._inbox.get(timeout=None if wakeup is None else max(0.0, wakeup - now)))

    def _is_over(self) -> bool:
        """Nobody runs. Blocks held all the same would never come back: better no run than a smaller pool."""
        kv = self.engine.kv
        if not self.engine.running and (kv.num_free < kv.num_blocks or kv.num_held_back):
            raise RuntimeError(
                f"{kv.num_blocks - kv.num_free} of {kv.num_blocks} KV blocks are held and {kv.num_held_back} promised, "
                "but nobody runs: blocks are stranded"
            )
        return self._is_stopping and (not self.engine.has_work or self.engine.next_wakeup(self._clock()) is None)

    # -- a step that threw --------------------------------------------------------------------------------------

    def _fail(self, plan: StepPlan, error: BaseException, now: float) -> None:
        """Its requests fail, with those who read what it was to write. The step behind it goes on without them."""
        failed = self.engine.fail(plan, now)
        self._errors |= dict.fromkeys(failed, error)
        lost = {*failed, *(name for name in plan.request_ids if self._first_steps.get(name, 0) <= plan.step_id)}
        self._device.resume()
        behind = [Flight(each.plan, self._device.execute(_without(each.plan, lost))) for each in self._in_flight]
        self._in_flight.clear()
        self._in_flight.extend(behind)

    # -- inbox and outbox ---------------------------------------------------------------------------------------

    def _drain_inbox(self) -> None:
        self._drain_aborts()
        while self._arrivals:
            self._add(self._arrivals.popleft())
        self._collect()

    def _drain_aborts(self) -> None:
        """Arrivals are kept for the next schedule."""
        while True:
            try:
                self._take(self._inbox.get_nowait())
            except Empty:
                return

    def _take(self, message: Message) -> None:
        self._num_taken += 1
        if isinstance(message, Arrival):
            self._arrivals.append(message)
        elif isinstance(message, Cancel):
            self._abort(message.request_id)
        else:
            self._is_stopping = True

    def _add(self, arrival: Arrival) -> None:
        self._collect()  # the last bearer of its id may just have left
        request = arrival.request
        outcome = self.engine.add(request, self._clock())
        if outcome.accepted:
            self._first_steps[request.request_id] = self.engine.next_step_id
            self._device.add(*arrival)
        self._listener.added(request, outcome)

    def _abort(self, request_id: str) -> None:
        """Who is still in the inbox comes and goes at once: the engine tells of everybody."""
        early = next((each for each in self._arrivals if each.request.request_id == request_id), None)
        if early is not None:
            self._arrivals.remove(early)
            self._add(early)
        self.engine.abort(request_id, self._clock())
        self._first_steps.pop(request_id, None)

    def _collect(self) -> None:
        """Who has left is forgotten by the device too, once it is through with what is in flight."""
        for record in self.engine.drain_records():
            self._first_steps.pop(record.request_id, None)
            self._device.discard(record.request_id)
            self._listener.left(record, self._errors.pop(record.request_id, None))


def _without(plan: StepPlan, lost: Container[str]) -> StepPlan:
    """The same step for the others."""
    kept = [name not in lost for name in plan.request_ids]
    return replace(
        plan,
        request_ids=list(compress(plan.request_ids, kept)),
        starts=list(compress(plan.starts, kept)),
        counts=list(compress(plan.counts, kept)),
        samples=list(compress(plan.samples, kept)),
        tables=list(compress(plan.tables, kept)),
    )

"""One replica under SimPy's clock: the loop of the live backend, with time that costs nothing.

Order at one instant: update, aborts, arrivals, schedule. So a step ends after everything else that happens at its time.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Generator, Sequence
from heapq import heappush
from typing import Any

import simpy
from simpy.events import NORMAL, EventPriority

from policies.engine import EngineCore
from policies.types import Outcome, Request, RequestRecord, Sample, StepOutput, StepPlan
from policies.view import sample
from sim.executor import SimulatedExecutor

LATE = EventPriority(2)  # after SimPy's URGENT (0) and NORMAL (1)

Process = Generator[simpy.Event, Any, None]


class Moment(simpy.Event):
    """Happens at a time, to the last bit: not every time is the sum of now and some delay, when sums are rounded."""

    def __init__(self, env: simpy.Environment, time: float, priority: EventPriority = NORMAL) -> None:
        assert time >= env.now, f"{time} is over, it is {env.now}"
        super().__init__(env)
        self._ok, self._value = True, None
        heappush(env._queue, (time, priority, next(env._eid), self))


class Late(Moment):
    """Happens after all else at its instant; of several, the one of lowest rank goes first."""

    def __init__(self, env: simpy.Environment, time: float, rank: int = 0) -> None:
        super().__init__(env, time, EventPriority(LATE + rank))


class Replica:
    """Drives an engine. `on_record` hears of all who leave; `jumps` takes equal steps at once, to the same bits.

    Among replicas under one clock, those of lower `rank` go first at an instant. `on_add` hears what became of each
    request in the inbox, `on_step` of each plan that is done, and of the ends of its steps. `horizon` tells when the
    next event comes that can matter to this replica; any event can, unless it is given.
    """

    def __init__(
        self,
        env: simpy.Environment,
        engine: EngineCore,
        executor: SimulatedExecutor,
        on_record: Callable[[RequestRecord], None],
        jumps: bool = True,
        *,
        rank: int = 0,
        on_add: Callable[[Request, Outcome], object] | None = None,
        on_step: Callable[[StepPlan, Sequence[float]], object] | None = None,
        horizon: Callable[[], float] | None = None,
    ) -> None:
        self.env = env
        self.engine = engine
        self.executor = executor
        self.step_ends = array("d")  # by step id
        self.samples: list[Sample] = []
        self.num_plans = 0
        self._rank = rank
        self._on_record = on_record
        self._on_add = on_add
        self._on_step = on_step
        self._horizon = horizon or env.peek
        self._repeats = self._jump if jumps and engine.config.async_depth == 1 else None
        self._arrivals: deque[Request] = deque()
        self._aborts: deque[tuple[float, str]] = deque()
        self._wake = env.event()
        env.process(self._run())

    def submit(self, request: Request) -> None:
        """A request reaches the engine's inbox."""
        self._arrivals.append(request)
        self._ring()

    def cancel(self, request_id: str) -> None:
        """Its caller is gone."""
        self._aborts.append((self.env.now, request_id))
        self._ring()

    def _ring(self) -> None:
        if not self._wake.triggered:
            self._wake.succeed()

    # -- the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> Process:
        in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
        depth = self.engine.config.async_depth
        while True:
            self._drain_inbox()
            plan = self.engine.schedule(self.env.now, self._repeats)
            self._collect()  # whoever was shed
            if plan is not None:
                self.samples.append(sample(self.engine, plan))
                self.num_plans += 1
                in_flight.append((plan, self.executor.execute(plan)))
            elif not in_flight:
                yield from self._sleep()
                continue
            if len(in_flight) == depth or plan is None:
                yield from self._finish(*in_flight.popleft())

    def _finish(self, plan: StepPlan, output: StepOutput) -> Process:
        ends = self.executor.ends(plan) if plan.repeat > 1 else (self.env.now + output.duration,)
        yield Late(self.env, ends[-1], self._rank)
        self._drain_aborts(before=self.env.now)
        self.engine.update(plan, output, self.env.now)
        self.step_ends.extend(ends)
        if self._on_step is not None:
            self._on_step(plan, ends)
        self._collect()

    def _sleep(self) -> Process:
        wakeup = self.engine.next_wakeup(self.env.now)
        self._wake = self.env.event()
        if wakeup is None:
            yield self._wake
        else:
            yield self._wake | Moment(self.env, max(wakeup, self.env.now))
        yield Late(self.env, self.env.now, self._rank)  # who else arrives at this instant belongs to the same step

    def _jump(self, plan: StepPlan, limit: int) -> int:
        wakeup = self.engine.next_wakeup(self.env.now)  # from then on a policy may answer otherwise
        until = self._horizon() if wakeup is None else min(wakeup, self._horizon())
        return self.executor.repeats(plan, limit, until)

    # -- inbox and outbox ---------------------------------------------------------------------------------------

    def _drain_inbox(self) -> None:
        self._drain_aborts(before=math.inf)
        while self._arrivals:
            self._add(self._arrivals.popleft())
        self._collect()

    def _add(self, request: Request) -> None:
        outcome = self.engine.add(request, self.env.now)
        if self._on_add is not None:
            self._on_add(request, outcome)

    def _drain_aborts(self, before: float) -> None:
        while self._aborts and self._aborts[0][0] < before:
            self._abort(self._aborts.popleft()[1])

    def _abort(self, request_id: str) -> None:
        """Who is still in the inbox comes and goes at once: the engine tells of everybody."""
        early = next((each for each in self._arrivals if each.request_id == request_id), None)
        if early is not None:
            self._arrivals.remove(early)
            self._add(early)
        self.engine.abort(request_id, self.env.now)

    def _collect(self) -> None:
        for record in self.engine.drain_records():
            self._on_record(record)

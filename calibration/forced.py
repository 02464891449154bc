"""Teacher-forced replay: our own core takes its decisions, and the clock is what the server's tokens say.

Where every token's time is recorded, all requests that a step serves get theirs together: when the step ended. So the
core is asked for a plan, the plan says whose tokens come next, and the records say when they came. No cost is assumed,
and what comes out is a step log: what each step computed, and how long it took.

A request is given to the core when its first token says that it was in: not so early that it would have answered
before, and not so late that its answer would come too soon. Where the core cannot agree to that, it is counted: a
wrong engine limit shows there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from calibration.records import MeasuredRequest, MeasuredRun
from calibration.replayed import request_of
from policies.catalogue import build
from policies.config import EngineConfig
from policies.types import StepOutput, StepPlan
from sim.cost import StepCost, StepWork
from sim.executor import work_of

SAME_STEP = 0.4  # of a step: first tokens within it belong to that step
SHORTEST = 3e-3  # seconds by which the first token of an answer may come later than its step's other tokens
MARGIN = 10e-3  # seconds by which a request may come later to the engine than `ingress` says
LATEST_STEPS = 3.0  # steps by which an answer may begin later: what was in the cache shifts prompts by one


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """One interval between two observed ends of steps: mostly one step, more where nobody's token was recorded.

    `is_busy`: the engine had work when it began, so that all of `duration` was work. `num_arrivals`: requests that
    their clients sent meanwhile; where one core does everything, taking them in makes the step longer. `entered`:
    requests that were let in, of each of `works`.
    """

    works: tuple[StepWork, ...]
    start: float
    end: float
    is_busy: bool
    num_arrivals: int = 0
    entered: tuple[tuple[str, ...], ...] = ()

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Forced:
    """What a forced replay found. `usage`: share of the pool by step.

    `early`, `late`: requests whose answer began before the core would let it, or when the core would long have given
    it; either speaks against an engine limit.
    """

    steps: list[ObservedSteps] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_requests: int = 0
    early: int = 0
    late: int = 0

    @property
    def contradictions(self) -> float:
        """Share of requests that the core cannot serve as they were served."""
        return (self.early + self.late) / self.num_requests if self.num_requests else 0.0


class ForcedReplay:
    """Of one run. `ingress`: seconds from the client to the engine. `known`: whose token times may be looked at.
    `cost`, where there is a first idea of it: tells whether a prompt that takes several steps was begun in the next.
    """

    def __init__(
        self,
        run: MeasuredRun,
        config: EngineConfig,
        ingress: float = 0.0,
        known: Collection[str] | None = None,
        cost: StepCost | None = None,
    ) -> None:
        self._engine = build(config)
        self._config = config
        self._content_size = run.content_size
        self._arrivals = [request.arrival_time for request in run.requests]
        self._coming = sorted(run.completed, key=lambda request: request.arrival_time)
        self._requests = {request.request_id: request for request in self._coming}
        self._times = {
            each.request_id: each.token_times
            for each in self._coming
            if len(each.token_times) == each.num_output_tokens and (known is None or each.request_id in known)
        }
        self._typical = _typical_gap(self._times.values())
        self._ingress = ingress
        self._cost = cost
        self._next = 0
        self._now = 0.0
        self._num_tokens = dict.fromkeys(self._requests, 0)  # given out, by request
        self._waiting: dict[str, int] = {}  # in the core's queue: prompt tokens
        self._is_late = False  # the request that comes next
        self._works: list[StepWork] = []  # since the last observed end
        self._entered: list[tuple[str, ...]] = []  # with them
        self._start = 0.0
        self._was_busy = False
        self._found = Forced(num_requests=len(self._coming))

    def run(self) -> Forced:
        while True:
            self._admit()
            plan = self._engine.schedule(self._now)
            if plan is not None and plan.request_ids:
                self._step(plan)
            elif self._next < len(self._coming):
                self._now = max(self._now, self._coming[self._next].arrival_time + self._ingress)
                self._begin_again()
                if plan is not None:
                    self._engine.update(plan, StepOutput(0.0), self._now)
            else:
                return self._found

    def _begin_again(self) -> None:
        self._works, self._entered, self._start, self._was_busy = [], [], self._now, False

    # -- who comes in ---------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        end = self._expected_end()
        while self._next < len(self._coming) and self._is_due(self._coming[self._next], end):
            request = self._coming[self._next]
            self._found.late += self._is_late
            self._next, self._is_late = self._next + 1, False
            self._waiting[request.request_id] = request.num_prompt_tokens
            self._engine.add(request_of(request, self._content_size), self._now)

    def _expected_end(self) -> float | None:
        """When the coming step ended, as the next tokens of those who decode say."""
        running = self._engine.running
        times = [time for state in running if state.num_output_tokens and (time := self._next_time(state.request_id))]
        return median(times) if times else None

    def _next_time(self, request_id: str) -> float | None:
        times, index = self._times.get(request_id), self._num_tokens[request_id]
        return times[index] if times and index < len(times) else None

    def _is_due(self, request: MeasuredRequest, end: float | None) -> bool:
        has_come = request.arrival_time + self._ingress <= self._now
        first = request.first_token_time
        if end is None or first is None or request.request_id not in self._times:
            return has_come
        step = max(end - self._now, SHORTEST)
        if first <= end + SAME_STEP * step:
            return request.arrival_time <= self._now
        if not self._would_answer(request):
            return self._has_begun(request, end) if self._may_have_come(request) else has_come
        if not has_come:
            return False
        self._is_late |= self._now - request.arrival_time > self._ingress + MARGIN
        return False

    def _may_have_come(self, request: MeasuredRequest) -> bool:
        """Whether it is not known if it had come; only asked where a cost can tell."""
        return self._cost is not None and 0.0 <= self._now - request.arrival_time <= self._ingress + MARGIN

    def _has_begun(self, request: MeasuredRequest, end: float) -> bool:
        """Whether the coming step took as long as with a part of this prompt, rather than without."""
        assert self._cost is not None
        running = self._engine.running
        decodes = [state.num_tokens for state in running if state.num_output_tokens]
        others = sum(
            state.num_prompt_tokens - state.num_computed_tokens for state in running if not state.num_output_tokens
        )
        others += sum(self._waiting.values())
        room = self._config.max_num_batched_tokens - len(decodes)
        times = [
            self._cost.device_time(
                StepWork(len(decodes) + tokens, 0, len(decodes), len(decodes), sum(decodes), 1, tokens * (tokens + 1))
            )
            for tokens in (min(room, others), min(room, others + request.num_prompt_tokens))
        ]
        return end - self._now > sum(times) / 2

    def _would_answer(self, request: MeasuredRequest) -> bool:
        """Whether the coming step would compute the whole prompt, if it could enter now."""
        running = self._engine.running
        left = self._config.max_num_batched_tokens - sum(self._waiting.values())
        left -= sum(max(1, state.num_prompt_tokens - state.num_computed_tokens) for state in running)
        slots = self._config.max_num_seqs - len(running) - len(self._waiting)
        blocks = -(-(request.num_prompt_tokens + sum(self._waiting.values())) // self._config.block_size)
        return request.num_prompt_tokens <= left and slots > 0 and blocks < self._engine.kv.num_free

    # -- what is computed -----------------------------------------------------------------------------------------

    def _step(self, plan: StepPlan) -> None:
        for each in plan.admitted:
            self._waiting.pop(each.request_id, None)
        self._works.append(work_of(plan))
        self._entered.append(tuple(each.request_id for each in plan.admitted))
        self._found.num_preemptions += len(plan.preempted)
        end = self._observed_end(plan)
        kv = self._engine.kv
        self._found.usage.append(1.0 - kv.num_free / self._config.num_blocks)
        if end is not None and end > self._start:
            self._found.steps.append(self._observed(end))
            self._now = max(end, self._now)
            self._works, self._entered, self._start, self._was_busy = [], [], end, True
        elif end is None:
            self._now += self._guess(self._works[-1])
        self._engine.update(plan, StepOutput(0.0), self._now)
        self._engine.drain_records()

    def _guess(self, work: StepWork) -> float:
        """How long a step took that nobody saw."""
        return self._typical if self._cost is None else self._cost.device_time(work)

    def _observed(self, end: float) -> ObservedSteps:
        num = bisect_left(self._arrivals, end) - bisect_left(self._arrivals, self._start)
        return ObservedSteps(tuple(self._works), self._start, end, self._was_busy, num, tuple(self._entered))

    def _observed_end(self, plan: StepPlan) -> float | None:
        """The median of later tokens; of first ones the earliest, as each may wait for its answer to be opened."""
        later: list[float] = []
        firsts: list[float] = []
        for request_id, samples in zip(plan.request_ids, plan.samples, strict=True):
            if samples:
                index = self._num_tokens[request_id]
                if (time := self._next_time(request_id)) is not None:
                    (later if index else firsts).append(time)
                self._num_tokens[request_id] = index + 1
        end = median(later) if later else min(firsts, default=None)
        if end is not None:
            self._found.early += sum(first < self._now for first in firsts)
            latest = end + LATEST_STEPS * max(MARGIN, end - self._now)
            self._found.late += sum(first > latest for first in firsts)
        return end


def forced_steps(
    run: MeasuredRun,
    config: EngineConfig,
    ingress: float = 0.0,
    known: Collection[str] | None = None,
    cost: StepCost | None = None,
) -> Forced:
    """Raises ValueError where no request has a time for each of its tokens."""
    if not has_token_times(run):
        raise ValueError(f"run {run.name!r} has no token times: steps cannot be seen in it")
    return ForcedReplay(run, config, ingress, known, cost).run()


def has_token_times(run: MeasuredRun) -> bool:
    """Of at least half of its answers."""
    known = sum(len(each.token_times) == each.num_output_tokens for each in run.completed)
    return 2 * known >= len(run.completed)


def _typical_gap(many: Iterable[Sequence[float]]) -> float:
    """Seconds between tokens, the median."""
    gaps = [later - earlier for times in many for earlier, later in pairwise(times)]
    return median(gaps) if gaps else 0.0

"""EngineCore: requests come in, steps go out. Sans-IO: the shell owns the clock, the inbox and the device.

    plan = engine.schedule(now)
    output = executor.execute(plan)
    engine.update(plan, output, now)

Order at one instant: update, aborts, arrivals, schedule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from policies.config import EngineConfig
from policies.fitting import check, misfit, token_limit, unpromised
from policies.held import HeldLines
from policies.host_tier import HostTier
from policies.interfaces import (
    AdmissionPolicy,
    AllocationPolicy,
    BatchingPolicy,
    EvictionPolicy,
    HearsOfEnds,
    HearsOfPreemptions,
    IsolationPolicy,
    Partitions,
    PreemptionPolicy,
    Promise,
    Releases,
    SchedulingPolicy,
    Sheds,
)
from policies.kv import KVCache
from policies.overheard import overheard
from policies.poison import poisoned
from policies.prompt import Namespace, seals
from policies.records import record, rejection
from policies.repeat import grow, repeat_limit
from policies.step import Step
from policies.totals import TotalsBy
from policies.types import (
    Admit,
    Block,
    FinishReason,
    Flight,
    Hold,
    Outcome,
    Reject,
    Request,
    RequestRecord,
    RequestState,
    Status,
    StepOutput,
    StepPlan,
)
from policies.view import EngineView
from policies.yielding import Yielding

_NOBODY = -1  # the owner of content that is no request's


@dataclass(frozen=True, slots=True)
class Policies:
    """One answer to each question."""

    admission: AdmissionPolicy
    scheduling: SchedulingPolicy
    batching: BatchingPolicy
    allocation: AllocationPolicy
    preemption: PreemptionPolicy
    eviction: EvictionPolicy
    isolation: IsolationPolicy

    def all(self) -> tuple[object, ...]:
        return (self.admission, self.scheduling, self.batching, self.allocation, self.preemption, self.eviction,
                self.isolation)  # fmt: skip


class PrefixStats(NamedTuple):
    """Lookups at admission, each request once. Tokens, as vLLM counts them."""

    num_requests: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0

    def plus(self, query_tokens: int, hit_tokens: int) -> PrefixStats:
        return PrefixStats(
            self.num_requests + 1, self.num_query_tokens + query_tokens, self.num_hit_tokens + hit_tokens
        )


class EngineCore:
    """One replica's scheduler and KV cache. Deterministic: same inputs, same decisions."""

    def __init__(self, config: EngineConfig, policies: Policies, secret: bytes = b"") -> None:
        if config.enable_prefix_caching and not policies.allocation.shares_blocks:
            raise ValueError(
                f"allocation {config.allocation!r} cannot share blocks between requests: "
                f"switch prefix caching off (--no-prefix-caching)"
            )
        if not policies.allocation.shares_blocks and not config.unhashed_first:
            raise ValueError(f"allocation {config.allocation!r} reuses regions newest first: leave unhashed_first on")
        self.config = config
        self.scheduling = overheard(policies.scheduling, policies.eviction)
        self.preemption = policies.preemption
        self.running: list[RequestState] = []
        self.kv = KVCache(
            config.num_blocks, config.block_size, policies.eviction, config.enable_prefix_caching, config.unhashed_first
        )
        self.view = EngineView(self)
        self.yielding = Yielding(self, policies.preemption, policies.admission, policies.scheduling)
        self.host = HostTier(config.num_host_blocks, config.block_size)
        self.held = HeldLines()
        self.next_step_id = 0
        self.num_waiting_tokens = 0
        self.num_waiting_blocks = 0
        self.num_preemptions = 0
        self.num_stopped = 0  # running requests that are done and wait for their group
        self.prefix_stats = PrefixStats()
        self.prefix_stats_resumed = PrefixStats()
        self.caches_at_schedule = config.cache_at == "schedule"
        self._policies = policies
        self._secret = secret
        self._states: dict[str, RequestState] = {}
        self._totals: dict[str, TotalsBy] = {}
        self._partitions = policies.isolation if isinstance(policies.isolation, Partitions) else None
        if (self._partitions is None) is not (self.kv.parts is None):
            raise ValueError(
                f"isolation {config.isolation!r} needs an eviction policy for each part: let build make both"
            )
        self._sheds = policies.admission if isinstance(policies.admission, Sheds) else None
        self._releases = policies.admission if isinstance(policies.admission, Releases) else None
        self._hear_of_ends = [policy for policy in policies.all() if isinstance(policy, HearsOfEnds)]
        self._hears_of_preemptions = (
            policies.allocation if isinstance(policies.allocation, HearsOfPreemptions) else None
        )
        self._in_flight: deque[Flight] = deque()
        self._records: list[RequestRecord] = []
        self._next_sequence = 0
        self._needs_tokens = False  # somebody's keys depend on tokens that only an output tells
        self._answers_may_be_found = False  # somebody's output has keys that others' prompts can have
        self.order_reads_cache = False  # whether this step's order of the waiting depends on what is cached
        self.now = -math.inf
        self._wakeups = [policy.next_wakeup for policy in policies.all() if hasattr(policy, "next_wakeup")]
        self._settles_at_schedule = config.async_depth == 1 and self.caches_at_schedule
        self._evicts_in_repeats = not getattr(policies.eviction, "time_dependent", False)
        others = [policy for policy in policies.all() if policy is not policies.eviction]
        self._policies_repeat = (
            config.async_depth == 1
            and self.kv.parts is None  # what is free for one part is not for another
            and policies.batching.repeats
            and not any(getattr(policy, "time_dependent", False) for policy in others)
        )
        self._progress_matters = self.yielding.for_waiting or any(
            getattr(policy, "depends_on_progress", False) for policy in others
        )

    # -- inputs -------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Outcome:
        """Queue a request, or refuse it with the reason.

        Raises ValueError for what no server would accept: a live id, an empty prompt, no token asked for, time
        running backwards.
        """
        self._advance_clock(now)
        if request.request_id in self._states:
            raise ValueError(
                f"request id {request.request_id!r} is live: wait until it has finished, or choose another"
            )
        check(request)
        reason = misfit(request, self.config, self.kv.quota) if self.config.refuse_unfittable else ""
        part = 0 if self._partitions is None else self._partitions.part(request.context)
        if part is None:
            reason = "each part of the cache belongs to another tenant: raise the parts of isolation partition"
        if reason:
            return self._refuse(request, Reject(reason), now)
        verdict = self._policies.admission.decide(request, self.view, now)
        if isinstance(verdict, Reject):
            return self._refuse(request, verdict, now)
        state = self._new_state(request, part or 0, now)
        required = self.promise(state, 0, 1).num_blocks_required
        if required > self.kv.quota and self.config.refuse_unfittable:
            self._tell_of_end(state, now)
            return self._refuse(request, Reject(unpromised(request, required, self.config, self.kv.quota)), now)
        self._states[request.request_id] = state
        if len(state.chain.keys) > request.prompt.num_tokens // self.config.block_size:
            self._answers_may_be_found = True
        self._needs_tokens |= state.chain.counts_from is None
        state.status = Status.HELD if isinstance(verdict, Hold) else Status.WAITING
        for totals in self._totals.values():
            totals.count(state, 1)
        if isinstance(verdict, Hold):
            self.held.add(state, verdict.line)
        else:
            self._line_up(state, now)
        return Outcome(accepted=True)

    def abort(self, request_id: str, now: float) -> bool:
        """Cancel in any state; its blocks are free at once. False if there is no such request (any more).

        A repeated step in flight has reached its last repeat by then, as no shell repeats beyond the next event.
        """
        self._advance_clock(now)
        state = self._states.get(request_id)
        if state is None:
            return False
        self._count_done_repeats(state)
        self._leave(state, FinishReason.ABORT, now)
        self._hand_over(now)
        return True

    def schedule(self, now: float, repeats: Callable[[StepPlan, int], int] | None = None) -> StepPlan | None:
        """The next step, or None when nothing can be done before an arrival or `next_wakeup`.

        A plan without chunks is a step in which requests were preempted and nobody could run. `repeats(plan, limit)`
        lets the shell take the same step up to `limit` times at once; what happens is what single steps would do.
        Raises RuntimeError when `async_depth` steps are in flight already.
        """
        self._advance_clock(now)
        if len(self._in_flight) >= self.config.async_depth:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight, async_depth is {self.config.async_depth}")
        self.kv.expire(now)
        if self._sheds is not None:
            self._shed_waiting(self._sheds, now)
        if self.held:
            self._ask_held_again(now)
        self.order_reads_cache = False
        step = Step(self, now)
        self._policies.batching.compose(step)
        step.requeue_yielded()
        if not step.entries and not step.preempted:
            return None
        return self._commit(step, repeats)

    def update(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Apply the output of the oldest step in flight."""
        self._advance_clock(now)
        flight = self._take_flight(plan)
        settled = self._settles_at_schedule and not output.token_ids
        step_id, repeat, stopped = plan.step_id, plan.repeat, output.stopped
        for index, state in enumerate(flight.states):
            if settled and state.span_end == step_id and plan.samples[index]:
                # It went on decoding, the case of nearly all: what `_apply` does, without the questions.
                num_output = state.num_output_tokens + repeat
                if num_output < state.token_limit and state.request_id not in stopped:
                    state.num_output_tokens = num_output
                    state.num_tokens += repeat
                    state.span_end = step_id + repeat
                    if plan.time > state.last_step_time:
                        state.stall_time += plan.time - state.last_step_time
                    state.last_step_time = now
                    continue
            self._apply(state, index, flight, output, now)
        self._hand_over(now)

    def fail(self, plan: StepPlan, now: float) -> list[str]:
        """A step threw: its requests fail, and so does whoever found blocks it was to write. Returns their ids.

        Keys of those blocks are dropped, so that nobody finds them later; what was in flight behind it is forgotten
        for the failed requests only.
        """
        self._advance_clock(now)
        flight = self._take_flight(plan)
        failed, bad = poisoned(flight, self._in_flight, self.running, self.kv.blocks)
        self.kv.drop_keys(bad)
        for state, life in zip(flight.states, flight.lives, strict=True):
            if life == state.num_preemptions and state.stop_reason is None:
                self._take_part(state, plan, now)
        for transfer in plan.transfers:
            if transfer.request_id in self._states:  # what was on its way to host memory is lost
                self.host.forget(self._states[transfer.request_id])
        for state in failed:
            self._leave(state, FinishReason.ERROR, now, "its step failed")
        self._hand_over(now)
        return [state.request_id for state in failed]

    def next_wakeup(self, now: float) -> float | None:
        """When to call `schedule` again though nothing arrives; None if that would change nothing."""
        times = [time for time in (wakeup(now) for wakeup in self._wakeups) if time is not None]
        return min(times, default=None)

    def reset_prefix_cache(self, now: float, reset_running: bool = False) -> bool:
        """Forget all cached blocks; refused while any is in use, unless the running are preempted first."""
        self._advance_clock(now)
        if reset_running:
            for state in reversed(self.running[:]):  # the first to run ends up first in the queue
                self._count_done_repeats(state)
                self.preempt(state, now)
                state.discard_before_step = self.next_step_id
        if not self.kv.reset():
            return False
        for state in self._states.values():
            self.host.forget(state)
        return True

    # -- outputs ------------------------------------------------------------------------------------------------

    @property
    def states(self) -> Iterable[RequestState]:
        """Everybody who has come and not left, in order of adding."""
        return self._states.values()

    def keys_of(self, request: Request) -> Sequence[int]:
        """Keys of its prompt's blocks that others may have filled, as this engine would look for them."""
        namespaces = self._policies.isolation.namespaces(request.context)
        if not self.config.enable_prefix_caching or namespaces is None:
            return ()
        sealed = seals(namespaces, self.config.block_size, self._secret)
        chain = request.prompt.chain(self.config.block_size, sealed, self._secret, _NOBODY)
        return chain.keys[: (request.prompt.num_tokens - 1) // self.config.block_size]

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self._states) or bool(self._in_flight)

    def drain_records(self) -> list[RequestRecord]:
        """Records of those who left since the last call, in order of leaving."""
        records, self._records = self._records, []
        return records

    # -- adding -------------------------------------------------------------------------------------------------

    def _advance_clock(self, now: float) -> None:
        if not now >= self.now or now == math.inf:
            raise ValueError(f"time ({now}) must be finite and not before the last call's ({self.now})")
        self.now = now

    def _refuse(self, request: Request, verdict: Reject, now: float) -> Outcome:
        self._records.append(rejection(request, verdict.reason, now, verdict.retry_after))
        return Outcome(accepted=False, reason=verdict.reason, retry_after=verdict.retry_after)

    def _new_state(self, request: Request, part: int, now: float) -> RequestState:
        sequence, prompt = self._next_sequence, request.prompt.num_tokens
        self._next_sequence += 1
        return RequestState(
            request=request,
            request_id=request.request_id,
            sequence=sequence,
            num_prompt_tokens=prompt,
            token_limit=token_limit(request, self.config),
            chain=request.prompt.chain(self.config.block_size, self._seals(request, sequence), self._secret, sequence),
            arrival_time=request.arrival_time,
            priority=request.priority,
            num_tokens=prompt,
            part=part,
            waiting_since=now,
        )

    def _seals(self, request: Request, sequence: int) -> dict[int, bytes]:
        if not self.config.enable_prefix_caching:
            return {}
        namespaces = self._policies.isolation.namespaces(request.context)
        if namespaces is None:
            namespaces = (Namespace(0, ("request", str(sequence))),)
        return seals(namespaces, self.config.block_size, self._secret)

    def _line_up(self, state: RequestState, now: float) -> None:
        self._count_waiting(state, 1)
        self.scheduling.add(state, now)

    def _ask_held_again(self, now: float) -> None:
        ask = self._policies.admission.decide if self._releases is None else self._releases.release

        def is_let_go(state: RequestState) -> bool:
            verdict = ask(state.request, self.view, now)
            if isinstance(verdict, Admit):
                self.held.discard(state)
                self._turn(state, Status.WAITING)
                self._line_up(state, now)
            elif isinstance(verdict, Reject):
                self._leave(state, FinishReason.REJECTED, now, verdict.reason, verdict.retry_after)
            return not isinstance(verdict, Hold)

        self.held.ask(is_let_go)

    def _shed_waiting(self, policy: Sheds, now: float) -> None:
        for request_id, verdict in policy.shed(self.view, now):
            state = self._states.get(request_id)
            if state is not None and state.first_scheduled_time is None:
                self._leave(state, FinishReason.REJECTED, now, verdict.reason, verdict.retry_after)

    # -- counting -----------------------------------------------------------------------------------------------

    def totals_by(self, name: str) -> TotalsBy:
        """By a field of the requests; kept from the first time that somebody asks."""
        if name not in self._totals:
            self._totals[name] = TotalsBy(attrgetter(name), self.config.block_size, self._states.values())
        return self._totals[name]

    def _count_waiting(self, state: RequestState, num: int) -> None:
        self.num_waiting_tokens += num * state.num_tokens
        self.num_waiting_blocks += num * -(-state.num_tokens // self.config.block_size)

    def _count_all(self, state: RequestState, num: int) -> None:
        """Of one that waits, around a change of its tokens."""
        self._count_waiting(state, num)
        for totals in self._totals.values():
            totals.count(state, num)

    def _turn(self, state: RequestState, status: Status) -> None:
        """Change its status."""
        for totals in self._totals.values():
            totals.count(state, -1)
        state.status = status
        for totals in self._totals.values():
            totals.count(state, 1)

    def _tell_of_end(self, state: RequestState, now: float) -> None:
        for policy in self._hear_of_ends:
            policy.finished(state, now)

    # -- placing and preempting (called by Step) ----------------------------------------------------------------

    def find_cached(self, state: RequestState) -> list[Block]:
        """Cached blocks at the head of a waiting request; its last token is never among them."""
        limit = (state.num_tokens - 1) // self.config.block_size
        if limit > len(state.chain.keys) and self.kv.caching:
            state.chain.extend(limit)
        return self.kv.lookup(state.chain, limit)

    def promise(self, state: RequestState, num_there: int, num_tokens: int) -> Promise:
        """What it would be promised if it computed `num_tokens` beyond those that are there."""
        return self._policies.allocation.promise(state, num_there, num_tokens, self.view)

    def num_missing(self, promise: Promise, hit: list[Block], state: RequestState) -> int:
        """Blocks that would have to become free for it to enter; 0 or less if there is room."""
        idle = sum(block.ref_count == 0 for block in hit)  # these leave the free blocks too
        required = max(promise.num_blocks_required, promise.num_blocks_held) - len(hit) + idle
        return required + promise.num_blocks_slack - self.kv.num_available(state)

    def place(self, state: RequestState, hit: list[Block], num_there: int, promise: Promise, now: float) -> None:
        """Move a waiting request into the running set; the caller has seen that there is room."""
        self.scheduling.discard(state)
        self._count_waiting(state, -1)
        self.kv.reuse(state, hit)
        self.kv.allocate(state, promise.num_blocks_now - len(hit), now)
        self.kv.hold_back(state, max(0, promise.num_blocks_held - promise.num_blocks_now))
        if promise.contiguous:
            state.block_ids.sort()
        self.host.forget(state)
        self._start(state, len(hit) * self.config.block_size, now)
        state.num_computed_tokens = num_there

    def _start(self, state: RequestState, num_hit: int, now: float) -> None:
        self.running.append(state)
        self._turn(state, Status.RUNNING)
        state.last_step_time = now
        if state.first_scheduled_time is None:
            state.first_scheduled_time = now
            state.num_cached_tokens = num_hit
        else:
            state.requeue_time += now - state.waiting_since
            state.num_spared_tokens += max(0, num_hit - state.num_lost_tokens)
        if not self.kv.caching:
            return
        if state.num_preemptions:
            self.prefix_stats_resumed = self.prefix_stats_resumed.plus(state.num_tokens, num_hit)
        else:
            self.prefix_stats = self.prefix_stats.plus(state.num_tokens, num_hit)

    def preempt(self, state: RequestState, now: float) -> None:
        """Take all its blocks; it waits again."""
        self.unseat(state, now)
        if state.status is Status.PREEMPTED:
            self.scheduling.requeue(state, now)

    def unseat(self, state: RequestState, now: float, may_swap: bool = False) -> None:
        """Take all its blocks, before it waits again. Those with keys stay in the cache until evicted.

        `may_swap`: what it has computed may be kept in host memory. One that is done and only waits for its group has
        nothing to come back for: its answer goes out.
        """
        assert state.status is Status.RUNNING, f"request {state.request_id} is {state.status.value}, it cannot yield"
        if state.stop_reason is not None:
            self._answer_whole(state, now)
            return
        self.running.remove(state)
        state.span_end = -1
        if may_swap and self.config.num_host_blocks:
            self.host.keep(state)
        self.kv.release(state, now)
        state.num_lost_tokens = max(state.num_lost_tokens, state.num_computed_tokens)
        state.num_computed_tokens = 0
        state.num_placeholders = 0
        state.num_preemptions += 1
        self._stall(state, now)
        state.waiting_since = now
        self._turn(state, Status.PREEMPTED)
        self.num_preemptions += 1
        self._count_waiting(state, 1)
        if self._hears_of_preemptions is not None:
            self._hears_of_preemptions.preempted(state, self.view)

    # -- committing a step --------------------------------------------------------------------------------------

    def _commit(self, step: Step, repeats: Callable[[StepPlan, int], int] | None) -> StepPlan:
        states = list(step.entries)
        plan = StepPlan(
            step_id=step.step_id,
            time=step.now,
            request_ids=[state.request_id for state in states],
            starts=[state.num_computed_tokens for state in states],
            counts=list(step.entries.values()),
            samples=self._advance(step.entries),
            tables=[state.block_ids for state in states],
            only_decodes=step.num_decodes == len(states) > 0,
            num_running=len(self.running),
            num_padding_tokens=step.num_padding_tokens,
            admitted=tuple(step.admitted),
            preempted=tuple(step.preempted),
            transfers=tuple(step.transfers),
        )
        if repeats is not None and plan.only_decodes and self._may_repeat(step):
            limit = repeat_limit(states, self.kv, self._may_evict(step))
            repeat = repeats(plan, limit) if limit > 1 else 1
            assert 1 <= repeat <= limit, f"{repeat} repeats asked for, {limit} are allowed"
            if repeat > 1:
                grow(states, self.kv, repeat - 1, self.caches_at_schedule, plan.time)
                object.__setattr__(plan, "repeat", repeat)  # nobody has seen the plan yet
        self.next_step_id += plan.repeat
        self._in_flight.append(
            Flight(plan, states, [state.num_preemptions for state in states], self.config.block_size)
        )
        return plan

    def _may_repeat(self, step: Step) -> bool:
        """Whether the next step would be decided like this one, if all in it just decode."""
        if step.admitted or step.preempted or step.is_singular or self._needs_tokens:
            return False
        if self._answers_may_be_found and len(self.scheduling):
            return False  # the next step might find a block that this one fills
        if self.scheduling.reorders and step.lookups:
            return False  # somebody else might be first by then, and fit
        if (self._progress_matters and step.lookups) or (self.held and not (self._releases and self._releases.steady)):
            return False  # the next step might let somebody in whom this one did not
        return self._policies_repeat and len(step.entries) == len(self.running) - self.num_stopped

    def _may_evict(self, step: Step) -> bool:
        """Whether an eviction in a repeat would change nothing for those who wait."""
        if self.order_reads_cache or any(block.ref_count == 0 for hit in step.lookups for block in hit):
            return False
        return self._evicts_in_repeats

    def _advance(self, entries: dict[RequestState, int]) -> list[bool]:
        """Count the granted tokens as computed, optimistically, as in vLLM; tells who will yield an output token."""
        samples, ahead = [], self.config.async_depth > 1
        for state, num_tokens in entries.items():
            start = state.num_computed_tokens
            state.num_computed_tokens = end = start + num_tokens
            if start < state.num_lost_tokens:
                state.num_recomputed_tokens += min(end, state.num_lost_tokens) - start
            is_last = end == state.num_tokens + state.num_placeholders
            samples.append(is_last)
            if ahead and is_last:
                state.num_placeholders += 1
        return samples

    # -- applying outputs ---------------------------------------------------------------------------------------

    def _take_flight(self, plan: StepPlan) -> Flight:
        if not self._in_flight or self._in_flight[0].plan is not plan:
            raise ValueError(f"step {plan.step_id} is not the oldest step in flight: apply outputs in order, once")
        return self._in_flight.popleft()

    def _apply(self, state: RequestState, index: int, flight: Flight, output: StepOutput, now: float) -> None:
        plan = flight.plan
        if state.status is Status.FINISHED or state.stop_reason is not None:
            return  # aborted, or stopped by the step before this one
        if flight.lives[index] != state.num_preemptions:  # preempted since: the token counts, its KV is gone
            if plan.samples[index] and plan.step_id >= state.discard_before_step:
                self._finish(state, self._emit(state, plan, output, now), now)
            return
        self._take_part(state, plan, now)
        self._account(state, index, plan)
        if plan.samples[index]:
            reason = self._emit(state, plan, output, now)
            self._confirm(state)
            self._finish(state, reason, now)

    def _account(self, state: RequestState, index: int, plan: StepPlan) -> None:
        """What a step leaves behind where it is not settled at schedule time."""
        if not self.caches_at_schedule:
            end = plan.starts[index] + plan.counts[index] + plan.repeat - 1
            self.kv.cache(state, min(end, state.num_tokens + plan.repeat))

    def _confirm(self, state: RequestState) -> None:
        """A token that was scheduled ahead is known: its block may be full."""
        if state.num_placeholders:
            state.num_placeholders -= 1
        if self.config.async_depth > 1:
            self.kv.cache(state, state.num_computed_tokens - state.num_placeholders)

    def _emit(self, state: RequestState, plan: StepPlan, output: StepOutput, now: float) -> FinishReason | None:
        """Its tokens of this step are known. Returns why they were its last, if they were."""
        repeat = plan.repeat
        is_waiting = state.status is Status.PREEMPTED  # thrown out of this very step
        if is_waiting:
            self._count_all(state, -1)
        state.num_output_tokens += repeat
        state.num_tokens += repeat
        if is_waiting:
            self._count_all(state, 1)
        if output.token_ids:
            state.chain.append(output.token_ids.get(state.request_id, ()))
        if state.first_token_time is None:
            self._first_token(state, now)
        if state.span_end != plan.step_id:
            state.token_spans.append((plan.step_id, state.num_output_tokens - repeat))
        state.span_end = plan.step_id + repeat
        if output.stopped and state.request_id in output.stopped:
            return output.stopped[state.request_id]
        return FinishReason.LENGTH if state.num_output_tokens >= state.token_limit else None

    def _first_token(self, state: RequestState, now: float) -> None:
        assert state.first_scheduled_time is not None
        state.first_token_time = now
        lost = state.stall_time + state.requeue_time
        if state.status is Status.PREEMPTED:  # the token of a step it was thrown out of
            lost += now - state.waiting_since
        state.prefill_time = now - state.first_scheduled_time - lost

    def _finish(self, state: RequestState, reason: FinishReason | None, now: float) -> None:
        if reason is None:
            return
        if self._policies.batching.returns_together and state.status is Status.RUNNING:
            state.stop_reason = reason
            self.num_stopped += 1
        else:
            self._leave(state, reason, now)

    def _hand_over(self, now: float) -> None:
        """If the whole group is done, its answers go out together."""
        if self.num_stopped and self.num_stopped == len(self.running):
            for state in self.running[:]:
                self._answer_whole(state, now)

    def _answer_whole(self, state: RequestState, now: float) -> None:
        """An answer that was held back: all its tokens are seen now."""
        assert state.stop_reason is not None
        state.first_token_time = now
        state.token_spans = []
        self._leave(state, state.stop_reason, now)

    def _leave(
        self, state: RequestState, reason: FinishReason, now: float, detail: str = "", retry_after: float | None = None
    ) -> None:
        """End a request in whatever state it is; the one place where requests leave."""
        for totals in self._totals.values():
            totals.count(state, -1)
        status = state.status
        if status is Status.RUNNING:
            self.running.remove(state)
            self.num_stopped -= state.stop_reason is not None
            self._stall(state, now)
        self._records.append(record(state, reason, detail, now, retry_after))
        state.status = Status.FINISHED
        if status is Status.HELD:
            self.held.discard(state)
        elif status is not Status.RUNNING:
            self.scheduling.discard(state)
            self._count_waiting(state, -1)
        self.kv.release(state, now)
        self.host.forget(state)
        state.span_end = -1
        del self._states[state.request_id]
        self._tell_of_end(state, now)

    def _stall(self, state: RequestState, now: float) -> None:
        """Count the time since its last step in which a running request that leaves, or yields, was not served."""
        if now > state.last_step_time:
            is_done = state.stop_reason is not None  # what a step in flight does for it is for nothing
            begins = [flight.plan.time for flight in self._in_flight if state in flight.states and not is_done]
            state.stall_time += max(0.0, min(begins, default=now) - state.last_step_time)

    def _take_part(self, state: RequestState, plan: StepPlan, now: float) -> None:
        """A step is over in which it was served, whatever came of it."""
        if plan.time > state.last_step_time:
            state.stall_time += plan.time - state.last_step_time
        state.last_step_time = now

    def _count_done_repeats(self, state: RequestState) -> None:
        """Of a repeated step in flight all but the last repeat are over: count their tokens."""
        flight = self._in_flight[0] if self._in_flight else None
        if flight is None or flight.plan.repeat == 1 or state not in flight.states:
            return
        plan = flight.plan
        if flight.lives[flight.states.index(state)] != state.num_preemptions:
            return  # counted when it lost its place
        if state.span_end != plan.step_id:
            state.token_spans.append((plan.step_id, state.num_output_tokens))
        state.num_output_tokens += plan.repeat - 1
        state.num_tokens += plan.repeat - 1
        if not self.caches_at_schedule:
            self.kv.cache(state, state.num_computed_tokens - 1)

"""A ledger that stands beside an engine, sees what goes in and comes out, and counts for itself.

After each event its own books must agree with the engine's, and the laws (tests/laws.py) must hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.catalogue import make
from policies.config import EngineConfig
from policies.engine import EngineCore
from policies.prompt import ContentPrompt, TokenPrompt
from policies.types import (
    Chunk,
    FinishReason,
    Outcome,
    Request,
    RequestRecord,
    RequestState,
    Status,
    StepOutput,
    StepPlan,
)
from tests.device import PaperDevice, Slot, Text, Write, output_token
from tests.laws import check_blocks, check_drained, check_host, check_index, check_totals, first_that_could_enter

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(eq=False)
class Bearer:
    """One request from its arrival to its leaving, as told by plans and outputs."""

    request: Request
    state: RequestState
    limit: int
    text: Text
    life: int = 0  # preemptions so far
    computed: int = 0
    outputs: int = 0
    in_flight: int = 0  # tokens of this life that are sampled but not known
    stopped: bool = False
    was_told_to_stop: bool = False
    discard_before: int = -1
    cached: int = 0
    swapped: int = 0  # tokens in host memory
    scheduled: int = 0
    recomputed: int = 0
    spared: int = 0  # found in the cache on return, though never computed by itself
    farthest: int = 0  # tokens it has ever computed or found
    first_scheduled: float | None = None
    first_token: float | None = None
    running: bool = False
    prefill: float = 0.0
    stall: float = 0.0
    requeue: float = 0.0
    restored: tuple[int, int] = (0, 0)  # tokens that this step brings back from host memory
    idle_since: float | None = None  # runs, and no step in flight serves it
    away_since: float | None = None


class Member(NamedTuple):
    bearer: Bearer
    chunk: Chunk
    life: int
    write: Write
    slots: list[Slot]


class Flight(NamedTuple):
    plan: StepPlan
    members: list[Member]
    reads: list[set[Write]]  # whose writes each member reads


@dataclass(eq=False)
class Ledger:
    """Drives the engine and checks it. Times should be multiples of a power of two: sums are compared exactly."""

    engine: EngineCore
    live: dict[str, Bearer] = field(default_factory=dict)
    flights: deque[Flight] = field(default_factory=deque)
    records: list[RequestRecord] = field(default_factory=list)
    now: float = 0.0
    num_added: int = 0
    next_step: int = 0
    has_preempted: bool = False  # the last step did
    stats: list[int] = field(default_factory=lambda: [0, 0, 0])

    def __post_init__(self) -> None:
        self.config: EngineConfig = self.engine.config
        self.allocation = self.config.allocation.partition(",")[0]
        self.batching = self.config.batching.partition(",")[0]
        self.shares_blocks: bool = make("allocation", self.config.allocation).shares_blocks
        self.batcher = make("batching", self.config.batching)
        # A step's own newcomers count for more in it than after it, or stand elsewhere in line.
        cautious = getattr(make("allocation", self.config.allocation), "depends_on_progress", False)
        self.is_cautious = cautious or self.engine.scheduling.reorders
        self.isolation = make("isolation", self.config.isolation)
        self.device = PaperDevice(self.config.block_size)

    # -- events ---------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Outcome:
        self.now = now
        outcome = self.engine.add(request, now)
        self.num_added += 1
        if outcome.accepted:
            state = next(state for state in self.engine.states if state.request_id == request.request_id)
            limit = min(request.max_tokens, self.config.max_model_len - request.prompt.num_tokens)
            text = Text(self.device.names, request, self.num_added, self._scopes(request))
            self.live[request.request_id] = Bearer(request, state, limit, text)
        self._collect(now)
        return outcome

    def _scopes(self, request: Request) -> dict[int, object]:
        """First token -> with whom it shares from there on; all of its block, and of its content id, is private."""
        namespaces, scopes = self.isolation.namespaces(request.context), dict[int, object]()
        prompt, unit = request.prompt, self.config.block_size
        if isinstance(prompt, ContentPrompt):
            unit = max(unit, prompt.content_size)
        if namespaces is None:
            return {0: self.num_added}
        for start_token, fields in namespaces:
            at = start_token - start_token % unit
            scopes[at] = (scopes.get(at), fields)
        return scopes

    def abort(self, request_id: str, now: float) -> bool:
        self.now = now
        known = request_id in self.live
        if known:
            self._learn_all_but_the_last(self.live[request_id])
        assert self.engine.abort(request_id, now) is known, "abort says whether there was such a request"
        self._collect(now)
        assert request_id not in self.live, "an aborted request leaves at once"
        if known:
            self._check_nobody_is_kept()
        return known

    def schedule(self, now: float, repeats: Callable[[StepPlan, int], int] | None = None) -> StepPlan | None:
        self.now = now
        could_enter = first_that_could_enter(self.engine, now, self.config.max_num_batched_tokens)
        plan = self.engine.schedule(now, repeats)
        if plan is not None:
            self._see(plan, now)
        if could_enter not in {state.request_id for state in self.engine.states}:
            could_enter = None  # it was shed
        self._check_nobody_waits_in_vain(plan, could_enter)
        self._collect(now)
        return plan

    def update(self, now: float, stop: Iterable[str] = ()) -> None:
        """Apply the oldest step in flight; the answers of `stop` end with it."""
        self.now = now
        flight = self.flights.popleft()
        repeat = flight.plan.repeat
        stopped = {
            m.chunk.request_id: FinishReason.STOP for m in flight.members if m.chunk.samples
            and m.chunk.request_id in stop
        }  # fmt: skip
        token_ids = {}
        if any(isinstance(m.bearer.request.prompt, TokenPrompt) for m in flight.members):
            for member in flight.members:
                end = member.chunk.start + member.chunk.num_tokens
                if member.chunk.samples:
                    token_ids[member.chunk.request_id] = [output_token(end + i) for i in range(repeat)]
        for member in flight.members:
            self._learn(member, flight.plan, now, told_to_stop=member.chunk.request_id in stopped)
        self.engine.update(flight.plan, StepOutput(now - flight.plan.time, stopped, token_ids), now)
        self._collect(now)
        self._check_nobody_is_kept()

    def fail(self, now: float) -> list[str]:
        """The oldest step in flight threw."""
        self.now = now
        flight = self.flights.popleft()
        later = [
            pair for each in self.flights for pair in zip([m.write for m in each.members], each.reads, strict=True)
        ]
        rubbish = self.device.spoil({member.write for member in flight.members}, later)
        members = [m.bearer for m in flight.members if self.live.get(m.chunk.request_id) is m.bearer]
        readers = [
            bearer for bearer in self.live.values() if bearer.running and bearer not in members
            and any(slot in rubbish for slot in self.device.slots(bearer.state.block_ids, 0, bearer.computed))
        ]  # fmt: skip
        for member in flight.members:
            self._end_service(member, now)
        for transfer in flight.plan.transfers:
            if transfer.request_id in self.live:
                self.live[transfer.request_id].swapped = 0
        failed = self.engine.fail(flight.plan, now)
        hit = {bearer.request.request_id for bearer in members + readers}
        assert set(failed) == hit, "whoever read what was never written fails, and nobody else"
        self._collect(now)
        assert not self.live.keys() & set(failed), "a failed request leaves at once"
        self._check_nobody_is_kept()
        return failed

    def reset(self, now: float, reset_running: bool) -> None:
        self.now = now
        if reset_running:
            for bearer in self.live.values():
                self._learn_all_but_the_last(bearer)
                if bearer.running and not bearer.stopped:  # one that is done is answered instead
                    self._see_preempted(bearer, now)
                    bearer.discard_before = self.next_step
        held = sum(len(state.block_ids) for state in self.engine.running) if not reset_running else 0
        done = self.engine.reset_prefix_cache(now, reset_running)
        assert done is (held == 0), "a reset is refused while, and only while, a block is held"
        if not held:
            assert not self.engine.kv._index, "a reset leaves no key"
            for bearer in self.live.values():
                bearer.swapped = 0
        self._collect(now)

    def drive_to_end(self, now: float, max_steps: int = 3000) -> float:
        """Run until nobody is left (T27), and look at what remains (T28). Returns the time."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            plan = self.schedule(now) if len(self.flights) < self.config.async_depth else None
            if len(self.flights) == self.config.async_depth or (plan is None and self.flights):
                now += 0.5
                self.update(now)
            elif plan is None and self.engine.has_work:
                wakeup = self.engine.next_wakeup(now)
                assert wakeup is not None, "T27: work is left, but nobody can run and nothing will change"
                now = wakeup
        assert not self.engine.has_work, f"T27: work is left after {max_steps} steps"
        check_drained(self.engine)
        return now

    # -- what plans and outputs tell ------------------------------------------------------------------------------

    def _see(self, plan: StepPlan, now: float) -> None:
        config = self.config
        assert (plan.step_id, plan.time) == (self.next_step, now), "steps are numbered and dated in order"
        assert plan.num_tokens <= config.max_num_batched_tokens, "T25: over the token budget"
        assert plan.num_running == len(self.engine.running) <= config.max_num_seqs, "T25: over the slots"
        makes_way = self.engine.yielding.for_waiting
        if self.engine.kv.parts is None:
            assert makes_way or not (plan.preempted and plan.admitted), "nobody is let in by a step that preempted"
        assert not set(plan.preempted) & {entry.request_id for entry in plan.admitted}, "in and out in one step"
        assert plan.chunks or plan.preempted, "a plan without anything in it"
        if self.allocation in ("paged_reserve_output", "contiguous_max_len") and not makes_way:
            assert not plan.preempted, f"{self.allocation} never preempts"
        self.next_step += plan.repeat
        away = {each.request_id: each.num_blocks for each in plan.transfers if each.to_host}
        back = {each.request_id: each.num_blocks for each in plan.transfers if not each.to_host}
        for request_id in plan.preempted:
            self._see_kept(self.live[request_id], away.pop(request_id, 0))
            self._see_preempted(self.live[request_id], now)
        for entry in plan.admitted:
            bearer = self.live[entry.request_id]
            self._see_admitted(bearer, entry.num_cached_tokens, entry.resumed, now)
            self._see_restored(bearer, entry.num_cached_tokens, back.pop(entry.request_id, 0))
        assert not away and not back, "KV moves of those who come and go, and of nobody else"
        members = [self._see_chunk(chunk, index, plan) for index, chunk in enumerate(plan.chunks)]
        assert len({member.chunk.request_id for member in members}) == len(members), "one chunk a request"
        slots = [slot for member in members for slot in member.slots]
        assert len(set(slots)) == len(slots), "two write into one slot"
        reads = [self.device.read(m.bearer.text, m.chunk.block_ids, m.chunk.start) for m in members]
        self.flights.append(Flight(plan, members, reads))

    def _see_admitted(self, bearer: Bearer, num_hit: int, resumed: bool, now: float) -> None:
        assert not bearer.running, f"{bearer.request.request_id} is let in twice"
        assert resumed == (bearer.life > 0), "whoever was preempted resumes"
        bearer.running, bearer.idle_since = True, now
        if bearer.first_scheduled is None:
            bearer.first_scheduled, bearer.cached = now, num_hit
            bearer.farthest = num_hit
        else:
            assert bearer.away_since is not None
            bearer.requeue += now - bearer.away_since
            bearer.away_since = None
            bearer.spared += max(0, num_hit - bearer.farthest)
            bearer.farthest = max(bearer.farthest, num_hit)
        if bearer.life == 0 and self.config.enable_prefix_caching:
            self.stats = [a + b for a, b in zip(self.stats, (1, bearer.state.num_prompt_tokens, num_hit), strict=True)]
        assert num_hit < bearer.request.prompt.num_tokens + bearer.outputs, "the last token is always computed"
        bearer.computed = num_hit

    def _see_kept(self, bearer: Bearer, num_blocks: int) -> None:
        """What it had computed before this step goes to host memory, whole or not at all."""
        needed = -(-bearer.computed // self.config.block_size)
        assert num_blocks in (0, needed), "host memory keeps a request's KV whole"
        bearer.swapped = bearer.computed if num_blocks else 0

    def _see_restored(self, bearer: Bearer, num_hit: int, num_blocks: int) -> None:
        """What is not found in the cache comes back from host memory."""
        needed = -(-bearer.swapped // self.config.block_size) - num_hit // self.config.block_size
        assert num_blocks == max(0, needed), "each block comes back that is not there"
        bearer.restored = (num_hit, bearer.swapped)
        bearer.computed = max(num_hit, bearer.swapped)
        bearer.swapped = 0

    def _see_preempted(self, bearer: Bearer, now: float) -> None:
        assert bearer.running, f"{bearer.request.request_id} yields, but does not run"
        bearer.running, bearer.away_since = False, now
        if bearer.idle_since is not None:
            bearer.stall += now - bearer.idle_since
        bearer.idle_since = None
        bearer.life += 1
        bearer.computed = bearer.in_flight = 0

    def _see_chunk(self, chunk: Chunk, index: int, plan: StepPlan) -> Member:
        bearer, size = self.live[chunk.request_id], self.config.block_size
        assert bearer.running, f"{chunk.request_id} computes, but was never let in"
        assert not bearer.stopped, f"{chunk.request_id} computes, but its answer has ended"
        assert chunk.start == bearer.computed, "tokens are computed in order, each once"
        end = chunk.start + chunk.num_tokens
        known = bearer.request.prompt.num_tokens + bearer.outputs + bearer.in_flight
        assert chunk.samples == (end == known), "the last known token yields the next one, and no other does"
        last = end + plan.repeat - 1
        if not self.shares_blocks:
            first = chunk.block_ids[0]
            assert list(chunk.block_ids) == list(range(first, first + len(chunk.block_ids))), "one contiguous region"
            assert len(chunk.block_ids) == -(-self.config.max_model_len // size), "a region is of max_model_len"
        else:
            assert len(chunk.block_ids) == -(-last // size), "blocks are taken as they fill"
        if bearer.idle_since is not None:
            bearer.stall += plan.time - bearer.idle_since
            bearer.idle_since = None
        bearer.scheduled += last - chunk.start
        bearer.recomputed += max(0, min(last, bearer.farthest) - chunk.start)
        bearer.farthest = max(bearer.farthest, last)
        bearer.computed = last
        bearer.in_flight += plan.repeat * chunk.samples
        write = (plan.step_id, index)
        self.device.write(bearer.text, chunk.block_ids, *bearer.restored, write)
        bearer.restored = (0, 0)
        slots = self.device.write(bearer.text, chunk.block_ids, chunk.start, last, write)
        return Member(bearer, chunk, bearer.life, write, slots)

    def _learn(self, member: Member, plan: StepPlan, now: float, told_to_stop: bool) -> None:
        bearer, chunk = member.bearer, member.chunk
        if self.live.get(chunk.request_id) is not bearer or bearer.stopped:
            return
        current = member.life == bearer.life
        if not current and plan.step_id < bearer.discard_before:
            return
        self._end_service(member, now)
        if not chunk.samples:
            return
        bearer.outputs += plan.repeat
        if current:
            bearer.in_flight -= plan.repeat
        if bearer.first_token is None:
            bearer.first_token = now
            away = now - bearer.away_since if bearer.away_since is not None else 0.0
            assert bearer.first_scheduled is not None
            bearer.prefill = now - bearer.first_scheduled - bearer.stall - bearer.requeue - away
        bearer.was_told_to_stop = told_to_stop
        if told_to_stop or bearer.outputs >= bearer.limit:
            bearer.stopped = True
            if current:
                bearer.idle_since = now  # what a later step does for it is for nothing

    def _end_service(self, member: Member, now: float) -> None:
        """A step is over that served it; it idles unless another one in flight serves it too."""
        bearer = member.bearer
        if member.life == bearer.life and not bearer.stopped:
            served = any(bearer is m.bearer and m.life == bearer.life for each in self.flights for m in each.members)
            bearer.idle_since = None if served else now

    def _learn_all_but_the_last(self, bearer: Bearer) -> None:
        """No shell repeats a step beyond an event: all repeats but the last are over when it comes."""
        for flight in self.flights:
            for member in flight.members:
                if member.bearer is bearer and member.life == bearer.life:
                    bearer.outputs += flight.plan.repeat - 1

    def _collect(self, now: float) -> None:
        for record in self.engine.drain_records():
            self.records.append(record)
            bearer = self.live.get(record.request_id)
            if record.reason is FinishReason.REJECTED:
                assert record.finish_time - record.arrival_time == record.queue_time, "a refused one only waited"
                self.live.pop(record.request_id, None)  # it was held, or shed
                continue
            assert bearer is not None, f"{record.request_id} leaves, but is not there"
            self._learn_keys(bearer)
            self._check_record(record, bearer, now)
            del self.live[record.request_id]
        self.check()

    # -- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        check_blocks(self.engine)
        check_totals(self.engine)
        check_host(self.engine)
        check_index(self.engine.kv)
        for bearer in self.live.values():
            self._learn_keys(bearer)
        self.device.check_keys(self.engine.kv.blocks)
        self._check_counts()

    def _learn_keys(self, bearer: Bearer) -> None:
        if self.config.enable_prefix_caching:
            self.device.learn_keys(bearer.text, bearer.state.chain.keys)

    def _check_counts(self) -> None:
        engine = self.engine
        states = list(engine.states)
        assert [state.request_id for state in states] == list(self.live), "T22: the present are not those who came"
        waiting = [state for state in states if state.status in (Status.WAITING, Status.PREEMPTED)]
        held = [state for state in states if state.status is Status.HELD]
        num_present = len(held) + len(waiting) + len(engine.running)
        assert self.num_added == len(self.records) + num_present, "T22: a request is lost"
        assert len(engine.held) == len(held), "the held are not those whom admission keeps back"
        running = {request_id for request_id, bearer in self.live.items() if bearer.running}
        assert {state.request_id for state in engine.running} == running, "the running are not those let in"
        assert len(engine.scheduling) == len(waiting) == engine.view.num_waiting, "the line is not who waits"
        num_waiting_tokens = sum(state.num_tokens for state in waiting)
        assert engine.num_waiting_tokens == num_waiting_tokens, "waiting tokens are miscounted"
        num_waiting_blocks = sum(-(-state.num_tokens // self.config.block_size) for state in waiting)
        assert engine.num_waiting_blocks == num_waiting_blocks, "waiting blocks are miscounted"
        assert tuple(engine.prefix_stats) == tuple(self.stats), "lookups are counted once a request, at its admission"
        num_stopped = sum(bearer.stopped for bearer in self.live.values() if bearer.running)
        assert engine.num_stopped == num_stopped, "those who are done and wait for their group are miscounted"
        for bearer in self.live.values():
            state = bearer.state
            counted = (state.num_output_tokens, state.num_computed_tokens)
            assert counted == (bearer.outputs, bearer.computed), f"tokens of {state.request_id} are miscounted"
            assert bearer.outputs <= bearer.limit, f"{state.request_id} has more tokens than it asked for"

    def _check_nobody_is_kept(self) -> None:
        """A group whose members are all done has been answered."""
        running = [bearer for bearer in self.live.values() if bearer.running]
        assert not running or not all(bearer.stopped for bearer in running), "a whole group is done and waits"

    def _check_record(self, record: RequestRecord, bearer: Bearer, now: float) -> None:
        is_whole = self.batcher.returns_together and record.reason in COMPLETED and bearer.running
        self._check_times(record, bearer, now, is_whole)
        told = (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens, record.num_preemptions)
        seen = (bearer.request.prompt.num_tokens, bearer.outputs, bearer.cached, bearer.life)
        assert told == seen, f"the record of {record.request_id} is not what happened"
        num_spanned = sum(num for _, num in record.token_spans)
        assert num_spanned == (0 if is_whole else bearer.outputs), "each token has its step"
        # T23: what was scheduled is useful or recomputed; what of the useful was for nothing is thrown away.
        assert record.num_recomputed_tokens == bearer.recomputed, "T23: recomputed tokens are miscounted"
        assert bearer.state.num_spared_tokens == bearer.spared, "tokens found on a return are miscounted"
        useful = bearer.farthest - bearer.cached - bearer.spared
        assert bearer.scheduled == useful + bearer.recomputed, "T23: scheduled = useful + recomputed"
        if record.reason in COMPLETED:
            assert bearer.stopped, "it left before its answer had ended"
            reason = FinishReason.STOP if bearer.was_told_to_stop else FinishReason.LENGTH
            assert record.reason is reason, f"{record.request_id} says {record.reason}"
            needed = bearer.request.prompt.num_tokens + bearer.outputs - 1  # the last token's KV is never computed
            assert 0 <= bearer.farthest - needed <= self.config.async_depth - 1, "T23: more than the steps in flight"

    def _check_times(self, record: RequestRecord, bearer: Bearer, now: float, is_whole: bool) -> None:
        parts = (record.queue_time, record.prefill_time, record.decode_time, record.stall_time, record.requeue_time)
        assert record.finish_time == now, "T29: a request leaves when it leaves"
        assert sum(parts) == record.finish_time - record.arrival_time, "T24: the parts are not the whole"
        assert min(parts) >= 0, f"T24: {record}"
        assert record.first_scheduled_time == bearer.first_scheduled, "T29: when it was first let in"
        reached = [record.arrival_time, record.first_scheduled_time, record.first_token_time, record.finish_time]
        times = [time for time in reached if time is not None]
        assert times == sorted(times), "T29: effects come after causes"
        first_token = now if is_whole else bearer.first_token
        assert record.first_token_time == first_token, "T29: when its first token was known, or its group was answered"
        if bearer.idle_since is not None:
            bearer.stall += now - bearer.idle_since
        if bearer.away_since is not None:
            bearer.requeue += now - bearer.away_since
        assert (record.stall_time, record.requeue_time) == (bearer.stall, bearer.requeue), (
            "T24: not where its time went"
        )
        if bearer.first_token is not None:
            assert record.prefill_time == bearer.prefill, "T24: prefill ends with the first token"
        else:
            assert record.decode_time == 0, "T24: nothing is decoded before the first token"

    # -- T26 ------------------------------------------------------------------------------------------------------

    def _check_nobody_waits_in_vain(self, plan: StepPlan | None, could_enter: str | None) -> None:
        """Exceptions: a step that preempted lets nobody in, nor does prefill_first's next decode; a static group is
        closed; the head of the line blocks it.

        `could_enter` names somebody for whom there was room before the step.
        """
        engine, config = self.engine, self.config
        owes_decode, self.has_preempted = self.has_preempted, plan is not None and bool(plan.preempted)
        if plan is None and not self.flights:
            assert not engine.running, "T26: nobody computes, but somebody runs"
        if plan is not None and (plan.preempted or self.is_cautious):
            return
        if self.batcher.returns_together:
            is_forming = engine.next_wakeup(self.now) is not None
            assert plan is not None or self.flights or is_forming or not len(engine.scheduling), "T26: no group forms"
        elif self.batching == "decode_first" and plan is not None and not self._has_prefill(plan):
            pass  # nobody enters while anybody decodes
        elif plan is None or (self.batching == "prefill_first" and not self._has_prefill(plan)):
            assert could_enter is None or owes_decode, f"T26: {could_enter} waits in vain"
        elif not ((config.hol_skip or engine.kv.parts) and plan.admitted):  # what one admits another may find
            budget = config.max_num_batched_tokens
            if self.batching == "stall_free" and config.enable_chunked_prefill:
                budget = min(budget, self.batcher.chunk_size)
            if self.batching == "tpot_budget" and config.enable_chunked_prefill:
                budget = min(budget, engine._policies.batching.last_chunk_size)  # type: ignore[attr-defined]
            left, cut = budget - plan.num_tokens, self.batching != "prefill_first" and config.enable_chunked_prefill
            could_enter = first_that_could_enter(engine, self.now, left, cut)
            assert could_enter is None, f"T26: {could_enter} waits in vain"

    def _has_prefill(self, plan: StepPlan) -> bool:
        decoding = {
            m.chunk.request_id for m in self.flights[-1].members
            if m.chunk.num_tokens == 1 and m.bearer.outputs + m.bearer.in_flight > m.chunk.samples
        }  # fmt: skip
        return bool(plan.admitted) or any(chunk.request_id not in decoding for chunk in plan.chunks)

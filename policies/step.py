"""One step being composed: what a batching policy may do, and the guard on every grant.

Mechanism guards, policy steers: a policy cannot overrun the budget, take a held block, or bring back in the same step
what it preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from policies.types import Admission, Block, RequestState, Status, Transfer

if TYPE_CHECKING:
    from policies.engine import EngineCore


class Grant(Enum):
    GRANTED = "granted"
    YIELDED = "yielded"  # the request itself was preempted
    NO_MEMORY = "no memory"  # nobody yields: it waits where it is


class Step:
    """Requests are granted tokens in the order of the calls; that order is the order of the plan."""

    __slots__ = (
        "_cursor",
        "_engine",
        "_hit",
        "_kv",
        "_looked_up",
        "_num_parts",
        "_yielded",
        "admitted",
        "config",
        "entries",
        "closed",
        "is_singular",
        "lookups",
        "now",
        "num_decodes",
        "num_padding_tokens",
        "preempted",
        "step_id",
        "token_budget",
        "transfers",
    )

    def __init__(self, engine: EngineCore, now: float) -> None:
        self.config = engine.config
        self.token_budget = engine.config.max_num_batched_tokens
        self.now = now
        self.step_id = engine.next_step_id
        self.entries: dict[RequestState, int] = {}
        self.admitted: list[Admission] = []
        self.preempted: list[str] = []
        self.transfers: list[Transfer] = []
        self.lookups: list[list[Block]] = []  # what was found of the waiting that were asked
        self.closed: set[int] = set()  # parts whose memory was short for the running: nobody is let in
        self.num_decodes = 0  # entries that only go on by a token, as far as nobody was preempted
        self.num_padding_tokens = 0
        self.is_singular = False
        self._engine = engine
        self._kv = engine.kv
        self._num_parts = 1 if engine.kv.parts is None else engine.kv.parts.num
        self._cursor = 0
        self._looked_up: RequestState | None = None
        self._hit: list[Block] = []
        self._yielded: list[RequestState] = []

    # -- what there is ------------------------------------------------------------------------------------------

    @property
    def running(self) -> Iterator[RequestState]:
        """The running in order of admission; nobody is skipped when somebody is preempted meanwhile."""
        self._cursor = 0
        running = self._engine.running
        while self._cursor < len(running):
            state = running[self._cursor]
            self._cursor += 1
            yield state

    @property
    def num_running(self) -> int:
        return len(self._engine.running)

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduling)

    @property
    def waiting(self) -> Iterator[RequestState]:
        """All the waiting, best first, whether or not they could enter."""
        return self._engine.scheduling.candidates(self._engine.view, self.now)

    def candidates(self) -> Iterator[RequestState]:
        """The waiting, best first, as long as one more may enter.

        Ends when a running one found no memory in this step, at the first that is not admitted (or after `hol_skip` of
        them; who has a claim goes past), and when slots or budget are used up.
        """
        yielding = self._engine.yielding
        skips = [self.config.hol_skip] * self._num_parts
        if not self._open():
            return
        for state in self._engine.scheduling.candidates(self._engine.view, self.now):
            if skips[state.part] < 0 and not yielding.may_claim(state):
                continue
            yield state
            if state.status is not Status.RUNNING:
                skips[state.part] -= 1
            if (max(skips) < 0 and yielding.reclaims is None) or not self._open():
                return

    def _open(self) -> bool:
        has_slot = self.num_running < self.config.max_num_seqs or self._engine.yielding.for_waiting
        return self.token_budget > 0 and len(self.closed) < self._num_parts and has_slot

    def remaining(self, state: RequestState) -> int:
        """Tokens a running request could compute now."""
        if state.stop_reason is not None:
            return 0  # done, and waiting for its group
        computed = state.num_computed_tokens
        left = state.num_tokens + state.num_placeholders - computed
        if state.num_placeholders and state.num_output_tokens + state.num_placeholders >= state.request.max_tokens:
            return 0  # the tokens in flight are its last
        room = self.config.max_model_len - 1 - computed
        return left if left <= room else room

    def uncached(self, state: RequestState) -> int:
        """Tokens a waiting request would have to compute; at least its last one."""
        return state.num_tokens - self._num_there(state)

    def _num_there(self, state: RequestState) -> int:
        """Tokens found in the cache, or brought back from host memory."""
        num_hit = len(self._find(state)) * self.config.block_size
        return num_hit if num_hit > state.num_swapped_tokens else state.num_swapped_tokens

    def _find(self, state: RequestState) -> list[Block]:
        if self._looked_up is not state:
            self._looked_up, self._hit = state, self._engine.find_cached(state)
            self.lookups.append(self._hit)
        return self._hit

    def pad(self, num_tokens: int) -> None:
        """Count tokens that are computed only to fill a rectangle."""
        self.num_padding_tokens += num_tokens

    def do_not_repeat(self) -> None:
        """The next step would be composed otherwise, though nobody arrives, ends or runs short."""
        self.is_singular = True

    # -- what may be done ---------------------------------------------------------------------------------------

    def grant_running(self, limit: int, decoding: bool | None = None) -> bool:
        """Grant each of the running, in order of admission, what it can compute, up to `limit` tokens.

        `decoding` picks those that decode, or those that do not. Ends when the budget is used up; False if one could
        not be granted. The same as calling `grant` for each, but a decode inside its last block takes the short way.
        """
        engine, entries, step_id, size = self._engine, self.entries, self.step_id, self._kv.block_size
        running, last = engine.running, self._kv.block_size - 1
        short_way = decoding is not False and not engine.num_stopped and self.config.async_depth == 1
        self._cursor = 0
        while self._cursor < len(running) and self.token_budget > 0:
            state = running[self._cursor]
            self._cursor += 1
            computed = state.num_computed_tokens
            is_one_short = computed + 1 == state.num_tokens and state.num_output_tokens
            if short_way and is_one_short and 0 < computed % size < last:  # no block is taken, none gets full
                entries[state] = 1
                state.granted_step = step_id
                self.token_budget -= 1
                self.num_decodes += 1
                continue
            if decoding is not None and state.is_decoding is not decoding:
                continue
            num = min(self.remaining(state), limit, self.token_budget)
            if num > 0 and self.grant(state, num) is not Grant.GRANTED and self._num_parts == 1:
                return False  # of several parts another may have room
        return True

    def grant(self, state: RequestState, num_tokens: int) -> Grant:
        """Let a running request compute `num_tokens` more, preempting others if memory is short."""
        if not 0 < num_tokens <= self.token_budget:
            raise ValueError(
                f"a batching policy granted {num_tokens} tokens to request {state.request_id}; "
                f"the step has {self.token_budget} left"
            )
        assert state.status is Status.RUNNING and state.granted_step != self.step_id, "granted twice, or not running"
        kv, end = self._kv, state.num_computed_tokens + num_tokens
        assert end <= state.num_tokens + state.num_placeholders, f"{state.request_id} has no {num_tokens} tokens left"
        short = -(-end // kv.block_size) - len(state.block_ids)
        if short > 0:
            if short > kv.num_available(state):
                outcome = self._make_room(state, short)
                if outcome is not Grant.GRANTED:
                    return outcome
            kv.allocate(state, short, self.now)
        self._enter(state, num_tokens, end)
        return Grant.GRANTED

    def _enter(self, state: RequestState, num_tokens: int, end: int) -> None:
        if self._engine.caches_at_schedule and end // self._kv.block_size > state.num_keyed_blocks:
            self._kv.cache(state, min(end, state.num_tokens))
        if num_tokens == 1 and state.is_decoding:
            self.num_decodes += 1
        self.entries[state] = num_tokens
        state.granted_step = self.step_id
        self.token_budget -= num_tokens

    def _make_room(self, state: RequestState, short: int) -> Grant:
        while short > self._kv.num_available(state):
            victim = self._engine.yielding.to_running(state, self.now)
            if victim is None:
                return Grant.NO_MEMORY
            self._unseat(victim)
            self.requeue_yielded()
            if self.preempted:
                self.closed.add(state.part)
            if victim is state:
                return Grant.YIELDED
        return Grant.GRANTED

    def _unseat(self, victim: RequestState) -> None:
        index = self._engine.running.index(victim)
        if index < self._cursor:
            self._cursor -= 1
        if victim.granted_step == self.step_id:
            self.token_budget += self.entries.pop(victim)
            if self.config.drop_unwritten_keys:  # or somebody would find a block that holds nothing
                self._kv.drop_keys(victim.block_ids[victim.num_computed_tokens // self._kv.block_size :])
        self._engine.unseat(victim, self.now, may_swap=victim.admitted_step != self.step_id)
        if victim.status is Status.PREEMPTED:
            self.preempted.append(victim.request_id)
            self._yielded.append(victim)
        if victim.num_swapped_tokens:
            num_blocks = self._engine.host.num_blocks(victim.num_swapped_tokens)
            self.transfers.append(Transfer(victim.request_id, num_blocks, to_host=True))

    def requeue_yielded(self) -> None:
        """They wait again. Not while the line is walked: nobody comes back in the step in which he yielded."""
        for state in self._yielded:
            self._engine.scheduling.requeue(state, self.now)
        self._yielded.clear()

    def admit(self, state: RequestState, num_tokens: int) -> bool:
        """Let a waiting request in and compute `num_tokens` of it; False, with nothing changed, if it does not fit."""
        if not 0 < num_tokens <= self.token_budget:
            raise ValueError(
                f"a batching policy admitted request {state.request_id} with {num_tokens} tokens; "
                f"the step has {self.token_budget} left"
            )
        hit, num_there = self._find(state), self._num_there(state)
        assert num_there + num_tokens <= state.num_tokens, f"{state.request_id} has no {num_tokens} tokens to compute"
        if state.part in self.closed or not self._place(state, hit, num_there, num_tokens):
            return False
        self._looked_up = None  # the index changed
        num_hit = len(hit) * self.config.block_size
        self.admitted.append(Admission(state.request_id, num_hit, resumed=state.num_preemptions > 0))
        if num_there > num_hit:
            num_blocks = self._engine.host.num_blocks(num_there) - len(hit)
            self.transfers.append(Transfer(state.request_id, num_blocks, to_host=False))
        state.admitted_step = self.step_id
        self._enter(state, num_tokens, num_there + num_tokens)
        return True

    def _place(self, state: RequestState, hit: list[Block], num_there: int, num_tokens: int) -> bool:
        """Move a waiting request into the running set, if there is room or others make way."""
        engine = self._engine
        promise = engine.promise(state, num_there, num_tokens)
        missing = engine.num_missing(promise, hit, state)
        if missing > 0 or self.num_running >= self.config.max_num_seqs:
            if not engine.yielding.for_waiting:
                return False
            victims = engine.yielding.to_waiting(state, hit, missing, self.step_id)
            for victim in victims:
                self._unseat(victim)
            promise = engine.promise(state, num_there, num_tokens)
            if not victims or engine.num_missing(promise, hit, state) > 0:
                return False
        engine.place(state, hit, num_there, promise, self.now)
        return True

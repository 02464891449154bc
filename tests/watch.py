"""Watchmen around the policies of an engine: each answer is held against what the policy was told.

Methods are replaced on the policy itself, so that what it is able to do stays to be seen by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from policies.engine import EngineCore
from policies.interfaces import Promise, View
from policies.types import Admit, Block, Hold, Reject, Request, RequestState, Status, Verdict


def watch(engine: EngineCore) -> EngineCore:
    """Whatever a policy of this engine answers against its contract is an AssertionError from now on."""
    policies = engine._policies
    _watch_admission(policies.admission)
    Line(policies.scheduling)
    _watch_allocation(policies.allocation)
    _watch_preemption(policies.preemption)
    Pool(policies.eviction)
    return engine


class Line:
    """Who waits, as the scheduling policy was told."""

    def __init__(self, policy: Any) -> None:
        self.waiting: dict[RequestState, None] = {}
        self.policy = policy
        self._add, self._requeue, self._discard = policy.add, policy.requeue, policy.discard
        self._candidates = policy.candidates
        self._is_joining = False  # some requeue by their own `add`
        policy.add, policy.requeue, policy.discard = self.add, self.requeue, self.discard
        policy.candidates = self.candidates

    def add(self, state: RequestState, now: float) -> None:
        self._join(state, now, self._add)

    def requeue(self, state: RequestState, now: float) -> None:
        assert state.status is Status.PREEMPTED
        self._join(state, now, self._requeue)

    def _join(self, state: RequestState, now: float, join: Callable[[RequestState, float], None]) -> None:
        if self._is_joining:
            join(state, now)
            return
        assert state not in self.waiting, "it waits already"
        self.waiting[state] = None
        self._is_joining = True
        join(state, now)
        self._is_joining = False
        self._check_length()

    def discard(self, state: RequestState) -> None:
        del self.waiting[state]
        self._discard(state)
        self._check_length()

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        seen: dict[RequestState, None] = {}
        for state in self._candidates(view, now):
            assert state not in seen, f"{state.request_id} is offered twice"
            assert state in self.waiting, f"{state.request_id} is offered, but does not wait"
            seen[state] = None
            yield state
        assert all(state in seen for state in self.waiting), "somebody who waits is never offered"

    def _check_length(self) -> None:
        assert len(self.policy) == len(self.waiting), "the line's length is not the number of those in it"


class Pool:
    """The blocks that the eviction policy holds, as it was told."""

    def __init__(self, policy: Any) -> None:
        self.blocks: dict[Block, None] = {}
        self.policy = policy
        self._add, self._discard, self._pop = policy.add, policy.discard, policy.pop
        policy.add, policy.discard, policy.pop = self.add, self.discard, self.pop
        if hasattr(policy, "expired"):
            self._expired = policy.expired
            policy.expired = self.expired

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        assert block not in self.blocks and block.ref_count == 0
        self.blocks[block] = None
        self._add(block, holder, now)
        self._check_length()

    def discard(self, block: Block) -> None:
        del self.blocks[block]
        self._discard(block)
        self._check_length()

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        block: Block = self._pop(beneficiary, now)
        self._give_up(block)
        self._check_length()
        return block

    def expired(self, now: float) -> Sequence[Block]:
        blocks: Sequence[Block] = self._expired(now)
        for block in blocks:
            self._give_up(block)
        self._check_length()
        return blocks

    def _give_up(self, block: Block) -> None:
        assert block in self.blocks, f"block {block.block_id} is given up, but was never there"
        assert block.ref_count == 0, f"block {block.block_id} is given up, but held"
        del self.blocks[block]

    def _check_length(self) -> None:
        assert len(self.policy) == len(self.blocks), "blocks are miscounted"
        listed = list(self.policy)
        assert len(listed) == len(self.blocks) and all(block in self.blocks for block in listed), "others are listed"


def _watch_admission(policy: Any) -> None:
    def checked(ask: Callable[[Request, View, float], Verdict]) -> Callable[[Request, View, float], Verdict]:
        def decide(request: Request, view: View, now: float) -> Verdict:
            verdict = ask(request, view, now)
            assert isinstance(verdict, Admit | Hold | Reject), f"{verdict!r} is no verdict"
            if isinstance(verdict, Reject):
                assert verdict.reason and "\n" not in verdict.reason, "a refusal gives its reason in one line"
                assert verdict.retry_after is None or 0 <= verdict.retry_after < float("inf")
            return verdict

        return decide

    policy.decide = checked(policy.decide)
    if hasattr(policy, "release"):
        policy.release = checked(policy.release)


def _watch_allocation(policy: Any) -> None:
    promise = policy.promise

    def checked(state: RequestState, num_hit_tokens: int, num_new_tokens: int, view: View) -> Promise:
        made: Promise = promise(state, num_hit_tokens, num_new_tokens, view)
        table = -(-(num_hit_tokens + num_new_tokens) // view.block_size)
        assert made.num_blocks_now >= table, "what is granted now finds no place"
        assert max(made.num_blocks_required, made.num_blocks_held) >= made.num_blocks_now, "more is taken than is asked"
        assert made.num_blocks_held >= 0 <= made.num_blocks_slack
        return made

    policy.promise = checked


def _watch_preemption(policy: Any) -> None:
    choose = policy.choose_victim

    def checked(candidates: Sequence[RequestState], beneficiary: RequestState, now: float) -> RequestState | None:
        before = list(candidates)
        victim: RequestState | None = choose(candidates, beneficiary, now)
        assert victim is None or victim in candidates, "somebody yields who was not asked"
        assert list(candidates) == before, "a choice changes nothing"
        return victim

    policy.choose_victim = checked

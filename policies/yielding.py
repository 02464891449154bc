"""Who makes way: for a running request that must grow, and for a waiting one that has a claim or outranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from policies.interfaces import Outranks, PreemptionPolicy, Reclaims
from policies.types import Block, RequestState

if TYPE_CHECKING:
    from policies.engine import EngineCore


class Yielding:
    """Which of the running are asked; the preemption policy says who of them it is."""

    def __init__(self, engine: EngineCore, preemption: PreemptionPolicy, admission: object, scheduling: object) -> None:
        self.reclaims = admission if isinstance(admission, Reclaims) and admission.lends else None
        self._outranks = _order_of(engine, scheduling)
        if self.reclaims is not None and self._outranks is not None:
            raise ValueError(
                f"admission {engine.config.admission!r} gives places to classes and preempt_for_waiting gives them by "
                f"rank: what one takes the other would take back; leave out the reserves, or preempt_for_waiting"
            )
        self._engine = engine
        self._preemption = preemption

    @property
    def for_waiting(self) -> bool:
        """Whether anybody may ever yield to one that waits."""
        return self.reclaims is not None or self._outranks is not None

    def to_running(self, beneficiary: RequestState, now: float) -> RequestState | None:
        """Who yields so that a running request can grow, perhaps itself: borrowers first, and of them the lowest.

        If who has taken a place by his rank could lose it to one below him, the two would take turns for ever.
        """
        candidates: Sequence[RequestState] = self._neighbours(beneficiary)
        if self.reclaims is not None:
            candidates = self.reclaims.borrowers(candidates, self._engine.view) or candidates
        if self._outranks is not None:
            candidates = _lowest(candidates, self._outranks)
        return self._preemption.choose_victim(candidates, beneficiary, now)

    def _neighbours(self, state: RequestState) -> Sequence[RequestState]:
        """Of the running, those whose memory it could use."""
        running = self._engine.running
        return running if self._engine.kv.parts is None else [each for each in running if each.part == state.part]

    def may_claim(self, state: RequestState) -> bool:
        if self.reclaims is None:
            return False
        engine = self._engine
        whole = max(engine.promise(state, 0, 1).num_blocks_required, -(-state.num_tokens // engine.config.block_size))
        return self.reclaims.may_claim(state.request.class_name, whole, engine.view)

    def to_waiting(self, state: RequestState, hit: list[Block], missing: int, step_id: int) -> list[RequestState]:
        """Who yields so that a waiting request finds a slot and `missing` more blocks: enough of them, or nobody."""
        engine, found = self._engine, set(map(id, hit))
        left = [each for each in self._neighbours(state) if each.stop_reason is None and each.admitted_step != step_id]
        chosen: list[RequestState] = []
        given: Counter[int] = Counter()
        while missing > 0 or len(engine.running) - len(chosen) >= engine.config.max_num_seqs:
            victim = self._one(state, left, step_id)
            if victim is None:
                return []
            left.remove(victim)
            chosen.append(victim)
            given.update(victim.block_ids)
            blocks = [engine.kv.blocks[block_id] for block_id in victim.block_ids]
            missing -= sum(given[b.block_id] == b.ref_count and id(b) not in found for b in blocks)
            missing -= victim.num_held_blocks
        return chosen

    def _one(self, state: RequestState, running: list[RequestState], step_id: int) -> RequestState | None:
        engine = self._engine
        candidates: Sequence[RequestState] = ()
        if self.reclaims is not None and self.may_claim(state):
            candidates = self.reclaims.borrowers(running, engine.view)
        if not candidates and self._outranks is not None:
            latest = step_id - engine.config.preempt_min_steps
            candidates = [
                each for each in running if each.admitted_step <= latest and self._outranks.outranks(state, each)
            ]
        return self._preemption.choose_victim(candidates, state, engine.now) if candidates else None


def _lowest(candidates: Sequence[RequestState], order: Outranks) -> list[RequestState]:
    """Those who outrank nobody of them, in their order."""
    lowest: list[RequestState] = []
    for state in candidates:
        if lowest and order.outranks(lowest[0], state):
            lowest = [state]
        elif not lowest or not order.outranks(state, lowest[0]):
            lowest.append(state)
    return lowest


def _order_of(engine: EngineCore, scheduling: object) -> Outranks | None:
    """Raises ValueError if the waiting may take places, but the order says nothing about who runs."""
    if not engine.config.preempt_for_waiting:
        return None
    if not isinstance(scheduling, Outranks):
        raise ValueError(
            f"preempt_for_waiting needs an order that ranks the waiting above the running; scheduling "
            f"{engine.config.scheduling!r} does not: choose priority, or switch it off"
        )
    return scheduling

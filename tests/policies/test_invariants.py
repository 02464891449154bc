"""Laws that hold after every event in every tiny world (T21-T29), and proof that breaking the engine breaks them.

What must hold is written in tests/laws.py, tests/ledger.py and tests/device.py, what may happen in tests/lives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from policies.catalogue import MENU, SCHEDULING
from policies.config import MENUS
from policies.engine import EngineCore
from policies.kv import KVCache
from policies.records import record
from policies.step import Step
from policies.types import Block, RequestRecord, RequestState, StepPlan
from tests.ledger import Ledger
from tests.lives import Choose, Life, chooser, draw_settings
from tests.specs import meetings
from tests.worlds import request, step, tiny_engine

MEETINGS = meetings(*(list(MENU[menu]) for menu in MENUS))
NUM_LIVES, NUM_EVENTS = 8, 80


# -- whatever happens -------------------------------------------------------------------------------------------------


class EngineLife(RuleBasedStateMachine):
    """Any engine, any events. Every rule ends with the ledger's checks; the end drives what is left to its end."""

    life: Life

    @initialize(data=st.data(), names=st.sampled_from(MEETINGS))
    def build(self, data: st.DataObject, names: tuple[str, ...]) -> None:
        choose = self._chooser(data)
        self.life = Life(choose, draw_settings(choose, **dict(zip(MENUS, names, strict=True))))

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self._let("add", data)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._let("abort", data)

    @precondition(lambda self: len(self.life.ledger.flights) < self.life.ledger.config.async_depth)
    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        self._let("schedule", data)

    @precondition(lambda self: self.life.ledger.flights)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        self._let("update", data)

    @precondition(lambda self: self.life.ledger.flights)
    @rule(data=st.data(), rarely=st.sampled_from((False, False, False, True)))
    def fail(self, data: st.DataObject, rarely: bool) -> None:
        if rarely:
            self._let("fail", data)

    @rule(data=st.data(), event=st.sampled_from(("reset", "reset", "reset_running")))
    def reset_prefix_cache(self, data: st.DataObject, event: str) -> None:
        self._let(event, data)

    @invariant()
    def laws_hold(self) -> None:
        self.life.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.end()

    def _let(self, event: str, data: st.DataObject) -> None:
        self.life.choose = self._chooser(data)
        self.life.pass_time()
        getattr(self.life, event)()

    @staticmethod
    def _chooser(data: st.DataObject) -> Choose:
        return lambda options: data.draw(st.sampled_from(options))


def test_the_laws_hold_whatever_happens() -> None:
    run_state_machine_as_test(
        EngineLife,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


KNOBS = (
    [{"scheduling": name} for name in SCHEDULING]
    + [{"async_depth": depth} for depth in (1, 2)]
    + [{"cache_at": when} for when in ("schedule", "step_end")]
    + [{"hol_skip": num} for num in (0, 2)]
    + [{"unhashed_first": first} for first in (True, False)]
    + [{"enable_prefix_caching": on} for on in (True, False)]
    + [{"isolation": name} for name in ("global", "tenant", "no_reuse")]
)


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: "-".join(f"{name}={value}" for name, value in knob.items()))
def test_the_laws_hold_for_every_knob_under_memory_pressure(knob: dict[str, Any]) -> None:
    num_preemptions = 0
    for seed, batching in product(range(NUM_LIVES), ("chunked", "stall_free", "prefill_first")):
        choose = chooser(knob, batching, seed)
        drawn = draw_settings(choose, **{"batching": batching, "num_blocks": 9, **knob})
        life = Life(choose, drawn)
        life.run(NUM_EVENTS)
        num_preemptions += life.ledger.engine.num_preemptions
        life.end()
    assert num_preemptions > 0, "no pressure, no proof"


# -- equal steps taken at once ----------------------------------------------------------------------------------------


NEVER_REPEATS = ("partition",)  # what is free for one part of the pool is not for another


@pytest.mark.parametrize("menu, name", [(menu, name) for menu in MENUS for name in MENU[menu]], ids=str)
def test_a_repeated_plan_leaves_what_single_steps_leave(menu: str, name: str) -> None:
    num_repeated = 0
    roomy = {"async_depth": 1, "max_model_len": 24, "num_blocks": 24, menu: name}  # few are refused
    for seed in range(60):
        if seed >= 12 and (num_repeated or name in NEVER_REPEATS):
            break
        choose = chooser(menu, name, seed)
        others = {other: choose(list(MENU[other])) for other in MENUS if other not in (menu, "admission")}
        num_repeated += _live_twice(choose, draw_settings(choose, **{**others, **roomy}))
    assert num_repeated > 0 or name in NEVER_REPEATS, "nothing was repeated"


def _live_twice(choose: Choose, drawn: dict[str, Any]) -> int:
    """The same events for an engine that jumps and one that does not. Returns how many steps were saved."""
    life = Life(choose, drawn)
    jumping, stepping = life.ledger, Ledger(tiny_engine(**drawn))
    num_saved = 0
    for _ in range(NUM_EVENTS // 2):
        event = choose(("add", "add", "abort", "step", "step", "step", "reset"))
        if event == "step":
            num_saved += _jump(jumping, stepping, life, choose)
        elif event == "reset":
            jumping.reset(life.now, reset_running=False)
            stepping.reset(life.now, reset_running=False)
        else:
            _same_event(jumping, stepping, life, event)
        assert _state(jumping) == _state(stepping)
    life.now = max(jumping.drive_to_end(life.now), stepping.drive_to_end(life.now))
    assert jumping.records == stepping.records
    return num_saved


def _same_event(jumping: Ledger, stepping: Ledger, life: Life, event: str) -> None:
    if event == "add":
        free = [request_id for request_id in "abcdefg" if request_id not in jumping.live]
        if free:
            drawn = life.draw_request(life.choose(free))
            jumping.add(drawn, life.now)
            stepping.add(drawn, life.now)
    else:
        request_id = life.choose("abcdefg")
        jumping.abort(request_id, life.now)
        stepping.abort(request_id, life.now)


def _jump(jumping: Ledger, stepping: Ledger, life: Life, choose: Choose) -> int:
    """One repeated step here, as many single ones there. Whatever happens does so in the last of them."""

    def repeats(plan: StepPlan, limit: int) -> int:
        """As a shell does: not beyond what changes by itself."""
        wakeup = jumping.engine.next_wakeup(life.now)
        most = limit if wakeup is None else max(1, min(limit, math.ceil((wakeup - life.now) / 0.25)))
        return int(choose(range(1, most + 1)))

    plan = jumping.schedule(life.now, repeats)
    if plan is None:
        assert stepping.schedule(life.now) is None
        life.now += 0.25
        return 0
    stop, cancelled = choose(((), (), "a", "b")), choose(("nobody", "nobody", *plan.request_ids))
    resets = choose((False, False, False, True))
    for each in range(plan.repeat):
        single = stepping.schedule(life.now)
        assert single is not None
        assert [chunk[:3] for chunk in single.chunks] == [
            (request_id, start + each, num_tokens) for request_id, start, num_tokens, *_ in plan.chunks
        ]
        assert (single.admitted, single.preempted) == (plan.admitted, plan.preempted)
        life.now += 0.25
        if each == plan.repeat - 1:
            for ledger in (jumping, stepping):
                if resets:
                    ledger.reset(life.now, reset_running=True)
                ledger.abort(cancelled, life.now)
        stepping.update(life.now, stop if each == plan.repeat - 1 else ())
    jumping.update(life.now, stop)
    return plan.repeat - 1


def _state(ledger: Ledger) -> list[object]:
    kv = ledger.engine.kv
    return [
        ledger.engine.next_step_id,
        [(state.request_id, state.block_ids, state.num_computed_tokens) for state in ledger.engine.running],
        [block.block_id for block in kv.free_order()],
        [(block.key, block.ref_count) for block in kv.blocks],
        {key: block.block_id for key, block in kv._index.items()},
        (kv.num_held_back, kv.num_evicted),
        ledger.engine.prefix_stats,
        ledger.records,
    ]


# -- the laws can fail (S6) -------------------------------------------------------------------------------------------


PLAIN = {"admission": "accept_all", "batching": "chunked", "preemption": "latest", "scheduling": "priority"}


def lives_until_a_law_breaks(allocation: str = "paged", **fixed: Any) -> None:
    for seed in range(60):
        choose = chooser("broken", seed)
        settings = draw_settings(choose, **{"allocation": allocation, "num_blocks": 9, **PLAIN, **fixed})
        life = Life(choose, settings)
        life.run(NUM_EVENTS)
        life.end()


def forgets_a_block(
    release: Callable[[KVCache, RequestState, float], int],
) -> Callable[[KVCache, RequestState, float], int]:
    def broken(kv: KVCache, state: RequestState, now: float) -> int:
        state.block_ids = state.block_ids[:-1]
        return release(kv, state, now)

    return broken


def leaves_a_reference(
    release: Callable[[KVCache, RequestState, float], int],
) -> Callable[[KVCache, RequestState, float], int]:
    def broken(kv: KVCache, state: RequestState, now: float) -> int:
        last = state.block_ids[-1:]
        freed = release(kv, state, now)
        for block_id in last:
            kv.blocks[block_id].ref_count += 1
        return freed

    return broken


def keeps_what_was_promised(
    release: Callable[[KVCache, RequestState, float], int],
) -> Callable[[KVCache, RequestState, float], int]:
    def broken(kv: KVCache, state: RequestState, now: float) -> int:
        kv.num_held_back += state.num_held_blocks
        return release(kv, state, now)

    return broken


@pytest.mark.parametrize(
    "damage, settings, law",
    [
        (forgets_a_block, {}, "references are miscounted|a reset is refused"),
        (leaves_a_reference, {}, "a block is free and referenced"),
        (keeps_what_was_promised, {"allocation": "paged_reserve_output"}, "what is held back is not what was promised"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_leak_in_release_is_noticed(
    damage: Callable[..., Callable[[KVCache, RequestState, float], int]],
    settings: dict[str, Any],
    law: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KVCache, "release", damage(KVCache.release))
    with pytest.raises(AssertionError, match=law):
        lives_until_a_law_breaks(**settings)


def test_a_leak_costs_admissions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request strands one of 8 blocks; the ninth cannot enter an empty engine."""
    monkeypatch.setattr(KVCache, "release", forgets_a_block(KVCache.release))
    engine = tiny_engine()
    for number in range(8):
        engine.add(request(number, prompt=4, max_tokens=1), now=number)
        step(engine, now=number)
        assert engine.kv.num_free == 7 - number
    engine.add(request("ninth", prompt=4, max_tokens=1), now=8.0)
    assert engine.schedule(now=8.0) is None


def test_a_false_hit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds_any(kv: KVCache, keys: list[int], limit: int) -> list[Block]:
        return [block for block in kv.blocks if block.key is not None][:limit]

    monkeypatch.setattr(KVCache, "lookup", finds_any)
    with pytest.raises(AssertionError, match="is read in block"):
        lives_until_a_law_breaks(enable_prefix_caching=True)


def test_a_key_on_a_block_that_was_never_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "drop_keys", lambda kv, block_ids: None)
    with pytest.raises(AssertionError, match="does not hold what the key stands for"):
        lives_until_a_law_breaks(enable_prefix_caching=True, cache_at="schedule")


def test_a_key_without_its_tenant_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, "_seals", lambda engine, request, sequence: {})
    with pytest.raises(AssertionError, match="one key, two prefixes"):
        lives_until_a_law_breaks(enable_prefix_caching=True, isolation="tenant")


def test_a_lost_request_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = EngineCore.drain_records
    monkeypatch.setattr(EngineCore, "drain_records", lambda engine: drain(engine)[1:])
    with pytest.raises(AssertionError, match="T22"):
        lives_until_a_law_breaks()


def test_time_that_is_counted_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*told: Any) -> RequestRecord:
        honest = record(*told)
        return replace(honest, stall_time=honest.stall_time + honest.decode_time)

    monkeypatch.setattr("policies.engine.record", twice)
    with pytest.raises(AssertionError, match="T24"):
        lives_until_a_law_breaks()


def test_a_closed_door_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "candidates", lambda step: iter(()))
    with pytest.raises(AssertionError, match=r"T26: . waits in vain"):
        lives_until_a_law_breaks()

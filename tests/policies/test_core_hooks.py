"""What the core offers to policies: lines of the held, shedding, totals, wakeups, and jumps that look past nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from policies.batching.tpot_budget import TpotBudget
from policies.catalogue import make
from policies.config import MENUS
from policies.engine import EngineCore, Policies
from policies.interfaces import View
from policies.repeat import repeat_limit
from policies.types import Admit, Block, FinishReason, Hold, Reject, Request, RequestState, Status, StepPlan, Verdict
from sim.cost import AffineCost
from sim.simulate import simulate
from sim.workload.workload import WorkItem, Workload
from tests.worlds import finish, request, shown, state_of, step, tiny_config, tiny_engine


def engine_with(settings: dict[str, Any], **policies: object) -> EngineCore:
    """A tiny engine with somebody's own policies."""
    config = tiny_config(**settings)
    chosen = {menu: make(menu, getattr(config, menu)) for menu in MENUS}
    return EngineCore(config, Policies(**{**chosen, **policies}))


# -- the held ---------------------------------------------------------------------------------------------------------


class Gate:
    """Holds everybody in the line of his class; lets go who is named, and writes down whom it was asked about."""

    def __init__(self, *open_to: str) -> None:
        self.open_to = set(open_to)
        self.asked: list[str] = []
        self.ended: list[tuple[str, FinishReason | None]] = []

    def decide(self, request: Request, view: View, now: float) -> Verdict:
        return Hold(request.class_name or None)

    steady = True

    def release(self, request: Request, view: View, now: float) -> Verdict:
        self.asked.append(request.request_id)
        return Admit() if request.request_id in self.open_to else Hold(request.class_name or None)

    def finished(self, state: RequestState, now: float) -> None:
        self.ended.append((state.request_id, state.stop_reason))


def held_engine(gate: Gate) -> EngineCore:
    engine = engine_with({}, admission=gate)
    for name in ("x1", "y1", "x2", "y2", "alone1", "alone2"):
        line = {"x": "x", "y": "y"}.get(name[0], "")
        engine.add(request(name, class_name=line), now=0.0)
    return engine


def test_of_a_line_the_first_is_asked_and_the_next_only_if_it_was_let_go() -> None:
    gate = Gate("x1", "y2")
    engine = held_engine(gate)
    plan = engine.schedule(now=0.0)
    assert plan is not None and shown(plan) == [("x1", 0, 4)]
    assert gate.asked == ["x1", "y1", "x2", "alone1", "alone2"], "in order of adding; y2 stands behind y1"
    assert (engine.view.num_held("x"), engine.view.num_held("y"), engine.view.num_held("z")) == (1, 2, 0)


def test_who_is_cancelled_in_a_line_lets_the_next_step_forward() -> None:
    gate = Gate("y2")
    engine = held_engine(gate)
    engine.abort("y1", now=0.0)
    assert shown(engine.schedule(now=0.0)) == [("y2", 0, 4)]
    assert [name for name, _ in gate.ended] == ["y1"]


def test_an_admission_policy_hears_of_everybodys_end_also_of_who_was_refused_after_it_had_agreed() -> None:
    class Counts(Gate):
        def decide(self, request: Request, view: View, now: float) -> Verdict:
            return Admit()

    gate = Counts()
    settings = {"allocation": "contiguous_max_len", "num_blocks": 4, "enable_prefix_caching": False}
    engine = engine_with(settings, admission=gate)
    assert not engine.add(request("wide"), now=0.0).accepted, "a region of 8 blocks"
    assert [name for name, _ in gate.ended] == ["wide"]


class Sheds:
    """Tells whoever is named to go."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def decide(self, request: Request, view: View, now: float) -> Verdict:
        return Hold() if request.class_name == "held" else Admit()

    def shed(self, view: View, now: float) -> Sequence[tuple[str, Reject]]:
        return [(name, Reject("go", retry_after=2.0)) for name in self.names] if now >= 1.0 else []


def test_who_waits_and_who_is_held_may_be_shed_and_who_was_let_in_may_not() -> None:
    engine = engine_with({"max_num_seqs": 1}, admission=Sheds("runs", "waits", "held", "nobody"))
    for name in ("runs", "waits", "stays"):
        engine.add(request(name), now=0.0)
    engine.add(request("held", class_name="held"), now=0.0)
    step(engine, now=0.0)
    engine.schedule(now=1.0)
    records = {record.request_id: record for record in engine.drain_records()}
    assert set(records) == {"waits", "held"}
    assert {(record.reason, record.detail, record.retry_after) for record in records.values()} == {
        (FinishReason.REJECTED, "go", 2.0)
    }
    assert [state.request_id for state in engine.states] == ["runs", "stays"]


def test_a_preempted_request_is_not_shed() -> None:
    engine = engine_with({}, admission=Sheds("a"))
    engine.add(request("a"), now=0.0)
    step(engine, now=0.0)
    engine.preempt(state_of(engine, "a"), now=1.0)
    assert shown(engine.schedule(now=1.0)) == [("a", 4, 1)]


def test_shed_requests_are_heard_of_though_nobody_runs() -> None:
    """In a simulation whose engine is empty the moment it has shed."""
    late = WorkItem(request("late", prompt=8, arrival_time=0.0, deadline=1.0), 4)
    first = WorkItem(request("first", prompt=8, max_tokens=9), 9)
    config = tiny_config(admission="shed_late,prefill_rate=100", max_num_seqs=1)
    run = simulate(config, Workload("it", [first, late]), AffineCost(per_step=1.0))
    assert [(record.request_id, record.finish_time) for record in run.records] == [("late", 1.0), ("first", 9.0)]
    assert not run.unfinished


def test_whoever_is_shed_from_an_engine_that_has_nothing_to_do_is_heard_of() -> None:
    """The only request waits for its group, which never comes."""
    alone = WorkItem(request("alone", prompt=8, deadline=1.0), 4)
    config = tiny_config(admission="shed_late,prefill_rate=100", batching="static,group_size=2,max_wait=9")
    run = simulate(config, Workload("it", [alone]), AffineCost(per_step=1.0))
    (record,) = run.records
    assert record.reason is FinishReason.REJECTED and record.finish_time == pytest.approx(0.92)
    assert not run.unfinished


# -- totals -----------------------------------------------------------------------------------------------------------


def test_totals_begin_when_somebody_asks_and_are_then_kept() -> None:
    engine = tiny_engine(num_blocks=20, max_num_seqs=2, admission="class_budgets,max_running=y:1")
    for name, class_name in (("a", "x"), ("b", "y"), ("c", "y"), ("d", "x")):
        engine.add(request(name, prompt=5, class_name=class_name, client_id=name), now=0.0)
    step(engine, now=0.0)
    x, y = engine.view.of_class("x"), engine.view.of_class("y")
    assert (x.num_running, x.num_waiting, x.num_waiting_tokens, x.num_waiting_blocks) == (1, 1, 5, 2)
    assert (y.num_running, y.num_held, y.num_held_tokens) == (1, 1, 5)
    assert engine.view.of_client("d").num_waiting == 1
    engine.preempt(state_of(engine, "a"), now=1.0)
    x = engine.view.of_class("x")
    assert (x.num_running, x.num_waiting, x.num_waiting_tokens, x.num_waiting_blocks) == (0, 2, 11, 4)
    assert engine.view.of_class("nobody").num_running == 0


# -- jumps ------------------------------------------------------------------------------------------------------------


class HeadsFirst:
    """Gives up the head of a chain before its tail, as no engine does: what hangs on it is lost with it."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        self.blocks[block.block_id] = block

    def discard(self, block: Block) -> None:
        del self.blocks[block.block_id]

    def touch(self, block: Block) -> None:
        pass

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        return self.blocks.pop(min(self.blocks.values(), key=lambda block: (block.depth, block.block_id)).block_id)

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(sorted(self.blocks.values(), key=lambda block: (block.depth, block.block_id)))


def squeezed(allocation: str = "paged") -> EngineCore:
    """10 blocks of 1 token. Five are cached, `runs` holds the others. `waits` finds the five and needs a sixth: it does
    not fit. With the head of the five it loses them all, and then it asks for one block only."""
    settings = {
        "num_blocks": 10, "block_size": 1, "allocation": allocation, "long_prefill_token_threshold": 1,
        "max_model_len": 10, "refuse_unfittable": False,
    }  # fmt: skip
    engine = engine_with(settings, eviction=HeadsFirst())
    engine.add(request("past", prompt=[1, 2, 3, 4, 5], max_tokens=1), now=0.0)
    finish(engine, whole(engine, 0.0), now=1.0)
    engine.add(request("runs", prompt=4, max_tokens=6), now=1.0)
    finish(engine, whole(engine, 1.0), now=2.0)
    engine.add(request("waits", prompt=[1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1), now=2.0)
    return engine


def whole(engine: EngineCore, now: float) -> StepPlan:
    """Steps until somebody's prompt is computed; the last of them is not finished."""
    while True:
        plan = engine.schedule(now)
        assert plan is not None
        if any(plan.samples):
            return plan
        finish(engine, plan, now)


def test_a_jump_does_not_look_past_an_eviction_that_lets_somebody_in() -> None:
    jumping, stepping = squeezed(), squeezed()
    admitted: list[list[tuple[str, int]]] = [[], []]
    for index, engine in enumerate((jumping, stepping)):
        now = 2.0
        while any(state.request_id == "runs" for state in engine.states):
            plan = engine.schedule(now, (lambda _, limit: limit) if engine is jumping else None)
            assert plan is not None
            admitted[index] += [(entry.request_id, plan.step_id) for entry in plan.admitted]
            now += plan.repeat
            finish(engine, plan, now)
    assert admitted[0] == admitted[1] != []


def test_evictions_do_not_end_a_jump_where_those_who_wait_would_find_nothing() -> None:
    engine = squeezed("paged_full_prompt")
    engine.abort("waits", now=2.0)
    engine.add(request("waits", prompt=8, max_tokens=1), now=2.0)
    plan = engine.schedule(now=2.0, repeats=lambda _, limit: limit)
    assert plan is not None and plan.repeat > 1


def test_a_limit_without_evictions_is_that_of_the_blocks_without_a_key() -> None:
    engine = squeezed()
    runs = [state_of(engine, "runs")]
    assert repeat_limit(runs, engine.kv, may_evict=True) > repeat_limit(runs, engine.kv, may_evict=False) >= 1


@pytest.mark.parametrize("jumps", [True, False])
def test_a_wakeup_falls_between_the_steps_of_a_jump(jumps: bool) -> None:
    """`ann`'s second request may enter at 5.0, while her first decodes: neither sooner nor later, jumps on or off."""
    items = [
        WorkItem(request("a", prompt=4, max_tokens=16, client_id="ann"), 16),
        WorkItem(request("b", prompt=4, max_tokens=16, client_id="ann"), 2),
    ]
    config = tiny_config(admission="token_buckets,rate=4,burst=5", max_num_seqs=2)
    run = simulate(config, Workload("it", items), AffineCost(per_step=0.5), jumps=jumps)
    times = {record.request_id: record.first_scheduled_time for record in run.records}
    assert times == {"a": 0.0, "b": 5.0}
    assert run.num_plans < 10 if jumps else run.num_plans > 10


# -- batching ---------------------------------------------------------------------------------------------------------


def test_decode_first_lets_nobody_in_while_anybody_decodes() -> None:
    engine = tiny_engine(batching="decode_first", max_num_batched_tokens=8)
    engine.add(request("a", prompt=5, max_tokens=3), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 5)]
    engine.add(request("b", prompt=12, max_tokens=2), now=1.0)
    assert [shown(step(engine, now=float(now))) for now in range(1, 6)] == [
        [("a", 5, 1)], [("a", 6, 1)], [("b", 0, 8)], [("b", 8, 4)], [("b", 12, 1)],
    ]  # fmt: skip


def test_a_chunk_is_as_large_as_the_time_between_tokens_allows() -> None:
    """0.1 s a step, 0.05 s a token: within half a second, 8 tokens."""
    policy = TpotBudget(tpot=0.5, step_time=0.1, token_time=0.05, min_chunk=2)
    assert policy.chunk_size(0) == 8
    assert TpotBudget(tpot=0.05, step_time=0.1, min_chunk=2).chunk_size(0) == 2, "or prompts would never end"
    spec = "tpot_budget,tpot=0.5,step_time=0.1,token_time=0.05,context_time=0.01,min_chunk=2"
    engine = tiny_engine(batching=spec, num_blocks=20)
    engine.add(request("a", prompt=8), now=0.0)
    engine.add(request("b", prompt=20), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a", 0, 8)]
    assert shown(step(engine, now=1.0)) == [("a", 8, 1), ("b", 0, 5)], "9 tokens of context leave 6"


def test_no_step_is_longer_than_the_target() -> None:
    items = [WorkItem(request(n, prompt=100, max_tokens=20, arrival_time=n / 2), 20) for n in range(10)]
    cost = AffineCost(per_step=0.1, per_token=0.01)
    sizes = {"num_blocks": 300, "max_model_len": 200, "max_num_batched_tokens": 200, "max_num_seqs": 8}
    gaps = {}
    for batching in ("chunked", "tpot_budget,tpot=0.4,step_time=0.1,token_time=0.01,min_chunk=1"):
        summary = simulate(tiny_config(batching=batching, **sizes), Workload("it", items), cost).summary
        gaps[batching[:4]] = summary.itl.max
    assert gaps["tpot"] <= 0.4 + 1e-9 < gaps["chun"]


WRONG = {
    "tpot_budget,tpot=0": "tpot (0.0) must be a finite number of seconds above 0",
    "tpot_budget,step_time=-1": "step_time (-1.0) must be a finite number of seconds, 0 or more",
    "tpot_budget,min_chunk=0": "min_chunk (0) must be at least 1 token",
}


@pytest.mark.parametrize("spec", WRONG)
def test_a_wrong_knob_says_what_is_right(spec: str) -> None:
    with pytest.raises(ValueError) as error:
        make("batching", spec)
    assert str(error.value) == WRONG[spec]


def test_held_requests_count_as_present_and_are_no_part_of_the_line() -> None:
    engine = held_engine(Gate())
    assert engine.schedule(now=0.0) is None and engine.has_work
    assert (len(engine.held), engine.view.num_waiting) == (6, 0)
    assert {state.status for state in engine.states} == {Status.HELD}

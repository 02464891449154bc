"""One request's time, cut without a gap, and who held what it waited for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from policies.types import RequestRecord
from sim.commands import Prepared
from sim.cost import AffineCost
from sim.experiment.explain.blame import ADMISSION, ANSWERS, BLOCKS, BUDGET, GROUP, PREFILLS, SLOTS
from sim.experiment.explain.commands import explain_journal, explain_run, headline, print_explained, to_dict
from sim.experiment.explain.life import (
    BEHIND,
    DECODE,
    FRONT_END,
    PASSED_OVER,
    PREEMPTED,
    PREFILL,
    QUEUE,
    RECOMPUTED,
    STREAMING,
    Span,
)
from sim.experiment.explain.life import GROUP as UNFINISHED_GROUP
from sim.experiment.explain.story import Explained, explain
from sim.frontend import FrontEndTimes
from sim.setup import Setup
from sim.simulate import simulate
from sim.workload.workload import WorkItem, Workload
from tests.lives import Life, chooser, draw_settings
from tests.worlds import request, tiny_config

SECOND = AffineCost(per_step=1.0)
SERVED = (PREFILL, DECODE, BEHIND, RECOMPUTED, UNFINISHED_GROUP)


def played(*items: tuple[str, float, int, int], cost: AffineCost = SECOND, **settings: Any) -> list[str]:
    """The journal of (name, arrival, prompt tokens, output tokens); a name before a hyphen is a class."""
    lines: list[str] = []
    made = [
        WorkItem(request(name, num, max_tokens=out, arrival_time=at, class_name=name.split("-")[0]), out)
        for name, at, num, out in items
    ]
    simulate(tiny_config(**settings), Workload("w", made), cost, lines.append)
    return lines


def spans(found: Explained) -> list[tuple[str, str, float]]:
    return [(span.stage, span.cause.what, span.duration) for span in found.spans]


# -- what it waited for, exactly --------------------------------------------------------------------------------------


def test_who_holds_the_blocks_is_named() -> None:
    """8 blocks of 4: batch-1 and batch-2 hold 3 each, growing to 4; the chat's prompt needs 5 and waits for both."""
    lines = played(("batch-1", 0.0, 12, 4), ("batch-2", 0.0, 12, 4), ("chat-1", 1.0, 20, 1))
    found = explain(lines, "chat-1")
    assert spans(found) == [(QUEUE, BLOCKS, 3.0), (PREFILL, "", 1.0)]
    assert found.holders(QUEUE, BLOCKS) == {"batch-1": 1.5, "batch-2": 1.5}
    assert found.classes == {"batch-1": "batch", "batch-2": "batch"}
    assert headline(found) == (
        "request chat-1: 4 s; waited 3 s: 3 s for blocks held by class batch (req batch-1, batch-2)"
    )


def test_who_holds_more_blocks_holds_up_more() -> None:
    """From the second step on 4 and 2 of 8 blocks, for three seconds."""
    lines = played(("big", 0.0, 12, 4), ("small", 0.0, 4, 4), ("chat", 1.0, 12, 1))
    found = explain(lines, "chat")
    assert spans(found)[0] == (QUEUE, BLOCKS, 3.0)
    assert found.holders(QUEUE, BLOCKS) == {"big": 2.0, "small": 1.0}


def test_who_holds_the_slots_is_named() -> None:
    lines = played(("a", 0.0, 4, 3), ("b", 0.0, 4, 5), ("c", 1.0, 4, 1), max_num_seqs=2)
    found = explain(lines, "c")
    assert spans(found) == [(QUEUE, SLOTS, 2.0), (PREFILL, "", 1.0)]
    assert found.holders(QUEUE, SLOTS) == {"a": 1.0, "b": 1.0}


def test_whose_prefill_takes_the_budget_is_named() -> None:
    """8 tokens a step: the first 16 of a prompt leave nothing for two steps, its last and this prompt share a third."""
    lines = played(("long", 0.0, 17, 1), ("short", 0.0, 4, 1), max_num_batched_tokens=8, max_num_seqs=4)
    found = explain(lines, "short")
    assert spans(found)[0] == (QUEUE, BUDGET, 2.0)
    assert found.holders(QUEUE, BUDGET) == {"long": 2.0}


def test_admission_that_holds_is_named() -> None:
    lines = played(("a", 0.0, 4, 3), ("a-2", 0.0, 4, 1), admission="class_budgets,max_running=a:1")
    assert spans(explain(lines, "a-2"))[0] == (QUEUE, ADMISSION, 3.0)


def test_a_group_is_waited_for_before_and_after() -> None:
    """Static batching: c waits until a and b are done; b, whose answer is short, until a is."""
    lines = played(("a", 0.0, 4, 4), ("b", 0.0, 4, 2), ("c", 1.0, 4, 1), batching="static", max_num_seqs=2)
    late = explain(lines, "c")
    assert spans(late) == [(QUEUE, GROUP, 3.0), (PREFILL, "", 1.0)]
    assert headline(late).endswith("3 s for the group that runs to be done (req a, b)")
    found = explain(lines, "b")
    assert spans(found)[-1] == (UNFINISHED_GROUP, ANSWERS, 2.0)
    assert found.holders(UNFINISHED_GROUP, ANSWERS) == {"a": 2.0}
    assert headline(found).endswith("2 s for the longer answers of req a, 500 ms behind the prefills of req a")


# -- what a shared step is made of ------------------------------------------------------------------------------------


def test_a_decode_beside_prefills_waits_for_what_they_add() -> None:
    """A step costs 1 s and 1/8 s a token. b's 16 tokens and c's 8 make one of a's steps 3 s longer than the others."""
    cost = AffineCost(per_step=1.0, per_token=0.125)
    lines = played(("a", 0.0, 4, 4), ("b", 1.5, 16, 1), ("c", 1.5, 8, 1), cost=cost)
    found = explain(lines, "a")
    assert spans(found) == [
        (PREFILL, "", 1.5), (DECODE, "", 1.125), (BEHIND, PREFILLS, 3.0), (DECODE, "", 2.25),
    ]  # fmt: skip
    assert found.holders(BEHIND, PREFILLS) == {"b": 2.0, "c": 1.0}


def test_a_prefill_beside_another_waits_for_its_part() -> None:
    """Two prompts in one step of 3 s, of 12 tokens and 4: each waits for the other's share of it."""
    lines = played(("a", 0.0, 12, 1), ("b", 0.0, 4, 1), cost=AffineCost(per_step=1.0, per_token=0.125))
    assert spans(explain(lines, "a")) == [(PREFILL, "", 2.25), (BEHIND, PREFILLS, 0.75)]
    assert spans(explain(lines, "b")) == [(PREFILL, "", 0.75), (BEHIND, PREFILLS, 2.25)]


def test_what_is_preempted_waits_and_is_computed_again() -> None:
    """6 blocks of 4 for two that grow to 4 each: the later yields, and begins anew when the other is done."""
    lines = played(("a", 0.0, 8, 9), ("b", 1.0, 8, 9), num_blocks=6, enable_prefix_caching=False)
    found = explain(lines, "b")
    assert found.num_preemptions == 1
    stages = list(found.parts())
    assert stages == [PREFILL, DECODE, PREEMPTED, RECOMPUTED]
    assert found.holders(PREEMPTED, BLOCKS) == {"a": found.parts()[PREEMPTED]}


def test_who_runs_and_is_not_served_is_told_whom_for() -> None:
    """Prefills first: the decode of a stands still while b's prompt is computed in two steps."""
    lines = played(
        ("a", 0.0, 4, 3), ("b", 1.0, 16, 1), batching="prefill_first", max_num_batched_tokens=16, max_num_seqs=4
    )
    found = explain(lines, "a")
    assert (PASSED_OVER, BUDGET, 1.0) in spans(found)
    assert found.holders(PASSED_OVER, BUDGET) == {"b": 1.0}


# -- nothing is lost, whatever happens --------------------------------------------------------------------------------


def assert_whole(found: Explained, begin: float, end: float) -> None:
    """T24: spans follow each other from arrival to leaving, to the last bit."""
    assert (found.arrival_time, found.finish_time) == (begin, end)
    assert not found.spans or (found.spans[0].begin, found.spans[-1].end) == (begin, end)
    assert all(one.end == other.begin for one, other in pairwise(found.spans))
    assert all(isinstance(span, Span) and span.duration >= 0.0 for span in found.spans)
    assert math.fsum(found.parts().values()) == pytest.approx(end - begin, abs=1e-9)
    for (stage, what), seconds in found.causes().items():
        holders = found.holders(stage, what)
        assert not holders or math.fsum(holders.values()) == pytest.approx(seconds)


def assert_agrees(found: Explained, record: RequestRecord) -> None:
    """With the five parts that the engine kept by itself."""
    parts = found.parts()
    assert parts.get(FRONT_END, 0.0) + parts.get(QUEUE, 0.0) == pytest.approx(record.queue_time, abs=1e-9)
    assert parts.get(PREEMPTED, 0.0) == pytest.approx(record.requeue_time, abs=1e-9)
    served = sum(parts.get(stage, 0.0) for stage in SERVED) + parts.get(PASSED_OVER, 0.0)
    told = record.prefill_time + record.decode_time + record.stall_time
    assert served == pytest.approx(told, abs=1e-9)


@pytest.mark.parametrize("async_depth", [1, 2])
@pytest.mark.parametrize("batching", ["chunked", "stall_free", "prefill_first", "static"])
def test_t24_the_parts_are_the_whole_whatever_happens(batching: str, async_depth: int) -> None:
    """Random lives: refused, cancelled, preempted, swapped, failed, reset; jumps too."""
    seen: set[str] = set()
    for seed in range(6):
        life, lines = lived(batching, async_depth, seed)
        first = {record.request_id: record for record in reversed(life.ledger.records)}  # an id may come again
        for name, record in first.items():
            found = explain(lines, name)
            assert_whole(found, record.arrival_time, record.finish_time)
            assert_agrees(found, record)
            assert found.reason == record.reason.value
            seen |= set(found.parts())
    assert {QUEUE, PREFILL, DECODE} <= seen


def lived(batching: str, async_depth: int, seed: int) -> tuple[Life, list[str]]:
    lines: list[str] = []
    choose = chooser("explain", batching, async_depth, seed)
    life = Life(choose, draw_settings(choose, batching=batching, async_depth=async_depth), lines.append)
    life.repeats = True
    life.run(50)
    life.end()
    return life, lines


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_t24_from_the_clients_end_too(num_replicas: int) -> None:
    """With a front end: on the way there, in the engine, on the way back; also of those who give up."""
    setup = Setup(
        workload="chat",
        rate=30.0,
        num_requests=40,
        transforms=("cancel=0.3,patience=1",),
        costs="datasheet",
        num_replicas=num_replicas,
        engine={"max_num_seqs": 4, "num_blocks": 400},
    )
    run = Prepared.of(setup).run()
    for client in run.clients[:8]:
        if client.added_time is None:
            with pytest.raises(ValueError, match="never reached an engine"):
                explain_run(setup, client.request_id)
            continue
        found = explain_run(setup, client.request_id)
        assert_whole(found, client.arrival_time, client.finish_time)
        assert found.sees_client and (STREAMING in found.parts()) is (client.left_time is None)


def test_the_way_there_is_told_hop_by_hop() -> None:
    times = FrontEndTimes.off(gateway_time_per_request=1.0, api_time_per_request=2.0, tokenise_time_per_token=0.5,
                              engine_link_time=0.25, stream_time_per_token=4.0)  # fmt: skip
    lines: list[str] = []
    made = Workload("w", [WorkItem(request("a", 4, max_tokens=1), 1)])
    run = simulate(tiny_config(), made, SECOND, lines.append, front_end=times)
    assert spans(explain(lines, "a", run.clients[0])) == [
        (FRONT_END, "the gateway", 1.0), (FRONT_END, "the API server", 2.0), (FRONT_END, "the tokeniser", 2.0),
        (QUEUE, "the step in progress", 0.25), (PREFILL, "", 1.0), (STREAMING, "", 4.25),
    ]  # fmt: skip


# -- as people read it ------------------------------------------------------------------------------------------------


def shown(found: Explained, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as text:
        print_explained(console, found)
    return text.get()


@pytest.mark.parametrize("width", [80, 100])
def test_it_reads_like_this_and_fits(width: int) -> None:
    lines = played(("batch-1", 0.0, 12, 4), ("batch-2", 0.0, 12, 4), ("chat-1", 1.0, 20, 1))
    text = shown(explain(lines, "chat-1"), width)
    rows = [line.split() for line in text.splitlines()]
    assert ["blocks", "3", "s", "batch", "3", "s", "(req", "batch-1,", "batch-2)"] in rows
    assert ["whole", "4", "s", "100.0", "%"] in rows
    assert max(map(len, text.splitlines())) <= width


def test_a_class_that_looks_like_markup_is_printed_as_it_is() -> None:
    lines = played(("[/red]-1", 0.0, 12, 4), ("[/red]-2", 0.0, 12, 4), ("c", 1.0, 20, 1))
    assert "[/red] 3 s" in shown(explain(lines, "c"), 100)


def test_the_slowest_of_a_journal_is_found(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text("\n".join(played(("a", 0.0, 4, 9), ("b", 0.0, 4, 2), ("c", 1.0, 4, 3))) + "\n")
    found = explain_journal(path, "slowest")
    assert (found.request_id, found.e2e) == ("a", 9.0)
    told = to_dict(found)
    assert math.fsum(told["parts"].values()) == told["e2e"] == 9.0
    assert json.loads(json.dumps(told)) == told


def journal_of(lines: Sequence[str], path: Path) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_what_cannot_be_explained_is_refused_in_a_line(tmp_path: Path) -> None:
    lines = played(("a", 0.0, 4, 3), ("b", 0.0, 4, 3))
    with pytest.raises(ValueError, match="no request 'x' in the journal: it has 2, 'a' to 'b'"):
        explain(lines, "x")
    with pytest.raises(ValueError, match="request 'a' has not left by the end of the journal"):
        explain(lines[:5], "a")
    changed = [line.replace('["a",0,4', '["a",0,3') for line in lines]
    with pytest.raises(ValueError, match="cannot be followed: line 5 differs; see servetwin replay"):
        explain(changed, "a")
    with pytest.raises(ValueError, match="cannot read"):
        explain_journal(tmp_path / "none", "a")
    with pytest.raises(ValueError, match="nobody has left"):
        explain_journal(journal_of(lines[:3], tmp_path / "short"), "slowest")


def test_who_is_refused_has_no_more_than_the_way_there() -> None:
    found = explain(played(("a", 0.0, 40, 1), ("b", 0.0, 4, 1)), "a")
    assert found.reason == "rejected" and found.parts() == {}
    assert_whole(found, 0.0, 0.0)

"""A journal replays to the same decisions, tells where it does not, and tells nobody what was said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from policies.catalogue import build
from policies.config import EngineConfig
from policies.engine import EngineCore
from policies.journal import Replayed, Write, replay
from policies.prompt import TokenPrompt
from policies.types import StepOutput, StepPlan
from tests.lives import Life, chooser, draw_settings
from tests.worlds import finish, request, run_to_end, tiny_engine

SECRET = b"nobody knows"
Count = Callable[[str, int], None]


def rebuild(config: EngineConfig, write: Write) -> EngineCore:
    """Without the secret: keys are in the journal."""
    return build(config, write)


def recorded_life(batching: str, allocation: str, async_depth: int, seed: int) -> tuple[Life, list[str]]:
    lines: list[str] = []
    choose = chooser("journal", batching, allocation, async_depth, seed)
    drawn = draw_settings(choose, batching=batching, allocation=allocation, async_depth=async_depth)
    life = Life(choose, drawn, lines.append)
    life.repeats = True
    life.run(60)
    life.end()
    return life, lines


# -- equal, line for line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", ["chunked", "stall_free", "prefill_first", "static"])
@pytest.mark.parametrize("async_depth", [1, 2])
def test_whatever_was_recorded_replays_equal(batching: str, async_depth: int, count: Count) -> None:
    seen: set[str] = set()
    for allocation, seed in product(("paged", "paged_reserve_output"), range(12)):
        _, lines = recorded_life(batching, allocation, async_depth, seed)
        replayed = replay(lines, rebuild)
        assert replayed.divergence is None, str(replayed.divergence)
        assert replayed.num_lines == len(lines)
        count("decisions_replayed", replayed.num_decisions)
        seen |= set(kinds_of_lines(lines))
    wanted = {
        "journal",
        "add",
        "refused",
        "abort",
        "plan",
        "idle",
        "update",
        "stopped",
        "reset",
        "left",
        "live keys",
        "fail",
    }
    wanted |= {"repeated"} if async_depth == 1 else set()
    assert wanted <= seen, f"a life without {wanted - seen} proves nothing about it"


def kinds_of_lines(lines: Sequence[str]) -> list[str]:
    found: list[str] = []
    for line in map(json.loads, lines):
        found += line
        found += ["repeated"] * (line.get("repeat", 1) > 1) + ["live keys"] * ("update" in line and "keys" in line)
    return found


def test_to_be_recorded_changes_nothing() -> None:
    life, _ = recorded_life("chunked", "paged", 1, seed=0)
    choose = chooser("journal", "chunked", "paged", 1, 0)
    silent = Life(choose, draw_settings(choose, batching="chunked", allocation="paged", async_depth=1))
    silent.repeats = True
    silent.run(60)
    silent.end()
    assert silent.ledger.records == life.ledger.records


def a_small_day() -> list[str]:
    """Two are let in, one is refused, one is cancelled; then the cache is reset and nobody is left."""
    lines: list[str] = []
    engine = tiny_engine(lines.append, SECRET, num_blocks=6)
    engine.add(request("a", prompt=range(6), max_tokens=2), now=0.0)
    engine.add(request("large", prompt=29), now=0.0)
    engine.add(
        request("b", prompt=6, max_tokens=4, priority=3, client_id="c7", class_name="batch", deadline=9.5), now=0.0
    )
    plan = engine.schedule(now=0.0)
    assert plan is not None
    engine.abort("b", now=0.5)
    finish(engine, plan, now=1.0)
    run_to_end(engine, now=1.0)
    engine.reset_prefix_cache(now=5.0)
    engine.schedule(now=6.0)
    return lines


def test_a_small_day_reads_like_this() -> None:
    header, *lines = map(json.loads, a_small_day())
    assert header["journal"] == 1
    assert EngineConfig.from_dict(header["config"]).num_blocks == 6
    assert [next(iter(line)) for line in lines] == [
        "add", "add", "add", "plan", "abort", "update", "plan", "update", "reset", "idle",
    ]  # fmt: skip
    assert lines[1]["refused"].startswith("request large needs 31 tokens")
    assert lines[3] == {
        "plan": 0, "now": 0.0, "repeat": 1, "chunks": [["a", 0, 6, [1, 2]], ["b", 0, 6, [3, 4]]],
        "admitted": [["a", 0, False], ["b", 0, False]],
    }  # fmt: skip
    assert lines[5] == {"update": 0, "now": 1.0}
    assert lines[6]["chunks"] == [["a", 6, 1]], "blocks are told once"
    assert lines[7]["left"] == [["a", "length"]]


def test_a_reset_that_answers_a_member_that_is_done_tells_who_left() -> None:
    lines: list[str] = []
    engine = tiny_engine(lines.append, batching="static,max_wait=0")
    for name, max_tokens in (("done", 1), ("other", 9)):
        engine.add(request(name, max_tokens=max_tokens), now=0.0)
    plan = engine.schedule(now=0.0)
    assert plan is not None
    finish(engine, plan, now=1.0)
    engine.reset_prefix_cache(now=2.0, reset_running=True)
    assert json.loads(lines[-1]) == {"reset": True, "now": 2.0, "done": True, "left": [["done", "length"]]}
    assert replayed(lines).divergence is None


# -- the first difference ---------------------------------------------------------------------------------------------


def change(lines: Sequence[str], number: int, **fields: Any) -> list[str]:
    """The journal with another value in its line `number`."""
    line = {**json.loads(lines[number - 1]), **fields}
    return [*lines[: number - 1], json.dumps(line, separators=(",", ":")), *lines[number:]]


def replayed(lines: Sequence[str]) -> Replayed:
    return replay(lines, rebuild)


@pytest.mark.parametrize(
    "number, fields",
    [
        (3, {"refused": "request large is not wanted"}),
        (5, {"chunks": [["a", 0, 6, [1, 2]], ["b", 0, 6, [3, 5]]]}),
        (5, {"chunks": [["a", 0, 5, [1, 2]], ["b", 0, 6, [3, 4]]]}),
        (5, {"admitted": [["b", 0, False], ["a", 0, False]]}),
        (5, {"preempted": ["a"]}),
        (5, {"plan": 1}),
        (6, {"known": False}),
        (9, {"left": [["a", "stop"]]}),
        (10, {"done": False}),
        (11, {"plan": 2}),
    ],
)
def test_a_tampered_decision_is_the_first_difference(number: int, fields: dict[str, Any]) -> None:
    divergence = replayed(change(a_small_day(), number, **fields)).divergence
    assert divergence is not None
    assert divergence.line_number == number
    assert str(divergence).startswith(f"line {number} differs\n  journal: {{")
    assert divergence.expected != divergence.found


@pytest.mark.parametrize(
    "number, fields, differs_at",
    [
        (2, {"prompt": 7}, 5),
        (2, {"max_tokens": 3}, 9),
        (4, {"max_tokens": 90}, 4),
        (7, {"stopped": {"a": "stop"}}, 7),
        (1, {"config": {**EngineConfig().to_dict(), "num_blocks": 1}}, 3),
    ],
)
def test_a_tampered_input_shows_where_it_first_decides_otherwise(
    number: int, fields: dict[str, Any], differs_at: int
) -> None:
    divergence = replayed(change(a_small_day(), number, **fields)).divergence
    assert divergence is not None
    assert divergence.line_number == differs_at


def test_a_difference_comes_with_the_state_around_it() -> None:
    divergence = replayed(change(a_small_day(), 6, known=False)).divergence
    assert divergence is not None
    assert divergence.state == "step 1; running [a@6]; 0 waiting; 4 of 6 blocks free, 1 of them cached"


def test_other_policies_decide_otherwise() -> None:
    """The comparison can fail: lives replayed under another allocation part at some plan."""
    parted = []
    for seed in range(8):
        _, lines = recorded_life("chunked", "paged", 1, seed=seed)
        config = json.loads(lines[0])["config"]
        divergence = replayed(change(lines, 1, config={**config, "max_num_seqs": 1})).divergence
        parted.append(divergence is not None and divergence.line_number > 1)
    assert any(parted)


# -- what is not a journal --------------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "empty": (lambda lines: [], "the journal is empty: expected a first line with its version and configuration"),
    "cut in the middle of a line": (
        lambda lines: [*lines[:4], lines[4][:30]],
        "line 5 of the journal is not JSON: is the file whole?",
    ),
    "a text": (lambda lines: ["Dear diary,"], "line 1 of the journal is not JSON: is the file whole?"),
    "a blank line": (lambda lines: [*lines, "\n"], "line 12 of the journal is not JSON: is the file whole?"),
    "a list": (lambda lines: ["[1, 2]"], "line 1 of the journal is not an object: is this a journal?"),
    "nested beyond reason": (lambda lines: ["[" * 100_000], "line 1 of the journal is not JSON: is the file whole?"),
    "without its first line": (
        lambda lines: lines[1:],
        "not a journal of version 1: the first line must hold 'journal' and 'config'",
    ),
    "another version": (
        lambda lines: change(lines, 1, journal=2),
        "not a journal of version 1: the first line must hold 'journal' and 'config'",
    ),
    "an unknown setting": (
        lambda lines: change(lines, 1, config={"num_block": 8}),
        "unknown engine setting 'num_block'",
    ),
    "a bad setting": (lambda lines: change(lines, 1, config={"num_blocks": 0}), "num_blocks (0) must be at least 1"),
    "a line without its time": (
        lambda lines: [*lines[:2], '{"abort":"a"}'],
        "line 3 of the journal cannot be replayed ('now'): is the file whole?",
    ),
    "a line of no known kind": (
        lambda lines: [*lines[:2], '{"now":0.0,"pause":1}'],
        "line 3 of the journal cannot be replayed ('a known kind of line'): is the file whole?",
    ),
    "an update of a step that never was": (
        lambda lines: [*lines[:2], '{"update":7,"now":0.0}'],
        "line 3 of the journal cannot be replayed (7): is the file whole?",
    ),
    "time running backwards": (
        lambda lines: [*lines, '{"idle":true,"now":0.0}'],
        "time (0.0) must be finite and not before",
    ),
}


@pytest.mark.parametrize("breaks, complaint", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_journal_is_one_line_of_complaint(breaks: Callable[[list[str]], list[str]], complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        replayed(breaks(a_small_day()))
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_journal_may_end_after_any_line() -> None:
    lines = a_small_day()
    assert [replayed(lines[:num]).num_lines for num in range(1, len(lines) + 1)] == list(range(1, len(lines) + 1))


def test_line_ends_do_not_matter() -> None:
    assert replayed([line + "\n" for line in a_small_day()]).divergence is None


# -- what a journal does not tell -------------------------------------------------------------------------------------

PROMPT, ANSWER = tuple(range(7_310_001, 7_310_010)), tuple(range(7_320_001, 7_320_008))


def a_live_run(secret: bytes = SECRET, async_depth: int = 1) -> list[str]:
    """Token ids in, token ids out, as a live body knows them."""
    lines: list[str] = []
    engine = tiny_engine(lines.append, secret, async_depth=async_depth, isolation="tenant")
    engine.add(request("a", TokenPrompt(PROMPT), max_tokens=len(ANSWER), tenant="alice"), now=0.0)
    plans, answer, now = list[StepPlan](), list(ANSWER), 0.0
    while engine.has_work:
        plan = engine.schedule(now) if len(plans) < async_depth else None
        if plan is not None:
            plans.append(plan)
            continue
        done, now = plans.pop(0), now + 1.0
        said = {"a": [answer.pop(0)]} if any(done.samples) and answer else {}
        engine.update(done, StepOutput(1.0, token_ids=said), now)
    return lines


@pytest.mark.parametrize("async_depth", [1, 2])
def test_a_live_run_replays_equal_without_its_tokens(async_depth: int) -> None:
    lines = a_live_run(async_depth=async_depth)
    assert replayed(lines).divergence is None
    assert kinds_of_lines(lines).count("live keys") == 2, "9 + 7 tokens: two blocks were filled by the answer"


def test_a_journal_holds_no_token_ids_and_no_names_of_tenants() -> None:
    text = "\n".join(a_live_run())
    assert not [token for token in PROMPT + ANSWER if str(token) in text]
    assert "alice" not in text


def test_keys_in_a_journal_tell_nothing_without_the_secret() -> None:
    """Whoever guesses the prompt cannot check the guess."""
    keys = [json.loads(line)["keys"] for line in (a_live_run(SECRET)[1], a_live_run(b"guess")[1], a_live_run(b"")[1])]
    assert len({json.dumps(each) for each in keys}) == 3

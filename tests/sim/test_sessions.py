"""Closed loops: what follows, when, and what an unanswered request does to its session."""

from __future__ import annotations

import pytest

from policies.config import EngineConfig
from policies.prompt import ContentPrompt, LengthPrompt
from policies.types import Request
from sim.cost import AffineCost
from sim.simulate import Run, simulate
from sim.workload.sessions import FollowUp, Sessions
from sim.workload.workload import WorkItem

CONFIG = EngineConfig(num_blocks=32, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32)


def item(name: str, arrival: float = 0.0, prompt: int = 4, output: int = 2) -> WorkItem:
    return WorkItem(Request(name, arrival, LengthPrompt(prompt), max_tokens=8), output)


def play(workload: Sessions) -> Run:
    return simulate(CONFIG, workload, AffineCost(per_step=1.0))


def finishes(run: Run) -> dict[str, tuple[float, float]]:
    return {record.request_id: (record.arrival_time, record.finish_time) for record in run.records}


def test_the_next_turn_comes_a_think_time_after_the_answer() -> None:
    chat = Sessions("chat", [item("a")], follow_ups=[FollowUp(item("b"), ("a",), 5.0)])
    assert finishes(play(chat)) == {"a": (0.0, 2.0), "b": (7.0, 9.0)}


def test_a_turn_that_joins_branches_waits_for_the_last_of_them() -> None:
    agent = Sessions(
        "agent",
        [item("a")],
        follow_ups=[
            FollowUp(item("b"), ("a",), 1.0),
            FollowUp(item("c", output=5), ("a",), 1.0),
            FollowUp(item("d"), ("b", "c")),
        ],
    )
    assert finishes(play(agent))["d"] == (8.0, 10.0)


@pytest.mark.parametrize(("goes_on", "answered"), [(False, {"a"}), (True, {"a", "c"})])
def test_a_refused_request_ends_its_session_unless_it_goes_on(goes_on: bool, answered: set[str]) -> None:
    follow_ups = [FollowUp(item("b", prompt=99), ("a",)), FollowUp(item("c"), ("b",), 1.0)]
    run = play(Sessions("chat", [item("a")], follow_ups=follow_ups, goes_on=goes_on))
    assert {record.request_id for record in run.records if record.num_output_tokens} == answered
    assert run.summary.num_rejected == 1


def test_a_second_run_is_the_first_again() -> None:
    chat = Sessions("chat", [item("a")], follow_ups=[FollowUp(item("b"), ("a",), 0.5)])
    assert finishes(play(chat)) == finishes(play(chat))


@pytest.mark.parametrize(
    ("follow_ups", "words"),
    [
        ([FollowUp(item("b"), ("c",))], "must follow requests listed before it, not ['c']"),
        ([FollowUp(item("b"), ())], "not nothing"),
        ([FollowUp(item("a"), ("a",))], "lists a request id twice"),
    ],
)
def test_a_loop_that_makes_no_sense_is_refused(follow_ups: list[FollowUp], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[").replace("]", r"\]")):
        Sessions("chat", [item("a")], follow_ups=follow_ups)


def test_the_next_turn_finds_the_blocks_of_the_answer_before() -> None:
    """Turn 1: 6 prompt tokens, 7 answered; turn 2 repeats those 13 and adds 5. Blocks of 4, content ids of 2."""
    second = ContentPrompt(18, tuple(range(9)), content_size=2)
    first = ContentPrompt(6, (0, 1, 2), content_size=2).followed_by(second)
    turns = [
        WorkItem(Request("a", 0.0, first, max_tokens=8), 7),
        WorkItem(Request("b", 0.0, second, max_tokens=8), 2),
    ]
    run = play(Sessions("chat", turns[:1], follow_ups=[FollowUp(turns[1], ("a",), 1.0)]))
    cached = {record.request_id: record.num_cached_tokens for record in run.records}
    assert cached == {"a": 0, "b": 12}  # 6 + 7 - 1 tokens have KV: three full blocks


def test_a_prompt_that_does_not_go_on_tells_nothing_about_the_answer() -> None:
    prompt = ContentPrompt(6, (0, 1, 2), content_size=2)
    assert prompt.followed_by(ContentPrompt(8, (0, 9, 2, 3), content_size=2)) == prompt
    assert prompt.followed_by(ContentPrompt(4, (0, 1), content_size=2)) == prompt

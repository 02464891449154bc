"""Entries that are on a menu because they won somewhere (benchmarks/policies.py): each rule in its smallest world."""

from __future__ import annotations

import pytest

from policies.catalogue import make
from policies.eviction.workload_aware import WorkloadAware
from policies.types import Block, RequestState
from tests.worlds import request, step, tiny_engine, waiting_state


def order(scheduling: str, now: float, **prompts: tuple[int, float]) -> str:
    """Of requests so long that came at these times, who is next at a later one."""
    engine = tiny_engine(scheduling=scheduling)
    for name, (num_tokens, arrival_time) in prompts.items():
        engine.add(request(name, num_tokens, arrival_time=arrival_time), arrival_time)
    return "".join(state.request_id for state in engine.scheduling.candidates(engine.view, now))


# -- hrrn -------------------------------------------------------------------------------------------------------------


def test_hrrn_takes_the_longest_wait_for_each_token() -> None:
    """A long prompt stands behind newcomers at first, and passes them in time: 5/20 to 3/5 s a token, 25/20 to 5/5."""
    assert order("hrrn", 5.0, long=(20, 0.0), short=(5, 2.0)) == "shortlong"
    assert order("hrrn", 25.0, long=(20, 0.0), short=(5, 20.0)) == "longshort"


def test_hrrn_takes_equals_as_they_came_and_bands_first() -> None:
    assert order("hrrn", 9.0, b=(4, 1.0), a=(4, 1.0)) == "ba"
    engine = tiny_engine(scheduling="hrrn")
    for name, priority in (("old", 1), ("urgent", 0)):
        engine.add(request(name, priority=priority, arrival_time=float(1 - priority)), now=1.0)
    assert [state.request_id for state in engine.scheduling.candidates(engine.view, 9.0)] == ["urgent", "old"]


@pytest.mark.parametrize("scheduling, first", [("hrrn", "a"), ("hrrn,window=0", "b")])
def test_hrrn_counts_no_cached_token_where_it_looks(scheduling: str, first: str) -> None:
    engine = tiny_engine(scheduling=scheduling)
    engine.add(request("warm", range(13), max_tokens=1), now=0.0)
    step(engine, now=0.0)
    for name, prompt in (("a", range(14)), ("b", [9] * 3)):
        engine.add(request(name, prompt, arrival_time=1.0), now=1.0)
    assert next(iter(engine.scheduling.candidates(engine.view, 2.0))).request_id == first


# -- least slack ------------------------------------------------------------------------------------------------------


def in_time(scheduling: str, now: float, **requests: tuple[int, float | None]) -> list[str]:
    """Of requests so long that are due at these times, the order at a time."""
    engine = tiny_engine(scheduling=scheduling)
    for name, (num_tokens, deadline) in requests.items():
        engine.add(request(name, num_tokens, deadline=deadline), now=0.0)
    return [state.request_id for state in engine.scheduling.candidates(engine.view, now)]


def test_least_slack_starts_first_who_must_start_soonest() -> None:
    """At 4 tokens a second: `long` must start by 10 - 20/4 = 5, `short` by 8 - 4/4 = 7, though it is due sooner."""
    due = {"short": (4, 8.0), "long": (20, 10.0)}
    assert in_time("least_slack,prefill_rate=4", 0.0, **due) == ["long", "short"]
    assert in_time("edf", 0.0, **due) == ["short", "long"]


def test_least_slack_lets_the_late_wait_and_the_rest_after_them() -> None:
    due = {"never": (4, None), "late": (20, 10.0), "in time": (4, 20.0)}
    assert in_time("least_slack,prefill_rate=4", 5.0, **due) == ["late", "in time", "never"], (
        "it can start at 5 just so"
    )
    assert in_time("least_slack,prefill_rate=4", 5.5, **due) == ["in time", "late", "never"]


def test_least_slack_counts_no_cached_token_where_it_looks() -> None:
    for window, expected in (("", ["cold", "warm"]), (",window=0", ["warm", "cold"])):
        engine = tiny_engine(scheduling=f"least_slack,prefill_rate=4{window}")
        engine.add(request("first", range(13), max_tokens=1), now=0.0)
        step(engine, now=0.0)
        engine.add(request("warm", range(16), deadline=10.0), now=1.0)  # must start by 6, or by 9 as 12 are cached
        engine.add(request("cold", [9] * 8, deadline=9.5), now=1.0)  # by 7.5
        assert [state.request_id for state in engine.scheduling.candidates(engine.view, 2.0)] == expected


# -- workload_aware ---------------------------------------------------------------------------------------------------


def holder(class_name: str, at: float) -> RequestState:
    state = waiting_state(request(class_name, class_name=class_name))
    state.first_scheduled_time = at
    return state


def used_again(policy: WorkloadAware, block: Block, class_name: str, at: float, until: float) -> None:
    """Found at a time, and released later."""
    policy.touch(block)
    policy.discard(block)
    policy.add(block, holder(class_name, at), until)


def test_workload_aware_learns_which_class_comes_back_and_when() -> None:
    policy, chat = WorkloadAware(memory=0.5), Block(0, key=10)
    policy.add(chat, holder("chat", 0.0), 1.0)
    for at in (3.0, 6.0):
        used_again(policy, chat, "chat", at, at + 1.0)
    kind = chat.note.kind
    assert kind.gap == 2.0, "found 2 s after each release"
    assert kind.share_found == 0.875, "half, then half of what was left, twice"


def test_workload_aware_gives_up_a_newer_block_of_a_class_that_never_comes_back() -> None:
    """A scan's blocks went unfound; so its next one goes before chat's, which is older, and lru would take that."""
    policy = WorkloadAware(memory=0.5)
    chat, scans = Block(0, key=10), [Block(number, key=10 + number) for number in (1, 2, 3)]
    policy.add(chat, holder("chat", 0.0), 1.0)
    used_again(policy, chat, "chat", 3.0, 4.0)
    gone = []
    for now, block in enumerate(scans, 5):
        policy.add(block, holder("scan", float(now)), float(now))
        gone.append(policy.pop(None, now + 0.5))
    assert gone == scans and list(policy) == [chat]


def test_workload_aware_takes_the_oldest_of_a_class() -> None:
    policy, blocks = WorkloadAware(), [Block(number, key=number) for number in range(3)]
    for now, block in enumerate(blocks):
        policy.add(block, holder("chat", 0.0), float(now))
    assert [policy.pop(None, 9.0) for _ in blocks] == blocks


@pytest.mark.parametrize(
    "menu, spec, message",
    [
        ("scheduling", "hrrn,window=-1", "window (-1) must be 0 (nobody is looked up) or more"),
        ("scheduling", "least_slack,prefill_rate=0", "prefill_rate (0.0) must be a finite number of tokens a second"),
        ("scheduling", "least_slack,prefill_rate=1,window=-1", "window (-1) must be 0 (nobody is looked up) or more"),
        ("eviction", "workload_aware,memory=0", "memory (0.0) must be above 0 (nothing is learnt), up to 1"),
    ],
)
def test_wrong_knobs_are_refused(menu: str, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(").replace(")", r"\)")):
        make(menu, spec)

"""What a live run keeps of each request is what happened: tokens after their steps, ends with the last of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from backend.load import load_model
from backend.start import Body
from bench import Bench, fitted
from liverun import play
from policies.prompt import LengthPrompt
from policies.types import FinishReason, Request
from sim.setup import Setup
from sim.simulate import Run
from sim.visit import ClientRecord
from sim.workload.sessions import FollowUp, Sessions
from sim.workload.workload import WorkItem, Workload
from tests.worlds import tiny_config

TINY = load_model("tiny")
STOPPED = (FinishReason.STOP, FinishReason.LENGTH)


def body(**settings: Any) -> Body:
    return Body(TINY, tiny_config(num_blocks=64, **settings), torch.device("cpu"))


def item(name: str, arrival: float = 0.0, length: int = 5, patience: float | None = None) -> WorkItem:
    return WorkItem(Request(name, arrival, LengthPrompt(6), max_tokens=20), length, patience)


def played(workload: Workload, **settings: Any) -> tuple[Run, dict[str, ClientRecord]]:
    run, pace = play(body(**settings), workload)
    assert 0.0 <= pace.p99 <= pace.max
    return run, {client.request_id: client for client in run.clients}


@pytest.mark.parametrize("async_depth", [1, 2])
def test_each_token_comes_to_its_client_after_its_step(async_depth: int) -> None:
    names = "abcdef"
    run, clients = played(
        Workload("six", [item(name, index / 200) for index, name in enumerate(names)]), async_depth=async_depth
    )
    assert run.deliveries is not None and set(run.deliveries.answers.tolist()) == set(range(len(names)))
    ends = np.array(run.step_ends)
    for number, name in enumerate(names):
        client, record = clients[name], clients[name].record
        times = run.deliveries.times(np.flatnonzero(run.deliveries.answers == number))  # type: ignore[arg-type]
        steps = np.concatenate([np.arange(first, first + num) for first, num in record.token_spans])
        assert len(times) == len(steps) == client.num_tokens == 5
        assert (times >= ends[steps]).all(), "a token is heard of when its step is over, not before"
        assert (client.first_token_time, client.last_token_time, client.finish_time) == (times[0], times[-1], times[-1])
        assert client.added_time is not None and client.added_time >= record.arrival_time


def test_an_answer_that_is_handed_over_whole_comes_at_once() -> None:
    run, clients = played(Workload("two", [item("a", length=3), item("b")]), batching="static,group_size=2")
    assert {client.first_token_time == client.finish_time for client in clients.values()} == {True}
    assert [client.num_tokens for client in clients.values()] == [3, 5]
    assert run.deliveries is not None and len(run.deliveries.gaps()) == 0


@pytest.mark.parametrize("async_depth", [1, 2])
def test_who_left_gets_no_more_and_little_is_computed_for_him(async_depth: int) -> None:
    """At depth 2 the token behind another's last is computed in vain too: but not for somebody who left."""
    workload = Workload("two", [item("stays"), item("leaves", length=20, patience=0.01)])
    run, clients = played(workload, async_depth=async_depth)
    gone, there = clients["leaves"], clients["stays"]
    assert there.reason in STOPPED and there.num_zombie_tokens == 0
    if gone.left_time is not None:  # a machine may be so fast that it was answered
        assert gone.reason is FinishReason.ABORT and gone.num_zombie_tokens <= async_depth
        assert gone.last_token_time is None or gone.last_token_time <= gone.left_time
    assert run.engine.kv.num_free == run.engine.kv.num_blocks


def test_what_follows_from_an_answer_comes_once_even_if_its_client_left() -> None:
    first = item("first", length=20, patience=0.0)
    following = FollowUp(replace(item("second"), patience=None), after=("first",), delay=0.01)
    _, clients = played(Sessions("session", [first], follow_ups=[following], goes_on=True))
    assert clients["first"].reason is FinishReason.ABORT and clients["second"].reason in STOPPED
    assert len(clients) == 2 and clients["first"].left_time is not None
    assert clients["second"].arrival_time >= clients["first"].left_time + 0.01


def test_without_a_front_end_latencies_are_the_engines() -> None:
    workload, the_body = Workload("two", [item("a"), item("b")]), body()
    run, _ = play(the_body, workload)
    there, off = (Bench(Setup(front_end=front_end), the_body, workload) for front_end in ("default", "off"))
    of_engine = [record.first_token_time - record.arrival_time for record in run.records if record.first_token_time]
    assert off.summary(run).ttft.mean == pytest.approx(sum(of_engine) / 2)
    assert there.summary(run).ttft.mean > off.summary(run).ttft.mean


def test_the_cost_fitted_to_a_run_takes_as_long_as_the_run() -> None:
    run, _ = played(Workload("six", [item(name) for name in "abcdef"]))
    cost, tokens = fitted(run), np.array([sample.num_tokens for sample in run.samples])
    assert cost.per_step >= 0.0 and cost.per_token >= 0.0
    begins = np.array([sample.time for sample in run.samples])
    busy = (np.array(run.step_ends) - begins).sum()
    assert (cost.per_step * len(tokens) + cost.per_token * tokens.sum()) >= 0.999 * busy

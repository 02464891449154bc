"""What the server decided, a fresh core decides again; what the simulator would have decided stands beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from backend.load import load_model
from backend.sequences import known_answer, prompt_tokens
from backend.start import Body
from liverun import play
from policies.catalogue import MENU, build
from policies.config import EngineConfig
from policies.journal import replay
from policies.prompt import ContentPrompt, LengthPrompt, Prompt, TokenPrompt
from policies.types import Context, Request
from sim.cost import AffineCost, StepCost
from sim.match import match
from sim.simulate import Run, simulate
from sim.workload.every import with_requests
from sim.workload.workload import WorkItem, Workload
from tests.worlds import tiny_config

Count = Callable[[str, int], None]
TINY = load_model("tiny")
COST = AffineCost(4e-3, 5e-5)  # of the simulated steps: chosen once, near what a step takes on some CPU

# Every entry of both menus, the larger one gone round twice: an engine at each depth.
ENTRIES = [(b, a, 1 + (i + j) % 2) for i, b in enumerate(MENU["batching"]) for j, a in enumerate(MENU["allocation"])]
ENTRIES += [(batching, "paged", 1 + (i + 1) % 2) for i, batching in enumerate(MENU["batching"])]


def body(**settings: Any) -> Body:
    return Body(TINY, tiny_config(**settings), torch.device("cpu"))


def random_body(random: Random, batching: str, allocation: str, async_depth: int) -> Body:
    """A pool so small that somebody has to yield."""
    shares = allocation != "contiguous_max_len"
    return body(
        num_blocks=random.randint(10, 14),
        max_num_batched_tokens=random.choice((16, 24)) if shares else 32,
        max_model_len=32,
        batching=batching + (",max_wait=0.01" if batching == "static" else ""),
        allocation=allocation,
        scheduling=random.choice(("fcfs", "priority")),
        preemption=random.choice(("latest", "lowest_priority")),
        isolation="tenant" if random.random() < 0.7 else "global",
        enable_prefix_caching=shares,
        async_depth=async_depth,
        cache_at=random.choice(("schedule", "step_end")),
    )


def random_workload(random: Random) -> Workload:
    """A burst of requests that begin alike, then stragglers; some are impatient, one at once."""
    items, now = [], 0.0
    for index in range(14):
        now += random.choice((0.0, 0.0, 0.01, 0.03)) if index > 7 else 0.0
        request = Request(
            str(index), now, random_prompt(random), max_tokens=random.randint(4, 14), priority=random.randrange(3),
            context=Context(tenant=random.choice("xy")),
        )  # fmt: skip
        patience = 0.0 if index == 3 else random.choice((None, None, None, 0.03))
        items.append(WorkItem(request, random.randint(1, 14), patience))
    return Workload("random", items)


def random_prompt(random: Random) -> Prompt:
    num_tokens, first = random.randint(1, 18), random.choice((7, 7, 8))
    kind = random.choice((TokenPrompt, TokenPrompt, ContentPrompt, LengthPrompt))
    if kind is LengthPrompt:
        return LengthPrompt(num_tokens)
    ids = (first,) * num_tokens
    return TokenPrompt(ids) if kind is TokenPrompt else ContentPrompt(num_tokens, ids, content_size=1)


def kinds(lines: Sequence[str]) -> Counter[str]:
    found = Counter[str]()
    for line in map(json.loads, lines):
        found.update(line.keys())
        found["hit"] += any(num_cached for _, num_cached, _ in line.get("admitted", ()))
        found["live keys"] += "update" in line and "keys" in line
    return found


def as_content(request: Request) -> Request:
    """A simulated answer has no tokens, so that a prompt of tokens is told by their numbers as content."""
    prompt = request.prompt
    if not isinstance(prompt, TokenPrompt):
        return request
    return replace(request, prompt=ContentPrompt(prompt.num_tokens, prompt.token_ids, content_size=1))


def played(the_body: Body, workload: Workload) -> tuple[Run, list[str]]:
    lines: list[str] = []
    return play(the_body, workload, lines.append)[0], lines


def simulated(workload: Workload, config: EngineConfig, cost: StepCost) -> list[str]:
    lines: list[str] = []
    simulate(config, with_requests(workload, as_content), cost, lines.append, jumps=False)
    return lines


def check_twin(the_body: Body, workload: Workload, count: Count) -> tuple[Run, Counter[str]]:
    run, lines = played(the_body, workload)
    replayed = replay(lines, build)
    assert replayed.divergence is None, str(replayed.divergence)
    assert replayed.num_lines == len(lines)
    alike = match(lines, simulated(workload, the_body.config, COST))
    count("decisions_replayed", replayed.num_decisions)
    count("live_decisions", alike.num_live)
    count("live_decisions_matched", alike.num_alike)
    return run, kinds(lines)


@pytest.mark.parametrize("batching", MENU["batching"])
def test_random_live_runs_replay_equal(batching: str, count: Count) -> None:
    """Twenty in all: salts, aborts, preemptions, priorities, hits, either depth, every batching and allocation."""
    seen = Counter[str]()
    for number, entry in enumerate(ENTRIES):
        if entry[0] == batching:
            random = Random(f"twin {number}")
            workload = random_workload(random)
            run, found = check_twin(random_body(random, *entry), workload, count)
            assert len(run.records) == len(workload.items), "everybody leaves"
            seen += found
    wanted = {"add", "abort", "plan", "update", "left", "stopped", "hit", "live keys"}
    wanted |= set() if batching == "static" else {"preempted"}
    assert wanted <= {kind for kind, num in seen.items() if num}, seen


def test_there_are_twenty_of_them() -> None:
    assert len(ENTRIES) >= 20
    assert {depth for *_, depth in ENTRIES} == {1, 2}


# -- the comparison can fail ------------------------------------------------------------------------------------------

CLOCKED = """
import time

class Clocked:
    repeats = False
    returns_together = False

    def compose(self, step):
        for state in step.running:
            left = min(step.remaining(state), step.token_budget)
            if left > 0:
                step.grant(state, 1 + time.perf_counter_ns() % left)
        for state in step.candidates():
            step.admit(state, 1 + time.perf_counter_ns() % min(step.uncached(state), step.token_budget))
"""


def test_a_policy_that_reads_the_clock_does_not_replay(tmp_path: Path) -> None:
    (tmp_path / "clocked.py").write_text(CLOCKED)
    items = [WorkItem(Request(str(i), 0.0, LengthPrompt(24), max_tokens=4), 4) for i in range(6)]
    run, lines = played(body(batching=f"{tmp_path}/clocked.py:Clocked", num_blocks=48), Workload("long", items))
    assert all(record.num_output_tokens == 4 for record in run.records)
    divergence = replay(lines, build).divergence
    assert divergence is not None and '"plan"' in divergence.expected


def test_a_policy_that_reads_nothing_but_its_arguments_does(tmp_path: Path) -> None:
    """The same policy with the engine's time in place of the clock's."""
    (tmp_path / "told.py").write_text(CLOCKED.replace("time.perf_counter_ns()", "int(step.now * 1e9)"))
    items = [WorkItem(Request(str(i), 0.0, LengthPrompt(24), max_tokens=4), 4) for i in range(6)]
    _, lines = played(body(batching=f"{tmp_path}/told.py:Clocked", num_blocks=48), Workload("long", items))
    assert replay(lines, build).divergence is None


def test_who_is_never_served_is_named_as_in_a_simulation(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(
        "class Lazy:\n    repeats = False\n    returns_together = False\n    def compose(self, step): pass\n"
    )
    items = [WorkItem(Request(str(i), i / 100, LengthPrompt(4), max_tokens=2), 2) for i in range(3)]
    the_body, workload = body(batching=f"{tmp_path}/lazy.py:Lazy"), Workload("ignored", items)
    run, _ = played(the_body, workload)
    assert run.unfinished == ("0", "1", "2") == simulate(the_body.config, workload, COST).unfinished


# -- the match of free runs -------------------------------------------------------------------------------------------


def test_runs_that_decide_alike_match_whole_and_others_in_part() -> None:
    workload, config = random_workload(Random(1)), tiny_config(num_blocks=16)
    right, slow = (simulated(workload, config, AffineCost(per_step)) for per_step in (0.004, 0.04))
    whole, part = match(right, right), match(right, slow)
    assert whole.rate == 1.0 and whole.num_until_first == whole.num_live
    assert 0.0 < part.rate < 1.0 and part.num_until_first < part.num_live


# -- what keys stand for ----------------------------------------------------------------------------------------------


def test_where_the_core_sees_equal_keys_the_device_has_equal_tokens() -> None:
    """Also across the turns of a session, which may call the tokens of a half filled content id by another name."""
    random, tokens_of, num_shared = Random(7), dict[int, tuple[int, ...]](), 0
    for owner in range(300):
        size, block_size = random.choice(((4, 4), (8, 4), (4, 8)))
        prompt, answer = (random.randint(1, 40) for _ in range(2))
        first, later = (
            ContentPrompt(num, tuple(random.choice((1, 1, 1, 2)) for _ in range(-(-num // size))), size)
            for num in (prompt, prompt + answer)
        )
        turn = first.followed_by(later)
        chain = turn.chain(block_size, {}, b"", owner)
        said = [*prompt_tokens(turn, str(owner), 512), *known_answer(turn, 512)]
        for index, key in enumerate(chain.keys):
            known = tuple(said[: (index + 1) * block_size])
            num_shared += key in tokens_of
            assert len(known) == (index + 1) * block_size and tokens_of.setdefault(key, known) == known
    assert num_shared > 300

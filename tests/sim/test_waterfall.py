"""Where hits go: every token of the endless cache is accounted for, and each loss is laid at the right door."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.config import EngineConfig
from sim.commands import Prepared
from sim.cost import AffineCost
from sim.experiment.waterfall.losses import Price, Waterfall, waterfall
from sim.experiment.waterfall.report import answer, run_waterfall
from sim.setup import Setup
from sim.workload.reuse import reuse

SHARED = Setup(workload="shared-prefix", num_requests=80, rate=8.0, front_end="off", costs="datasheet")
WHY = {"threat_decision": "a test"}


def trace(tmp_path: Path, *requests: tuple[float, int, list[int]], output: int = 1) -> Setup:
    """Times in seconds, prompt tokens, content ids of 512 tokens."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": round(1000 * at), "input_length": num, "output_length": output, "hash_ids": ids}
        for at, num, ids in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Setup(trace=str(path), front_end="off", costs="datasheet", ticks="as-is")


def tokens(found: Waterfall) -> dict[str, int]:
    return {each.name.split()[0]: each.num_tokens for each in found.levels}


CASES: list[dict[str, Any]] = [
    {"isolation": "tenant", "num_blocks": 400},
    {"isolation": "user", "num_blocks": 4000},
    {"isolation": "no_reuse"},
    {"isolation": "partition,parts=8", "num_blocks": 3200},
    {**WHY, "num_blocks": 300, "eviction": "fifo"},
    {**WHY, "num_blocks": 300, "eviction": "s3fifo"},
    {**WHY, "num_blocks": 420, "eviction": "gdsf", "max_num_seqs": 3, "block_size": 32},
    {**WHY, "num_blocks": 600, "eviction": "belady"},
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_is_lost_and_what_is_found_add_up_exactly(number: int) -> None:
    """And no condition but scheduling gives back what another took. Mutations: Belady is not told the string; a
    replica's cache is everybody's; seconds are added as floats."""
    num_replicas = 1 + number % 2
    setup = replace(SHARED, engine=CASES[number], num_replicas=num_replicas)
    found = waterfall(setup)
    assert sum(each.num_tokens for each in found.losses) + found.found.num_tokens == found.ceiling.num_tokens
    assert sum(each.nanoseconds for each in found.losses) + found.found.nanoseconds == found.ceiling.nanoseconds
    assert all(each.num_tokens >= 0 for each in found.losses[:-1])
    assert len(found.levels) == 6 + (num_replicas > 1)
    prepared = Prepared.of(setup)
    summary = prepared.summary(prepared.run())
    assert found.found.num_tokens == summary.num_cached_tokens
    assert found.num_prompt_tokens == summary.num_prompt_tokens


def test_the_ceiling_is_what_an_endless_cache_was_predicted_to_find() -> None:
    """By another count of the same, made when workloads are described."""
    workload = SHARED.load()
    predicted = reuse(item.request.prompt for item in workload.items)
    found = waterfall(replace(SHARED, engine={"isolation": "no_reuse"}))
    assert found.ceiling.num_tokens == pytest.approx(predicted * found.num_prompt_tokens)
    assert tokens(found)["isolation"] == 0


def test_whole_blocks_lose_the_last_tokens_and_what_is_less_than_a_block(tmp_path: Path) -> None:
    """Of 100 tokens 96 in blocks of 16; of a whole prompt all but the block with its last token."""
    apart = trace(tmp_path, (0, 100, [1]), (50, 1024, [1, 2]), (100, 1024, [1, 2]))
    found = waterfall(replace(apart, engine=WHY))
    assert tokens(found) == {
        "an": 100 + 1024, "whole": 96 + 1008, "isolation": 96 + 1008, "capacity": 96 + 1008, "eviction": 96 + 1008,
        "scheduling": 96 + 1008,
    }  # fmt: skip


def test_what_a_small_pool_must_forget_is_lost_to_capacity(tmp_path: Path) -> None:
    """66 blocks hold one prompt of 64 and a token more: of the second half of the first, 3 blocks at most survive."""
    apart = trace(tmp_path, (0, 1024, [1, 2]), (50, 1024, [1, 3]), (100, 1024, [1, 2]))
    engine = {**WHY, "num_blocks": 67, "max_model_len": 1040}
    found = tokens(waterfall(replace(apart, engine=engine)))
    assert found["isolation"] == 512 + 1008
    assert found["capacity"] == 512 + (32 + 67 - 64) * 16
    assert found["eviction"] == found["scheduling"] == found["capacity"]


def test_the_best_eviction_keeps_what_the_least_recently_used_would_not(tmp_path: Path) -> None:
    """One prompt of two comes back; the other one, used in between, is newer and worth nothing."""
    apart = trace(tmp_path, (0, 512, [1]), (50, 512, [2]), (100, 512, [3]), (150, 512, [1]))
    found = tokens(waterfall(replace(apart, engine={**WHY, "num_blocks": 65, "max_model_len": 1040})))
    assert found["capacity"] == 31 * 16 and found["eviction"] == found["scheduling"] == 16, "its head is left"


def test_what_is_asked_for_while_it_is_computed_is_lost_to_scheduling(tmp_path: Path) -> None:
    at_once = trace(tmp_path, (0, 1024, [1, 2]), (0, 1024, [1, 2]))
    found = tokens(waterfall(replace(at_once, engine={**WHY, "cache_at": "step_end"})))
    assert found["eviction"] == 1008 and found["scheduling"] == 0


def test_a_replica_does_not_find_what_another_one_has(tmp_path: Path) -> None:
    apart = trace(tmp_path, *((50 * n, 1024, [1, 2]) for n in range(4)))
    found = tokens(waterfall(replace(apart, engine=WHY, num_replicas=2)))
    assert (found["isolation"], found["routing"], found["scheduling"]) == (3 * 1008, 2 * 1008, 2 * 1008)


def test_answers_that_come_back_in_a_later_turn_belong_to_the_ceiling() -> None:
    setup = Setup(workload="conversation", num_requests=60, front_end="off", costs="datasheet", engine=WHY)
    prompts = [item.request.prompt for item in setup.load().items]
    found = waterfall(setup)
    assert all(each.num_tokens >= 0 for each in found.losses[:-1]), "what comes after an answer is not known with it"
    assert found.ceiling.num_tokens >= found.found.num_tokens > reuse(prompts) * found.num_prompt_tokens


def test_preempted_requests_are_told_once() -> None:
    engine = {**WHY, "num_blocks": 160, "max_num_seqs": 16, "allocation": "paged", "max_model_len": 2500}
    setup = replace(SHARED, rate=50.0, engine=engine)
    prepared = Prepared.of(setup)
    summary = prepared.summary(prepared.run())
    assert summary.num_preemptions > 0, "none, no proof"
    found = waterfall(setup)
    assert found.num_requests == summary.num_completed and found.found.num_tokens == summary.num_cached_tokens


@pytest.mark.parametrize(("num_tokens", "num_found", "steps"), [(100, 0, 4), (100, 20, 3), (97, 96, 1), (64, 64, 1)])
def test_a_prompt_is_priced_alone_chunk_by_chunk(num_tokens: int, num_found: int, steps: int) -> None:
    """Of a prompt found whole the last token is still computed."""
    price = Price(AffineCost(1.0, per_token=0.001), EngineConfig(max_num_batched_tokens=32, max_num_seqs=8))
    assert price.of(num_tokens, num_found) == 10**9 * steps + 10**6 * max(1, num_tokens - num_found)


def test_a_cache_that_is_off_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix caching is off"):
        waterfall(replace(SHARED, engine={"enable_prefix_caching": False}))


def test_the_answer_names_what_costs_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tenants = replace(SHARED, engine={"isolation": "user"})
    assert "most is lost to isolation user" in answer(waterfall(tenants))
    assert "no cache would find any" in answer(waterfall(Setup(workload="chat", num_requests=5)))
    run_waterfall(tenants, tmp_path / "w.json", tmp_path / "w.html")
    assert "lost to isolation user" in capsys.readouterr().out
    levels = json.loads((tmp_path / "w.json").read_text())["levels"]
    assert levels[2]["name"] == "isolation user" and "endless" in (tmp_path / "w.html").read_text()

"""The article's requirements that no other test holds in its own words; docs/requirements.md lists all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from policies.catalogue import ALLOCATION
from policies.config import EngineConfig
from policies.prompt import ContentPrompt, LengthPrompt, Prompt
from policies.types import FinishReason, Request
from sim.capacity import GIB
from sim.cost import AffineCost
from sim.diff import check_comparable
from sim.frontend import FrontEndTimes
from sim.metrics import HIT_BINS, Summary
from sim.models import from_config, model, stored_as
from sim.report import Banded, comparison, difference_table, print_run, warnings
from sim.series import timeline
from sim.setup import Setup, manifest
from sim.simulate import Run, simulate
from sim.workload.generate import from_lengths, generate
from sim.workload.reuse import reuse
from sim.workload.transform import inject_volatile_token
from sim.workload.workload import WorkItem, Workload
from tests.configs import PUBLIC
from tests.conftest import REPOSITORY
from tests.worlds import request, shown, state_of, step, tiny_config, tiny_engine

SECOND = AffineCost(per_step=1.0)
ROOMY: dict[str, Any] = {"num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 16}


def workload(*items: tuple[float, int | Sequence[int], int]) -> Workload:
    """(arrival, length or tokens of the prompt, output tokens) of each, named a, b, c and so on."""
    return Workload("it", [_item(name, *each) for name, each in zip("abcdefghijklmnopqrst", items, strict=False)])


def _item(name: str, arrival: float, prompt: int | Sequence[int], num_output_tokens: int) -> WorkItem:
    return WorkItem(request(name, prompt, max_tokens=num_output_tokens, arrival_time=arrival), num_output_tokens)


def by_name(run: Run) -> dict[str, Any]:
    return {record.request_id: record for record in run.records}


def manifest_of(**settings: Any) -> dict[str, Any]:
    setup = Setup(**{"workload": "fixed", "num_requests": 4, **settings})
    config = setup.config()
    return manifest(setup, config, setup.load(), setup.cost(config))


def printed(what: Any) -> str:
    text = StringIO()
    Console(file=text, width=500, color_system=None).print(what, highlight=False)
    return text.getvalue()


def report(summary: Summary, **settings: Any) -> str:
    """A run as the terminal shows it."""
    text = StringIO()
    console = Console(file=text, width=500, color_system=None)
    print_run(console, Banded("it", summary), manifest_of(**settings))
    return text.getvalue()


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(name)).removeprefix(name).split()


# -- KV cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.2-1b", "mistral-7b", "qwen2.5-7b", "qwen3-30b-a3b"])
def test_s02_kv_bytes_are_two_times_layers_heads_dims_and_bytes_over_gpus(name: str) -> None:
    config, shape = PUBLIC[name], from_config(PUBLIC[name], name)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    in_bf16 = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2
    assert shape.kv_bytes_per_token == in_bf16
    for num_gpus in (2, 4):
        assert shape.shard(num_gpus).kv_bytes_per_token == in_bf16 // num_gpus
    assert stored_as(shape, kv_dtype="fp8").kv_bytes_per_token == in_bf16 // 2


def test_s02_a_latent_and_a_window_have_sizes_of_their_own() -> None:
    config = PUBLIC["deepseek-v3"]
    latent = from_config(config, "deepseek-v3")
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert latent.kv_bytes_per_token == config["num_hidden_layers"] * width * 2
    assert latent.shard(8).kv_bytes_per_token == latent.kv_bytes_per_token, "each GPU holds the whole latent"
    windowed = from_config(PUBLIC["mistral-7b"], "mistral-7b")
    assert windowed.kv_bytes(32768) == windowed.kv_bytes(4096) == 4096 * windowed.kv_bytes_per_token


def num_admitted(num_prompt_tokens: int, **settings: Any) -> int:
    """How many of 64 equal requests one step lets in, slots and tokens to spare."""
    engine = tiny_engine(**{"max_num_batched_tokens": 2048, "max_num_seqs": 64, **settings})
    for index in range(64):
        engine.add(request(index, num_prompt_tokens, max_tokens=1), now=0.0)
    return len(step(engine, now=0.0).admitted)


def test_s03_memory_grows_with_the_tokens_that_are_there_and_not_with_requests() -> None:
    """The same pool holds as many requests as their lengths allow, and a running one grows as it answers."""
    assert [num_admitted(length, num_blocks=16) for length in (4, 8, 16, 31)] == [16, 8, 4, 2]
    engine = tiny_engine()
    engine.add(request("a", prompt=4, max_tokens=9), now=0.0)
    held = []
    for now in range(9):
        step(engine, now=float(now))
        held.append(engine.kv.num_blocks - engine.kv.num_free)
    assert held == [1, 2, 2, 2, 2, 3, 3, 3, 0]


def test_s04_the_context_limit_times_requests_is_shown_though_the_weights_fit() -> None:
    engine = {"max_num_seqs": 128, "max_model_len": 8192}
    found = manifest_of(workload="fixed", engine=engine)
    wanted, llama = found["memory"], model("llama-3-8b")
    assert wanted["weight_bytes"] == llama.weight_bytes
    assert wanted["worst_tokens"] == 128 * 8192
    item = generate("fixed", num_requests=1).items[0]
    prompt, output = item.request.prompt.num_tokens, item.num_output_tokens
    assert wanted["mean_tokens"] == 128 * (prompt + output / 2)
    assert wanted["mean_tokens"] < wanted["p99_tokens"] < wanted["worst_tokens"]
    line = next(each for each in report(SMALL.summary, engine=engine).splitlines() if each.startswith("memory"))
    kib = llama.kv_bytes_per_token
    for tokens in (wanted["mean_tokens"], wanted["p99_tokens"], wanted["worst_tokens"]):
        assert f"{tokens * kib / GIB:.3g} GiB" in line
    assert f"weights {llama.weight_bytes / GIB:.3g} GiB" in line and "128 running" in line
    room = found["engine"]["num_blocks"] * found["engine"]["block_size"]
    assert room < wanted["worst_tokens"], "the weights fit, and all requests at their longest do not"


def test_s07_pages_waste_less_than_regions_and_let_more_in() -> None:
    """16 blocks of 4; prompts of 5 tokens in regions of 16: 4 of them at 69 % waste, or 8 at 38 % in pages."""
    found = {}
    for allocation in ("contiguous_max_len", "paged"):
        caching = allocation == "paged"
        engine = tiny_engine(num_blocks=16, max_model_len=16, max_num_batched_tokens=64, max_num_seqs=16,
                             allocation=allocation, enable_prefix_caching=caching)  # fmt: skip
        for index in range(10):
            engine.add(request(index, prompt=5, max_tokens=3), now=0.0)
        step(engine, now=0.0)
        held = engine.kv.block_size * (engine.kv.num_blocks - engine.kv.num_free)
        written = sum(state.num_computed_tokens for state in engine.running)
        found[allocation] = (len(engine.running), 1 - written / held)
    assert found == {"contiguous_max_len": (4, 1 - 20 / 64), "paged": (8, 1 - 40 / 64)}


# -- prefix caching -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["system-instruction", "tool-schema", "document-template", "conversation"])
def test_s10_each_kind_of_shared_prefix_is_found_again(name: str) -> None:
    made = generate(name, num_requests=60, seed=1)
    config = EngineConfig(num_blocks=200_000, max_model_len=131_072, max_num_batched_tokens=131_072)
    summary = simulate(config, made, AffineCost(per_step=1e-6)).summary
    assert summary.num_completed == 60
    assert summary.token_hit_rate > 0.2
    assert not warnings(summary)


def sharing(num: int, num_shared: int, num_own: int) -> Workload:
    """Requests a minute apart, whose first content ids are the same; 16 tokens each."""
    size = 16 * (num_shared + num_own)
    prompts = [
        ContentPrompt(size, (*range(num_shared), *range(1000 * (i + 1), 1000 * (i + 1) + num_own)), content_size=16)
        for i in range(num)
    ]
    items = [WorkItem(Request(str(i), 60.0 * i, prompt, max_tokens=2), 2) for i, prompt in enumerate(prompts)]
    return Workload("sharing", items)


def hit_rate(made: Workload) -> float:
    config = EngineConfig(num_blocks=2000, block_size=16)
    return simulate(config, made, SECOND).summary.token_hit_rate


@pytest.mark.parametrize(("position", "left"), [(0, 0.0), (16, 1 / 6), (40, 2 / 6), (63, 3 / 6), (64, 4 / 6)])
def test_s13_a_volatile_token_near_the_beginning_destroys_reuse_as_predicted(position: int, left: float) -> None:
    """Of 6 content ids 4 are shared: one changed token loses its own and all behind it, for 9 of 10 requests."""
    made = sharing(10, num_shared=4, num_own=2)
    changed = inject_volatile_token(made, position)
    predicted = reuse(prompts_of(changed))
    assert predicted == pytest.approx(0.9 * left)
    assert hit_rate(changed) == pytest.approx(predicted)
    loss = hit_rate(made) - hit_rate(changed)
    assert loss == pytest.approx(reuse(prompts_of(made)) - predicted)
    assert f"{predicted:.1%}" in changed.findings[-1]


def prompts_of(made: Workload) -> list[Prompt]:
    return [item.request.prompt for item in made.items]


def test_s15_hits_evictions_and_prefill_time_by_what_was_found_are_printed() -> None:
    """8 blocks of 4: a is found whole by a prompt a token longer, half by another; one of 31 tokens leaves nothing."""
    a = range(16)
    texts = (a, [*a, 50], [*a[:8], *range(60, 65)], range(200, 231), a)
    made = workload(*[(100.0 * i, text, 1) for i, text in enumerate(texts)])
    summary = simulate(tiny_config(), made, AffineCost(per_step=0.0, per_token=1.0)).summary
    text = report(summary)
    assert summary.num_cached_tokens == 16 + 8
    assert row(text, "prefix hits by token") == ["25.8", "%"]  # 24 of 93
    assert row(text, "nothing (cold)")[:3] == ["3", "21", "s"]  # 16, 31 and 16 tokens
    assert row(text, "a part")[:3] == ["1", "5", "s"]
    assert row(text, "all it could (full)")[:3] == ["1", "1", "s"]
    evicted = summary.num_evicted_blocks
    assert row(text, "cached blocks evicted") == [str(evicted)] and evicted > 0
    assert row(text, "evicted, blocks/s") == [f"{evicted / summary.duration:.3g}"]


def test_s15_without_a_cache_there_is_no_prefill_by_its_state() -> None:
    made = workload((0.0, 4, 1))
    summary = simulate(tiny_config(enable_prefix_caching=False), made, SECOND).summary
    assert "(cold)" not in report(summary)


def test_s16_hits_by_token_and_by_request_stand_beside_their_lengths() -> None:
    """Nine of ten requests hit, and hardly a token: 16 of 1,600 each."""
    config = EngineConfig(num_blocks=2000, block_size=16)
    summary = simulate(config, sharing(10, num_shared=1, num_own=99), SECOND).summary
    assert summary.request_hit_rate == 0.9
    assert summary.token_hit_rate == 0.009
    assert summary.hit_lengths == {
        "0": 1, f"1-{HIT_BINS[1] - 1}": 9, "128-511": 0, "512-2047": 0, "2048-8191": 0, "8192+": 0,
    }  # fmt: skip
    runs = [Banded("x", summary), Banded("y", summary)]
    figures = summary.to_dict()
    tables = (report(summary), printed(comparison(runs)), printed(difference_table("x", "y", figures, figures)))
    for text in tables:
        lines = text.splitlines()
        at = next(index for index, line in enumerate(lines) if line.startswith(HITS))
        names = [line.partition("   ")[0] for line in lines[at + 1 : at + 4]]
        assert names[0] in ("prefix hits by request", "request hit rate")
        assert [row(text, name)[0] for name in LENGTHS] == ["1", "9"]
        assert names[1:] == list(LENGTHS)


HITS = ("prefix hits by token", "token hit rate")
LENGTHS = ("  requests with 0 tokens hit", "  requests with 1-127 tokens hit")


# -- static and continuous batching -------------------------------------------------------------------------------


def test_s24_a_static_group_waits_pads_runs_and_returns_together() -> None:
    config = tiny_config(batching="static,group_size=2,max_wait=100", enable_prefix_caching=False)
    run = simulate(config, workload((0.0, 2, 1), (5.0, 5, 3)), SECOND)
    a, b = (by_name(run)[name] for name in "ab")
    assert (a.first_scheduled_time, b.first_scheduled_time) == (5.0, 5.0), "a waits for its group"
    assert (a.finish_time, b.finish_time) == (8.0, 8.0), "one prefill and two decodes, returned together"
    assert run.summary.num_padding_tokens == (5 - 2) + 2, "a's prompt filled up, and a done for two steps"
    assert row(report(run.summary), "padding tokens") == ["5"]


def test_s25_a_short_request_in_a_static_group_waits_for_the_longest() -> None:
    mixed = workload((0.0, 4, 1), (0.0, 4, 20))
    e2e = {}
    for batching in ("static,group_size=2", "chunked"):
        records = by_name(simulate(tiny_config(batching=batching), mixed, SECOND))
        e2e[batching] = [records[name].finish_time for name in "ab"]
    assert e2e == {"static,group_size=2": [20.0, 20.0], "chunked": [1.0, 20.0]}


def test_s25_equal_answers_offline_lose_nothing_in_a_static_group() -> None:
    equal = workload(*[(0.0, 4, 5)] * 8)
    durations = [
        simulate(tiny_config(batching=batching), equal, SECOND).summary.duration for batching in ("static", "chunked")
    ]
    assert durations == [10.0, 10.0]


def test_s26_each_step_may_add_advance_and_drop_the_completed_and_the_cancelled() -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    engine.add(request("done", prompt=4, max_tokens=2), now=0.0)
    engine.add(request("cancelled", prompt=4, max_tokens=9), now=0.0)
    assert shown(step(engine, now=0.0)) == [("done", 0, 4), ("cancelled", 0, 4)]
    engine.add(request("new", prompt=3, max_tokens=9), now=1.0)
    assert shown(step(engine, now=1.0)) == [("done", 4, 1), ("cancelled", 4, 1), ("new", 0, 3)]
    assert engine.abort("cancelled", now=2.0)
    engine.add(request("newer", prompt=2, max_tokens=9), now=2.0)
    assert shown(step(engine, now=2.0)) == [("new", 3, 1), ("newer", 0, 2)], "completed and cancelled are gone"
    reasons = {record.request_id: record.reason for record in engine.drain_records()}
    assert reasons == {"done": FinishReason.LENGTH, "cancelled": FinishReason.ABORT}


def test_s27_a_larger_batch_buys_throughput_with_latency_and_memory() -> None:
    """No size is best in all three: each lies on the frontier of throughput, tail and occupancy."""
    config = {"num_blocks": 200, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    backlog = from_lengths([0.0] * 64, [8] * 64, [16] * 64)
    found = [
        simulate(tiny_config(**config, max_num_seqs=size), backlog, AffineCost(1.0, per_token=0.1)).summary
        for size in (1, 2, 4, 8, 16)
    ]
    for name, column in {
        "throughput": [each.output_throughput for each in found],
        "gaps": [each.itl.p99 for each in found],
        "time a token": [each.tpot.p50 for each in found],
        "occupancy": [each.max_kv_held for each in found],
    }.items():
        assert column == sorted(set(column)), name


def test_s27_the_queue_grows_with_the_load_on_a_batch_of_one_size() -> None:
    config = tiny_config(**{**ROOMY, "max_num_seqs": 2})
    delays = [
        simulate(config, from_lengths([gap * i for i in range(20)], [4] * 20, [4] * 20), SECOND).summary.queue_delay
        for gap in (4.0, 1.5, 0.5)
    ]
    assert delays[0].p99 == 0.0 < delays[1].p99 < delays[2].p99


@pytest.mark.parametrize("num_prompt_tokens", [1, 16, 48])
def test_s28_a_long_prompt_lengthens_the_step_of_those_that_decode(num_prompt_tokens: int) -> None:
    cost = AffineCost(per_step=1.0, per_token=0.1)
    config = tiny_config(**ROOMY, max_model_len=64)
    alone = simulate(config, workload((0.0, 4, 20)), cost).summary
    joined = simulate(config, workload((0.0, 4, 20), (5.0, num_prompt_tokens, 1)), cost).summary
    assert alone.itl.max == pytest.approx(1.1)
    assert joined.itl.max == pytest.approx(1.1 + 0.1 * num_prompt_tokens)
    chunked = simulate(replace(config, batching="stall_free,chunk_size=9"), workload((0.0, 4, 20),
                       (5.0, num_prompt_tokens, 1)), cost).summary  # fmt: skip
    assert chunked.itl.max == pytest.approx(1.0 + 0.1 * min(9, 1 + num_prompt_tokens)), "a chunk bounds it"


# -- what is reported ---------------------------------------------------------------------------------------------

PROMPT = (7, 1, 2, 3, 4, 5, 6, 8)  # two blocks
SMALL = simulate(tiny_config(), workload((0.0, PROMPT, 3), (10.0, PROMPT, 2), (10.5, 8, 2), (11.0, 99, 2)), SECOND)
"""A step a second: a in 3 steps from 0; b, the same prompt, in 2 from 10; c waits half a second; d can never run."""


def figures() -> dict[str, Any]:
    return SMALL.summary.to_dict()


def test_s45_time_to_first_token() -> None:
    ttft = figures()["ttft"]
    assert (ttft["num"], ttft["p50"], ttft["max"]) == (3, 1.0, 1.5)
    assert row(report(SMALL.summary), "TTFT") == ["1.17", "s", "1", "s", "1.4", "s", "1.49", "s"]


def test_s46_time_per_output_token_and_gaps_between_tokens() -> None:
    assert (figures()["tpot"]["num"], figures()["tpot"]["mean"]) == (3, 1.0)
    assert (figures()["itl"]["num"], figures()["itl"]["mean"]) == (2 + 1 + 1, 1.0)
    for name in ("TPOT", "ITL"):
        assert row(report(SMALL.summary), name) == ["1", "s"] * 4


def test_s47_input_and_output_throughput() -> None:
    found = figures()  # 3 prompts of 8, 7 tokens out, 13 seconds
    assert (found["input_throughput"], found["output_throughput"]) == (24 / 13, 7 / 13)
    assert row(report(SMALL.summary), "input, tok/s") == ["1.85"]
    assert row(report(SMALL.summary), "output, tok/s") == ["0.538"]


def test_s48_queue_delay() -> None:
    assert (figures()["queue_delay"]["max"], figures()["queue_delay"]["p50"]) == (0.5, 0.0)
    assert row(report(SMALL.summary), "queue delay")[:2] == ["167", "ms"]


def test_s49_cache_occupancy() -> None:
    found = figures()
    # Blocks held while each step runs, of 8: a 2, 3, 3; b 2; b and c 3 + 2; c 3.
    assert found["mean_kv_held"] == pytest.approx((2 + 3 + 3 + 2 + 5 + 3) / 6 / 8)
    assert found["max_kv_held"] == 5 / 8
    # Idle: none; a's second block while b has the first and computes the second anew; at the end all three.
    assert found["mean_kv_cached"] == pytest.approx((1 + 1 + 3) / 6 / 8)
    assert row(report(SMALL.summary), "KV held, most") == ["62.5", "%"]
    assert row(report(SMALL.summary), "KV cached idle, mean") == ["10.4", "%"]


def test_s50_prefix_tokens_reused() -> None:
    found = figures()
    assert (found["num_cached_tokens"], found["num_prompt_tokens"]) == (4, 24)
    assert found["token_hit_rate"] == 4 / 24 and found["request_hit_rate"] == 1 / 3
    assert row(report(SMALL.summary), "prefix hits by token") == ["16.7", "%"]


def test_s51_errors_are_counted_apart() -> None:
    records = [replace(each, reason=FinishReason.ERROR) if each.request_id == "b" else each for each in SMALL.records]
    found = replace(SMALL, records=records).summary
    assert (found.num_failed, found.num_rejected, found.num_completed) == (1, 1, 2)
    assert (SMALL.summary.num_failed, figures()["num_failed"]) == (0, 0)
    text = report(found)
    assert row(text, "errors") == ["1"] and row(text, "rejections") == ["1"]
    assert "1 failed" in text.splitlines()[0]


def test_s52_rejections_are_counted_apart_and_have_a_reason() -> None:
    assert (figures()["num_rejected"], figures()["num_failed"], figures()["num_completed"]) == (1, 0, 3)
    d = by_name(SMALL)["d"]
    assert d.reason is FinishReason.REJECTED and "99" in d.detail
    text = report(SMALL.summary)
    assert row(text, "rejections") == ["1"] and row(text, "errors") == ["0"]
    assert "1 rejected" in text.splitlines()[0]


# -- mistakes to make impossible ----------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ALLOCATION)
def test_s58_capacity_is_never_a_number_of_requests(allocation: str) -> None:
    """Slots to spare, half the blocks: half as many run, whatever the allocation."""
    caching = allocation != "contiguous_max_len"
    found = [
        num_admitted(31, num_blocks=num, allocation=allocation, enable_prefix_caching=caching) for num in (64, 32, 16)
    ]
    spare = allocation == "new_token_ratio"  # a page stays free
    assert found == [8 - spare, 4 - spare, 2 - spare]


def test_s58_nothing_is_named_as_if_requests_were_memory() -> None:
    """Lint: what bounds requests is called slots (max_num_seqs) or a gateway's limit, and never sizes the pool."""
    for path in sorted(REPOSITORY.glob("policies/**/*.py")) + sorted(REPOSITORY.glob("sim/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
            assert name not in {"max_requests", "max_num_requests", "kv_requests", "num_request_slots"}, path.name
    pool = ast.parse((REPOSITORY / "policies" / "kv.py").read_text())
    assert "max_num_seqs" not in {getattr(node, "attr", "") for node in ast.walk(pool)}, "the pool counts blocks"


def test_s64_every_result_says_whether_its_cache_was_warm_and_two_kinds_are_not_compared() -> None:
    cold = manifest_of()
    assert cold["cache_state"] == "cold"
    assert "cache cold at the start" in report(SMALL.summary)
    warm = {**manifest_of(engine={"batching": "static"}), "cache_state": "warm"}
    with pytest.raises(ValueError, match=r"not comparable.*cache_state: 'cold' and 'warm'"):
        check_comparable(cold, warm, "engine.batching")
    assert set(check_comparable(cold, {**warm, "cache_state": "cold"}, "engine.batching")) == {"engine.batching"}


def test_s64_what_requests_want_of_memory_follows_and_does_not_forbid_a_comparison() -> None:
    few, many = (manifest_of(engine={"num_blocks": 100, "max_num_seqs": num}) for num in (4, 8))
    assert few["memory"] != many["memory"]
    assert set(check_comparable(few, many, "engine.max_num_seqs")) == {"engine.max_num_seqs"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "memory by paged_full_prompt allocation, lru eviction, latest preemption"),
        ({"engine": {"allocation": "paged_reserve_output"}}, "memory by paged_reserve_output allocation"),
        ({"engine": {"preemption": "lowest_priority"}}, "lowest_priority preemption"),
        ({}, "latency by accept_all admission, fcfs scheduling, chunked batching, objectives none"),
        ({"engine": {"scheduling": "priority", "batching": "static"}}, "priority scheduling, static batching"),
        ({"slo": "ttft_p99<2s"}, "objectives ttft_p99<2s"),
        ({}, "security by global isolation, prefix caching on"),
        ({"engine": {"isolation": "tenant"}}, "security by tenant isolation"),
        ({"engine": {"enable_prefix_caching": False}}, "prefix caching off"),
    ],
)
def test_s65_policies_for_memory_latency_and_security_are_printed(settings: dict[str, Any], words: str) -> None:
    line = next(each for each in report(SMALL.summary, **settings).splitlines() if each.startswith("policies: "))
    assert words in line


def test_s66_a_cache_that_is_on_and_finds_nothing_is_warned_of() -> None:
    unlike = workload((0.0, 8, 2), (5.0, 8, 2))
    on, off = (simulate(tiny_config(enable_prefix_caching=each), unlike, SECOND).summary for each in (True, False))
    assert on.num_cached_tokens == 0
    warned = "warning: prefix caching is on, but not one request found a token"
    assert [warned in report(each) for each in (on, off, SMALL.summary)] == [True, False, False]


def test_s66_latencies_are_those_at_the_clients_end() -> None:
    times = FrontEndTimes.off(client_link_time=0.25, api_time_per_request=0.5)
    engine, client = (
        simulate(tiny_config(), workload((0.0, 8, 3)), SECOND, front_end=each).summary for each in (None, times)
    )
    assert engine.ttft.p50 == 1.0
    assert client.ttft.p50 == 1.0 + 0.25 + 0.5 + 0.25
    assert client.e2e.p50 == engine.e2e.p50 + 1.0


# -- cross-cutting ------------------------------------------------------------------------------------------------


def competing(num_blocks: int) -> Run:
    """a leaves its prompt in the cache; b, alike to nobody, needs 7 blocks; then a's prompt comes again as c."""
    config = tiny_config(num_blocks=num_blocks)
    made = workload((0.0, PROMPT, 2), (10.0, 24, 3), (20.0, PROMPT, 2))
    return simulate(config, made, AffineCost(per_step=1.0, per_token=0.1))


def test_s68_running_requests_evict_the_cache_and_the_next_prefill_pays_for_it() -> None:
    small, large = competing(num_blocks=7), competing(num_blocks=16)
    assert (small.num_evicted_blocks > 0, large.num_evicted_blocks) == (True, 0)
    assert [by_name(run)["c"].num_cached_tokens for run in (small, large)] == [0, 4]
    prefills = [by_name(run)["c"].prefill_time for run in (small, large)]
    assert prefills == [pytest.approx(1.0 + 0.8), pytest.approx(1.0 + 0.4)]


def test_s68_active_cached_and_free_share_one_pool_at_every_time() -> None:
    line = timeline(competing(num_blocks=7))
    assert np.allclose(line.held + line.cached + line.free, 1.0)
    assert line.held.max() == 1.0 and line.cached.max() > 0.0
    at_most = line.cached[line.held == 1.0]
    assert len(at_most) and not at_most.any(), "what runs has taken all that was cached"


def test_s68_what_a_request_leaves_is_free_and_can_still_be_found() -> None:
    engine = tiny_engine()
    engine.add(request("a", LengthPrompt(8), max_tokens=2), now=0.0)
    step(engine, now=0.0)
    held = len(state_of(engine, "a").block_ids)
    assert (held, engine.kv.num_idle_cached, engine.kv.num_free) == (2, 0, 6)
    step(engine, now=1.0)
    assert (engine.kv.num_idle_cached, engine.kv.num_free) == (2, 8)


# -- the list -----------------------------------------------------------------------------------------------------


def test_every_requirement_is_listed_and_the_tests_it_names_are_there() -> None:
    text = (REPOSITORY / "docs" / "requirements.md").read_text()
    rows = re.findall(r"^\| S(\d+) \|.*\| (held|partly|not built yet) \| (.+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 70))
    there = {
        name for path in REPOSITORY.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    for number, state, told in rows:
        named = re.findall(r"`(test_\w+)`", told)
        assert set(named) <= there, f"S{number}"
        assert named or state != "held", f"S{number} is held by nothing"
    assert {name for name in there if name.startswith("test_s") and name[6:8].isdigit()} <= set(
        re.findall(r"`(test_\w+)`", text)
    )

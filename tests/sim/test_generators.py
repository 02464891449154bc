"""Generators and arrivals: how near each is to what it imitates, and that no draw disturbs another."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from policies.config import EngineConfig
from policies.prompt import ContentPrompt, Prompt
from sim.cost import AffineCost
from sim.simulate import simulate
from sim.workload.arrivals import Day, Gamma, OnOff, Poisson, Weibull, parse_arrivals
from sim.workload.bursts import CodeBursts
from sim.workload.every import every_item, follow_ups
from sim.workload.generate import RECIPES, Fixed, generate
from sim.workload.generators.claude_code import ClaudeCode
from sim.workload.generators.multi_tenant import client_shares
from sim.workload.load import load
from sim.workload.quantiles import Percentiles
from sim.workload.recipe import Draw, Link
from sim.workload.recorded import Recorded
from sim.workload.reuse import lru_reuse, reuse
from sim.workload.sessions import Sessions
from sim.workload.shared_prefix import SharedPrefix
from sim.workload.streams import keyed_uniforms
from sim.workload.users import Users
from sim.workload.workload import Workload
from tests.conftest import REPOSITORY

SEEDS = (0, 1, 2)
PERCENTS = (10, 50, 90, 99)


@cache
def made(name: str, num_requests: int, seed: int) -> Workload:
    return generate(name, num_requests=num_requests, seed=seed)


def prompts(workload: Workload) -> list[Prompt]:
    """In the order of request ids, as generators number them."""
    return [item.request.prompt for item in sorted(every_item(workload), key=lambda item: int(item.request.request_id))]


def prompt_lengths(workload: Workload) -> list[int]:
    return [prompt.num_tokens for prompt in prompts(workload)]


def output_lengths(workload: Workload) -> list[int]:
    return [item.num_output_tokens for item in every_item(workload)]


def arrivals(workload: Workload) -> list[float]:
    return [item.request.arrival_time for item in workload.items]


def told(values: Sequence[float]) -> list[float]:
    """p10, p50, p90, p99 and the mean."""
    return [*np.percentile(values, PERCENTS).tolist(), float(np.mean(values))]


def cv(times: Sequence[float] | NDArray[np.float64]) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


def dispersion(times: Sequence[float] | NDArray[np.float64], window: float) -> float:
    """Variance over mean of the counts in windows of so many seconds: 1 for Poisson arrivals."""
    counts = np.bincount((np.array(times) // window).astype(int))
    return float(counts.var() / counts.mean())


def near(values: Sequence[float], published: Sequence[float], within: Sequence[float]) -> None:
    for value, expected, tolerance in zip(values, published, within, strict=True):
        assert value == pytest.approx(expected, rel=tolerance), f"{values} against {published}"


# What the originals are like: p10, p50, p90, p99, mean; then what is granted to each.

LENGTHS: dict[str, tuple[int, list[float], list[float], list[float], list[float]]] = {
    "azure-conv": (
        19366,
        [207, 1020, 2734.5, 4142, 1154.7],
        [0.03, 0.03, 0.08, 0.1, 0.04],
        [54, 129, 424, 601, 211.1],
        [0.03, 0.03, 0.03, 0.12, 0.03],
    ),
    "azure-code": (
        8819,
        [147, 1469, 5187.6, 7436, 2047.8],
        [0.1, 0.05, 0.06, 0.01, 0.04],
        [7, 13, 55, 251, 27.9],
        [0.01, 0.01, 0.08, 0.15, 0.12],
    ),
    "mooncake-conversation": (
        12031,
        [964, 6909, 27367, 85400, 12035],
        [0.05, 0.06, 0.1, 0.12, 0.05],
        [24, 350, 597, 1118.5, 342.6],
        [0.08, 0.03, 0.03, 0.08, 0.03],
    ),
    "multi-tenant": (
        20000,
        [17, 180, 3473, 26836, 1576],
        [0.1, 0.15, 0.25, 0.15, 0.15],
        [294, 1014, 5423, 15063, 2133],
        [0.06, 0.1, 0.1, 0.2, 0.08],
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_have_the_originals_percentiles(name: str, seed: int) -> None:
    num, prompt, prompt_within, output, output_within = LENGTHS[name]
    workload = made(name, num, seed)
    near(told(prompt_lengths(workload)), prompt, prompt_within)
    near(told(output_lengths(workload)), output, output_within)


def test_azure_code_comes_in_bursts_like_the_original() -> None:
    """Ten hours of 8,819 requests: each may differ by where its few long pauses fall."""
    hours = [CodeBursts().times(8819, seed) for seed in range(10)]
    assert all(9 < cv(times) < 16 for times in hours)
    assert np.mean([cv(times) for times in hours]) == pytest.approx(13.15, rel=0.1)
    for window, published in ((1, 13.2), (10, 71.3), (60, 160.5)):
        assert np.mean([dispersion(times, window) for times in hours]) == pytest.approx(published, rel=0.15)
    assert np.mean([times[-1] for times in hours]) == pytest.approx(8819 / 2.57, rel=0.12)


@pytest.mark.parametrize("seed", SEEDS)
def test_azure_conv_swells_and_ebbs_within_the_hour(seed: int) -> None:
    times = arrivals(made("azure-conv", 19366, seed))
    assert cv(times) == pytest.approx(1.094, abs=0.08)
    assert dispersion(times, 1) == pytest.approx(1.386, abs=0.2)
    assert dispersion(times, 10) == pytest.approx(4.0, abs=0.8)
    assert dispersion(times, 60) == pytest.approx(20.6, rel=0.3)
    assert 19366 / times[-1] == pytest.approx(5.53, rel=0.04)


@pytest.mark.parametrize(("file", "name"), [("conv", "azure-conv"), ("code", "azure-code")])
def test_azure_lengths_are_nowhere_far_from_the_real_file(shared: Path, file: str, name: str) -> None:
    """The largest gap between the two distribution functions; knots 5 % apart allow 0.05, chance the rest."""
    path = shared / "data" / "traces" / "azure-llm-2023" / f"AzureLLMInferenceTrace_{file}.csv"
    if not path.exists():
        pytest.skip(f"the real trace {path.name} is not at ../shared")
    real, ours = load(path, None), made(name, 8819, 0)
    for lengths in (prompt_lengths, output_lengths):
        a, b = np.sort(lengths(real)), np.sort(lengths(ours))
        points = np.unique(np.concatenate([a, b]))
        gap = np.abs(np.searchsorted(a, points, "right") / len(a) - np.searchsorted(b, points, "right") / len(b))
        assert gap.max() < 0.08


# Reuse of prefixes

CAPACITIES = (102_400, 2_048_000, 5_120_000)  # tokens, where the curve bends


def conversation_stats(shared: Path) -> dict[str, Any]:
    path = shared / "data" / "traces" / "stats.json"
    if not path.exists():
        pytest.skip("the traces' statistics are not at ../shared")
    stats: dict[str, Any] = json.loads(path.read_text())["mooncake_conversation_trace"]
    return stats


def test_reuse_of_the_real_trace_is_as_published(shared: Path) -> None:
    """The measure itself, before it judges a generator: vLLM's order of eviction, zero service time."""
    stats = conversation_stats(shared)
    path = shared / "data" / "traces" / "mooncake-fast25" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("the real Mooncake trace is not at ../shared")
    real = [item.request.prompt for item in load(path, None).items]
    assert reuse(real) == pytest.approx(stats["prefix"]["hit_token_frac"], abs=1e-12)
    published = [stats["lru"][str(tokens)] for tokens in CAPACITIES]
    assert lru_reuse(real, [tokens // 512 for tokens in CAPACITIES]) == pytest.approx(published, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_mooncake_has_the_originals_reuse_at_every_capacity(shared: Path, seed: int) -> None:
    stats, ours = conversation_stats(shared), prompts(made("mooncake-conversation", 12031, seed))
    assert reuse(ours) == pytest.approx(stats["prefix"]["hit_token_frac"], abs=0.015)
    published = [stats["lru"][str(tokens)] for tokens in CAPACITIES]
    assert lru_reuse(ours, [tokens // 512 for tokens in CAPACITIES]) == pytest.approx(published, abs=0.02)


def test_mooncake_shares_block_0_and_goes_on_as_often_as_the_original() -> None:
    ours = prompts(made("mooncake-conversation", 12031, 0))
    assert all(isinstance(prompt, ContentPrompt) and prompt.content_ids[0] == 0 for prompt in ours)
    seen, num_more = set[int](), 0
    for prompt in ours:
        assert isinstance(prompt, ContentPrompt) and prompt.content_size == 512
        num_more += len(prompt.content_ids) > 1 and prompt.content_ids[1] in seen
        seen.update(prompt.content_ids)
    assert num_more / len(ours) == pytest.approx(0.387, abs=0.03)
    assert reuse(ours[:918]) == pytest.approx(0.207, abs=0.05)  # a cold start, as the trace's first minutes


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_claude_code_is_like_its_original(seed: int) -> None:
    draw = ClaudeCode().draw(20_000, seed)
    links = draw.links or ()
    lengths = [prompt.num_tokens for prompt in draw.prompts]
    near(told(lengths), [41761, 100446, 209036, 505791, 118296], [0.15, 0.15, 0.35, 0.5, 0.15])
    near(told(draw.outputs), [104, 218, 893, 3721, 440], [0.05, 0.05, 0.1, 0.2, 0.08])
    thinks = [link.delay for link in links if link is not None]
    near(told(thinks)[1:], [10, 163, 2949, 155.8], [0.1, 0.1, 0.15, 0.3])
    assert len(lengths) / sum(link is None for link in links) == pytest.approx(66.8, rel=0.2)
    assert reuse(draw.prompts[:5_000]) == pytest.approx(0.962, abs=0.015)  # 75 sessions, of the trace's 692


def test_claude_code_shares_within_a_session_only() -> None:
    owners: dict[int, str] = {}
    for item in every_item(made("claude-code", 2000, 0)):
        prompt = item.request.prompt
        assert isinstance(prompt, ContentPrompt)
        assert all(owners.setdefault(each, item.request.context.session) == item.request.context.session
                   for each in prompt.content_ids)  # fmt: skip


def test_a_sub_agent_begins_after_a_turn_and_the_next_turn_waits_for_it() -> None:
    links = ClaudeCode(agent_share=1.0).draw(300, 0).links
    assert links is not None and links[0] is None
    assert all(link is None or link.after == (index - 1,) for index, link in enumerate(links))
    draw = ClaudeCode(agent_share=1.0).draw(300, 0)
    first, agent = draw.prompts[0], draw.prompts[1]
    assert isinstance(first, ContentPrompt) and isinstance(agent, ContentPrompt)
    assert not set(first.content_ids) & set(agent.content_ids)


def test_the_next_turn_tells_the_answer_before_it() -> None:
    draw = ClaudeCode(rewrite_share=0.0, agent_share=0.0).draw(40, 0)
    first, second = draw.prompts[0], draw.prompts[1]
    assert isinstance(first, ContentPrompt) and isinstance(second, ContentPrompt)
    assert second.num_tokens > first.num_tokens + draw.outputs[0]
    assert first.num_known_tokens == second.num_tokens
    assert first.content_ids[: first.num_tokens // 512] == second.content_ids[: first.num_tokens // 512]


@pytest.mark.parametrize("name", ["shared-prefix", "system-instruction", "tool-schema", "document-template"])
def test_a_prefix_is_found_by_all_but_the_first(name: str) -> None:
    workload, recipe = made(name, 1000, 0), RECIPES[name]()
    assert isinstance(recipe, SharedPrefix)
    num_seen = len({item.request.context.application for item in workload.items})
    total = sum(prompt_lengths(workload))
    assert reuse(prompts(workload)) == pytest.approx((1000 - num_seen) * recipe.prefix_tokens / total, abs=1e-12)


def test_kinds_of_prefix_differ_in_number_and_length() -> None:
    numbers = {
        name: len({item.request.context.application for item in made(name, 1000, 0).items})
        for name in ("system-instruction", "tool-schema", "document-template")
    }
    assert numbers == {"system-instruction": 1, "tool-schema": 8, "document-template": 64}
    assert min(prompt_lengths(made("tool-schema", 1000, 0))) > 12_288


@pytest.mark.parametrize("seed", SEEDS)
def test_a_conversation_has_wildchats_turns_and_repeats_itself(seed: int) -> None:
    workload = made("conversation", 10_000, seed)
    assert isinstance(workload, Sessions)
    sizes = np.bincount([int(item.request.context.session.removeprefix("session-")) for item in every_item(workload)])
    assert sizes[:-1].mean() == pytest.approx(2.35, rel=0.06)
    assert np.median(sizes) <= 2 and np.percentile(sizes, 99) == pytest.approx(13, abs=2)
    assert reuse(prompts(workload)[:2000]) == pytest.approx(0.8, abs=0.08)


# Clients


@pytest.mark.parametrize("seed", SEEDS)
def test_few_tenants_bring_most_of_the_load(seed: int) -> None:
    workload = made("multi-tenant", 20_000, seed)
    clients, counts = np.unique([item.request.client_id for item in workload.items], return_counts=True)
    shares = np.sort(counts)[::-1] / 20_000
    assert shares[0] == pytest.approx(0.286, abs=0.03) and shares[:10].sum() == pytest.approx(0.677, abs=0.03)
    assert 0.63 <= client_shares()[:10].sum() <= 0.93 and len(clients) <= 73
    classes = {item.request.client_id: item.request.class_name for item in workload.items}
    assert all(item.request.class_name == classes[item.request.client_id] for item in workload.items)
    batch = sum(item.request.class_name == "batch" for item in workload.items) / 20_000
    assert batch == pytest.approx(0.3, abs=0.04) and set(classes.values()) == {"batch", "interactive"}
    assert all(item.request.client_id == item.request.context.tenant for item in workload.items)


def test_a_tenant_comes_in_bursts_and_has_lengths_of_its_own() -> None:
    times: dict[str, list[float]] = {}
    logs: dict[str, list[float]] = {}
    for item in made("multi-tenant", 20_000, 0).items:
        times.setdefault(item.request.client_id, []).append(item.request.arrival_time)
        logs.setdefault(item.request.client_id, []).append(np.log(item.request.prompt.num_tokens))
    many = [name for name in times if len(times[name]) > 30]
    weights = [len(times[name]) for name in many]
    assert np.average([cv(times[name]) for name in many], weights=weights) == pytest.approx(2.28, rel=0.1)
    within = np.average([np.var(logs[name]) for name in many], weights=weights)
    assert within < 0.5 * np.var([log for name in many for log in logs[name]])


# Arrivals


@pytest.mark.parametrize("wanted", [0.3, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("kind", [Gamma, Weibull])
def test_gaps_have_the_cv_and_the_rate_asked_for(kind: type[Gamma] | type[Weibull], wanted: float) -> None:
    times = kind(5.0, wanted).times(200_000, 1)
    assert cv(times) == pytest.approx(wanted, rel=0.05)
    assert 200_000 / times[-1] == pytest.approx(5.0, rel=0.03)


def test_a_cv_of_1_is_poisson_and_vllms_burstiness_runs_the_other_way() -> None:
    assert Weibull(5.0, 1.0).times(1000, 0) == pytest.approx(Poisson(5.0).times(1000, 0))
    assert str(Gamma(1.0, 2.0)) == "gamma with CV 2 (a burstiness of 0.25 in vLLM)"


def test_on_off_keeps_the_mean_and_has_the_dispersion_of_its_formula() -> None:
    """Over long windows: 1 + 2 a b (high - low)**2 / ((a + b)**2 (high b + low a)), a, b the rates of leaving."""
    process = OnOff(8.0, on=1.0, off=3.0, low=0.1)
    times = process.times(400_000, 2)
    assert 400_000 / times[-1] == pytest.approx(8.0, rel=0.03)
    high, low, a, b = process.on_rate, 0.1 * process.on_rate, 1.0, 1 / 3
    limit = 1 + 2 * a * b * (high - low) ** 2 / ((a + b) ** 2 * (high * b + low * a))
    assert dispersion(times, 100.0) == pytest.approx(limit, rel=0.12)


def test_nothing_comes_while_it_is_off() -> None:
    gaps = np.diff(OnOff(10.0, on=1.0, off=9.0).times(20_000, 0))
    assert (gaps > 1.0).sum() == pytest.approx(20_000 / 100, rel=0.3)  # a pause each cycle of 100 requests
    assert gaps[gaps < 0.1].mean() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("peak", [1.0, 1.34, 2.66, 6.0])
def test_a_day_peaks_as_told_and_keeps_its_mean(peak: float) -> None:
    day = Day(100.0, peak, period=2400.0)
    assert day.factors().mean() == pytest.approx(1.0) and day.factors().max() == pytest.approx(peak)
    times = np.array(day.times(250_000, 0))  # a whole day, and some of the night after it
    assert (times < 2400.0).sum() == pytest.approx(240_000, rel=0.01)
    by_hour = np.bincount((times // 100).astype(int), minlength=24)[:24] / 10_000
    assert by_hour[12] == pytest.approx(peak, rel=0.05) and by_hour[0] == pytest.approx(day.factors()[0], abs=0.05)


def test_a_trace_is_stretched_and_begun_again() -> None:
    times = Recorded((3.0, 4.0, 7.0, 9.0), rate=2.0).times(6, 0)
    assert times == pytest.approx([0.0, 0.25, 1.0, 1.5, 2.0, 2.25])


def test_a_trace_lends_its_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n1,1,1\n2,1,1\n5,1,1\n")
    assert arrivals(generate("chat", num_requests=4, arrivals=f"trace,file={path}")) == [0.0, 1.0, 4.0, 6.0]
    faster = generate("chat", num_requests=3, rate=2.0, arrivals=f"trace,file={path}")
    assert arrivals(faster) == pytest.approx([0.0, 0.25, 1.0])


@pytest.mark.parametrize("text", ["poisson", "gamma,cv=3", "weibull,cv=2", "onoff,on=10,off=30,low=0.2",
                                  "day,peak_to_mean=2,period=600", "azure-code"])  # fmt: skip
def test_more_load_is_the_same_luck_sooner(text: str) -> None:
    """Each request at least as early at the higher rate, and more requests only extend the times."""
    slow, fast = (parse_arrivals(text, rate) for rate in (4.0, 5.0))
    assert not isinstance(slow, Users) and not isinstance(fast, Users)
    assert all(early <= late for early, late in zip(fast.times(2000, 3), slow.times(2000, 3), strict=True))
    assert slow.times(2000, 3)[:700] == slow.times(700, 3)
    assert slow.times(0, 3) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("poison", "unknown arrivals 'poison'; known: azure-code, closed, day, gamma, onoff, poisson, trace, weibull. "
                   "Did you mean 'poisson'?"),
        ("gamma", "arrivals 'gamma' needs cv: add cv=..."),
        ("gamma,burstiness=2", "unknown knob 'burstiness' of arrivals 'gamma'; known: cv"),
        ("onoff,on=1,offf=3", "unknown knob 'offf' of arrivals 'onoff'; known: on, off, low. Did you mean 'off'?"),
        ("gamma,cv=nan", "cv (nan) of gamma arrivals must be from 0.01 to 100"),
        ("weibull,cv=-2", "cv (-2) of weibull arrivals must be from 0.01 to 100"),
        ("gamma,cv=bursty", "cv=bursty of arrivals 'gamma' must be a number"),
        ("gamma,cv", "'cv' of arrivals 'gamma' must read knob=value"),
        ("gamma,cv=1,cv=2", "'cv' of arrivals 'gamma' is given twice: leave one out"),
        ("onoff,on=nan,off=1", "on (nan) of onoff arrivals must be from 0.001 to 1e+09"),
        ("day,peak_to_mean=0.5", "peak_to_mean (0.5) of day arrivals must be from 1 to 12"),
        ("closed,users=2.5", "users=2.5 of arrivals 'closed' must be a whole number"),
        ("closed,users=0", "users (0) of closed arrivals must be from 1 to 1000000"),
        ("closed,users=1,think=nan", "think (nan) of closed arrivals must be a number of seconds from 0 to 1e9"),
        ("poisson=4", "arrivals 'poisson' has no value of its own: write knob=value after a comma"),
    ],
)  # fmt: skip
def test_a_wrong_text_is_answered_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_arrivals(text, None)
    assert str(caught.value) == said


def test_users_have_no_rate() -> None:
    with pytest.raises(ValueError, match=r"rate \(4\) has no meaning for closed arrivals"):
        generate("chat", rate=4.0, arrivals="closed,users=3")


def test_the_first_value_may_follow_the_name() -> None:
    assert parse_arrivals("gamma=3", 2.0) == parse_arrivals(" gamma , cv = 3 ", 2.0) == Gamma(2.0, 3.0)


def test_too_few_arrivals_to_see_the_mean_are_said_to_be() -> None:
    day = generate("fixed", num_requests=1000, arrivals="day,peak_to_mean=2")
    assert any(finding.startswith("these 1000 come at 1.") for finding in day.findings)
    assert not any(finding.startswith("these") for finding in generate("fixed", num_requests=1000).findings)


# Closed loops

ROOMY = EngineConfig(num_blocks=4096, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=16384)


def test_each_users_next_request_follows_his_last_answer() -> None:
    workload = generate("fixed", num_requests=10, arrivals="closed,users=3,think=5")
    assert isinstance(workload, Sessions) and workload.goes_on
    assert [item.request.request_id for item in workload.items] == ["0", "1", "2"]
    assert [each.after for each in workload.follow_ups] == [(str(index - 3),) for index in range(3, 10)]


def test_a_closed_loop_obeys_littles_law() -> None:
    """N = X (R + Z), until the first user has no more to ask."""
    recipe = Fixed(num_prompt_tokens=64, num_output_tokens=16)
    workload = generate("mine", recipe=recipe, num_requests=1600, arrivals="closed,users=16,think=4")
    records = simulate(ROOMY, workload, AffineCost(per_step=0.1)).records
    assert len(records) == 1600
    end = min(record.arrival_time for record in records if int(record.request_id) >= 1584)
    done = [record for record in records if record.finish_time <= end]
    residence = np.mean([record.finish_time - record.arrival_time for record in done])
    assert len(done) / end * (residence + 4.0) == pytest.approx(16, rel=0.03)


def test_users_play_whole_sessions_one_after_another() -> None:
    workload = generate("conversation", num_requests=60, arrivals="closed,users=2,think=1")
    assert isinstance(workload, Sessions)
    records = simulate(ROOMY, workload, AffineCost(per_step=0.02)).records
    assert len(records) == 60 and len(workload.items) == 2


def test_a_simulated_conversation_finds_what_was_said() -> None:
    workload = generate("conversation", num_requests=80)
    records = simulate(ROOMY, workload, AffineCost(per_step=0.02)).records
    cached = sum(record.num_cached_tokens for record in records)
    assert cached / sum(record.num_prompt_tokens for record in records) > reuse(prompts(workload))  # answers, too


# Draws that do not disturb each other


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_more_requests_only_extend(name: str) -> None:
    few, many = (generate(name, num_requests=num, max_tokens=9) for num in (300, 700))
    key = {item.request.request_id: item for item in every_item(many)}
    waits = {each.item.request.request_id: each for each in follow_ups(many)}
    for item in every_item(few):
        later = key[item.request.request_id]
        assert later.request.arrival_time == item.request.arrival_time
        assert later.request.prompt.num_tokens == item.request.prompt.num_tokens
        assert (later.num_output_tokens, later.request.context) == (item.num_output_tokens, item.request.context)
    for each in follow_ups(few):
        assert waits[each.item.request.request_id].delay == each.delay


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_arrivals_change_nothing_else(name: str) -> None:
    plain = generate(name, num_requests=300)
    for text in ("gamma,cv=3", "onoff,on=5,off=5", "closed,users=8,think=1"):
        other = generate(name, num_requests=300, arrivals=text)
        assert prompts(other) == prompts(plain)
        assert sorted(output_lengths(other)) == sorted(output_lengths(plain))


def test_one_stream_leaves_the_others_alone() -> None:
    plain, rewritten = ClaudeCode().draw(400, 5), ClaudeCode(rewrite_share=0.5).draw(400, 5)
    assert plain.outputs == rewritten.outputs and plain.links == rewritten.links
    assert plain.prompts != rewritten.prompts


def test_a_keyed_draw_belongs_to_its_key() -> None:
    draws = keyed_uniforms(7, "patience", ["a", "b", "c"])
    assert keyed_uniforms(7, "patience", ["c", "x", "a"])[[0, 2]].tolist() == [draws[2], draws[0]]
    assert keyed_uniforms(7, "think", ["a"])[0] != draws[0] != keyed_uniforms(8, "patience", ["a"])[0]
    many = keyed_uniforms(0, "x", map(str, range(20_000)))
    assert many.min() >= 0 and many.max() < 1 and many.mean() == pytest.approx(0.5, abs=0.01)


def test_the_order_of_hashing_changes_nothing() -> None:
    code = (
        "import hashlib\n"
        "from sim.workload.generate import RECIPES, generate\n"
        "from sim.workload.transform import parse_transform\n"
        "digest = hashlib.sha256()\n"
        "for name in sorted(RECIPES):\n"
        "    workload = generate(name, num_requests=60, seed=3)\n"
        "    for text in ('tenants=5', 'classes,a=0.5,b=0.5', 'cancel=0.5,patience=3', 'volatile=600'):\n"
        "        workload = parse_transform(text, 3)(workload)\n"
        "    digest.update(repr(workload).encode())\n"
        "print(digest.hexdigest())"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
                         env={"PYTHONHASHSEED": seed, "PATH": ""})
        for seed in ("1", "2")
    ]  # fmt: skip
    digests = {run.communicate()[0].strip() for run in runs}
    assert len(digests) == 1 and len(digests.pop()) == 64


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_ten_thousand_requests_take_less_than_a_second(name: str) -> None:
    def seconds() -> float:
        begin = time.process_time()
        generate(name, num_requests=10_000, seed=9)
        return time.process_time() - begin

    assert any(seconds() < 1.0 for _ in range(3))


# Percentiles


def test_percentiles_are_met_at_their_knots_and_between_them() -> None:
    table = Percentiles({0: 1.0, 50: 10.0, 100: 1000.0})
    assert table.at(np.array([0.0, 0.25, 0.5, 1.0])).tolist() == [1.0, 5.5, 10.0, 1000.0]
    through_logarithms = Percentiles({0: 1.0, 50: 10.0, 100: 1000.0}, log=True)
    assert through_logarithms.at(np.array([0.75]))[0] == pytest.approx(100.0)


def test_a_link_names_what_it_waits_for() -> None:
    """A session whose branches are still open at its end: the user's next session waits for all of them."""

    class Branching(Fixed):
        def draw(self, num_requests: int, seed: int) -> Draw:
            plain = Fixed().draw(6, seed)
            links = [None, Link((0,), 1.0), Link((0,), 2.0), None, Link((3,), 1.0), None]
            return Draw(plain.prompts, plain.outputs, links=links)

    workload = generate("mine", recipe=Branching(), num_requests=6, arrivals="closed,users=1")
    assert [each.after for each in follow_ups(workload)] == [("0",), ("0",), ("1", "2"), ("3",), ("4",)]


def digest(workload: Workload) -> str:
    return hashlib.sha256(repr(every_item(workload)).encode()).hexdigest()


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_seed_gives_the_same_again_and_another_another(name: str) -> None:
    first, again, other = (generate(name, num_requests=50, seed=seed) for seed in (4, 4, 5))
    assert digest(first) == digest(again) != digest(other)

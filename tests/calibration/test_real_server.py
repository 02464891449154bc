"""A real vLLM 0.32.0 server on a CPU: what its records say, and what they say beforehand of other loads."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from calibration.figures import compare
from calibration.fit_server import ServerFit, fit_server
from calibration.forced import forced_steps
from calibration.importers.vllm_bench import read_vllm_bench
from calibration.records import MeasuredRun
from calibration.replayed import config_of
from calibration.request_fit import Case
from calibration.step_log import with_hits
from sim.cost.server import read_server_costs
from sim.workload.vllm_random import VllmRandom

LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 2048}
NAMES = ("r2_s1_p0_0", "r4_s1_p0_1", "r6_s1_p0_2", "r6_s1_p0_6", "r6_s1_p0_7", "r12_s1_p0_4")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpu-vllm-0.32.json"


@pytest.fixture(scope="module")
def runs() -> dict[str, MeasuredRun]:
    folder = EXAMPLE.parents[2] / "shared" / "data" / "vllm-runs" / "cpu-vllm-0.32"
    if not folder.is_dir():
        pytest.skip("needs the recorded runs beside the repository, at shared/data/vllm-runs/cpu-vllm-0.32")
    return {name: read_vllm_bench(folder / f"base_{name}.json.gz") for name in NAMES}


@pytest.fixture(scope="module")
def fit(runs: dict[str, MeasuredRun]) -> ServerFit:
    """On loads of 2 and 4 requests a second."""
    return fit_server([runs["r2_s1_p0_0"], runs["r4_s1_p0_1"]], LIMITS)


def taken(run: MeasuredRun) -> Counter[tuple[int, int, int]]:
    """Steps of the forced replay: prompts, their tokens, decodes."""
    forced = forced_steps(run, config_of(run, LIMITS), ingress=4e-3)
    assert forced.contradictions < 0.025
    works = [work for step in forced.steps for work in step.works]
    return Counter((work.num_prefills, work.num_tokens - work.num_decodes, work.num_decodes) for work in works)


def logged(run: MeasuredRun) -> Counter[tuple[int, int, int]]:
    return Counter((step.num_prefills, step.num_prefill_tokens, step.num_decodes) for step in run.steps)


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_replay_takes_the_steps_that_the_engine_logged(runs: dict[str, MeasuredRun], name: str) -> None:
    """From the times of tokens alone; what was in the prefix cache is then read from the log."""
    run = runs[name]
    lines = logged(run)
    assert abs(taken(run).total() - lines.total()) <= 1
    assert (lines - taken(run)).total() <= 0.06 * lines.total()
    told = with_hits(run, config_of(run, LIMITS))
    assert (lines - taken(told)).total() <= 0.035 * lines.total()
    hits = sum(request.num_cached_tokens or 0 for request in told.requests)
    computed = sum(step.num_prefill_tokens for step in run.steps)
    assert hits == pytest.approx(sum(each.num_prompt_tokens for each in run.requests) - computed, rel=0.15)


@pytest.mark.parametrize(
    ("names", "goals"),
    [
        (("r6_s1_p0_2", "r6_s1_p0_6", "r6_s1_p0_7"), {"throughput": 0.03, "tpot": 0.05, "e2e": 0.06, "ttft": 0.10}),
        (("r12_s1_p0_4",), {"throughput": 0.03, "tpot": 0.05, "e2e": 0.06, "ttft": 0.10}),
    ],
    ids=["6 a second", "overload"],
)
def test_two_loads_predict_the_others(
    runs: dict[str, MeasuredRun], fit: ServerFit, names: tuple[str, ...], goals: dict[str, float]
) -> None:
    """The mean of the repeats, where there are some: single ones lie up to 7.5 % from it."""
    cases = [Case(with_hits(runs[name], fit.configs[0]), fit.configs[0]) for name in names]
    found = [compare(case.recorded(), case.predicted(fit.cost, fit.front_end)) for case in cases]
    for same in zip(*found, strict=True):
        goal = goals.get(same[0].name.removesuffix(" mean"))
        if goal is not None:
            error = np.mean([f.predicted for f in same]) / np.mean([f.recorded for f in same]) - 1
            assert abs(error) <= goal, f"{same[0].name} {error:+.1%}"


def test_a_wrong_limit_is_refused(runs: dict[str, MeasuredRun]) -> None:
    """In overload, when it binds."""
    with pytest.raises(ValueError, match="contradicts its engine limits"):
        fit_server([runs["r12_s1_p0_4"]], {**LIMITS, "max_num_seqs": 64})
    with pytest.raises(ValueError, match="logged a step of 512 tokens"):
        fit_server([runs["r12_s1_p0_4"]], {**LIMITS, "max_num_batched_tokens": 256})


def test_even_requests_predict_odd_ones(runs: dict[str, MeasuredRun]) -> None:
    run = runs["r6_s1_p0_6"]
    ids = [request.request_id for request in run.completed]
    fit = fit_server([run], LIMITS, chosen=set(ids[::2]))
    case = Case(with_hits(run, fit.configs[0]), fit.configs[0], set(ids[1::2]))
    errors = {f.name: abs(f.error) for f in compare(case.recorded(), case.predicted(fit.cost, fit.front_end))}
    goals = {"e2e mean": 0.03, "tpot mean": 0.03, "ttft mean": 0.08, "e2e p99": 0.05}
    assert not {name: errors[name] for name, goal in goals.items() if errors[name] > goal}


def test_the_example_is_a_fit_of_these_records(runs: dict[str, MeasuredRun]) -> None:
    shipped = read_server_costs(EXAMPLE)
    told = json.loads(EXAMPLE.read_text())["about"]["sources"]
    assert sorted(told) == sorted(run.source for run in runs.values())
    assert shipped.engine["max_num_seqs"] == 32
    assert len(shipped.draws) == 32


@pytest.mark.parametrize("name", ["r4_s1_p0_1", "r6_s1_p0_2"])
def test_the_tool_that_made_the_load_is_followed_to_the_token(runs: dict[str, MeasuredRun], name: str) -> None:
    run = runs[name]
    items = VllmRandom(len(run.requests), round(run.rate), 1, 200, 60, 0.6, 0, 4096, 4096, 32).workload().items
    assert [item.num_output_tokens for item in items] == [each.num_output_tokens for each in run.requests]
    alike = [
        item.request.prompt.num_tokens == each.num_prompt_tokens for item, each in zip(items, run.requests, strict=True)
    ]
    assert sum(alike) > 0.95 * len(alike)
    late = [each.arrival_time - item.request.arrival_time for item, each in zip(items, run.requests, strict=True)]
    assert max(map(abs, late)) < 4e-3

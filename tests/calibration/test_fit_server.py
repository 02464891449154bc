"""A server's costs from its records: known ones come back, and what records cannot tell is refused or said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibration.fit_server import ServerFit, fit_server, unexplained
from calibration.forced import forced_steps
from calibration.records import MeasuredRun, MeasuredStep
from calibration.replayed import config_of
from sim.cost import LinearCost, StepWork
from tests.calibration.servers import LIMITS, measure

TRUE = LinearCost(
    per_step=8e-3,
    per_token=200e-6,
    free_tokens=8,
    per_decode=300e-6,
    per_prompt=3e-3,
    per_kv_token=1e-6,
    per_pair=0.2e-6,
)
RATES = (1.0, 3.0, 8.0)


@pytest.fixture(scope="module")
def runs() -> list[MeasuredRun]:
    return [measure(rate, TRUE, seed=seed) for seed, rate in enumerate(RATES)]


@pytest.fixture(scope="module")
def fit(runs: list[MeasuredRun]) -> ServerFit:
    return fit_server(runs, {})


def test_known_prices_come_back(fit: ServerFit) -> None:
    assert fit.cost.free_tokens == TRUE.free_tokens
    for name in ("per_step", "per_token", "per_decode", "per_prompt", "per_kv_token", "per_pair"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert not fit.refused
    assert fit.typical_error < 0.002


def test_the_time_to_the_engine_comes_back(fit: ServerFit) -> None:
    assert fit.front_end is not None
    assert fit.front_end.api_time_per_request == pytest.approx(3e-3, abs=1e-3)


def test_the_steps_of_a_forced_replay_are_those_that_ran(runs: list[MeasuredRun]) -> None:
    for run in runs:
        forced = forced_steps(run, config_of(run, {}), ingress=3e-3, cost=TRUE)
        errors = [sum(map(TRUE.device_time, step.works)) / step.duration - 1 for step in forced.steps if step.is_busy]
        assert forced.contradictions < 0.01
        assert sum(abs(error) < 0.001 for error in errors) > 0.98 * len(errors)


def test_every_draw_is_a_cost_near_the_fit(fit: ServerFit) -> None:
    assert len(fit.draws) == 32
    assert all(draw.per_step == pytest.approx(fit.cost.per_step, rel=0.05) for draw in fit.draws)


def test_a_fit_is_the_same_every_time(runs: list[MeasuredRun]) -> None:
    assert fit_server(runs[2:], {}) == fit_server(runs[2:], {})


def test_moods_of_the_machine_do_not_bend_the_prices() -> None:
    moods = (1.2, 0.9, 1.0)
    runs = [measure(rate, replace(TRUE, scale=mood), seed=7) for rate, mood in zip(RATES, moods, strict=True)]
    fit = fit_server(runs, {})
    level = (1.2 * 0.9) ** (1 / 3)
    assert fit.speeds == pytest.approx([mood / level for mood in moods], rel=0.02)
    assert fit.cost.band == pytest.approx(1.16, abs=0.03)
    for work in (StepWork(1, 1, 1, 1, 200), StepWork(12, 12, 12, 12, 3000), StepWork(210, 11, 11, 10, 2500, 1, 40200)):
        assert fit.cost.device_time(work) == pytest.approx(level * TRUE.device_time(work), rel=0.03)


def test_requests_that_may_not_be_looked_at_are_not(runs: list[MeasuredRun]) -> None:
    even = {request.request_id for request in runs[1].requests[::2]}
    blind = replace(
        runs[1],
        requests=[each if each.request_id in even else replace(each, token_times=()) for each in runs[1].requests],
    )
    seen = [forced_steps(run, config_of(run, {}), known=even).steps for run in (runs[1], blind)]
    assert seen[0] == seen[1]
    fit = fit_server([runs[1]], {}, chosen=even)
    assert fit.cost.per_step == pytest.approx(TRUE.per_step, rel=0.05)


def test_prices_that_loads_do_not_tell_apart_are_refused_by_name() -> None:
    """One request at a time: in each step seen one decodes, so that its price is the step's."""
    fit = fit_server([measure(0.005, TRUE, num=30)], {})
    assert "cannot be told" in fit.refused["per_decode"]
    assert fit.cost.per_decode == 0.0
    assert fit.cost.per_step == pytest.approx(TRUE.per_step + TRUE.per_decode, rel=0.01)
    assert any(finding.startswith("1 load level(s)") for finding in fit.findings)


# -- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"max_num_seqs": 8}, "earlier than they allow"),
        ({"max_num_seqs": 64}, "later than they explain"),
        ({"max_num_batched_tokens": 128}, "earlier than they allow"),
        ({"num_blocks": 90}, "earlier than they allow"),
    ],
)
def test_a_wrong_limit_is_refused(told: dict[str, int], why: str) -> None:
    run = measure(12.0, TRUE, told={**LIMITS, **told})
    with pytest.raises(ValueError, match=f"contradicts its engine limits .*{why}"):
        fit_server([run], {})


def test_the_right_limits_are_not_refused_in_overload() -> None:
    fit_server([measure(12.0, TRUE)], {})


def test_limits_that_nobody_tells_are_asked_for(runs: list[MeasuredRun]) -> None:
    silent = replace(runs[0], engine={"block_size": 16})
    with pytest.raises(ValueError, match=r"does not tell num_blocks, max_num_seqs, .*--num-blocks, as the server logs"):
        fit_server([silent], {})


def test_two_truths_about_a_limit_are_one_too_many(runs: list[MeasuredRun]) -> None:
    with pytest.raises(ValueError, match="its server says max_num_seqs 16, you say 32: which is it"):
        fit_server(runs, {"max_num_seqs": 32})


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (MeasuredStep(1, 300, 4, 0.1), "a step of 304 tokens, but max_num_batched_tokens is said to be 256"),
        (MeasuredStep(1, 30, 16, 0.1), "a step of 17 requests, but max_num_seqs is said to be 16"),
    ],
)
def test_a_logged_step_beyond_a_limit_is_refused(runs: list[MeasuredRun], step: MeasuredStep, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        fit_server([replace(runs[0], steps=(step,))], {})


def test_a_logged_share_of_the_pool_tells_its_size(runs: list[MeasuredRun]) -> None:
    forced = forced_steps(runs[2], config_of(runs[2], {}), ingress=3e-3)
    log = tuple(
        MeasuredStep(work.num_prefills, work.num_tokens - work.num_decodes, work.num_decodes, 0.01, 2 * usage)
        for work, usage in zip((w for step in forced.steps for w in step.works), forced.usage, strict=False)
    )
    with pytest.raises(ValueError, match="num_blocks should be near 300"):
        fit_server([replace(runs[2], steps=log)], {})


# -- first and last tokens ----------------------------------------------------------------------------------------


def test_without_token_times_a_prior_is_asked_for(runs: list[MeasuredRun]) -> None:
    with pytest.raises(ValueError, match=r"first and last tokens only.*give --model and"):
        fit_server([_without_tokens(run) for run in runs], {})


def test_first_and_last_tokens_correct_a_prior() -> None:
    prior = replace(TRUE, per_step=12e-3, per_token=150e-6, per_decode=400e-6)
    cases = [measure(rate, TRUE, num=60, seed=seed, tokens=False) for seed, rate in enumerate((3.0, 8.0))]
    fit = fit_server(cases, {}, prior=prior)
    assert fit.cost.per_step == pytest.approx(TRUE.per_step, rel=0.2)
    assert "per_step" not in fit.from_prior
    assert not [finding for finding in fit.findings if "unexplained" in finding]


def test_what_the_fit_does_not_explain_is_refused_or_said(runs: list[MeasuredRun], fit: ServerFit) -> None:
    slow = replace(fit, cost=replace(fit.cost, scale=1.4))
    with pytest.raises(ValueError, match="something limits it that is not in the records"):
        unexplained(runs, slow)
    late = replace(fit, cost=replace(fit.cost, scale=1.12))
    assert [finding for finding in unexplained(runs, late) if "E2E mean +" in finding]


def _without_tokens(run: MeasuredRun) -> MeasuredRun:
    return replace(run, requests=[replace(each, token_times=()) for each in run.requests])

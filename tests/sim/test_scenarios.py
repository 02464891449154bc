"""Named cases in the simulator: each keeps its rules, says what it measured, and notices a policy that breaks them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sim.commands import Prepared
from sim.experiment.runner import Outcome
from sim.experiment.runner import play as play_once
from sim.experiment.scenarios import LIVE, SCENARIOS, SIMULATED, Scale, Scenario, Verdict, named, play
from sim.experiment.scenarios.commands import FIGURES, print_verdict, run_scenarios, to_dict
from sim.setup import Setup
from sim.workload.generate import generate

SHORT = replace(SIMULATED, num_requests=64, num_slots=8, num_seeds=3)
BY_REQUIREMENT = {each.requirement: each for each in SCENARIOS}


class Changed:
    """The simulator, at costs that are quickly there, and with every setup changed before it is played.

    What was asked for stays in the manifest: it is the engine that does something else.
    """

    def __init__(self, change: Mapping[str, Any] | None = None, **engine: object) -> None:
        self._change, self._engine = change or {}, engine

    def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]:
        for setup in (replace(each, costs="datasheet") for each in setups):
            played = play_once(replace(setup, engine={**setup.engine, **self._engine}, **self._change))
            yield Outcome(Prepared.of(setup).manifest, played.metrics)


QUICK = Changed()


@pytest.fixture(scope="module", params=SCENARIOS, ids=lambda scenario: scenario.name)
def verdict(request: pytest.FixtureRequest) -> Verdict:
    scenario: Scenario = request.param
    return play(scenario, QUICK, SHORT)


def test_each_case_of_the_article_has_one_name() -> None:
    assert sorted(BY_REQUIREMENT) == ["S40", "S41", "S42", "S43", "S53", "S54", "S55", "S56", "S57"]
    assert len({each.name for each in SCENARIOS}) == len(SCENARIOS)


def test_every_case_keeps_its_rules(verdict: Verdict) -> None:
    broken = [check for check in verdict.checks if not check.is_kept]
    assert not broken and verdict.passes and len(verdict.checks) >= 3


def test_arms_differ_in_their_factor_and_in_nothing_else(verdict: Verdict) -> None:
    assert len(verdict.arms) >= 2
    for found in verdict.factor.values():
        assert found and all(name.startswith(verdict.scenario.factor) for name in found)


def test_a_verdict_shows_what_the_article_asks_for_at_80_columns(verdict: Verdict) -> None:
    text = StringIO()
    print_verdict(Console(file=text, width=80, color_system=None), verdict)
    lines = text.getvalue().splitlines()
    assert lines[0] == f"PASS  {verdict.scenario.name} ({verdict.scenario.requirement})"
    assert all(any(line.startswith(name) for line in lines) for name, _, _ in FIGURES)
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("kept") for line in lines) == len(verdict.checks)
    assert json.loads(json.dumps(to_dict(verdict)))["checks"][0]["is_kept"] is True


ALIKE = "repeated-prefix,prefix_tokens=448,own_tokens=64,output_tokens=64"
# What each case must notice, and in which of its rules.
BREAKS: dict[str, tuple[Changed, str]] = {
    "S40": (Changed({"workload": ALIKE}), "caching on: prompt tokens found in the cache"),
    "S41": (Changed(enable_prefix_caching=False), "caching on: prompt tokens found in the cache"),
    "S42": (Changed(batching="static"), "E2E p50 of short requests"),
    "S43": (Changed(scheduling="fcfs"), "TTFT p50 of interactive requests"),
    "S53": (Changed({"transforms": ()}), "cancelled at least"),
    "S54": (Changed(batching="chunked"), "gaps between others' tokens"),
    "S55": (Changed(num_blocks=8192), "blocks evicted"),
    "S56": (Changed(isolation="global"), "tenant: tokens found"),
    "S57": (Changed(isolation="tenant"), "user: tokens found"),
}


@pytest.mark.parametrize("requirement", sorted(BREAKS))
def test_an_engine_that_does_not_do_what_it_was_told_is_noticed(requirement: str) -> None:
    body, rule = BREAKS[requirement]
    found = play(BY_REQUIREMENT[requirement], body, SHORT)
    assert any(rule in check.rule for check in found.checks if not check.is_kept)


def test_a_case_whose_arms_differ_in_more_is_refused() -> None:
    def arms(scale: Scale) -> dict[str, Setup]:
        plain = scale.setup("fixed", "poisson", 20)
        return {
            "a": plain,
            "b": replace(plain, engine={**plain.engine, "batching": "static", "scheduling": "priority"}),
        }

    with pytest.raises(ValueError, match=r"not comparable: besides 'engine.batching' .* engine.scheduling"):
        play(Scenario("it", "S0", "?", "engine.batching", arms, lambda *_: []), QUICK, SHORT)


def test_both_bodies_play_the_same_arms_at_scales_of_their_own() -> None:
    for scenario in SCENARIOS:
        here, there = scenario.arms(SIMULATED), scenario.arms(LIVE)
        assert list(here) == list(there)
        for name, setup in here.items():
            other = there[name]
            assert (setup.model, other.model) == ("llama-3-8b", "tiny")
            differing = {key for key in setup.engine if setup.engine[key] != other.engine[key]}
            assert differing <= {"num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "batching"}


def test_the_command_ends_with_1_if_a_rule_is_broken_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_scenarios(["two-tenants"], QUICK, SHORT, tmp_path / "it.json") == 0
    assert run_scenarios(["two-tenants"], Changed(isolation="global"), SHORT, None) == 1
    out = capsys.readouterr().out
    assert "1 of 1 pass" in out and "0 of 1 pass" in out and "BROKEN" in out
    (found,) = json.loads((tmp_path / "it.json").read_text())
    assert found["passes"] and set(found["arms"]) == {"global", "tenant", "no_reuse"}


def test_a_name_there_is_not_is_refused_before_anything_is_played() -> None:
    assert named(["all"]) == SCENARIOS
    with pytest.raises(ValueError, match=r"unknown scenario 'two-tenant'; known: all, .*Did you mean 'two-tenants'"):
        named(["cold-unique", "two-tenant"])


# -- their loads ------------------------------------------------------------------------------------------------------


def test_a_cycle_brings_its_kinds_in_turn() -> None:
    made = generate("cycle,turns=a:10+2/b:3+4/a:10+2", num_requests=5)
    found = [(item.request.class_name, item.request.prompt.num_tokens, item.num_output_tokens) for item in made.items]
    assert found == [("a", 10, 2), ("b", 3, 4), ("a", 10, 2), ("a", 10, 2), ("b", 3, 4)]


def test_every_caller_comes_behind_every_prefix() -> None:
    made = generate("repeated-prefix,num_prefixes=2,num_tenants=2,users_per_tenant=2", num_requests=8)
    asked = [(item.request.context.application, item.request.context.user) for item in made.items]
    assert len(set(asked)) == 8 and {app for app, _ in asked} == {"app-0", "app-1"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("chat,prompt_median=-3", "prompt_median (-3) of workload 'chat,prompt_median=-3' must be from 1"),
        ("chat,median=3", "unknown knob 'median' of workload 'chat'"),
        ("cycle,turns=a", "must read class:prompt+output"),
        ("cycle,turns=a:0+1", "at least 1 token"),
        ("repeated-prefix,prefix_tokens=7", "prefix_tokens (7) must be a multiple of 16"),
    ],
)
def test_knobs_of_a_workload_are_checked(text: str, told: str) -> None:
    with pytest.raises(ValueError) as error:
        generate(text, num_requests=3)
    assert told in str(error.value)

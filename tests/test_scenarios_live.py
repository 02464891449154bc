"""Experiments on the live body: real steps, real KV, callers that come with keys.

Times are a matter for a quiet machine; what is counted holds on any.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import cli
from backend.principals import Principals
from live_runner import Live, authenticated
from policies.types import Request
from sim.experiment.ab.bodies import compare_bodies
from sim.experiment.ab.compare import compare
from sim.experiment.runner import Simulated
from sim.experiment.scenarios import LIVE, SCENARIOS, Scenario, named, play
from sim.setup import Setup
from sim.workload.every import every_item
from sim.workload.generate import generate

SHORT = replace(LIVE, num_requests=16, long=128, giant=512, answer=4, pace=0.004, num_seeds=2)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_case_keeps_its_rules_on_a_live_body(scenario: Scenario) -> None:
    found = play(scenario, Live(), SHORT)
    counted = [check for check in found.checks if not check.is_timed]
    assert len(counted) >= 2 and not [check for check in counted if not check.is_kept]
    manifests = [outcome.manifest for arm in found.arms.values() for outcome in arm.outcomes]
    assert {manifest["body"] for manifest in manifests} == {"live"}


def test_callers_are_who_their_keys_say_whatever_their_bodies_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed: list[Request] = []
    vouch = Principals.vouch
    monkeypatch.setattr(
        Principals, "vouch", lambda self, key, request: claimed.append(request) or vouch(self, key, request)
    )
    made = generate("repeated-prefix,num_tenants=2,users_per_tenant=2", num_requests=8, arrivals="closed,users=1")
    before, after = ([item.request for item in every_item(each)] for each in (made, authenticated(made)))
    assert [request.context for request in after] == [request.context for request in before]
    assert [lie.context for lie in claimed] == [before[0].context] * 8
    accounts = {(request.context.tenant, request.context.user): request.client_id for request in after}
    assert len(set(accounts.values())) == 4 and not set(accounts.values()) & {"tenant-0", "tenant-1"}
    plain = generate("fixed", num_requests=3)
    assert [item.request for item in authenticated(plain).items] == [item.request for item in plain.items]


def test_s56_a_server_that_believes_what_bodies_say_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Principals, "vouch", lambda self, key, request: request)
    (scenario,) = named(["two-tenants"])
    broken = [check.rule for check in play(scenario, Live(), SHORT).checks if not check.is_kept]
    assert len(broken) == 1 and broken[0].startswith("tenant: tokens found")


def test_s64_a_live_run_is_warm_or_primed_by_the_same_protocol() -> None:
    lengths = "prefix_tokens=64,own_tokens=20,output_tokens=4"
    setup = Setup(
        workload=f"repeated-prefix,num_prefixes=3,num_tenants=2,{lengths}", arrivals="closed,users=1", num_requests=24,
        model="tiny", engine={"isolation": "tenant", "num_blocks": 512},
    )  # fmt: skip
    states = ("cold", "warm=0.25", "primed")
    found = dict(zip(states, Live().run([replace(setup, cache_state=state) for state in states]), strict=True))
    counts = {name: (each.metrics["num_requests"], each.metrics["num_cached_tokens"]) for name, each in found.items()}
    assert counts == {"cold": (24, 18 * 64), "warm=0.25": (18, 18 * 64), "primed": (24, 24 * 64)}
    assert [str(each.manifest["cache_state"]).split(":")[0] for each in found.values()] == ["cold", "warm", "primed"]
    with pytest.raises(ValueError, match="begin both alike"):
        compare(setup, replace(setup, cache_state="primed"), Live(), num=2)


def test_an_effect_is_looked_for_in_both_bodies() -> None:
    """Static groups make the first token wait for the last; both bodies play the settings that the live one settled."""
    setup = LIVE.setup("cycle,turns=short:16+4/short:16+4/short:16+4/long:16+32", LIVE.users(8), 16, batching="static")
    seen: list[Setup] = []

    def settle(each: Setup) -> Setup:
        seen.append(Live().settled(each))
        return seen[-1]

    other = replace(setup, engine={**setup.engine, "batching": "chunked"})
    found = compare_bodies(setup, other, Simulated(1), Live(), settle, costs="datasheet", num=2, num_live=2)
    assert [each.engine["max_model_len"] for each in seen] == [4096, 4096]
    assert list(found.simulated.factor) == list(found.live.factor) == ["engine.batching"]
    by_metric = {each.metric: each for each in found.agreements}
    assert by_metric["ttft.p50"].simulated.high < 0.0
    assert by_metric["ttft.p50"].live.num == 2 and by_metric["ttft.p50"].sign != "disagree"


def test_the_commands_play_both_bodies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["servetwin", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return int(exit_.value.code or 0), capsys.readouterr().out

    code, out = run("scenarios", "run", "two-tenants", "--live", "--json", tmp_path / "it.json")
    assert code == 0 and "PASS  two-tenants (S56)" in out and "1 of 1 pass (live, tiny)" in out
    assert json.loads((tmp_path / "it.json").read_text())[0]["body"] == "live"
    for arm in ("chunked", "static"):
        setup = LIVE.setup("fixed,num_prompt_tokens=8,num_output_tokens=4", LIVE.users(4), 12, batching=arm)
        (tmp_path / f"{arm}.toml").write_text(replace(setup, model="llama-3-8b", costs="datasheet").to_toml())
    arms = (tmp_path / "chunked.toml", tmp_path / "static.toml")
    code, out = run("compare", *arms, "--live", "--num", 2, "--num-live", 2, "--num-workers", 1)
    assert code == 0 and [out.count(each) for each in ("simulated\n", "live\n", "sizes agree if")] == [1, 1, 1]
    code, out = run("scenarios", "list")
    assert code == 0 and all(f"{each.name} " in out for each in SCENARIOS)

"""The price of isolation: hits and copies counted by hand, the bill for prompts, the largest rate, and the command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import cli
from policies.types import Context
from sim.cost import AffineCost, StepWork
from sim.experiment.isolation.price import PrefillBill, price
from sim.experiment.isolation.prices import largest_rate, meets, prices
from sim.experiment.isolation.scopes import SCOPES, Scope
from sim.setup import Setup
from sim.workload.workload import WorkItem

BY_NAME = {scope.name: scope for scope in SCOPES}
# 8 tenants, 4 applications, each behind a prefix of 1,024 tokens; slow enough that nobody waits for another's prefix.
LOAD = Setup(workload="shared-prefix", num_requests=80, rate=0.2, max_tokens=4)
PREFIX, NUM_TENANTS = 1024, 8
SHARED_WITH: dict[str, Callable[[Context], object]] = {
    "global": lambda it: it.application,
    "application": lambda it: it.application,
    "tenant": lambda it: (it.tenant, it.application),
    "hard partition": lambda it: (it.tenant, it.application),
    "dedicated workers": lambda it: (it.tenant, it.application),
    "user": lambda it: (it.tenant, it.user, it.application),
    "session": lambda it: it.session,
}


def items() -> list[WorkItem]:
    return list(LOAD.load().items)


# -- one run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SHARED_WITH)
def test_each_scope_finds_what_was_asked_before_within_it(scope: str) -> None:
    """Exactly: whoever is not the first of his kind finds the prefix (T35). What lies there twice is counted too:
    the same prefix once for each kind of caller, less once for each application."""
    kinds = [SHARED_WITH[scope](item.request.context) for item in items()]
    found = PREFIX * (len(kinds) - len(set(kinds)))
    total = sum(item.request.prompt.num_tokens for item in items())
    priced = price(BY_NAME[scope].of(LOAD, NUM_TENANTS))
    assert priced.token_hit_rate == found / total
    applications = {item.request.context.application for item in items()}
    assert priced.duplicate_blocks_max == PREFIX // 16 * (len(set(kinds)) - len(applications))
    assert priced.share_completed == 1.0


def test_caching_off_finds_nothing_keeps_nothing_and_pays_for_every_prompt() -> None:
    off, alone = (price(BY_NAME[name].of(LOAD, NUM_TENANTS)) for name in ("caching off", "session"))
    assert off.token_hit_rate == 0.0 and math.isnan(off.duplicate_blocks_mean)
    assert off.prefill_gpu_seconds_per_hour == pytest.approx(alone.prefill_gpu_seconds_per_hour, rel=0.02)


def test_the_stricter_the_scope_the_more_prompts_cost() -> None:
    costs = [
        price(BY_NAME[name].of(LOAD, NUM_TENANTS)).prefill_gpu_seconds_per_hour
        for name in ("global", "tenant", "user", "session")
    ]
    assert costs == sorted(costs) and costs[-1] > 1.5 * costs[0]


def test_an_overloaded_run_has_a_bill_and_no_percentiles() -> None:
    flood = price(BY_NAME["caching off"].of(replace(LOAD, rate=500.0, num_requests=300), NUM_TENANTS))
    assert math.isnan(flood.ttft_p50) and math.isnan(flood.ttft_p99)
    assert flood.prefill_gpu_seconds_per_hour > 0.0


def test_a_prompt_is_billed_what_its_step_takes_longer_for_it() -> None:
    """Alone the whole step; among decodes only what is added, their share of the step being theirs anyway."""
    bill = PrefillBill(AffineCost(per_step=1.0, per_token=0.01, per_request=0.1))
    alone = StepWork(num_tokens=50, num_requests=1, num_sampled=1, num_prefills=1, prefill_pairs=50 * 51)
    assert bill.device_time(alone) == 1.6 and bill.total == 1.6
    mixed = alone._replace(num_tokens=53, num_requests=4, num_sampled=4, num_decodes=3, decode_context=30)
    assert bill.device_time(mixed) == pytest.approx(1.93) and bill.total == pytest.approx(1.6 + 0.6)
    bill.device_time(StepWork(num_tokens=3, num_requests=3, num_sampled=3, num_decodes=3, decode_context=33))
    assert bill.total == pytest.approx(2.2), "a step of decodes is nobody's prompt"


# -- the largest rate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.03, 0.9, 1.0, 3.7, 500.0])
def test_the_largest_rate_is_found_from_wherever_one_begins(limit: float) -> None:
    found = largest_rate(1.0, lambda rate: rate <= limit)
    assert limit / 1.021 <= found <= limit


def test_a_rate_that_is_never_met_is_none_and_one_that_always_is_has_no_bound() -> None:
    assert largest_rate(1.0, lambda rate: False) == 0.0
    assert math.isinf(largest_rate(1.0, lambda rate: True))


def test_objectives_are_met_only_by_who_answers_all() -> None:
    """A part that refuses long prompts would else be the fastest of all."""
    kept = replace(LOAD, slo="ttft_p99<10s", engine={"isolation": "tenant"})
    assert meets(kept)
    assert not meets(replace(kept, slo="ttft_p99<1ms"))
    assert not meets(replace(kept, engine={"num_blocks": 70, "isolation": "tenant"}))


# -- all scopes -------------------------------------------------------------------------------------------------------


def test_every_scope_meets_the_same_requests_and_a_finder_of_rates_can_be_handed_in() -> None:
    """What differs is the scope, and what it needs: a GPU a tenant, or none but its own."""
    asked: list[float] = []

    def find(rate: float, is_met: Callable[[float], bool]) -> float:
        asked.append(rate)
        return 7.0 if is_met(0.2) else 0.0

    scopes = [BY_NAME[name] for name in ("global", "tenant", "dedicated workers")]
    found = prices(LOAD, scopes=scopes, num=2, num_workers=1, find=find)
    assert [each.num_gpus for each in found.scopes] == [1, 1, NUM_TENANTS]
    assert found.seeds == (0, 1) and asked == [0.2] * 3
    assert all(each.largest_rate == 7.0 and len(each.runs) == 2 for each in found.scopes)
    shared, own, apart = found.scopes
    interval = shared.interval("token_hit_rate")
    assert interval is not None and interval.low < shared.mean("token_hit_rate") < interval.high
    assert [run.token_hit_rate for run in own.runs] == [run.token_hit_rate for run in apart.runs]
    assert found.threat_decision.startswith("none given")


def test_a_seed_with_more_tenants_than_the_first_finds_a_place_for_each() -> None:
    few = replace(LOAD, num_requests=6, seed=1)
    tenants = [len({item.request.context.tenant for item in replace(few, seed=seed).load().items}) for seed in (1, 2)]
    assert tenants[0] < tenants[1]
    scopes = [BY_NAME["hard partition"], BY_NAME["dedicated workers"]]
    found = prices(few, scopes=scopes, num=2, num_workers=1, find_rates=False)
    assert found.num_tenants == tenants[1] == found.scopes[1].num_gpus
    assert all(run.share_completed == 1.0 for each in found.scopes for run in each.runs)


def test_a_closed_loop_has_no_rate_to_seek() -> None:
    closed = replace(LOAD, rate=None, arrivals="closed,users=4", num_requests=24)
    (found,) = prices(closed, scopes=[BY_NAME["tenant"]], num=1, num_workers=1).scopes
    assert math.isnan(found.largest_rate) and found.mean("share_completed") == 1.0


def test_one_tenant_has_nobody_to_be_kept_apart_from() -> None:
    with pytest.raises(ValueError, match="workload 'chat' has one tenant, and isolation costs it nothing: take"):
        prices(Setup(workload="chat", num_requests=10))


def test_a_recording_with_tenants_is_priced_once_as_seeds_change_nothing_in_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 512, "output_length": 2, "hash_ids": [7]} for i in range(20)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    setup = Setup(trace=str(trace), transforms=("tenants=2,zipf=0",))
    found = prices(setup, scopes=[BY_NAME["global"], BY_NAME["tenant"]], num=3, num_workers=1, find_rates=False)
    shared, own = found.scopes
    assert found.seeds == (0,) and shared.interval("token_hit_rate") is None
    assert (shared.mean("token_hit_rate"), own.mean("token_hit_rate")) == (19 * 496 / (20 * 512), 18 * 496 / (20 * 512))


def test_a_scope_says_who_shares_and_keeps_the_decision_that_was_written_down() -> None:
    decided = Setup(engine={"threat_decision": "all are one company"})
    assert BY_NAME["global"].of(decided, 3).engine["threat_decision"] == "all are one company"
    assert BY_NAME["hard partition"].of(decided, 3).engine["isolation"] == "partition,parts=3"
    assert Scope("x", {"isolation": "user"}, dedicated=True).of(decided, 3).routing == "pinned,exclusive=true"


# -- the command ------------------------------------------------------------------------------------------------------


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["servetwin", "isolation", *map(str, arguments), "--num-workers", "1"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_the_command_says_what_it_costs_what_leaks_and_what_that_rests_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """S17, S21, S23."""
    files = tmp_path / "found.json", tmp_path / "found.html"
    load = ("--num-requests", 24, "--rate", 40, "--num-seeds", 1, "--slo", "ttft_p99<70ms", "--max-tokens", 4)
    names = ("global", "tenant", "dedicated workers", "caching off")
    scopes = [word for name in names for word in ("--scope", name)]
    trials = ("--trials", 12, "--load", 0, "--prompt-tokens", 1024, *scopes)
    code, out, err = run(monkeypatch, capsys, *load, *trials, "--json", files[0], "--html", files[1])
    assert code == 0, err
    assert all(len(line) <= 100 for line in out.splitlines())
    assert out.startswith("this setup shares: global; threat decision: none given")
    for word in (*names, "with caching off: not found", "proves nothing safe", "mean AUC", "D <= 0.05 takes 4,239"):
        assert word in " ".join(out.split()), word
    assert " safe:" not in out and "is safe" not in out
    (result,) = json.loads(files[0].read_text())
    assert [each["scope"] for each in result["prices"]["scopes"]] == list(names)
    assert result["prices"]["scopes"][0]["runs"][0]["token_hit_rate"] > 0 < result["audit"]["pace"]["alone"]
    assert {each["leak"]["num_no"] for each in result["audit"]["found"]} == {12}
    page = files[1].read_text()
    assert "leakage audit, simulated" in page and "dedicated workers" in page and "<table>" in page


def test_the_command_audits_alone_where_it_is_asked_to_and_errs_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ("--audit-only", "--trials", 2, "--load", 0, "--prompt-tokens", 256, "--scope", "tenant")
    code, out, _ = run(monkeypatch, capsys, *how, "--threat-decision", "one company")
    assert code == 0 and "GPUs" not in out and "threat decision: one company" in out and "session" not in out
    code, _, err = run(monkeypatch, capsys, "--scope", "team")
    assert code == 2 and err.startswith("servetwin: error: unknown scope 'team'; known: global, application, tenant, ")
    code, _, err = run(monkeypatch, capsys, "--workload", "chat")
    assert code == 2 and err.startswith("servetwin: error: workload 'chat' has one tenant")

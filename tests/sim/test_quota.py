"""A quota: the largest budget of one class under which the other keeps its limit, where there is one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import cli
from sim.experiment.quota.largest import KINDS, Quota, quota, with_budget
from sim.experiment.runner import Outcome, Simulated
from sim.setup import Setup

BASE = Setup(slo="ttft_p99<1s")


class Crowd:
    """Each request of batch at once costs interactive `each` seconds; a seed is a few percent luckier than another."""

    def __init__(self, each: float, luck: float = 0.02, alone: float = 0.0) -> None:
        self.each, self.luck, self.alone = each, luck, alone
        self.played: list[tuple[int, int]] = []

    def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]:
        for setup in setups:
            budget = int(str(setup.engine.get("admission", ":1000000")).rpartition(":")[2])
            self.played.append((setup.seed, budget))
            ttft = (self.alone + self.each * budget) * (1.0 + self.luck * (setup.seed % 2))
            classes = {
                "interactive": {"ttft": {"p99": ttft}, "output_throughput": 1.0, "num_rejected": 0},
                "batch": {"ttft": {"p99": 9.0}, "output_throughput": 10.0 * budget, "num_rejected": 0},
            }
            yield Outcome({}, {"classes": classes})


def sought(runner: Crowd, setup: Setup = BASE, num: int = 4) -> Quota:
    return quota(setup, "batch", "interactive", runner, num=num)


@pytest.mark.parametrize("each", [0.3, 0.05, 0.011])
def test_the_largest_budget_that_surely_keeps_the_limit_is_found(each: float) -> None:
    """To 5 %. Mutation: the mean compared with the limit, not the interval's end."""
    runner = Crowd(each)
    found = sought(runner)
    assert found.verdict == "quota" and found.best is not None and found.best.budget is not None
    high = (1.01 + 0.0184) * each  # over two seeds at 1.0 and two at 1.02: t of 3 degrees, 3.18 * 0.0115 / 2
    assert found.best.budget * high < 1.0 <= max(found.best.budget + 1, 1.06 * found.best.budget) * high
    assert found.best.bought.mean == 10.0 * found.best.budget
    assert len(set(runner.played)) == len(runner.played), "nothing is played twice"


def test_each_seeds_own_budget_tells_how_much_is_luck() -> None:
    equal, lucky = sought(Crowd(0.01, luck=0.0)), sought(Crowd(0.01, luck=0.5))
    assert equal.of_seeds is not None and lucky.of_seeds is not None
    assert equal.of_seeds.half_width == 0.0 and 94 <= equal.of_seeds.mean < 100
    assert lucky.of_seeds.half_width > 10 and lucky.best is not None and lucky.best.budget is not None
    assert lucky.best.budget < 66, "what the unlucky seeds bear"


def test_where_no_limit_is_needed_it_is_said_and_nothing_is_sought() -> None:
    runner = Crowd(1e-7)
    found = sought(runner)
    assert found.verdict == "no limit needed" and found.best == found.unlimited and len(runner.played) == 4


def test_where_the_smallest_budget_breaks_the_limit_there_is_none() -> None:
    found = sought(Crowd(0.01, alone=2.0))
    assert found.verdict == "none" and found.best is None


def test_the_nearest_of_several_limits_decides() -> None:
    with_more = sought(Crowd(0.01), replace(BASE, slo="ttft_p99<9s,ttft_p99<0.5s"))
    assert with_more.best is not None and with_more.best.budget is not None and 44 < with_more.best.budget < 50


def test_a_budget_leaves_those_of_other_classes_and_other_knobs_alone() -> None:
    setup = replace(BASE, engine={"admission": "class_budgets,max_running=chat:9/batch:3,max_queued=batch:5"})
    changed = with_budget(setup, KINDS["max_running"], "batch", 7)
    assert changed.engine["admission"] == "class_budgets,max_running=chat:9/batch:7,max_queued=batch:5"
    rate = with_budget(BASE, KINDS["rate"], "batch", 500)
    assert rate.engine["admission"] == "token_buckets,by_class=true,rate=1e12,rates=batch:500"


def test_what_cannot_be_sought_is_refused() -> None:
    with pytest.raises(ValueError, match="a quota needs a limit to protect"):
        sought(Crowd(1.0), Setup())
    with pytest.raises(ValueError, match=r"is no limit for a class: bound its p50, p90 or p99"):
        sought(Crowd(1.0), Setup(slo="ttft<1s"))
    with pytest.raises(ValueError, match="the setup has admission 'shed_late'"):
        sought(Crowd(1.0, alone=2.0), replace(BASE, engine={"admission": "shed_late"}))
    with pytest.raises(ValueError, match="there is no class 'night'; known: interactive, batch"):
        quota(BASE, "night", "interactive", Crowd(1.0))
    with pytest.raises(ValueError, match="unknown budget 'slots'"):
        quota(BASE, "batch", "interactive", Crowd(1.0), "slots")


SHARED_SERVER = Setup(
    workload="chat", rate=30.0, num_requests=60, front_end="off", costs="datasheet", slo="ttft_p99<100ms",
    transforms=("classes,interactive=0.5,batch=0.5",), engine={"max_num_seqs": 8},
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_on_a_server_that_is_shared_buys_the_other_class_its_tail(kind: str) -> None:
    """By simulation, for each kind of budget: less of batch, a shorter tail of interactive."""
    found = quota(SHARED_SERVER, "batch", "interactive", Simulated(1), kind, num=2)
    assert found.unlimited.worst.mean > 1.0
    first = found.tried[0]
    assert first.worst.mean < 0.7 * found.unlimited.worst.mean
    assert first.bought.mean < found.unlimited.bought.mean


def test_the_command_answers_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "setup.toml"
    path.write_text(replace(SHARED_SERVER, slo="ttft_p99<1ms").to_toml())
    arguments = ["quota", str(path), "--num", "2", "--num-workers", "1", "--json", str(tmp_path / "q.json")]
    monkeypatch.setattr(sys, "argv", ["servetwin", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("none: interactive does not keep ttft p99 < 0.001 s even if batch gets")
    assert json.loads((tmp_path / "q.json").read_text())["verdict"] == "none"

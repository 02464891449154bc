"""A/B: the same requests in both arms, differences with their error, refusals where there is nothing to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from sim.experiment.ab.commands import print_comparison
from sim.experiment.ab.compare import Comparison, compare
from sim.experiment.ab.winner import winner
from sim.experiment.runner import Outcome, Simulated, play, seeded
from sim.setup import Setup

SMALL = Setup(workload="chat", rate=8.0, num_requests=60)
HERE = Simulated(num_workers=1)


class Drawn:
    """A runner whose outcomes are drawn, not played: one metric, known truth."""

    def __init__(self, effect: float, saturated: bool = False) -> None:
        self.effect, self.saturated, self.num_runs = effect, saturated, 0

    def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]:
        for setup in setups:
            self.num_runs += 1
            shared = np.random.default_rng(setup.seed).gamma(10.0, 1.0)
            is_b = setup.engine.get("batching") == "static"
            own = np.random.default_rng((setup.seed, is_b)).normal(0.0, 0.05)
            value = shared * (1.0 + self.effect * is_b) + own
            metrics = {"ttft": {"mean": value}, "saturation": {"is_saturated": self.saturated}, "goodput": value}
            yield Outcome({"engine": {"batching": "static" if is_b else "chunked"}, "workload": {"name": "x"}}, metrics)


A = Setup()
B = Setup(engine={"batching": "static"})
ONE = ("ttft.mean",)


def test_an_arm_against_itself_is_the_same_to_the_bit() -> None:
    found = compare(SMALL, SMALL, HERE, num=2)
    assert not found.factor
    assert {each.verdict for each in found.compared} == {"exactly equal"}


def test_a_change_of_policy_is_found_and_named() -> None:
    found = compare(SMALL, replace(SMALL, engine={"batching": "static"}), HERE, num=3, metrics=("e2e.mean",))
    assert list(found.factor) == ["engine.batching"]
    (e2e,) = found.compared
    assert e2e.effect.difference.low > 0 and e2e.verdict == "B is higher"


def test_results_are_equal_on_any_number_of_processes() -> None:
    setups = seeded(SMALL, 2)
    assert repr(list(Simulated(2).run(setups))) == repr([play(setup) for setup in setups])  # nan is not equal to itself


def test_two_percent_are_found_beneath_a_spread_of_thirty() -> None:
    (found,) = compare(A, B, Drawn(0.02), num=20, metrics=ONE).compared
    assert found.effect.relative.low < 0.02 < found.effect.relative.high and found.verdict == "B is higher"
    assert found.effect.correlation > 0.99


def test_equal_arms_with_seeds_of_their_own_are_told_apart_one_time_in_twenty() -> None:
    """A/A over 200 comparisons: 5 % within what chance allows (binomial, 99.9 %)."""
    rejected = 0
    for index in range(200):
        found = compare(replace(A, seed=1000 * index), replace(A, seed=1000 * index), Drawn(0.0), num=10, metrics=ONE,
                        independent=True)  # fmt: skip
        rejected += found.compared[0].p_adjusted < 0.05
    assert 2 <= rejected <= 20


def test_it_goes_on_until_the_difference_is_known_well_enough() -> None:
    coarse, fine = Drawn(0.1), Drawn(0.1)
    compare(A, B, coarse, num=4, metrics=ONE, precision=0.02)
    found = compare(A, B, fine, num=4, metrics=ONE, precision=0.006)
    assert coarse.num_runs < fine.num_runs == 2 * found.num
    assert found.compared[0].effect.relative.half_width <= 0.006
    assert not found.notes


def test_a_precision_out_of_reach_is_said() -> None:
    found = compare(A, B, Drawn(0.1), num=4, metrics=ONE, precision=1e-6, most=16)
    assert found.num <= 16 and "is not known to 0.0001 %" in found.notes[0]


def test_latencies_of_an_overloaded_arm_are_not_compared() -> None:
    found = compare(A, B, Drawn(0.1, saturated=True), num=3, metrics=("ttft.mean", "goodput"))
    assert found.saturated == {"A": 3, "B": 3} and found.refused == ("ttft.mean",)
    assert [each.metric for each in found.compared] == ["goodput"]


def test_different_loads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different loads \(workload\.name\)"):
        compare(SMALL, replace(SMALL, workload="azure-conv"), HERE, num=2)


def test_more_than_the_named_factor_is_refused() -> None:
    b = replace(SMALL, engine={"batching": "static", "block_size": 32})
    with pytest.raises(ValueError, match=r"besides 'engine\.batching' they differ in"):
        compare(SMALL, b, HERE, num=2, factor="engine.batching")


def test_an_unknown_metric_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown metric 'ttft\.p42'; known: .*ttft\.p50"):
        compare(SMALL, SMALL, HERE, num=2, metrics=("ttft.p42",))


def test_one_replication_is_none() -> None:
    with pytest.raises(ValueError, match="give no interval"):
        compare(SMALL, SMALL, HERE, num=1)


# -- which is better ---------------------------------------------------------------------------------------------------


def outcomes(throughput: float, tail: float, batch_tail: float = 1.0, num: int = 12) -> list[Outcome]:
    """Runs with a common luck of a few percent."""
    luck = 1.0 + 0.03 * np.random.default_rng(7).standard_normal(num)
    own = 1.0 + 0.001 * np.random.default_rng(int(1e3 * (throughput + tail + batch_tail))).standard_normal((3, num))
    return [
        Outcome(
            {},
            {
                "output_throughput": throughput * by * own[0, i],
                "ttft": {"p99": tail * by * own[1, i]},
                "classes": {"batch": {"ttft": {"p99": batch_tail * by * own[2, i]}}},
            },
        )
        for i, by in enumerate(luck.tolist())
    ]


def test_more_throughput_wins_where_no_tail_pays() -> None:
    found = winner(outcomes(100.0, 1.0), outcomes(105.0, 1.0))
    assert found.arm == "B" and "output throughput" in found.reason


def test_a_shorter_tail_wins_at_equal_throughput() -> None:
    assert winner(outcomes(100.0, 1.0), outcomes(100.0, 1.1)).arm == "A"


def test_s61_the_largest_throughput_does_not_win_if_a_tail_pays_for_it() -> None:
    """Mutation: TAILS left out of the paths, or only the first sure path judged; both make B win."""
    found = winner(outcomes(100.0, 1.0), outcomes(130.0, 1.2))
    assert found.arm is None and "B by output throughput" in found.reason and "A by ttft p99" in found.reason


def test_s61_nor_if_one_class_pays_for_it() -> None:
    """Mutation: the tails of classes left out; B wins then."""
    found = winner(outcomes(100.0, 1.0), outcomes(130.0, 1.0, batch_tail=1.2))
    assert found.arm is None and "A by ttft p99 of batch" in found.reason


def test_equal_arms_have_no_winner() -> None:
    assert winner(outcomes(100.0, 1.0), outcomes(100.0, 1.0)).arm is None


@pytest.mark.parametrize("arm", [{}, {"engine": {"batching": "static"}}])
def test_s23_the_scope_of_sharing_is_printed_whether_or_not_the_arms_differ(arm: dict[str, dict[str, str]]) -> None:
    shared = {"isolation": "tenant"}
    other = replace(SMALL, engine={**shared, **arm.get("engine", {})})
    text = _printed(compare(replace(SMALL, engine=shared), other, HERE, num=2, metrics=ONE))
    assert "prefixes shared: in both arms tenant; cache cold at the start" in text


def test_s23_where_the_scope_is_what_differs_each_arms_is_printed_with_why() -> None:
    shared = replace(SMALL, engine={"isolation": "global", "threat_decision": "one customer"})
    text = _printed(compare(shared, replace(SMALL, engine={"isolation": "tenant"}), HERE, num=2, metrics=ONE))
    assert "prefixes shared: A global, as decided: one customer; B tenant; cache cold at the start" in text
    off = replace(SMALL, engine={"enable_prefix_caching": False})
    text = _printed(compare(off, off, HERE, num=2, metrics=ONE))
    assert "prefixes shared: in both arms nobody: prefix caching is off" in text


def _printed(found: Comparison) -> str:
    text = StringIO()
    print_comparison(Console(file=text, width=100, color_system=None), "a", "b", found)
    return text.getvalue()


def test_arms_are_played_by_turns_so_that_a_machine_that_drifts_does_so_for_both() -> None:
    order: list[str] = []

    class Watched(Drawn):
        def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]:
            order.extend("B" if each.engine else "A" for each in setups)
            yield from super().run(setups)

    compare(A, B, Watched(0.1), num=3, metrics=ONE)
    assert order == ["A", "B"] * 3

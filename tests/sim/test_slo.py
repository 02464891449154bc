"""Objectives: what they mean, over all arrivals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sim.slo import Objective, attainment, judge, parse_objectives


def values(ttft: list[float], tpot: list[float]) -> dict[str, np.ndarray]:
    e2e = [1.0] * len(ttft)
    return {"ttft": np.array(ttft), "tpot": np.array(tpot), "e2e": np.array(e2e)}


def test_an_objective_reads_as_it_is_said() -> None:
    assert parse_objectives("ttft_p99<1s, tpot<50ms") == (
        Objective("ttft", 1.0, 99.0),
        Objective("tpot", 0.05),
    )
    assert parse_objectives("queue_delay_p99.9<=250us") == (Objective("queue_delay", 0.00025, 99.9),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must read like"),
        ("ttft", "must read like"),
        ("ttft<1", "must read like"),
        ("ttft>1s", "must read like"),
        ("ttfb<1s", "unknown metric 'ttfb'"),
        ("ttft<1h", "unknown unit 'h'"),
        ("ttft_p100<1s", "must lie between 0 and 100"),
        ("ttft<0s", "above 0"),
        ("ttft<1.2.3s", "is not a number"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_objectives(text)


def test_attainment_counts_all_arrivals_also_those_never_answered() -> None:
    """Four answered of five; one slow to start, one slow to go on."""
    figures = values([0.5, 0.5, 2.0, 0.5], [0.01, 0.09, 0.01, math.nan])
    objectives = parse_objectives("ttft<1s,tpot<50ms")
    assert attainment(objectives, figures, num_arrivals=5) == 2 / 5


def test_an_answer_of_one_token_breaks_no_promise_about_the_gaps() -> None:
    assert attainment(parse_objectives("tpot<50ms"), values([0.1], [math.nan]), 1) == 1.0


def test_a_percentile_is_judged_over_the_answered() -> None:
    (kept,) = judge(parse_objectives("ttft_p50<1s"), values([0.5, 0.7, 9.0], [0.1] * 3), num_arrivals=4)
    assert (kept.measured, kept.is_met) == (0.7, True)


def test_a_percentile_of_nothing_is_not_met() -> None:
    (kept,) = judge(parse_objectives("ttft_p50<1s"), values([], []), num_arrivals=3)
    assert math.isnan(kept.measured) and not kept.is_met

"""Intervals hold what they say they hold, by scipy and statsmodels' textbook answers and by repetition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from sim.experiment.statistics import (
    Looks,
    batch_means,
    equivalence,
    holm,
    mean_interval,
    paired_effect,
    replications_needed,
    share_interval,
    warm_up,
)

RNG = np.random.default_rng


def test_the_interval_is_scipys() -> None:
    values = RNG(1).normal(10.0, 2.0, 12).tolist()
    ours, theirs = mean_interval(values), stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)


def test_a_share_is_scipys() -> None:
    for hits, num in ((0, 10), (3, 10), (10, 10), (997, 1000)):
        theirs = stats.binomtest(hits, num).proportion_ci(0.95)
        ours = share_interval(hits, num)
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_a_paired_effect_is_scipys() -> None:
    a = RNG(2).normal(5.0, 1.0, 15)
    b = a + RNG(3).normal(0.1, 0.05, 15)
    ours, theirs = paired_effect(a.tolist(), b.tolist()), stats.ttest_rel(b, a)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert ours.correlation > 0.99


def test_the_same_arm_twice_differs_by_exactly_zero() -> None:
    values = RNG(4).normal(size=10).tolist()
    effect = paired_effect(values, values)
    assert effect.is_exactly_zero and effect.p_value == 1.0


def test_pairs_see_what_independent_arms_cannot() -> None:
    """A change of 2 % beneath a spread of 30 %."""
    a = RNG(5).gamma(10.0, 1.0, 20)
    assert paired_effect(a.tolist(), (1.02 * a).tolist()).p_value < 1e-6
    assert stats.ttest_ind(a, 1.02 * RNG(6).gamma(10.0, 1.0, 20)).pvalue > 0.05


def test_holm_is_the_worked_example() -> None:
    """p = .01, .04, .03, .005 among four: .03, .06, .06, .02 (the usual textbook table)."""
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


def test_holm_lets_through_one_family_in_twenty() -> None:
    draws = RNG(7).uniform(size=(4000, 5))
    found = sum(min(holm(dict(zip("abcde", row, strict=True))).values()) < 0.05 for row in draws.tolist())
    assert 0.035 < found / 4000 < 0.065


def test_equivalence_has_three_answers() -> None:
    noise = RNG(8).normal(0.0, 0.01, 20)
    base = RNG(9).normal(10.0, 1.0, 20)
    same, far = (paired_effect(base.tolist(), (base + shift + noise).tolist()) for shift in (0.0, 1.0))
    few = paired_effect([10.0, 11.0, 9.0], [10.3, 10.7, 9.1])
    assert equivalence(same, 0.1).verdict == "equivalent"
    assert equivalence(far, 0.1).verdict == "different"
    assert equivalence(few, 0.1).verdict == "undecided"


def test_equivalence_is_wrongly_claimed_once_in_twenty_at_the_margin() -> None:
    rng, claimed = RNG(10), 0
    for _ in range(2000):
        a = rng.normal(size=10)
        effect = paired_effect(a.tolist(), (a + rng.normal(0.5, 0.3, 10)).tolist())
        claimed += equivalence(effect, 0.5).verdict == "equivalent"
    assert 0.03 < claimed / 2000 < 0.07


def test_as_many_as_are_said_to_be_needed_are_enough() -> None:
    pilot = RNG(11).normal(10.0, 2.0, 20).tolist()
    num = replications_needed(pilot, half_width=0.5)
    deviation = float(np.std(pilot, ddof=1))
    assert stats.t.ppf(0.975, num - 1) * deviation / math.sqrt(num) <= 0.5
    fewer = int(num * 0.9)
    assert stats.t.ppf(0.975, fewer - 1) * deviation / math.sqrt(fewer) > 0.5


def test_looking_again_and_again_keeps_its_word() -> None:
    """Stopped at the first narrow interval, the truth is outside at most once in twenty; a plain interval is not so."""
    rng, missed, missed_plainly = RNG(12), 0, 0
    for _ in range(1000):
        values = rng.exponential(1.0, 640).tolist()
        looks = Looks(half_width=0.15)
        while True:
            look = looks.look(values[: looks.next_num])
            if look.is_enough or looks.next_num > len(values):
                break
        missed += not look.interval.low <= 1.0 <= look.interval.high
        plain = next(
            (each for num in range(10, 640, 5) if (each := mean_interval(values[:num])).relative <= 0.15), None
        )
        missed_plainly += plain is not None and not plain.low <= 1.0 <= plain.high
    assert missed / 1000 <= 0.05 < missed_plainly / 1000


def test_a_warm_up_is_found_where_it_is() -> None:
    noise = RNG(13).normal(0.0, 1.0, 2000)
    settling = noise + 20.0 * np.exp(-np.arange(2000) / 50.0)
    cut = warm_up(settling.tolist())
    assert cut is not None and 100 <= cut <= 400
    assert warm_up(noise.tolist()) in range(300)


def test_what_never_settles_is_said() -> None:
    assert warm_up(np.arange(500.0).tolist()) is None
    assert warm_up([1.0] * 20) is None  # too short


def test_batch_means_hold_the_truth_of_a_correlated_run() -> None:
    rng, held = RNG(14), 0
    for _ in range(200):
        noise = rng.normal(size=4000)
        values = np.empty(4000)
        values[0] = noise[0]
        for i in range(1, 4000):
            values[i] = 0.8 * values[i - 1] + noise[i]
        interval = batch_means(values.tolist())
        held += interval.low <= 0.0 <= interval.high
    assert held / 200 >= 0.90


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan]])
def test_no_interval_from_nothing(values: list[float]) -> None:
    with pytest.raises(ValueError, match="replication"):
        mean_interval(values)


def test_a_margin_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="margin"):
        equivalence(paired_effect([1.0, 2.0], [1.0, 2.1]), 0.0)

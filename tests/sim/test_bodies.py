"""One A/B in two bodies: when do they agree on the sign of an effect, and when on its size?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from sim.experiment.ab.bodies import agreements, compare_bodies
from sim.experiment.ab.compare import compare
from sim.experiment.runner import Outcome
from sim.setup import Setup

A, B = Setup(), Setup(engine={"batching": "static"})


class Body:
    """B is `effect` above A, give or take `noise`, both in shares of A."""

    def __init__(self, effect: float, noise: float, level: float = 1.0) -> None:
        self._effect, self._noise, self._level = effect, noise, level

    def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]:
        for setup in setups:
            is_b = setup.engine.get("batching") == "static"
            noise = self._noise * np.random.default_rng((setup.seed, is_b)).standard_normal()
            value = self._level * (1.0 + self._effect * is_b + noise)
            metrics = {"ttft": {"mean": value}, "saturation": {"is_saturated": False}}
            yield Outcome({"engine": {"batching": "static" if is_b else "chunked"}}, metrics)


def of(simulated: Body, live: Body, margin: float = 0.1) -> tuple[str, str]:
    there, here = (compare(A, B, body, num=10, metrics=("ttft.mean",)) for body in (simulated, live))
    (found,) = agreements(there, here, margin)
    return found.sign, found.size


@pytest.mark.parametrize(
    ("effect", "noise", "expected"),
    [
        (0.5, 0.01, ("agree", "agree")),
        (0.9, 0.01, ("agree", "disagree")),
        (-0.5, 0.01, ("disagree", "disagree")),
        (0.5, 0.3, ("agree", "undecided")),
        (0.0, 0.5, ("undecided", "undecided")),
    ],
)
def test_an_effect_of_a_half_is_held_against_what_the_live_body_shows(
    effect: float, noise: float, expected: tuple[str, str]
) -> None:
    """Levels do not matter: the live body is a hundred times slower."""
    assert of(Body(0.5, 0.01), Body(effect, noise, level=100.0)) == expected


def test_two_effects_that_are_surely_small_are_of_one_sign() -> None:
    assert of(Body(0.001, 0.001), Body(-0.001, 0.002)) == ("agree", "agree")


def test_exact_effects_are_told_apart_by_the_margin_alone() -> None:
    assert of(Body(0.5, 0.0), Body(0.55, 0.0), margin=0.1) == ("agree", "agree")
    assert of(Body(0.5, 0.0), Body(0.55, 0.0), margin=0.04) == ("agree", "disagree")


def test_sizes_are_wrongly_called_equal_one_time_in_twenty_at_most() -> None:
    """TOST at its worst: the true distance is the margin itself. 400 trials, binomial 99.9 %: 5 % and 3.6 % more."""
    num = 0
    for trial in range(400):
        seeds = [Setup(seed=1000 * trial), Setup(seed=1000 * trial, engine={"batching": "static"})]
        there = compare(*seeds, Body(0.5, 0.01), num=6, metrics=("ttft.mean",))
        here = compare(*seeds, Body(0.6, 0.02, level=2.0), num=6, metrics=("ttft.mean",), independent=True)
        (found,) = agreements(there, here, 0.1)
        num += found.size == "agree"
    assert num <= 0.086 * 400


def test_the_simulated_arms_have_the_live_bodys_settings_and_its_costs() -> None:
    played: list[Setup] = []

    class Watched(Body):
        def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]:
            played.extend(setups)
            yield from super().run(setups)

    def settle(setup: Setup) -> Setup:
        return Setup.from_dict({**setup.to_dict(), "engine": {**setup.engine, "num_blocks": 77}})

    body = Watched(0.5, 0.01)
    found = compare_bodies(A, B, body, body, settle, costs="mine.json", num=3, num_live=2, metrics=("ttft.mean",))
    assert (found.simulated.num, found.live.num) == (3, 2) and not found.simulated.notes
    assert [each.costs for each in played] == ["mine.json"] * 6 + ["auto"] * 4
    assert {each.engine["num_blocks"] for each in played} == {77}
    found = compare_bodies(A, B, body, body, settle, costs=None, num=3, num_live=2, metrics=("ttft.mean",))
    assert "sizes have no reason to agree" in found.simulated.notes[0]

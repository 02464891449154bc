"""Saturation: an overloaded run says so, a busy one does not."""

from __future__ import annotations

import pytest

from policies.config import EngineConfig
from sim.cost import AffineCost
from sim.saturation import Backlog, backlog
from sim.simulate import simulate
from sim.workload.generate import from_lengths
from sim.workload.streams import poisson_arrivals

CONFIG = EngineConfig(num_blocks=64, block_size=16, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64)


def run_at(load: float, seed: int, num: int = 2000) -> Backlog:
    """One server, ten steps of a tenth of a second a request: served at 1 a second."""
    workload = from_lengths(poisson_arrivals(load, num, seed), [1] * num, [10] * num)
    run = simulate(CONFIG, workload, AffineCost(per_step=0.1))
    return backlog(run.records, len(run.unfinished))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("load", [0.5, 0.8, 0.9])
def test_a_server_that_keeps_up_is_not_called_saturated(load: float, seed: int) -> None:
    assert not run_at(load, seed).is_saturated


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("load", [1.2, 1.5, 3.0])
def test_an_overloaded_server_is_and_says_by_how_much(load: float, seed: int) -> None:
    found = run_at(load, seed)
    assert found.is_saturated
    assert found.growth == pytest.approx(load - 1.0, rel=0.2)
    assert found.time_to_recover is not None and found.time_to_recover > 50
    assert "unserved" in found.reason or "longer" in found.reason


def test_a_queue_that_creeps_up_is_caught_by_its_trend() -> None:
    found = run_at(1.04, seed=1, num=6000)
    assert found.is_saturated


def test_a_handful_of_requests_tell_nothing() -> None:
    assert run_at(3.0, seed=0, num=50).reason == "too few requests to tell"

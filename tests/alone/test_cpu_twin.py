"""The twin on this machine: measured, simulated, played live; equal within margins, or the machine was not ours.

Timed, so by itself: `make alone` runs it when nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from backend.start import Body, start
from calibration.commands_body import noisy, play_probed, why_noisy
from calibration.measure import Measurement, measure
from calibration.offered import at_rate, largest_rate
from calibration.own import body_costs
from calibration.points import GRIDS
from calibration.twin import Played, Twin, compare
from sim.cost.body import BodyCost, BodyCosts
from sim.frontend import FrontEndTimes
from sim.simulate import simulate
from sim.workload.generate import poisson
from sim.workload.workload import Workload

SHORT = replace(GRIDS["cpu"], clients=(1, 2, 4, 8, 16), num_repeats=2)
REPEATS = 8
Count = Callable[[str, int], None]
Calibrate = Callable[[], Measurement]


@pytest.fixture(scope="module")
def body() -> Body:
    settings = {"max_model_len": 2048, "num_blocks": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    return start("small", "cpu", settings)


@pytest.fixture(scope="module")
def calibrate(body: Body, tmp_path_factory: pytest.TempPathFactory) -> Calibrate:
    return lambda: measure(body, SHORT, tmp_path_factory.mktemp("measured") / "small.jsonl")


@pytest.fixture(scope="module")
def measured(calibrate: Calibrate) -> Measurement:
    return calibrate()


@pytest.fixture(scope="module")
def costs(measured: Measurement) -> BodyCosts:
    return body_costs("small", measured)


@pytest.fixture(scope="module")
def workload() -> Workload:
    rng = np.random.default_rng(1)
    prompts = np.clip(rng.lognormal(np.log(100), 0.6, 64), 8, 600).astype(int).tolist()
    outputs = np.clip(rng.lognormal(np.log(30), 0.5, 64), 4, 120).astype(int).tolist()
    return poisson(prompts, outputs, rate=1.0, seed=3)


@pytest.fixture(scope="module", params=[0.5, 0.8], ids="at {} of the largest rate".format)
def utilisation(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(scope="module")
def twin(utilisation: float, body: Body, costs: BodyCosts, workload: Workload) -> Twin:
    return played(utilisation, body, costs, workload)


def played(utilisation: float, body: Body, costs: BodyCosts, workload: Workload) -> Twin:
    cost = BodyCost(costs)
    load = at_rate(workload, utilisation * largest_rate(body.config, workload, cost))
    return compare(
        lambda write: play_probed(body, load, write), body.config, load, cost,
        num_repeats=REPEATS, front_end=FrontEndTimes.off(**costs.front_end),
    )  # fmt: skip


def test_decisions_replay_equal_whatever_else_the_machine_does(twin: Twin, count: Count) -> None:
    count("live_decisions", twin.num_replayed)
    count("live_decisions_matched", sum(match.num_alike for match in twin.matches))
    assert not twin.divergences, twin.divergences[0]


def test_the_simulation_says_what_the_live_run_takes(
    twin: Twin, utilisation: float, measured: Measurement, calibrate: Calibrate, body: Body, workload: Workload
) -> None:
    """Within the margins surely, not by luck; and off by more only if a calibration of another minute says so too."""
    if reason := why_not_told(measured, twin):
        pytest.skip(reason)
    if off := surely_off(twin):
        measured = calibrate()
        twin = played(utilisation, body, body_costs("small", measured), workload)
        if reason := why_not_told(measured, twin):
            pytest.skip(f"{reason}; before that: {', '.join(off)}")
        assert not set(off) & set(surely_off(twin)), [str(each) for each in twin.differences]
    if undecided := [str(each) for each in twin.differences if each.margin and each.verdict == "undecided"]:
        pytest.skip(f"noisy: the live repeats differ too much to tell: {'; '.join(undecided)}")


def why_not_told(measured: Measurement, twin: Twin) -> str:
    if measured.is_noisy:
        return noisy(measured.others)
    return why_noisy(twin) if twin.is_noisy else ""


def surely_off(twin: Twin) -> list[str]:
    """Measures that are, and to which side."""
    return [
        f"{each.measure} too {'long' if each.error.mean > 0 else 'short'}"
        for each in twin.differences
        if each.verdict == "different"
    ]


def test_a_body_that_is_slower_than_its_costs_is_noticed(body: Body, costs: BodyCosts, workload: Workload) -> None:
    """The gate can fail: on steps a fifth longer than they are priced, and nothing else."""
    cost, door = BodyCost(costs), FrontEndTimes.off(**costs.front_end)
    load = at_rate(workload, 0.5 * largest_rate(body.config, workload, cost))
    slower = replace(cost, scale=1.2)
    twin = compare(
        lambda write: Played(simulate(body.config, load, slower, write, jumps=False, front_end=door)),
        body.config, load, cost, num_repeats=2, front_end=door,
    )  # fmt: skip
    assert {"tpot.mean", "e2e.mean"} <= set(twin.different)

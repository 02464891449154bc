"""Our own body measured, priced and held against its twin: the arithmetic of it, on a model too small to time well."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import liverun
from backend.start import Body, start
from calibration.journalled import TimedStep, timed_steps
from calibration.measure import Measurement, Taken, measure, read_measurement
from calibration.own import body_costs, table, work_of
from calibration.points import GRIDS, Load, Point
from calibration.probe import EVERY, Probing
from calibration.served import Service, own_steps
from calibration.twin import Played, PlayLive, compare
from policies.config import EngineConfig
from policies.journal import Write
from sim.cost import AffineCost
from sim.cost.body import BodyCost, BodyCosts, InService, body_behind, read_body_costs
from sim.cost.work import StepWork
from sim.simulate import simulate
from sim.workload.generate import poisson

ENGINE = EngineConfig(num_blocks=512, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64)
LOAD = poisson([32, 64, 100] * 6, [6, 9, 14] * 6, rate=200.0, seed=3)


@pytest.fixture(scope="module")
def body() -> Iterator[Body]:
    yield start("tiny", "cpu", {"max_model_len": 512, "num_blocks": 512, "max_num_seqs": 8})


@pytest.fixture(scope="module")
def measured(body: Body, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    return measure(body, GRIDS["cpu-small"], tmp_path_factory.mktemp("measured") / "tiny.jsonl")


# -- measuring -----------------------------------------------------------------------------------------------------


def test_every_part_is_measured_as_often_as_asked(measured: Measurement) -> None:
    grid = GRIDS["cpu-small"]
    assert {len(times) for part in ("layers", "decode", "step") for times in measured.times(part).values()} == {2}
    assert set(measured.times("decode")) == {(b, c) for b in grid.batches for c in grid.contexts}
    assert all(each.seconds > 0 and each.wall > 0 for each in measured.taken)
    assert len(measured.ceilings) == 3 and measured.about["kernels"]


def test_a_measurement_that_was_stopped_goes_on_where_it_was(body: Body, tmp_path: Path) -> None:
    path, done = tmp_path / "tiny.jsonl", 0

    def stop_at_20() -> None:
        nonlocal done
        done += 1
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(body, GRIDS["cpu-small"], path, stop_at_20)
    kept = read_measurement(path).taken
    path.write_text(path.read_text() + '{"part": "deco')  # as if it had been killed while it wrote
    whole = measure(body, GRIDS["cpu-small"], path)
    assert len(kept) == 20 and list(whole.taken[:20]) == list(kept)
    assert {len(times) for times in whole.times("decode").values()} == {2}


def test_measurements_of_another_body_do_not_mix(body: Body, tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    path.write_text(json.dumps({"about": {"device": "another"}}) + "\n")
    with pytest.raises(ValueError, match=r"measured with another .*device"):
        measure(body, GRIDS["cpu-small"], path)


@pytest.mark.parametrize("text", ["", "{", '{"part": "decode"}', '{"about": {}}\n{"part": "decode", "counts": [1]}'])
def test_what_is_no_measurement_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"measured\.jsonl: not a measurement") as complaint:
        read_measurement(path)
    assert "\n" not in str(complaint.value)


def test_a_point_names_its_part_and_has_its_counts() -> None:
    with pytest.raises(ValueError, match="has counts"):
        Point("decode", (1,))


# -- costs -----------------------------------------------------------------------------------------------------------


def exact(true: BodyCosts) -> Measurement:
    """A measurement of a body that takes exactly as long as these costs say."""
    cost = BodyCost(true)
    points = GRIDS["cpu"].points(2048, [(64, 64)])
    seconds = {
        "layers": true.layers.at, "head": true.head.at, "decode": true.decode.at, "prefill": true.prefill.at,
        "loop": true.loop.at, "step": lambda *counts: sum(cost.parts(work_of(*counts))), "prepare": lambda *_: 1e-9,
        "hash": lambda blocks: blocks * true.per_hashed_block,
    }  # fmt: skip
    taken = [Taken(point, seconds.get(point.part, lambda *_: 1e-3)(*point.counts), 1.0, 0.0) for point in points]
    works = [work_of(*point.counts) for point in points if point.part == "step"]
    steps = [TimedStep(work, cost.host_time(work) + cost.device_time(work)) for work in works]
    services = [
        Service(Load(0, 0.0), 1.0, steps, ask=2e-3, deliver=5e-4, others=0.0),
        Service(Load(8, 1.0), 1.0, steps, ask=None, deliver=5e-4, others=0.0),
    ]
    return Measurement({"kernels": "x"}, taken, [{"copy": 1.0, "gemm": 1.0}] * 3, services)


def plane(*axes: tuple[float, ...]) -> dict[tuple[int, ...], list[float]]:
    points: list[tuple[float, ...]] = [()]
    for nodes in axes:
        points = [(*point, node) for point in points for node in nodes]
    return {tuple(map(int, point)): [1e-3 + sum(1e-5 * each for each in point)] for point in points}


def true_costs() -> BodyCosts:
    grid = GRIDS["cpu"]
    return BodyCosts(
        name="true",
        layers=table(plane(tuple(map(float, grid.tokens)))),
        head=table(plane(tuple(map(float, grid.rows)))),
        decode=table(plane(tuple(map(float, grid.batches)), tuple(map(float, grid.contexts)))),
        prefill=table(plane(tuple(map(float, grid.chunks)), tuple(map(float, grid.starts)))),
        loop=table(plane(tuple(map(float, grid.running)))),
        in_service=InService(layers=1.1, per_step=2e-4, per_request=3e-5, per_token=1e-6),
        per_hashed_block=2e-6,
        band=1.0,
    )


def test_costs_that_were_true_come_out_again() -> None:
    true = true_costs()
    found = body_costs("found", exact(true))
    assert found.about["held_out_steps"]["p95"] < 1.0  # percent
    assert found.band < 1.01 and found.about["num_hiccups"] == 0
    assert found.about["sum_of_parts"]["mixed"]["p95"] < 0.1
    for work in (StepWork(8, 8, 8, 8, 4000), StepWork(136, 9, 9, 8, 800, 1, 128 * 129, 128)):
        assert BodyCost(found).device_time(work) == pytest.approx(BodyCost(true).device_time(work), rel=0.01)
        assert BodyCost(found).host_time(work) == pytest.approx(BodyCost(true).host_time(work), rel=0.01)


def test_what_a_request_waits_for_at_the_door_is_split_into_a_link_each_way_and_a_rest() -> None:
    assert body_costs("found", exact(true_costs())).front_end == pytest.approx(
        {"api_time_per_request": 1.5e-3, "engine_link_time": 5e-4}
    )


def test_a_pause_of_the_machine_is_no_price_of_a_step() -> None:
    true = true_costs()
    measured = exact(true)
    steps = list(measured.services[0].steps)
    steps[3] = TimedStep(steps[3].work, 20 * steps[3].duration)
    paused = replace(measured, services=[measured.services[0]._replace(steps=steps), measured.services[1]])
    found = body_costs("found", paused)
    work = StepWork(8, 8, 8, 8, 4000)
    assert BodyCost(found).device_time(work) == pytest.approx(BodyCost(true).device_time(work), rel=0.01)
    assert found.about["num_hiccups"] == 1


def test_noise_that_is_even_leaves_sums_of_steps_where_they_were() -> None:
    """Fitted in shares of each measured time, prices would come out low by the square of the noise."""
    true, rng = true_costs(), Random(1)
    measured = exact(true)
    noisy = [
        each._replace(steps=[TimedStep(w, t * rng.choice((0.6, 1.4))) for w, t, _ in each.steps for _ in range(20)])
        for each in measured.services
    ]
    found = BodyCost(body_costs("found", replace(measured, services=noisy)))
    works = [work for work, *_ in measured.services[0].steps]
    prices = sum(found.host_time(work) + found.device_time(work) for work in works)
    assert prices == pytest.approx(sum(t for service in noisy for _, t, _ in service.steps) / 40, rel=0.01)


def test_a_measured_body_is_priced_and_comes_back_from_its_file(measured: Measurement, tmp_path: Path) -> None:
    costs = body_costs("tiny", measured)
    path = tmp_path / "tiny.json"
    path.write_text(costs.to_json())
    again = read_body_costs(path)
    assert again.to_json() == costs.to_json() and body_behind(str(path)) == again
    assert again.about["model"]["name"] == "tiny" and again.band >= 1.0


def test_a_file_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(true_costs().to_json().replace("0.0002", "0.0003", 1))
    with pytest.raises(ValueError, match="does not match its hash"):
        read_body_costs(path)


def test_service_that_is_missing_is_named(measured: Measurement) -> None:
    with pytest.raises(ValueError, match="nothing was measured of service"):
        body_costs("tiny", replace(measured, services=()))


def test_a_part_that_is_missing_is_named(measured: Measurement) -> None:
    without = replace(measured, taken=[each for each in measured.taken if each.point.part != "head"])
    with pytest.raises(ValueError, match="nothing was measured of head"):
        body_costs("tiny", without)


def test_a_table_rises_whatever_noise_says() -> None:
    found = table({(1,): [2.0, 3.0], (2,): [1.0], (4,): [4.0]})
    assert list(found.values) == sorted(found.values) and found.at(8.0) == 2 * found.at(4.0)


# -- the twin ----------------------------------------------------------------------------------------------------------


def test_a_journal_tells_what_each_step_computed_and_took() -> None:
    """Of a simulated run, whose steps take what their cost says: so both must agree to the last bit but the clock's."""
    cost, lines = AffineCost(3e-3, 2e-5, 1e-4), list[str]()
    simulate(ENGINE, LOAD, cost, lines.append, jumps=False)
    steps = timed_steps(lines)
    assert len(steps) > 20 and sum(step.work.num_prefills for step in steps) >= 18
    for step in steps:
        assert step.duration == pytest.approx(cost.device_time(step.work), abs=1e-9)
    assert sum(step.work.num_sampled for step in steps) == sum([6, 9, 14] * 6)


def test_overlapping_steps_have_no_time_of_their_own() -> None:
    lines: list[str] = []
    simulate(replace(ENGINE, async_depth=2), LOAD, AffineCost(3e-3), lines.append, jumps=False)
    with pytest.raises(ValueError, match="two steps in flight"):
        timed_steps(lines)


def live_of(*factors: float) -> PlayLive:
    """A body that is another simulation, each repeat so much slower than the costs."""
    left = list(factors)

    def play(write: Write) -> Played:
        return Played(simulate(ENGINE, LOAD, replace(COST, scale=left.pop(0)), write, jumps=False))

    return play


COST = BodyCost(true_costs())


def test_equal_bodies_are_found_equal_and_their_decisions_too() -> None:
    twin = compare(live_of(1.0, 1.0, 1.0), ENGINE, LOAD, COST, num_repeats=3)
    assert {each.verdict for each in twin.differences if each.margin} == {"equal"}
    assert not twin.divergences and twin.num_replayed > 100
    assert all(match.rate == 1.0 for match in twin.matches) and abs(twin.cost_error) < 2e-3


def test_a_body_slower_than_its_costs_is_found_different() -> None:
    twin = compare(live_of(1.5, 1.51, 1.49), ENGINE, LOAD, COST, num_repeats=3)
    verdicts = {each.measure: each.verdict for each in twin.differences}
    assert verdicts["tpot.mean"] == verdicts["e2e.mean"] == "different"
    assert twin.cost_error == pytest.approx(1 / 1.5 - 1, abs=0.01)
    assert not twin.divergences  # replayed under its own times, each is equal all the same


def test_repeats_that_differ_too_much_decide_nothing() -> None:
    twin = compare(live_of(0.7, 1.3, 1.0), ENGINE, LOAD, COST, num_repeats=3)
    assert {each.measure: each.verdict for each in twin.differences}["tpot.mean"] == "undecided"


def test_a_machine_that_drifts_is_followed_by_the_probes_between_its_steps() -> None:
    """Each repeat on a machine of another speed, which its probes show and its steps, these holding the probes too."""
    cost = BodyCost(replace(true_costs(), about={"probe": 4e-3, "sensitivity": 1.0}))
    speeds = iter([1.1, 1.4, 1.05, 0.9])  # the second is another machine

    def play(write: Write) -> Played:
        speed = next(speeds)
        slower = replace(cost.with_time_per_step(4e-3 / EVERY), scale=speed)
        run = simulate(ENGINE, LOAD, slower, write, jumps=False)
        return Played(run, [4e-3 * speed] * (run.num_plans // EVERY))

    twin = compare(play, ENGINE, LOAD, cost, num_repeats=3)
    assert twin.slowness == pytest.approx([1.1, 1.05, 0.9]) and [live.slowness for live in twin.set_aside] == [1.4]
    assert not twin.is_noisy
    by_name = {each.measure: each for each in twin.differences}
    assert by_name["e2e.mean"].verdict == "equal" and abs(by_name["e2e.mean"].error.mean) < 1e-6
    assert by_name["e2e.mean"].as_calibrated.half_width > 0.05
    assert abs(twin.cost_error) < 0.02 and all(match.rate == 1.0 for match in twin.matches)


def test_a_machine_that_is_never_as_fast_as_at_the_calibration_is_noisy() -> None:
    cost = BodyCost(replace(true_costs(), about={"probe": 4e-3, "sensitivity": 1.0}))
    num_played = 0

    def play(write: Write) -> Played:
        nonlocal num_played
        num_played += 1
        return Played(simulate(ENGINE, LOAD, cost, write, jumps=False), [8e-3])

    twin = compare(play, ENGINE, LOAD, cost, num_repeats=3)
    assert twin.is_noisy and num_played == 6


def test_a_probe_runs_behind_every_so_many_steps_and_is_no_part_of_any(body: Body) -> None:
    """Live: what it takes is taken off the step that it followed."""
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.05)

    journal: list[str] = []
    probing = Probing(body.executor(), work)
    liverun.play(body, poisson([8] * 4, [12] * 4, rate=1e4), journal.append, executor=probing)
    steps = timed_steps(journal)
    own = own_steps(steps, probing.times)
    assert calls == len(probing.times) == len(steps) // EVERY >= 1
    probed = [index for index in range(len(steps)) if index % EVERY == EVERY - 1]
    assert all(steps[i].duration > 0.05 and own[i].duration < steps[i].duration - 0.049 for i in probed)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_how_far_steps_follow_the_probe_is_told_by_the_loads_served(power: float) -> None:
    true = true_costs()
    measured = exact(true)
    steps = measured.services[0].steps
    services = [
        Service(Load(1, 1.0), 1.0, [TimedStep(w, t * by**power) for w, t, _ in steps], 2e-3, 5e-4, 0.0, 4e-3 * by)
        for by in (0.8, 0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.25)
    ]
    found = body_costs("found", replace(measured, services=services))
    assert found.about["sensitivity"] == pytest.approx(power, abs=0.02)
    work = StepWork(8, 8, 8, 8, 4000)
    assert BodyCost(found).device_time(work) == pytest.approx(BodyCost(true).device_time(work), rel=0.02)


def test_times_are_told_at_the_usual_speed_of_the_machine() -> None:
    """A machine twice as slow for one measurement shows it in the probe, and the time is halved."""
    point, steps = Point("layers", (1,)), [TimedStep(StepWork(1, 1, 1, 1, 1), 2e-3)]
    taken = [Taken(point, 1.0, 1.0, 0.0, 5e-3), Taken(point, 2.0, 2.0, 0.0, 1e-2), Taken(point, 1.0, 1.0, 0.0, 5e-3)]
    services = [Service(Load(1, 1.0), 1.0, steps, None, 0.0, 0.0, probe) for probe in (4e-3, 4e-3, 8e-3)]
    measured = Measurement({}, taken, (), services)
    assert measured.times("layers") == {(1,): [1.0, 1.0, 1.0]}
    assert [steps[0].duration for steps in measured.served(sensitivity=0.0)] == pytest.approx([2e-3] * 3)
    assert [steps[0].duration for steps in measured.served(sensitivity=1.0)] == pytest.approx([2e-3, 2e-3, 1e-3])


def test_one_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing of chance"):
        compare(live_of(1.0), ENGINE, LOAD, COST, num_repeats=1)

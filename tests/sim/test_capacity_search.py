"""The largest rate at objectives, and the plan that follows, against queueing theory and bounds known beforehand."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy.optimize import brentq

from sim.cost.linear import LinearCost
from sim.cost.server import ServerCosts
from sim.experiment.capacity.answer import capacity
from sim.experiment.capacity.commands import print_capacity
from sim.experiment.capacity.misses import Curve, settled, steady, terms_of
from sim.experiment.capacity.observed import Here, Observed, Processes, Replication, Task, Usage, observe
from sim.experiment.capacity.page import page_of
from sim.experiment.capacity.plan import Capacity, Plan, pareto
from sim.experiment.capacity.record import record_of
from sim.experiment.capacity.replications import day_curve, source_of, unit_gaps
from sim.experiment.capacity.slo_rate import SloRate, Unmet, slo_rate
from sim.experiment.capacity.tune import tune
from sim.experiment.statistics import Interval
from sim.setup import Setup
from sim.slo import parse_objectives

TOKEN_TIME = 1e-3
PROMPT = 64
SERVICE = PROMPT * TOKEN_TIME


@pytest.fixture
def linear(tmp_path: Path) -> str:
    """A server whose steps take a millisecond a token, and nothing else."""
    return stored(tmp_path, LinearCost(per_step=0.0, per_token=TOKEN_TIME))


def stored(folder: Path, cost: LinearCost) -> str:
    path = folder / "costs.json"
    path.write_text(ServerCosts("line", cost).to_json())
    return str(path)


def one_at_a_time(costs: str, slo: str, **others: object) -> Setup:
    """Equal prompts, one token back, one request at once: M/D/1 with a service of 64 ms."""
    setup = Setup(
        workload=f"fixed,num_prompt_tokens={PROMPT},num_output_tokens=1",
        num_requests=600,
        costs=costs,
        slo=slo,
        engine={"max_num_seqs": 1, "num_blocks": 512, "max_num_batched_tokens": 2048, "max_model_len": 2048},
    )
    return replace(setup, **others)  # type: ignore[arg-type]


def share_waiting_less(time: float, rate: float, service: float) -> float:
    """P(W <= time) of M/D/1 (Erlang, 1909)."""
    terms = (
        (rate * (k * service - time)) ** k / math.factorial(k) * math.exp(-rate * (k * service - time))
        for k in range(int(time / service) + 1)
    )
    return (1.0 - rate * service) * sum(terms)


def test_the_rate_is_erlangs_where_one_is_served_at_a_time(linear: str) -> None:
    """The wait's 95th percentile is 5 services where theory says so, and the interval holds that rate."""
    found = capacity(one_at_a_time(linear, f"queue_delay_p95<{5 * SERVICE:g}s"), Here(), precision=0.08).found
    truth = brentq(lambda rate: share_waiting_less(5 * SERVICE, rate, SERVICE) - 0.95, 1.0, 15.0)
    assert isinstance(found, SloRate) and found.by == "objective"
    assert found.rate.low < truth < found.rate.high
    assert found.rate.relative <= 0.08


def in_batches(costs: str, slo: str, **others: object) -> Setup:
    """Prompts of 64 and answers of 64, 32 at once: 127 tokens to compute for each request."""
    setup = Setup(
        workload=f"fixed,num_prompt_tokens={PROMPT},num_output_tokens=64",
        num_requests=400,
        costs=costs,
        slo=slo,
        engine={"max_num_seqs": 32, "num_blocks": 4096, "max_num_batched_tokens": 2048, "max_model_len": 2048},
    )
    return replace(setup, **others)  # type: ignore[arg-type]


def test_with_no_objective_in_the_way_the_rate_is_the_bound_of_linear_costs(linear: str) -> None:
    """T18: (tokens a second) / (prompt + answer - 1)."""
    found = capacity(in_batches(linear, "e2e_p99<1000s", num_requests=200), Here())
    assert isinstance(found.found, SloRate) and found.found.by == "bound"
    assert found.found.rate.low < (1.0 / TOKEN_TIME) / (PROMPT + 64 - 1) <= found.found.rate.high
    assert found.found.rate.relative < 0.01


def test_an_overloaded_run_lends_no_number(tmp_path: Path) -> None:
    """Where the bound is not known beforehand runs find it: kept below, overloaded above, and nothing read there."""
    costs = stored(tmp_path, LinearCost(per_step=1e-9, per_token=TOKEN_TIME, free_tokens=1e-6))
    found = capacity(one_at_a_time(costs, "e2e_p99<1000s", num_requests=800), Here(), precision=0.1)
    assert isinstance(found.found, SloRate) and found.found.by == "stability"
    assert found.found.rate.low < 1.0 / SERVICE < found.found.rate.high
    above = [point for point in found.points if point.attained is None]
    assert above and all(point.rate > found.found.low and point.goodput is None for point in above)


def test_what_no_rate_keeps_is_said_to_be_infeasible(linear: str) -> None:
    """A prompt alone takes 64 ms."""
    found = capacity(one_at_a_time(linear, "ttft_p99<60ms", num_requests=300), Here())
    assert isinstance(found.found, Unmet) and found.plan is None and found.num_gpus == 0
    assert found.found.missed == {"ttft p99 < 0.06 s": 1.0}


def test_a_plan_is_never_below_the_rate_over_that_of_a_replica() -> None:
    for rate in np.geomspace(0.01, 1e4, 200):
        for low, mean, high in ((9.0, 10.0, 11.0), (0.5, 3.0, 5.5), (1e-3, 1.0, 2.0)):
            plan = Plan.of(float(rate), Interval(mean, low, high, 8))
            assert plan.num_replicas >= math.ceil(rate / mean) and plan.fewest <= plan.num_replicas == plan.most
            assert plan.num_replicas * low >= rate * (1 - 1e-9)


def test_the_plan_serves_the_rate_that_was_asked_for_and_its_price_follows(linear: str) -> None:
    setup = one_at_a_time(linear, f"queue_delay_p95<{5 * SERVICE:g}s", num_requests=400)
    found = capacity(setup, Here(), rate=50.0, precision=0.2, price=3.6)
    assert isinstance(found.found, SloRate) and found.plan is not None
    assert found.num_gpus == math.ceil(50.0 / found.found.rate.low)
    assert found.headroom == pytest.approx(found.num_gpus * found.found.rate.mean / 50.0 - 1.0)
    assert found.headroom_without_one == pytest.approx(found.headroom - found.found.rate.mean / 50.0)
    assert found.price_per_million is not None  # 1 answer token a request; 3.6 $/h is a tenth of a cent a second
    assert found.price_per_million[0] == pytest.approx(1e6 * found.num_gpus * 1e-3 / 50.0)
    assert found.price_per_million[1] == pytest.approx(found.price_per_million[0] / (PROMPT + 1))


def test_costs_twice_as_high_at_half_the_limit_are_the_clock_at_half_speed(tmp_path: Path, linear: str) -> None:
    """The band is read off runs at one cost; a search at the other cost must agree."""
    slower = tmp_path / "slower"
    slower.mkdir()
    costs = stored(slower, LinearCost(per_step=0.0, per_token=1.2 * TOKEN_TIME))
    banded = tmp_path / "banded"
    banded.mkdir()
    about = stored(banded, LinearCost(per_step=0.0, per_token=TOKEN_TIME, band=1.2))
    slo = f"queue_delay_p95<{5 * SERVICE:g}s"
    band = capacity(one_at_a_time(about, slo, num_requests=400), Here(), precision=0.1).band
    found = capacity(one_at_a_time(costs, slo, num_requests=400), Here(), precision=0.1).found
    assert band is not None and isinstance(found, SloRate)
    assert band.high_cost.low < found.rate.mean < band.high_cost.high
    truth = brentq(lambda rate: share_waiting_less(5 * SERVICE, rate, 1.2 * SERVICE) - 0.95, 1.0, 13.0)
    assert band.high_cost.low < truth < band.high_cost.high < band.low_cost.low


# -- the search itself, on misses that are drawn ----------------------------------------------------------------------


class Drawn:
    """Requests miss with log odds that grow by 20 with the log of the rate; half of them do at `even`."""

    def __init__(self, even: float, other: float | None = None) -> None:
        self.even, self.other, self.num_runs = even, other or even, 0

    def play(self, tasks: Sequence[Task]) -> list[Observed]:
        return [self._run(task) for task in tasks]

    def _run(self, task: Task) -> Observed:
        assert isinstance(task.load, Replication)
        self.num_runs += 1
        rate, number, length = task.load
        luck = np.random.default_rng((task.setup.seed, number))  # the same at every rate
        class_of = luck.integers(0, 2, length)
        even = np.where(class_of == 0, self.even, self.other)
        odds = (rate / even) ** 20 * luck.gamma(4.0, 0.25)
        ttft = np.where(luck.random(length) < odds / (1.0 + odds), 2.0, 0.5)
        values = {"ttft": ttft, "tpot": ttft, "e2e": np.full(length, 1e-3), "queue_delay": ttft}
        arrivals = np.arange(length) / rate
        usage = Usage(1.0, 0.1, 0.5, 10.0, 0.01, "nothing: hardly anybody waited")
        return Observed(rate, arrivals, values, ("a", "b"), class_of, np.ones(length), False, usage)


def curve(player: Drawn, seed: int = 0, classes: Sequence[str] = (), start: float = 10.0) -> Curve:
    terms = terms_of(parse_objectives("ttft_p90<1s"), classes, 0.99)
    return Curve(Setup(seed=seed), terms, player, length=400, start=start, ceiling=1000.0)


TRUE = 10.0 * (0.1 / 0.9) ** (1 / 20)  # where one in ten misses, but for the spread of replications


def test_an_interval_of_95_percent_holds_the_rate_19_times_in_20() -> None:
    """Over 100 searches, each of few replications: 90 % or more (what chance leaves of 95 %)."""
    reference = slo_rate(curve(Drawn(10.0), seed=999), precision=0.005, first=60, most=2000)
    assert isinstance(reference, SloRate)
    found = [slo_rate(curve(Drawn(10.0), seed=1000 * seed), precision=0.03) for seed in range(100)]
    held = [isinstance(f, SloRate) and f.rate.low < reference.rate.mean < f.rate.high for f in found]
    assert sum(held) >= 90
    assert reference.rate.mean == pytest.approx(TRUE, rel=0.03)


def test_it_finds_the_rate_from_wherever_it_begins_and_with_few_runs() -> None:
    for start in (1.0, 5.0, 8.9, 40.0, 300.0):
        player = Drawn(10.0)
        found = slo_rate(curve(player, start=start), precision=0.05)
        assert isinstance(found, SloRate) and found.rate.mean == pytest.approx(TRUE, rel=0.05)
        assert player.num_runs < 70


def test_more_replications_are_played_for_a_narrower_interval() -> None:
    coarse, fine = Drawn(10.0), Drawn(10.0)
    slo_rate(curve(coarse), precision=0.05)
    found = slo_rate(curve(fine), precision=0.005, most=1000)
    assert isinstance(found, SloRate) and found.rate.relative < 0.008
    assert fine.num_runs > 2 * coarse.num_runs


def test_an_interval_that_stays_wide_is_said_to_be() -> None:
    found = slo_rate(curve(Drawn(10.0)), precision=1e-4, most=10)
    assert isinstance(found, SloRate) and not found.is_enough and found.num == 10


def test_the_class_that_is_worst_off_sets_the_rate() -> None:
    player = Drawn(20.0, other=10.0)
    all_together = slo_rate(curve(Drawn(20.0, other=10.0)), precision=0.05)
    each = slo_rate(curve(player, classes=("a", "b")), precision=0.05)
    assert isinstance(each, SloRate) and isinstance(all_together, SloRate)
    assert each.rate.mean == pytest.approx(TRUE, rel=0.05)
    assert all_together.rate.mean > 1.03 * each.rate.mean


class Faster(Drawn):
    """Where steps hold 4,096 tokens, a tenth more requests are served; slots make no difference."""

    def _run(self, task: Task) -> Observed:
        gain = 1.1 if task.setup.engine.get("max_num_batched_tokens") == 4096 else 1.0
        replication = task.load
        assert isinstance(replication, Replication)
        return replace(super()._run(task._replace(load=replication._replace(rate=replication.rate / gain))), rate=1.0)


def test_another_setting_is_recommended_where_it_surely_serves_more_and_by_as_much() -> None:
    player = Faster(10.0)
    searched = curve(player)
    found = slo_rate(searched)
    assert isinstance(found, SloRate)
    best, *others = tune(Setup(), player, searched, found, residents=20.0)
    assert (best.setting, best.value, best.pays) == ("max_num_batched_tokens", 4096, True)
    assert best.gain.mean == pytest.approx(math.log(1.1), rel=0.3) and "--max-num-batched-tokens 4096" in best.flags
    assert others and not any(each.pays for each in others)


def test_requests_count_from_when_the_system_has_filled_until_answers_would_be_written_alone() -> None:
    """The first hundred fill it, one answer takes as long as ten arrivals."""
    (run,) = Drawn(10.0).play([Task(Setup(), Replication(1.0, 0, 400))])
    filling = np.minimum(np.arange(400) / 100.0, 1.0) * 50.0
    run = replace(run, present=filling, values={**run.values, "e2e": np.full(400, 10.0)})
    assert settled([run]) == 100
    counted = np.flatnonzero(steady(run, 100))
    assert (counted[0], counted[-1], len(counted)) == (100, 389, 290)


# -- replications of a recording --------------------------------------------------------------------------------------


def recorded(folder: Path, rates: Sequence[float], num: int = 400) -> Setup:
    """A trace whose rate changes: `num` Poisson arrivals at each rate, lengths counted up."""
    luck = np.random.default_rng(1)
    times = np.cumsum(np.concatenate([luck.exponential(1.0 / rate, num) for rate in rates]))
    lines = [f"2023-11-16 18:{int(t // 60):02}:{t % 60:010.7f},{100 + i % 50},2" for i, t in enumerate(times)]
    path = folder / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return Setup(trace=str(path), slo="ttft_p99<1s")


def test_a_replication_has_the_rate_asked_for_and_whole_blocks_of_the_recording(tmp_path: Path) -> None:
    source = source_of(recorded(tmp_path, [2.0, 8.0]))
    drawn = source.draw(5.0, 0, 400)
    times = [item.request.arrival_time for item in drawn.items]
    assert times[-1] == pytest.approx(400 / 5.0)
    lengths = [item.request.prompt.num_tokens for item in drawn.items]
    assert all(lengths[start : start + 50] == list(range(100, 150)) for start in range(0, 400, 50))


def test_replications_meet_the_same_luck_at_every_rate_and_each_its_own(tmp_path: Path) -> None:
    source = source_of(recorded(tmp_path, [4.0]))
    slow, fast, other = source.draw(2.0, 0, 200), source.draw(4.0, 0, 200), source.draw(2.0, 1, 200)
    at = [np.array([item.request.arrival_time for item in each.items]) for each in (slow, fast, other)]
    assert np.allclose(at[0], 2.0 * at[1]) and not np.allclose(at[0], at[2])


def test_all_of_a_recording_is_drawn_before_any_of_it_again(tmp_path: Path) -> None:
    source = source_of(recorded(tmp_path, [4.0]))
    lengths = [
        tuple(round(gap, 9) for gap in np.diff([i.request.arrival_time for i in source.draw(1.0, n, 50).items])[:3])
        for n in range(8)
    ]
    assert len(set(lengths)) == 8


def test_the_drift_of_a_rate_is_taken_out_and_kept_for_the_day(tmp_path: Path) -> None:
    setup = recorded(tmp_path, [2.0, 8.0], num=2000)
    source = source_of(setup)
    gaps = unit_gaps([item.request.arrival_time for item in source.whole.items])
    assert gaps.mean() == pytest.approx(1.0)
    assert gaps[500:1500].mean() == pytest.approx(gaps[2500:3500].mean(), rel=0.05)
    assert gaps.std() == pytest.approx(1.0, rel=0.1)  # what is left is Poisson
    rates = day_curve(source.whole)
    assert rates[3] == pytest.approx(2.0, rel=0.25) and rates[-3] == pytest.approx(8.0, rel=0.25)


def test_the_day_gives_peak_and_mean_and_the_plan_is_for_the_busiest_part(tmp_path: Path) -> None:
    setup = replace(recorded(tmp_path, [2.0, 8.0], num=1500), gpu="l4", slo="e2e_p95<1s", engine={"max_num_seqs": 8})
    found = capacity(setup, Here(), precision=0.2)
    assert found.day is not None and found.plan is not None and isinstance(found.found, SloRate)
    assert found.plan.rate == max(found.day.rates) > 7.0
    assert found.day.peak >= found.plan.num_replicas >= found.day.mean >= 1.0
    assert found.check is not None and found.check.rate == pytest.approx(found.plan.rate, rel=0.2)


# -- refusals, and the rest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        (Setup(workload="chat"), "objectives"),
        (Setup(workload="chat", slo="itl_p99<1s"), "tpot in its place"),
        (Setup(workload="chat", slo="ttft_p99<1s", arrivals="closed,users=4,think=1"), "closed loop"),
        (Setup(workload="chat", slo="ttft_p99<1s", transforms=("scale_rate=2",)), "scale_rate"),
    ],
)
def test_what_has_no_rate_or_no_objective_is_refused(setup: Setup, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        capacity(setup, Here())


def test_processes_see_what_this_one_sees(linear: str) -> None:
    setup = one_at_a_time(linear, "ttft_p99<1s", num_requests=200)
    tasks = [Task(setup, Replication(rate, 0, 200)) for rate in (2.0, 8.0)]
    with Processes(setup, 2) as player:
        there = player.play(tasks)
    for a, b in zip(there, map(observe, tasks), strict=True):
        assert np.array_equal(a.values["ttft"], b.values["ttft"]) and str(a.usage) == str(b.usage)  # nan is not equal


def filled(found: Capacity) -> bool:
    return found.plan is not None and bool(found.points) and found.binding is not None


def test_it_says_what_binds_what_it_rests_on_and_how_a_transient_ends(linear: str) -> None:
    found = capacity(in_batches(linear, "tpot_p90<25ms", num_requests=200), Here(), precision=0.2)
    assert filled(found) and found.binding is not None
    assert "tpot" in str(found.binding.objective) and found.binding.limit == "the time of a step"
    assert found.provenance == "fitted from server records" and not found.record
    assert found.recovery is not None and found.recovery.after is not None and found.recovery.after >= 0.0


def test_the_record_is_that_of_the_account_of_fidelity_and_there_is_none_where_nothing_was_compared() -> None:
    account = " ".join((Path(__file__).parents[2] / "docs/fidelity.md").read_text().split())
    for gpu, figures in (("h100", ("×/÷1.148", "8.9 % long")), ("l40s", ())):
        setup = Setup(gpu=gpu)
        told = " ".join(record_of(setup.cost(setup.config())))
        assert bool(told) == bool(figures)
        assert all(figure in told and figure in account for figure in figures)
    sheet = Setup(costs="datasheet")
    assert "1.124" in " ".join(record_of(sheet.cost(sheet.config()))) and "1.124 and 5.3 % long" in account


def test_it_is_printed_and_drawn_and_says_how_many_gpus_first(linear: str, tmp_path: Path) -> None:
    found = capacity(one_at_a_time(linear, "e2e_p90<1s", num_requests=200), Here(), rate=30.0, precision=0.3)
    text = io.StringIO()
    print_capacity(Console(file=text, width=80, color_system=None), found)
    first, *rest = text.getvalue().splitlines()
    assert first.startswith(f"{found.num_gpus} h100 GPUs (") and all(len(line) <= 80 for line in rest)
    assert "no record" in text.getvalue() and "with one replica lost" in text.getvalue()
    assert "Objectives and goodput by rate" in page_of(found)


def test_s27_a_gpu_makes_more_as_each_user_waits_longer_and_the_front_has_no_bettered_rate(linear: str) -> None:
    points = capacity(in_batches(linear, "tpot_p90<25ms", num_requests=200), Here(), precision=0.3).points
    known = [(each.tokens_per_gpu, each.tokens_per_user) for each in points if each.tokens_per_user is not None]
    assert len(known) >= 3 and sorted(known) == sorted(known, key=lambda each: -each[1])
    worse = replace(points[0], tokens_per_gpu=0.5 * points[0].tokens_per_gpu)
    overloaded = replace(points[0], tokens_per_user=None, tokens_per_gpu=1e9)
    assert pareto([*points, worse, overloaded]) == pareto(points) == [p for p in points if p.tokens_per_user]

"""What the article says of prefixes, batches and mechanisms, as sweeps that show it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.commands import Prepared
from sim.cost import StepWork
from sim.experiment.sweep.charts import charts
from sim.experiment.sweep.play import Sweep, Swept, sweep
from sim.experiment.sweep.report import alone_table
from sim.experiment.sweep.space import Choices, Knob
from sim.experiment.sweep.workers import Here
from sim.setup import Setup

SHARED = Setup(
    workload="shared-prefix,own_median=64,output_median=16,output_most=64", num_requests=60, rate=1.0,
    costs="datasheet", front_end="off", engine={"threat_decision": "a test", "num_blocks": 2000, "max_model_len": 4096},
)  # fmt: skip
ON_OFF = Choices("engine.enable_prefix_caching", (False, True))


def gains(knob: Choices, metric: str = "ttft.mean") -> list[float]:
    """The share of a metric that caching saves, by the knob's value."""
    found = sweep(Sweep(SHARED, (knob, ON_OFF)), None, Here())
    assert not any(each.errors for each in found.points)
    means = [each.mean(metric) for each in found.points]
    return [1.0 - on / off for off, on in zip(means[::2], means[1::2], strict=True)]


@pytest.mark.parametrize(
    ("knob", "metric"),
    [
        (Choices("workload.prefix_tokens", (64, 512, 2048)), "ttft.mean"),  # length
        (Choices("workload.num_applications", (60, 12, 2)), "ttft.mean"),  # how often each prefix comes back
        (Choices("engine.num_blocks", (120, 220, 2000)), "ttft.mean"),  # whether it is still there
        (Choices("host_times.per_lookup", (2e-4, 1e-4, 1e-6)), "ttft.mean"),  # what looking for it costs
        (Choices("workload.output_median", (512, 64, 8)), "e2e.mean"),  # what else takes the time
    ],
    ids=lambda each: each.name if isinstance(each, Choices) else each,
)
def test_s12_the_gain_of_a_prefix_cache_depends_on_each_of_five_things(knob: Choices, metric: str) -> None:
    """Mutations: a knob that is not set; lookups that cost nothing."""
    low, middle, high = gains(knob, metric)
    assert low < middle < high and high - low > 0.05


def swept_batches() -> Swept:
    base = Setup(
        workload="fixed,num_output_tokens=32", arrivals="closed,users=16", num_requests=400, costs="datasheet",
        front_end="off", engine={"num_blocks": 2000},
    )  # fmt: skip
    pareto = ("output_throughput", "tpot.p99", "max_kv_held")
    return sweep(Sweep(base, (Choices("engine.max_num_seqs", (1, 2, 4, 8, 16)),), pareto=pareto), None, Here())


def test_s27_a_larger_batch_buys_throughput_with_latency_and_cache_pressure_and_a_chart_shows_the_front() -> None:
    """No size betters another in all three, so that every one is on the front. Mutation: a cost that is a gain."""
    found = swept_batches()
    assert found.front == (0, 1, 2, 3, 4)
    for metric in found.sweep.pareto:
        column = [each.mean(metric) for each in found.points]
        assert column == sorted(set(column)), metric
    pareto, by_knob = charts(found)
    (front,) = [each for each in pareto.data if each.name == "front" and each.showlegend]
    assert list(front.y) == pytest.approx([each.mean("output_throughput") for each in found.points], rel=1e-6)
    assert list(front.x) == pytest.approx([1e3 * each.mean("tpot.p99") for each in found.points])
    assert [list(trace.x) for trace in by_knob.data] == [[1, 2, 4, 8, 16]] * 6


ALL_ON: dict[str, Any] = {
    "num_blocks": 190, "max_model_len": 2560, "max_num_batched_tokens": 256, "isolation": "tenant",
    "allocation": "paged", "admission": "token_buckets,rate=3000,burst=2",
}  # fmt: skip
SWITCHES: tuple[Knob, ...] = (
    Choices("engine.enable_prefix_caching", (False,)),
    Choices("engine.batching", ("static,group_size=4,max_wait=1",)),
    Choices("engine.long_prefill_token_threshold", (32,)),
    Choices("engine.allocation", ("paged_reserve_output",)),
    Choices("engine.admission", ("accept_all",)),
    Choices("engine.isolation", ("global",)),
)


def test_s69_an_ablation_is_a_sweep_of_one_switch_at_a_time() -> None:
    """Cache, continuous batching, chunking, preemption, quotas, salting: each makes a difference of its own."""
    base = replace(SHARED, rate=30.0, engine={**ALL_ON, "threat_decision": "a test"})
    found = sweep(Sweep(base, SWITCHES, "one-at-a-time"), None, Here())
    assert len(found.points) == 7 and not any(each.errors for each in found.points)
    assert found.points[0].mean("num_preemptions") > 0, "preemption has something to do"
    figures = [tuple(map(each.mean, ("ttft.p99", "e2e.p99", "token_hit_rate"))) for each in found.points]
    assert len(set(figures)) == 7
    assert found.points[4].mean("num_preemptions") == 0
    assert alone_table(found).row_count == 7


def test_the_hosts_times_can_be_set_and_the_manifest_says_so() -> None:
    setup = replace(SHARED, host_times={"per_lookup": 1e-3})
    prepared = Prepared.of(setup)
    assert prepared.cost.host_time(StepWork(num_lookups=7)) - prepared.cost.host_time(StepWork()) == pytest.approx(7e-3)
    assert prepared.manifest["profile"]["host_times"] == {"per_lookup": 1e-3}
    assert "host_times" not in Prepared.of(SHARED).manifest["profile"]
    assert Setup.from_dict(setup.to_dict()) == setup
    with pytest.raises(ValueError, match="unknown host time 'per_block'; known: per_step"):
        replace(SHARED, host_times={"per_block": 1.0})

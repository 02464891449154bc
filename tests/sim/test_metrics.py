"""Metrics: folds over a run small enough to be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.config import EngineConfig
from sim.cost import AffineCost
from sim.metrics import Distribution, Summary, inter_token_latencies
from sim.report import quantity, seconds
from sim.simulate import Run, simulate
from sim.workload.generate import from_lengths

CONFIG = EngineConfig(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32)


@pytest.fixture
def run() -> Run:
    """Two requests, a step a second: a (4 prompt, 3 out) at 0, b (12 prompt, 2 out) at 1; budget 8.

    step 0 [0, 1]: a's prompt -> token.  step 1 [1, 2]: a decodes, b's first 7.  step 2 [2, 3]: a decodes (done), b's
    last 5 -> token.  step 3 [3, 4]: b decodes (done).
    """
    return simulate(CONFIG, from_lengths([0.0, 1.0], [4, 12], [3, 2]), AffineCost(per_step=1.0))


def test_latencies_are_those_worked_out_by_hand(run: Run) -> None:
    summary = run.summary
    assert (summary.ttft.p50, summary.ttft.max) == (1.5, 2.0)  # a: 1, b: 3 - 1
    assert (summary.e2e.mean, summary.e2e.max) == (3.0, 3.0)  # a: 3, b: 4 - 1
    assert summary.tpot.mean == 1.0  # a: (3 - 1) / 2, b: (4 - 3) / 1
    assert (summary.itl.num, summary.itl.mean) == (3, 1.0)
    assert summary.queue_delay.max == 0.0
    assert list(run.step_ends) == [1.0, 2.0, 3.0, 4.0]


def test_rates_and_counts(run: Run) -> None:
    summary = run.summary
    assert (summary.num_requests, summary.num_completed, summary.num_steps) == (2, 2, 4)
    assert summary.duration == 4.0
    assert summary.request_throughput == 0.5
    assert summary.output_throughput == 5 / 4
    assert summary.input_throughput == 16 / 4
    assert summary.mean_running == (1 + 2 + 2 + 1) / 4
    # Blocks held while each step runs: 1; a takes its 2nd for its 5th token, b 2 (7 tokens): 4; b 3: 5; b alone: 4.
    assert summary.mean_kv_held == pytest.approx((1 + 4 + 5 + 4) / 4 / 16)
    assert summary.max_kv_held == 5 / 16


def test_rejections_are_results_and_not_errors() -> None:
    summary = simulate(CONFIG, from_lengths([0.0, 0.0], [4, 99], [3, 2]), AffineCost(per_step=1.0)).summary
    assert (summary.num_completed, summary.num_rejected, summary.num_failed) == (1, 1, 0)
    assert summary.ttft.num == 1


def test_nothing_measured_is_not_zero() -> None:
    empty = simulate(CONFIG, from_lengths([0.0], [99], [1]), AffineCost(per_step=1.0)).summary
    assert math.isnan(empty.ttft.p99) and empty.ttft.num == 0
    assert empty.request_throughput == 0.0


def test_gaps_between_tokens_include_the_time_a_request_was_preempted() -> None:
    """Memory for five blocks: the later request yields, and its next token comes late."""
    config = EngineConfig(num_blocks=5, block_size=2, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=10)
    run = simulate(config, from_lengths([0.0, 0.0], [3, 3], [6, 6]), AffineCost(per_step=1.0))
    late = next(record for record in run.records if record.num_preemptions)
    gaps = inter_token_latencies([late], np.asarray(run.step_ends))
    assert len(gaps) == 5 and gaps.max() > 1.0
    assert gaps.sum() == late.finish_time - (late.first_token_time or 0.0)


def test_a_distribution_of_one() -> None:
    assert Distribution.of(np.array([2.0])) == Distribution(1, 2.0, 2.0, 2.0, 2.0, 2.0)


def test_the_json_form_names_every_metric(run: Run) -> None:
    assert set(run.summary.to_dict()) == set(Summary.__dataclass_fields__)


@pytest.mark.parametrize(
    ("values", "text"),
    [((0.0123,), "12.3 ms"), ((0.9994,), "999 ms"), ((0.99951,), "1 s"), ((1234.5,), "1,234 s"), ((0.0,), "0 ms"),
     ((0.01, 0.02), "10–20 ms"), ((0.5, 2.0), "0.5–2 s"), ((0.01, 0.01), "10 ms"), ((math.nan,), "-")],
)  # fmt: skip
def test_times_read_well(values: tuple[float, ...], text: str) -> None:
    assert seconds(*values) == text


@pytest.mark.parametrize(
    ("unit", "values", "text"),
    [("%", (0.123,), "12.3 %"), ("n", (12345,), "12,345"), ("", (3.14159, 250.4), "3.14–250")],
)
def test_quantities_read_well(unit: str, values: tuple[float, ...], text: str) -> None:
    assert quantity(unit, *values) == text

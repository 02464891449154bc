"""A record of a measured request or run that cannot be true is refused, in one line that says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibration.records import MeasuredRequest, MeasuredRun, MeasuredSeries, MeasuredStep

GOOD = MeasuredRequest("a", 0.0, 100, 3, 0.5, 0.7, (0.5, 0.6, 0.7))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"outcome": "lost"}, "unknown outcome 'lost'; known: completed, failed"),
        ({"num_prompt_tokens": 0}, "a prompt has at least 1"),
        ({"num_output_tokens": -1}, "an answer 0 or more"),
        ({"num_cached_tokens": 101}, "101 cached of 100 prompt tokens"),
        ({"first_token_time": None}, "has no first token, last token or output: mark it failed"),
        ({"num_output_tokens": 2}, "3 token times for 2 tokens"),
        ({"arrival_time": 0.55}, "times out of order"),
        ({"token_times": (0.5, 0.7, 0.6)}, "times out of order"),
        ({"last_token_time": float("inf")}, "a time that is not finite"),
    ],
)
def test_an_impossible_request_is_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(GOOD, **change)


def test_latencies_count_from_the_arrival() -> None:
    assert (GOOD.ttft, GOOD.e2e, GOOD.tpot) == (0.5, 0.7, pytest.approx(0.1))


def test_milliseconds_taken_for_seconds_are_noticed() -> None:
    late = replace(GOOD, first_token_time=500.0, last_token_time=700.0, token_times=())
    with pytest.raises(ValueError, match=r"233 s a token is not plausible.*were they milliseconds"):
        MeasuredRun("run", [late])


def test_a_run_needs_an_answer_an_order_and_a_content_size() -> None:
    failed = MeasuredRequest("b", 0.0, 10, 0, outcome="failed")
    with pytest.raises(ValueError, match="has no completed request"):
        MeasuredRun("run", [failed])
    with pytest.raises(ValueError, match="in order of arrival"):
        MeasuredRun("run", [GOOD, replace(GOOD, request_id="c", arrival_time=-1.0)])
    with pytest.raises(ValueError, match="say content_size"):
        MeasuredRun("run", [replace(GOOD, content_ids=(1,))])


def test_steps_and_series_must_be_whole() -> None:
    with pytest.raises(ValueError, match="below 0"):
        MeasuredStep(-1, 0, 0, 0.1)
    with pytest.raises(ValueError, match="its duration must be finite"):
        MeasuredStep(1, 10, 0, -0.1)
    with pytest.raises(ValueError, match="the series running has 1 values at 2 times"):
        MeasuredSeries((0.0, 1.0), (3.0,))

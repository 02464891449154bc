"""Other tools' result files become one record: seconds and tokens, with what is doubtful said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from calibration.importers.llm_d import benchmark_report
from calibration.importers.read import read_results
from calibration.records import MeasuredRun
from calibration.summaries import MeasuredSummary, Stats, checked, stats, summary_of


def only_run(path: Path) -> MeasuredRun:
    (found,) = read_results(path)
    assert isinstance(found, MeasuredRun)
    return found


def only_summary(path: Path) -> MeasuredSummary:
    (found,) = read_results(path)
    assert isinstance(found, MeasuredSummary)
    return found


def written(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value, default=str))
    return path


# -- what the tools themselves say of the same file is what our records give ---------------------------------------


def test_vllms_own_means_are_those_of_its_requests(shared: Path) -> None:
    path = shared / "data/formats/vllm-bench-serve/vllm_bench_serve_random_detailed.json"
    told, ours = json.loads(path.read_text()), summary_of(only_run(path))
    assert ours.num_completed == told["completed"]
    assert ours.ttft.mean == pytest.approx(told["mean_ttft_ms"] / 1e3, rel=1e-9)
    assert ours.tpot.mean == pytest.approx(told["mean_tpot_ms"] / 1e3, rel=1e-6)
    assert ours.ttft.p99 == pytest.approx(told["p99_ttft_ms"] / 1e3, rel=1e-9)


def test_totals_of_vllm_agree_with_its_details(shared: Path, tmp_path: Path) -> None:
    path = shared / "data/formats/vllm-bench-serve/vllm_bench_serve_random_detailed.json"
    told = json.loads(path.read_text())
    arrays = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors", "generated_texts")
    totals = only_summary(written(tmp_path / "totals.json", {k: v for k, v in told.items() if k not in arrays}))
    details = summary_of(only_run(path))
    assert totals.ttft.mean == pytest.approx(details.ttft.mean, rel=1e-9)
    assert totals.tpot.p50 == pytest.approx(details.tpot.p50, rel=1e-6)
    assert totals.output_tokens.mean == details.output_tokens.mean


def test_aiperfs_own_means_are_those_of_its_requests(shared: Path) -> None:
    folder = shared / "data/formats/aiperf/run_chat_closedloop"
    told = json.loads((folder / "profile_export_aiperf.json").read_text())
    ours = summary_of(only_run(folder / "profile_export.jsonl"))
    assert ours.ttft.mean == pytest.approx(told["time_to_first_token"]["avg"] / 1e3, rel=1e-6)
    assert ours.e2e.mean == pytest.approx(told["request_latency"]["avg"] / 1e3, rel=1e-4)
    assert ours.tpot.mean == pytest.approx(told["inter_token_latency"]["avg"] / 1e3, rel=1e-3)


def test_guidellms_own_means_are_those_of_its_requests(shared: Path) -> None:
    path = shared / "data/formats/guidellm/guidellm_0.8.1_poisson_slo_20req.json"
    metrics = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    run = only_run(path)
    ours = summary_of(run)
    assert ours.ttft.mean == pytest.approx(metrics["time_to_first_token_ms"]["successful"]["mean"] / 1e3, rel=1e-6)
    assert ours.e2e.mean == pytest.approx(metrics["request_latency"]["successful"]["mean"], rel=1e-9)
    assert {request.num_cached_tokens for request in run.requests} != {None}


def test_its_tpot_is_not_ours_but_its_itl_nearly_is(shared: Path) -> None:
    """GuideLLM's TPOT counts the first token: 7.00 ms against 5.87 ms in its first request."""
    path = shared / "data/formats/guidellm/guidellm_0.8.1_poisson_slo_20req.json"
    first = json.loads(path.read_text())["benchmarks"][0]["requests"]["successful"][0]
    ours = only_run(path).requests[0]
    assert ours.tpot == pytest.approx(first["inter_token_latency_ms"] / 1e3, rel=0.01)
    assert ours.tpot < first["time_per_output_token_ms"] / 1e3


def test_a_sampled_guidellm_report_gives_totals(shared: Path) -> None:
    found = read_results(shared / "data/formats/guidellm/guidellm_report_v2.json")
    assert [type(each) for each in found] == [MeasuredSummary, MeasuredSummary]
    assert [each.offered_rate for each in found if isinstance(each, MeasuredSummary)] == [2.0, 4.0]
    assert all("totals only" in each.findings[0] for each in found)


# -- inference-perf: half the truth --------------------------------------------------------------------------------


def test_inference_perfs_tpot_is_recomputed_and_the_difference_said(shared: Path) -> None:
    """The published case: 4.00 ms reported, 8.42 ms by E2E, TTFT and lengths, 8.50 ms by the server."""
    stages = read_results(shared / "data/formats/inference-perf/h100-llama3-8b-vllm-0.11")
    assert len(stages) == 7
    first = stages[1]
    assert isinstance(first, MeasuredSummary)
    assert first.tpot.known == ("mean",) and first.tpot.mean == pytest.approx(8.42e-3, rel=1e-3)
    assert "4 ms" in first.findings[-1] and "8.42 ms" in first.findings[-1]


def test_a_client_that_could_not_send_as_asked_is_said(shared: Path) -> None:
    overloaded = read_results(shared / "data/formats/inference-perf/h100-llama3-8b-vllm-0.11")[4]
    assert any("106.5 of 122.6 requests a second" in finding for finding in overloaded.findings)


def test_an_agreeing_tpot_is_left_alone() -> None:
    summary = MeasuredSummary("run", "x", 3, output_tokens=Stats(mean=11), ttft=Stats(mean=0.1), e2e=Stats(mean=1.1),
                              tpot=Stats(mean=0.105, p99=0.2))  # fmt: skip
    assert checked(summary) is summary


# -- llm-d's report ------------------------------------------------------------------------------------------------


def test_what_is_written_is_valid_and_reads_back_the_same(shared: Path, tmp_path: Path) -> None:
    summary = summary_of(
        only_run(shared / "data/formats/vllm-bench-serve/vllm_bench_serve_random_detailed.json"), "vllm"
    )
    report = benchmark_report(summary)
    schema = json.loads((shared / "data/formats/llm-d-benchmark/br_v0_2_1_json_schema.json").read_text())
    jsonschema.validate(report, schema)
    path = tmp_path / "report.yaml"
    path.write_text(yaml.safe_dump(report))
    again = only_summary(path)
    for name in ("num_completed", "request_rate", "output_token_rate", "ttft", "tpot", "itl", "e2e", "output_tokens"):
        assert getattr(again, name) == getattr(summary, name), name


def test_each_version_is_read_in_its_own_units(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data/formats/llm-d-benchmark"
    old = only_summary(folder / "br_v0_1_example.yaml")
    assert old.ttft.mean == pytest.approx(0.800974442732916e-3)  # it says ms
    for version in ("0_2", "0_2_1"):
        report = yaml.safe_load((folder / f"br_v{version}_example.yaml").read_text())
        # The example's numbers are made up: 2,262 tokens in 37 ms, which is refused.
        with pytest.raises(ValueError, match="not plausible"):
            read_results(folder / f"br_v{version}_example.yaml")
        latency = report["results"]["request_performance"]["aggregate"]["latency"]
        latency["request_latency"] = {"units": "ms", "mean": 9_000.0}
        summary = only_summary(written(tmp_path / f"{version}.json", report))
        assert summary.e2e.mean == 9.0 and summary.num_completed == 500


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"version": "0.3"}, "known: 0.1, 0.2, 0.2.1"), ({"results": {}}, "nothing was measured of requests")],
)
def test_a_report_that_cannot_be_read_is_refused(
    change: dict[str, Any], complaint: str, shared: Path, tmp_path: Path
) -> None:
    report = yaml.safe_load((shared / "data/formats/llm-d-benchmark/br_v0_2_1_example.yaml").read_text())
    with pytest.raises(ValueError, match=complaint):
        read_results(written(tmp_path / "report.json", report | change))


def test_an_unknown_unit_is_refused_not_guessed(tmp_path: Path) -> None:
    aggregate = {"requests": {"total": 3}, "latency": {"request_latency": {"units": "fortnights", "mean": 1.0}}}
    report = {"version": "0.2.1", "scenario": {}, "results": {"request_performance": {"aggregate": aggregate}}}
    with pytest.raises(ValueError, match="units 'fortnights' are unknown"):
        read_results(written(tmp_path / "report.json", report))


# -- totals: SGLang, InferenceX, our own ---------------------------------------------------------------------------


def test_sglang_writes_a_line_a_run_in_milliseconds(tmp_path: Path) -> None:
    line = {
        "backend": "sglang", "request_rate": float("inf"), "max_concurrency": 8, "duration": 10.0, "completed": 40,
        "total_input_tokens": 4000, "total_output_tokens": 2000, "total_output_tokens_retokenized": 1990,
        "mean_ttft_ms": 100.0, "median_ttft_ms": 90.0, "p99_ttft_ms": 200.0, "mean_tpot_ms": 18.367346938775512,
        "mean_e2e_latency_ms": 1000.0, "median_e2e_latency_ms": 990.0,
    }  # fmt: skip
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (line, line | {"request_rate": 4.0})))
    first, second = read_results(path)
    assert isinstance(first, MeasuredSummary) and isinstance(second, MeasuredSummary)
    assert (first.offered_rate, second.offered_rate) == (None, 4.0)
    assert first.ttft == Stats(mean=0.1, p50=0.09, p99=0.2)
    assert first.e2e.mean == 1.0 and first.request_rate == 4.0
    assert "at most 8 requests were in flight" in first.findings[1]


def test_inferencex_is_in_seconds(shared: Path) -> None:
    path = shared / "data/formats/inferencex/minimax_m25_vllm_dep8_isl1024_osl128_conc16.json"
    told, ours = json.loads(path.read_text()), only_summary(path)
    assert ours.ttft.p50 == told["median_ttft"] and ours.max_concurrency == 16
    assert ours.request_rate == pytest.approx(told["request_throughput"], rel=1e-9)


def test_inferencexs_rates_are_per_gpu(tmp_path: Path) -> None:
    fields = {"hw": "h200", "isl": 1024, "osl": 1024, "tp": 4, "conc": 32, "tput_per_gpu": 500.0,
              "output_tput_per_gpu": 250.0, "mean_ttft": 0.2, "mean_tpot": 0.03, "mean_e2el": 30.89}  # fmt: skip
    assert only_summary(written(tmp_path / "agg_bmk.json", fields)).output_token_rate == 1000.0


def test_failed_requests_are_counted_and_masked(shared: Path, tmp_path: Path) -> None:
    told = json.loads((shared / "data/formats/vllm-bench-serve/vllm_bench_serve_random_detailed.json").read_text())
    told["errors"] = ["connection reset"] + [""] * (len(told["ttfts"]) - 1)
    run = only_run(written(tmp_path / "run.json", told))
    assert [request.outcome for request in run.requests].count("failed") == 1
    assert summary_of(run).num_failed == 1 and summary_of(run).num_completed == len(told["ttfts"]) - 1
    assert "1 of 24 requests failed" in run.findings[0]


# -- wrong units and other harm ------------------------------------------------------------------------------------


def test_milliseconds_taken_for_seconds_are_caught(shared: Path, tmp_path: Path) -> None:
    told = json.loads((shared / "data/formats/vllm-bench-serve/vllm_bench_serve_random_detailed.json").read_text())
    told["ttfts"] = [each * 1e3 for each in told["ttfts"]]
    told["itls"] = [[gap * 1e6 for gap in each] for each in told["itls"]]
    with pytest.raises(ValueError, match="milliseconds"):
        read_results(written(tmp_path / "run.json", told))


def test_ttft_above_e2e_is_a_wrong_unit() -> None:
    with pytest.raises(ValueError, match="are their units the same"):
        MeasuredSummary("run", "x", 3, ttft=Stats(mean=30.0), e2e=Stats(mean=1.0))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_statistic_is_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="finite number"):
        Stats(mean=bad)


def test_percentiles_do_not_go_down() -> None:
    with pytest.raises(ValueError, match="percentiles go down"):
        Stats(p50=2.0, p99=1.0)


def test_an_aiperf_metric_without_a_known_unit_is_refused(tmp_path: Path) -> None:
    row = {
        "metadata": {"request_start_ns": 1, "benchmark_phase": "profiling"},
        "metrics": {"input_sequence_length": {"value": 5, "unit": "tokens"},
                    "output_sequence_length": {"value": 5, "unit": "tokens"},
                    "time_to_first_token": {"value": 5.0, "unit": "jiffies"}},
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"time_to_first_token must have a value and a unit.*jiffies"):
        read_results(written(tmp_path / "profile_export.jsonl", row))


@pytest.mark.parametrize("content", ["", "not json", "[1, 2]", '{"a": 1}', "a: [", "\x00"])
def test_what_no_tool_wrote_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"result\.json") as complaint:
        read_results(path)
    assert "\n" not in str(complaint.value)


def test_a_field_of_another_type_is_a_complaint_about_the_file(shared: Path, tmp_path: Path) -> None:
    told = json.loads((shared / "data/formats/guidellm/guidellm_0.8.1_poisson_slo_20req.json").read_text())
    told["benchmarks"][0]["requests"]["successful"][0]["request_latency"] = "soon"
    with pytest.raises(ValueError, match="looks like GuideLLM's"):
        read_results(written(tmp_path / "report.json", told))


def test_statistics_of_a_sample() -> None:
    assert stats([1.0, 2.0, 3.0]).p50 == 2.0
    assert stats([]) == Stats()

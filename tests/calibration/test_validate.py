"""Predicted against recorded: the same definitions on both sides, repeats beside them, and a page to look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from calibration.commands_server import error_table, read_runs, run_fit_server, run_validate, told, write_page
from calibration.figures import compare, measured, simulated
from calibration.records import MeasuredRun, MeasuredSeries, MeasuredStep
from calibration.validate import validate
from sim.cost import LinearCost
from sim.cost.server import read_server_costs, server_behind
from sim.setup import Setup
from tests.calibration.servers import FRONT_END, load, measure, records, serve

COST = LinearCost(per_step=8e-3, per_token=200e-6, per_decode=300e-6)


@pytest.fixture(scope="module")
def run() -> MeasuredRun:
    return measure(3.0, COST, num=40)


def test_the_server_itself_is_predicted_without_error(run: MeasuredRun) -> None:
    (found,) = validate([run], COST, FRONT_END, {})
    assert [figure.name for figure in found.figures][:3] == ["throughput", "ttft mean", "ttft p50"]
    assert all(figure.error == pytest.approx(0.0, abs=1e-9) for figure in found.figures)
    assert found.recorded.ids == found.predicted.ids


def test_a_slower_cost_shows_in_every_latency(run: MeasuredRun) -> None:
    (found,) = validate([run], replace(COST, scale=1.2), FRONT_END, {})
    errors = {figure.name: figure.error for figure in found.figures}
    assert min(errors["ttft mean"], errors["tpot mean"], errors["e2e mean"]) > 0.15
    assert abs(errors["throughput"]) < 0.05  # the load is light: who waits longer is still served in time


def test_a_prediction_among_the_repeats_is_within_any_goal(run: MeasuredRun) -> None:
    slow = replace(measure(3.0, replace(COST, scale=1.1), num=40), name="again")
    found = validate([run, slow], replace(COST, scale=1.05), FRONT_END, {})
    for each in found:
        tpot = next(figure for figure in each.figures if figure.name == "tpot mean")
        assert len(each.repeats["tpot mean"]) == 2
        assert each.within(tpot, 0.0)
        assert not each.within(replace(tpot, predicted=1.2 * tpot.predicted), 0.05)


def test_levels_are_compared_where_they_were_recorded() -> None:
    workload = load(3.0, 40)
    played = serve(workload, COST)
    samples = played.samples
    series = MeasuredSeries(
        tuple(sample.time for sample in samples),
        tuple(float(sample.num_running) for sample in samples),
        tuple(float(sample.num_waiting) for sample in samples),
        tuple(sample.num_held_blocks / 600 for sample in samples),
    )
    log = tuple(MeasuredStep(0, 0, sample.num_running, 0.01) for sample in samples for _ in range(sample.num_steps))
    run = replace(records("sampled", workload, played), series=series, steps=log)
    (found,) = validate([run], COST, FRONT_END, {})
    errors = {figure.name: figure.error for figure in found.figures}
    assert errors["steps"] == 0.0
    assert errors["running mean"] == pytest.approx(0.0, abs=1e-9)
    assert errors["kv mean"] == pytest.approx(0.0, abs=1e-9)


def test_measured_and_simulated_figures_are_the_same_numbers() -> None:
    workload = load(5.0, 50)
    played = serve(workload, COST)
    assert all(
        figure.error == 0.0 for figure in compare(measured(records("same", workload, played)), simulated(played))
    )


def test_a_page_shows_every_run_with_its_table(run: MeasuredRun, tmp_path: Path) -> None:
    found = validate([run, replace(run, name="other <b>")], COST, FRONT_END, {}, draws=(COST,))
    assert error_table(found[0]).row_count == len(found[0].figures)
    write_page(tmp_path / "page.html", found, "Costs: known.")
    page = (tmp_path / "page.html").read_text()
    assert "Predicted and recorded latency" in page
    assert "other <b>" not in page


# -- files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted to a file that a benchmark tool might have written."""
    folder = tmp_path_factory.mktemp("server")
    out = folder / "costs.json"
    run_fit_server([bench_file(folder, measure(3.0, COST, num=60))], told({"from_": COMMAND}), out, "a server")
    return out


COMMAND = (
    "vllm serve m --max-num-seqs 16 --max-num-batched-tokens 256 --block-size 16 --num-gpu-blocks-override 601 "
    "--enable-prefix-caching --max-model-len 1024"
)


def bench_file(folder: Path, run: MeasuredRun) -> Path:
    import json

    requests = run.requests
    fields = {
        "num_prompts": len(requests),
        "total_input_tokens": sum(each.num_prompt_tokens for each in requests),
        "request_throughput": 1.0,
        "start_times": [100.0 + each.arrival_time for each in requests],
        "input_lens": [each.num_prompt_tokens for each in requests],
        "output_lens": [each.num_output_tokens for each in requests],
        "ttfts": [each.ttft for each in requests],
        "itls": [[b - a for a, b in zip(each.token_times, each.token_times[1:], strict=False)] for each in requests],
        "errors": [""] * len(requests),
    }
    path = folder / "bench.json"
    path.write_text(json.dumps(fields))
    return path


def test_a_fit_is_written_and_simulated_with(costs: Path) -> None:
    server = read_server_costs(costs)
    assert (server.name, server.cost.provenance) == ("a server", "fitted from server records")
    assert server.engine["num_blocks"] == 600  # one of 601 is vLLM's null block
    setup = Setup(workload="fixed", num_requests=10, costs=str(costs))
    config = setup.config()
    assert (config.max_num_seqs, config.block_size) == (16, 16)
    assert setup.cost(config).provenance == "fitted from server records"
    assert setup.front_end_model() is not None
    assert setup.front_end_model() == replace(
        FRONT_END, api_time_per_request=setup.front_end_model().api_time_per_request
    )
    assert replace(setup, engine={"max_num_seqs": 4}).config().max_num_seqs == 4


def test_a_fit_is_held_against_records_on_the_command_line(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bench_file(tmp_path, measure(6.0, COST, num=40, seed=3))
    run_validate([path], costs, told({"from_": COMMAND}), tmp_path / "page.html", draws=False)
    assert "bench: 40 requests at" in capsys.readouterr().out
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("a server", "another"), "does not match its hash"),
        (('"schema_version": 1', '"schema_version": 9'), "schema version 9, not 1"),
        (('"kind": "server costs"', '"kind": "song"'), "not a file of server costs"),
        (('"per_pair"', '"per_peer"'), "does not match its hash"),
    ],
)
def test_an_edited_file_of_costs_is_refused(costs: Path, tmp_path: Path, change: tuple[str, str], why: str) -> None:
    path = tmp_path / "edited.json"
    path.write_text(costs.read_text().replace(*change, 1))
    with pytest.raises(ValueError, match=why):
        read_server_costs(path)


def test_what_is_no_file_of_costs_is_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert server_behind(str(tmp_path / "other.json")) is None
    assert server_behind("auto") is None


def test_totals_are_not_records(shared: Path) -> None:
    totals = shared / "data" / "formats" / "inferencex" / "minimax_m25_vllm_dep8_isl1024_osl128_conc4.json"
    with pytest.raises(ValueError, match="records of its requests are needed"):
        read_runs([totals])

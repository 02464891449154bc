"""From kernel tables of a GPU to a real vLLM run on it that nothing was fitted to."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernel_tables_to_runs import GPUS, folders, peer_errors
from calibration.importers.kernel_tables import KernelTables, read_kernel_tables
from calibration.kernel_tables import longest_of
from calibration.tabled_run import TabledRun, tabled_run
from sim.cost import StepWork
from sim.cost.tabled import TabledCost

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="module")
def runs() -> dict[str, TabledRun]:
    if not (SHARED / "data/kernel-tables/llmservingsim").is_dir():
        pytest.skip("needs kernel tables and runs beside the repository, at shared/data")
    return {gpu: tabled_run(*folders(SHARED, gpu)) for gpu in GPUS}


def errors(run: TabledRun, per_step: float) -> dict[str, float]:
    return {figure.name: 100.0 * figure.error for figure in run.figures(per_step)}


def test_tables_predict_the_run_on_an_rtx_pro_6000_with_a_constant_of_the_rtx_4090(runs: dict[str, TabledRun]) -> None:
    """Within 2, 3 and 10 %, and nearer than the simulator that the tables were made for."""
    found = errors(runs["RTXPRO6000"], runs["RTX4090"].fitted_per_step())
    assert abs(found["tpot mean"]) < 1.0
    assert abs(found["e2e mean"]) < 1.0
    assert abs(found["ttft mean"]) < 2.5
    theirs = peer_errors(folders(SHARED, "RTXPRO6000")[1])
    for name in ("tpot mean", "e2e mean", "ttft mean", "ttft p99", "e2e p99"):
        assert abs(found[name]) < abs(float(theirs[name].rstrip("%"))), name


def test_tables_predict_the_run_on_an_rtx_4090_with_a_constant_of_the_rtx_pro_6000(runs: dict[str, TabledRun]) -> None:
    """Not within 2 and 3 %: its kernels were measured slower than the server ran them, see docs/fidelity.md."""
    per_step = runs["RTXPRO6000"].fitted_per_step()
    assert 0.0 < per_step < 0.3e-3
    found = errors(runs["RTX4090"], per_step)
    assert abs(found["tpot mean"]) < 3.0
    assert abs(found["e2e mean"]) < 5.0
    assert abs(found["ttft mean"]) < 6.0


def test_the_rtx_4090_ran_decodes_faster_than_its_tables_say(runs: dict[str, TabledRun]) -> None:
    """Second 175: 800 tokens of the same 16 requests, of 1,400 tokens in the mean, and no prompt."""
    run, cost = runs["RTX4090"].run, runs["RTX4090"].cost
    assert run.series.running[173:176] == (16, 16, 16)
    tables = cost.device_time(StepWork(16, 16, 16, 16, 16 * 1400))
    assert tables == pytest.approx(1.045 * 16 / 800, rel=0.01)


def test_unequal_contexts_take_longer_than_their_mean_says(runs: dict[str, TabledRun]) -> None:
    """Where 128 run: 4.7 % of the attention in the tables, for a longest context of 2.9 means."""
    cost = runs["RTXPRO6000"].cost
    assert cost.skew is not None
    point = (0.0, 0.0, 128.0, 1100.0)
    extra = cost.skew.time(cost.attention.decodes, point, is_beside=False)
    assert extra / cost.attention.decodes.time(*point) == pytest.approx(0.05, abs=0.01)


def test_a_step_costs_no_less_for_more(runs: dict[str, TabledRun]) -> None:
    """But a chunk beside decodes is another kernel's: the first token of one is a step up."""
    cost = runs["RTX4090"].cost
    decodes = [cost.device_time(StepWork(num, num, num, num, 1000 * num)) for num in (1, 8, 16, 30, 64, 200, 256)]
    assert decodes == sorted(decodes)
    chunks = [cost.device_time(_chunk(chunk, decodes=16)) for chunk in (16, 100, 500, 1000, 2000)]
    assert chunks == sorted(chunks)
    assert chunks[0] > decodes[2]


def _chunk(chunk: int, decodes: int) -> StepWork:
    work = StepWork(chunk + decodes, decodes + 1, decodes, decodes, 1000 * decodes)
    return work._replace(num_prefills=1, prefill_pairs=chunk * (chunk + 1), prefill_context=chunk)


def test_an_empty_step_costs_nothing(runs: dict[str, TabledRun]) -> None:
    assert runs["RTX4090"].cost.device_time(StepWork()) == 0.0


def test_the_longest_of_many_contexts_is_longer_than_that_of_few() -> None:
    ratios = longest_of(np.arange(1.0, 1001.0)).values
    assert ratios[0] == pytest.approx(1.0, abs=1e-3)  # half of all are longer than the median, here the mean
    assert ratios[-1] == pytest.approx(2.0, abs=0.01)
    assert list(ratios) == sorted(ratios)


# -- bad tables -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(shared: Path, tmp_path: Path) -> Path:
    """A copy of the RTX 4090's, to be spoilt."""
    folder = folders(shared, "RTX4090")[0]
    copied = tmp_path / "bf16" / "tp1"
    copied.mkdir(parents=True)
    for path in (*folder.glob("*.csv"), folder.parent / "meta.yaml"):
        shutil.copyfile(path, copied / path.name if path.suffix == ".csv" else copied.parent / path.name)
    return copied


def scaled(path: Path, factor: float) -> None:
    """Every time of a table, as if it were in another unit."""
    header, *lines = path.read_text().splitlines()
    parted = (line.rsplit(",", 1) for line in lines)
    path.write_text("\n".join([header, *(f"{counts},{factor * float(time)}" for counts, time in parted)]) + "\n")


def replaced(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("name", ["attention.csv", "dense.csv", "per_sequence.csv"])
@pytest.mark.parametrize("factor", [1e-3, 1e3], ids=["in milliseconds", "in nanoseconds"])
def test_times_in_another_unit_are_refused(tables: Path, name: str, factor: float) -> None:
    scaled(tables / name, factor)
    with pytest.raises(ValueError, match=r"microseconds|seconds, are these\?"):
        read_kernel_tables(tables)


@pytest.mark.parametrize("name", ["attention.csv", "dense.csv", "per_sequence.csv", "skew.csv"])
def test_a_missing_column_is_named(tables: Path, name: str) -> None:
    replaced(tables / name, "t_mean_us" if name == "skew.csv" else "time_us", "latency")
    with pytest.raises(ValueError, match=r"has no column t(ime|_mean)_us"):
        read_kernel_tables(tables)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("attention.csv", "0,0,1,16,9.31067", "0,0,1,16,-9.31067", "a time of"),
        ("dense.csv", "act_fn,1,2.592", "act_fn,1,-2.592", "must be above 0"),
        ("dense.csv", "act_fn,1,2.592", "act_fn,1,fast", "line 2 is not a layer, a count and a time"),
        ("dense.csv", "o_proj", "out_proj", "no rows of o_proj"),
        ("dense.csv", "act_fn,2048,168.943\n", "", "different counts"),
        ("per_sequence.csv", "sampler", "argmax", "no rows of sampler"),
        ("../meta.yaml", "gpu: ", "card: ", "has no gpu"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tables: Path, name: str, old: str, new: str, words: str) -> None:
    assert old in (tables / name).read_text()
    replaced(tables / name, old, new)
    with pytest.raises(ValueError, match=words):
        read_kernel_tables(tables)


def test_tables_of_several_gpus_are_refused(tables: Path) -> None:
    with pytest.raises(ValueError, match="hold no all-reduce"):
        read_kernel_tables(tables.rename(tables.parent / "tp2"))


def test_tables_without_unequal_contexts_price_the_mean(tables: Path, runs: dict[str, TabledRun]) -> None:
    (tables / "skew.csv").unlink()
    found: KernelTables = read_kernel_tables(tables)
    assert len(found.skew) == 0
    whole: TabledCost = runs["RTX4090"].cost
    bare = TabledCost(whole.layers, whole.head, whole.attention, whole.num_layers, None, whole.padded)
    work = StepWork(32, 32, 32, 32, 32_000)
    assert bare.device_time(work) < whole.device_time(work)

"""Exports: every request a row, the same values back, and whole files or none."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from policies.config import EngineConfig
from policies.prompt import LengthPrompt
from policies.types import Request
from sim import export as module
from sim.cost import AffineCost
from sim.export import COLUMNS, export, rows
from sim.frontend import FrontEndTimes
from sim.simulate import Run, simulate
from sim.workload.workload import WorkItem, Workload

CONFIG = EngineConfig(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32)
NAMES = [column.name for column in COLUMNS]
AWKWARD = 'a "class", with\na line'


def play(front_end: FrontEndTimes | None = None) -> Run:
    """b and a arrive together, c is too long; a third of a second a step."""
    requests = [("b", 0.1, 4, 3), ("a", 0.1, 12, 1), ("c", 0.2, 99, 1)]
    items = [
        WorkItem(Request(name, at, LengthPrompt(prompt), 32, class_name=AWKWARD), num)
        for name, at, prompt, num in requests
    ]
    return simulate(CONFIG, Workload("three", items), AffineCost(per_step=1 / 3), front_end=front_end)


@pytest.fixture
def run() -> Run:
    return play()


def as_rows(table: list[dict[str, object]]) -> list[list[object]]:
    return [[row[name] for name in NAMES] for row in table]


def test_rows_come_by_arrival_and_id_with_what_was_measured(run: Run) -> None:
    a, b, c = (dict(zip(NAMES, row, strict=True)) for row in rows(run))
    assert [row["request_id"] for row in (a, b, c)] == ["a", "b", "c"]
    assert (a["answered"], a["tpot_s"]) == (True, None)
    assert b["tpot_s"] == pytest.approx(1 / 3)
    assert b["e2e_s"] == b["finish_time_s"] - b["arrival_time_s"]  # type: ignore[operator]
    assert (c["reason"], c["answered"], c["ttft_s"], c["e2e_s"]) == ("rejected", False, None, None)
    assert "99" in str(c["detail"])


def test_columns_say_what_they_hold_and_times_their_unit(run: Run) -> None:
    assert len(set(NAMES)) == len(NAMES) and all(column.meaning for column in COLUMNS)
    assert all(column.name.endswith("_s") == (column.kind is float) for column in COLUMNS)
    for row in rows(run):
        assert all(value is None or type(value) is column.kind for value, column in zip(row, COLUMNS, strict=True))


def test_csv_gives_the_same_values_back(run: Run, tmp_path: Path) -> None:
    export(tmp_path / "new" / "requests.csv", run)
    with (tmp_path / "new" / "requests.csv").open(newline="") as file:
        back = list(csv.DictReader(file))
    expected = [["" if value is None else str(value) for value in row] for row in rows(run)]
    assert as_rows(back) == expected  # type: ignore[arg-type]
    times = [[float(row["arrival_time_s"]), float(row["finish_time_s"])] for row in back]
    assert times == [[row[NAMES.index("arrival_time_s")], row[NAMES.index("finish_time_s")]] for row in rows(run)]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_json_lines_give_the_same_values_back(run: Run, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"requests{ending}"
    export(path, run)
    text = gzip.decompress(path.read_bytes()).decode() if ending.endswith("gz") else path.read_text()
    assert as_rows([json.loads(line) for line in text.splitlines()]) == list(rows(run))


def test_parquet_gives_the_same_values_and_meanings_back(run: Run, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install pyarrow")
    export(tmp_path / "requests.parquet", run)
    table = parquet.read_table(tmp_path / "requests.parquet")
    assert as_rows(table.to_pylist()) == list(rows(run))
    assert [field.metadata[b"meaning"].decode() for field in table.schema] == [column.meaning for column in COLUMNS]
    assert [path.name for path in tmp_path.iterdir()] == ["requests.parquet"]


def test_a_client_waits_longer_than_its_engine_says() -> None:
    for row, near in zip(rows(play(FrontEndTimes.off(client_link_time=0.5))), rows(play()), strict=True):
        ttft, engines = (values[NAMES.index("ttft_s")] for values in (row, near))
        assert engines is None or ttft == pytest.approx(float(engines) + 1.0)


def test_a_run_of_nothing_is_a_header(tmp_path: Path) -> None:
    export(tmp_path / "none.csv", simulate(CONFIG, Workload("none", []), AffineCost(per_step=1.0)))
    assert (tmp_path / "none.csv").read_text() == ",".join(NAMES) + "\n"


def test_without_pyarrow_parquet_says_how_to_get_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(module, "import_module", missing)
    with pytest.raises(ValueError, match=r"^Parquet needs pyarrow: pip install pyarrow, or write \.csv or \.jsonl$"):
        export(tmp_path / "requests.parquet", run)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["requests.xlsx", "requests", "requests.parquet.gz"])
def test_an_unknown_ending_names_those_known(run: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"known endings: \.csv, \.csv\.gz, \.jsonl"):
        export(tmp_path / name, run)


def test_a_misspelt_ending_is_guessed(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Did you mean '\.jsonl'\?"):
        export(tmp_path / "requests.json", run)


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_where_nothing_can_be_written_the_error_is_one_line(run: Run, tmp_path: Path, ending: str) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    (tmp_path / f"requests{ending}").mkdir()
    with pytest.raises(ValueError, match=r"cannot write .*requests\.\w+': Is a directory; choose another place$"):
        export(tmp_path / f"requests{ending}", run)


def test_what_breaks_halfway_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: Run) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(module, "rows", broken)
    for ending in (".csv", ".jsonl"):
        with pytest.raises(RuntimeError, match="power cut"):
            export(tmp_path / f"requests{ending}", run)
    assert not list(tmp_path.iterdir())

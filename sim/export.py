"""Requests as a table for other tools: a row a request, by arrival, as CSV, JSON lines or Parquet.

`COLUMNS` says what each column holds. What does not exist (a first token of who was rejected) is empty in CSV, null
elsewhere. CSV and JSON lines may be gzipped: `requests.csv.gz`.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from math import isnan
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from policies.types import RequestRecord
from sim.files import whole_file
from sim.simulate import Run
from sim.timings import timings

Value = str | int | float | None  # bool is an int


class Row(NamedTuple):
    """A request's record at its engine, and what its client got; without a front end that is the same."""

    record: RequestRecord
    answered: bool
    first_token: float | None
    last_token: float
    num_tokens: int

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.record.arrival_time

    @property
    def tpot(self) -> float | None:
        if not self.answered or self.num_tokens < 2 or self.first_token is None:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    @property
    def e2e(self) -> float | None:
        return self.last_token - self.record.arrival_time if self.answered else None


@dataclass(frozen=True, slots=True)
class Column:
    """`kind` is str, bool, int or float; times are seconds, and say so in their name. `attribute` is a Row's."""

    name: str
    kind: type
    meaning: str
    attribute: str


COLUMNS: tuple[Column, ...] = (
    Column("request_id", str, "as in the workload", "record.request_id"),
    Column("class_name", str, "class of request", "record.class_name"),
    Column("client_id", str, "who asked", "record.client_id"),
    Column("reason", str, "why it left its engine: stop, length, abort, error or rejected", "record.reason.value"),
    Column("detail", str, "the same in words, where there are any", "record.detail"),
    Column("answered", bool, "its client got the whole answer", "answered"),
    Column("arrival_time_s", float, "when it was to arrive", "record.arrival_time"),
    Column("first_scheduled_time_s", float, "begin of its first step", "record.first_scheduled_time"),
    Column("first_token_time_s", float, "end of the step that gave its first token", "record.first_token_time"),
    Column("finish_time_s", float, "when it left its engine", "record.finish_time"),
    Column("queue_time_s", float, "arrival to first step", "record.queue_time"),
    Column("prefill_time_s", float, "first step to first token, less stalls and requeues", "record.prefill_time"),
    Column("decode_time_s", float, "first token to finish, less stalls and requeues", "record.decode_time"),
    Column("stall_time_s", float, "running, but not part of a step", "record.stall_time"),
    Column("requeue_time_s", float, "waiting after a preemption", "record.requeue_time"),
    Column("num_prompt_tokens", int, "tokens", "record.num_prompt_tokens"),
    Column("num_cached_tokens", int, "prompt tokens found when first admitted", "record.num_cached_tokens"),
    Column("num_output_tokens", int, "tokens", "record.num_output_tokens"),
    Column("num_recomputed_tokens", int, "computed again after preemptions", "record.num_recomputed_tokens"),
    Column("num_preemptions", int, "how often it gave up its blocks", "record.num_preemptions"),
    Column("ttft_s", float, "first token at its client - arrival", "ttft"),
    Column("tpot_s", float, "(last - first token) / (tokens - 1), at its client; nothing for one token", "tpot"),
    Column("e2e_s", float, "last token at its client - arrival; answered requests", "e2e"),
)  # fmt: skip


def rows(run: Run) -> Iterator[list[Value]]:
    """Of all who left, in order of arrival, then of id: in the same places for every run of a workload."""
    of = timings(run)
    seen = zip(of.records, of.completed.tolist(), of.firsts.tolist(), of.lasts.tolist(), of.nums.tolist(), strict=True)
    every = [Row(record, done, None if isnan(first) else first, *rest) for record, done, first, *rest in seen]
    values = attrgetter(*[column.attribute for column in COLUMNS])
    for row in sorted(every, key=lambda row: (row.record.arrival_time, row.record.request_id)):
        yield list(values(row))


def export(path: Path, run: Run) -> None:
    """Write what the name's ending asks for, one of `FORMATS`. Raises ValueError if that, or the file, cannot be."""
    ending = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if ending not in FORMATS:
        close = get_close_matches(ending, FORMATS, 1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"cannot tell the format of {str(path)!r}: known endings: {', '.join(FORMATS)}{hint}")
    FORMATS[ending](path, run)


def write_csv(path: Path, run: Run) -> None:
    with whole_file(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in COLUMNS])
        writer.writerows(rows(run))


def write_jsonl(path: Path, run: Run) -> None:
    names = [column.name for column in COLUMNS]
    with whole_file(path) as file:
        for row in rows(run):
            file.write(json.dumps(dict(zip(names, row, strict=True)), allow_nan=False) + "\n")


def write_parquet(path: Path, run: Run) -> None:
    """Needs pyarrow; each field's metadata holds the column's meaning."""
    arrow, parquet = _arrow()
    kinds = {str: arrow.string(), bool: arrow.bool_(), int: arrow.int64(), float: arrow.float64()}
    schema = arrow.schema(
        [arrow.field(each.name, kinds[each.kind], metadata={"meaning": each.meaning}) for each in COLUMNS]
    )
    table = list(rows(run))
    columns = [[row[index] for row in table] for index in range(len(COLUMNS))]
    arrays = [arrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    with _whole_binary_file(path) as file:
        parquet.write_table(arrow.Table.from_arrays(arrays, schema=schema), file)


FORMATS: dict[str, Callable[[Path, Run], None]] = {
    ".csv": write_csv,
    ".csv.gz": write_csv,
    ".jsonl": write_jsonl,
    ".jsonl.gz": write_jsonl,
    ".parquet": write_parquet,
}


def _arrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install pyarrow, or write .csv or .jsonl") from None


@contextmanager
def _whole_binary_file(path: Path) -> Iterator[IO[bytes]]:
    """As whole_file: written beside its place, moved when done."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise ValueError(f"cannot write {str(path)!r}: {error.strerror}; choose another place") from None
        raise

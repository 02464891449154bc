"""Which format a file has, told by its content, and whether every one of its rows can be trusted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sim.workload.aiperf_result import AIPERF_RESULT
from sim.workload.aiperf_sessions import AIPERF_SESSIONS
from sim.workload.azure import AZURE
from sim.workload.bailian import BAILIAN
from sim.workload.burstgpt import BURSTGPT
from sim.workload.clock import check_rate, check_span, likely_units
from sim.workload.content import coverage, two_lengths
from sim.workload.fields import header_fields
from sim.workload.guidellm import GUIDELLM
from sim.workload.lines import place, shown
from sim.workload.llmservingsim import LLMSERVINGSIM, LLMSERVINGSIM_RUN
from sim.workload.mooncake import MOONCAKE, TIMED
from sim.workload.rows import File, Reading, ReadOptions, Shape, Trace, TraceFormat, TraceRow
from sim.workload.servegen import SERVEGEN
from sim.workload.sources import Record, read_records, sha256
from sim.workload.vidur import VIDUR
from sim.workload.vllm_bench import VLLM_BENCH
from sim.workload.weka import WEKA

FORMATS = (  # of two that fit, the first
    AZURE,
    BURSTGPT,
    VIDUR,
    BAILIAN,
    AIPERF_SESSIONS,
    MOONCAKE,
    TIMED,
    WEKA,
    LLMSERVINGSIM,
    LLMSERVINGSIM_RUN,
    SERVEGEN,
    VLLM_BENCH,
    AIPERF_RESULT,
    GUIDELLM,
)
MAX_ROWS = 10**7  # about 10 GB of requests


def read_trace(
    path: Path,
    *,
    timestamp_unit: str | None = None,
    content_size: int | None = None,
    any_rate: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> Trace:
    """All rows or none: those beyond the limit are checked, and not kept. What the options mean: ReadOptions.

    Raises ValueError that names file, line, value, rule and way out.
    """
    options = ReadOptions(timestamp_unit, content_size, any_rate, limit, seed)
    records = read_records(path)
    first = next(records, None)
    if first is None:
        raise ValueError(f"{place(path)} is empty: a trace needs at least one row; fetch the file again")
    record, collector = first, _begun(path, first, options)
    for record in records:
        try:
            collector.add(record.value)
        except ValueError as error:
            raise ValueError(f"{record.place(path)}: {error}") from None
    source = f"{path.name} sha256:{sha256(path)}"
    try:
        return collector.trace(path.stem, source)
    except ValueError as error:
        raise ValueError(f"{record.place(path)}: {error}") from None


def _begun(path: Path, first: Record, options: ReadOptions) -> Collector:
    try:
        collector = Collector(recognise(first.value), first.value, options)
        if collector.format.shape is not Shape.CSV:  # where the first line is the header
            collector.add(first.value)
    except ValueError as error:
        raise ValueError(f"{first.place(path)}: {error}") from None
    return collector


def recognise(first: Any) -> TraceFormat:
    """The format whose columns the first record has; more columns do no harm."""
    if isinstance(first, File):
        shape, found = Shape.FILES, [first.name]
    elif isinstance(first, dict):
        shape, found = Shape.JSON, list(first)
    else:
        shape, found = Shape.CSV, header_fields(first)
    alike = [each for each in FORMATS if each.shape is shape]
    for each in alike:
        if _needs(each, found) == []:
            return each
    known = ", ".join(each.name for each in FORMATS)
    raise ValueError(
        f"{shown(', '.join(found))} is no known trace format; known: {known}{_nearest(alike, found)}. "
        "Convert or rename columns"
    )


def _needs(trace_format: TraceFormat, found: Sequence[str]) -> list[str]:
    if trace_format.shape is Shape.FILES:
        return [pattern for pattern in trace_format.columns if not fnmatch(found[0], pattern)]
    present = set(found)
    return [column for column in trace_format.columns if column not in present]


def _nearest(formats: Sequence[TraceFormat], found: Sequence[str]) -> str:
    """What the format that has most in common would need."""
    near = [each for each in formats if len(_needs(each, found)) < len(each.columns)]
    if not near:
        return ""
    best = min(near, key=lambda each: (len(_needs(each, found)), -len(each.columns)))
    return f"; {best.name} would need {', '.join(_needs(best, found))}"


class Collector:
    """Rows so far. Errors say what is wrong with a record; its caller knows where the record is."""

    def __init__(self, trace_format: TraceFormat, first: Any, options: ReadOptions) -> None:
        self.format = trace_format
        self.rows: list[TraceRow] = []
        self._reading = Reading(trace_format, options)
        self._parse = trace_format.parser(first, self._reading)
        self._times = array("d")
        self._last: TraceRow | None = None

    def add(self, value: Any) -> None:
        for row in self._parse(value):
            self._take(row)

    def _take(self, row: TraceRow) -> None:
        if self.format.in_order:
            self._check_order(row)
        if row.delay is None:
            self._times.append(row.arrival_time)
        if self._reading.keeps(self._reading.num_rows):
            if len(self.rows) >= MAX_ROWS:
                raise ValueError(f"a trace of more than {MAX_ROWS} requests must be cut: give num_requests")
            self.rows.append(row)
        self._reading.num_rows += 1

    def _check_order(self, row: TraceRow) -> None:
        last, self._last = self._last, row
        if last is None:
            return
        if row.arrival_time < last.arrival_time:
            column, early = self.format.columns[0], last.arrival_time - row.arrival_time
            raise ValueError(
                f"{column} is {early:.9g} s earlier than the row above: rows must be in order of arrival; "
                f"sort the file by {column}"
            )
        if row == last:
            self._reading.note("rows equal to the row above, kept")

    def trace(self, name: str, source: str) -> Trace:
        """Raises ValueError for what only the whole file can tell."""
        reading = self._reading
        for row in reading.at_end():
            self._take(row)
        if not self.rows:
            reasons = "; ".join(reading.said()) or "only a header"
            raise ValueError(f"no request to run ({reasons}): a trace needs at least one row with tokens both ways")
        findings = (*self._clock(), *self.format.assumptions, *self._contents(), *reading.said())
        return Trace(
            name, source, self.format, self.rows, self._times, reading.num_rows,
            reading.content_size, reading.has_starts, findings,
        )  # fmt: skip

    def _contents(self) -> list[str]:
        size = self._reading.content_size
        if size is None:
            return []
        return [coverage(self.rows, size), *([] if self._reading.makes_ids else two_lengths(self.rows, size))]

    def _clock(self) -> list[str]:
        """Checks the times and says in which unit they were read, and why."""
        times, unit, reading = self._times, self._reading.unit, self._reading
        if not reading.has_starts:
            return []
        if reading.unit_is_unknown:
            self._refuse_unit()
        check_span(times, unit)
        if not (reading.options.any_rate or self.format.declares_unit):
            check_rate(times, unit)
        why = "as given" if reading.options.timestamp_unit else f"as {self.format.name} has them"
        return [f"times are in {unit.name}, {why}: {len(times)} arrivals in {max(times) - min(times):.9g} s"]

    def _refuse_unit(self) -> None:
        span = max(self._times) - min(self._times)
        likely = likely_units(len(self._times) - 1, span, None)
        raise ValueError(
            f"{self.format.columns[0]} spans {span:g} of an unknown unit: give timestamp_unit; likely "
            f"{' or '.join(likely) or 'are all of them'}"
        )

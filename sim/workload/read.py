"""Which format a file has, told by its content, and whether every one of its rows can be trusted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from sim.workload.azure import AZURE
from sim.workload.clock import check_rate, check_span
from sim.workload.fields import header_fields, json_object
from sim.workload.lines import Line, place, read_lines, shown
from sim.workload.mooncake import MOONCAKE
from sim.workload.rows import Trace, TraceFormat, TraceRow
from sim.workload.vidur import VIDUR

FORMATS = (AZURE, MOONCAKE, VIDUR)


def read_trace(path: Path, *, any_rate: bool = False) -> Trace:
    """All rows or none. `any_rate` accepts an unlikely clock: the caller will set the rate himself.

    Raises ValueError that names file, line, value, rule and way out.
    """
    digest = hashlib.sha256()
    lines = read_lines(path, digest.update)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{place(path)} is empty: a trace needs at least one row; fetch the file again")
    collector = _open(path, first)
    rest = chain([first], lines) if collector.format.is_json else lines
    last = _collect(path, collector, rest, first.number)
    try:
        collector.check(any_rate)
    except ValueError as error:
        raise ValueError(f"{place(path, last)}: {error}") from None
    findings = (*collector.format.assumptions, *collector.dropped_rows())
    return Trace(path.stem, f"{path.name} sha256:{digest.hexdigest()}", collector.format, collector.rows, findings)


def recognise(first_line: str) -> TraceFormat:
    """The format whose columns the first line has; more columns do no harm."""
    is_json = first_line.startswith("{")
    fields = list(json_object(first_line)) if is_json else header_fields(first_line)
    for each in FORMATS:
        if each.is_json == is_json and set(each.columns) <= set(fields):
            return each
    known = "; ".join(f"{each.name} ({', '.join(each.columns)})" for each in FORMATS)
    raise ValueError(f"{shown(', '.join(fields))} is no known trace format; known: {known}. Convert or rename columns")


def _open(path: Path, first: Line) -> Collector:
    try:
        return Collector(recognise(first.text), first.text)
    except ValueError as error:
        raise ValueError(f"{place(path, first.number)}: {error}") from None


def _collect(path: Path, collector: Collector, lines: Iterator[Line], number: int) -> int:
    """Returns the number of the last line."""
    for number, text in lines:
        try:
            collector.add(text)
        except ValueError as error:
            raise ValueError(f"{place(path, number)}: {error}") from None
    return number


class Collector:
    """Rows so far. Errors say what is wrong with a line; its caller knows where the line is."""

    def __init__(self, trace_format: TraceFormat, first_line: str) -> None:
        self.format = trace_format
        self.rows: list[TraceRow] = []
        self._parse = trace_format.parser(first_line)
        self._dropped: Counter[str] = Counter()
        self._now = 0.0

    def add(self, text: str) -> None:
        row = self._parse(text)
        if row.arrival_time < self._now:
            self._refuse_order(row)
        self._now = row.arrival_time
        if row.num_prompt_tokens and row.num_output_tokens:
            self.rows.append(row)
        else:
            self._dropped["output" if row.num_prompt_tokens else "prompt"] += 1

    def _refuse_order(self, row: TraceRow) -> None:
        column = self.format.columns[0]
        raise ValueError(
            f"{column} is {self._now - row.arrival_time:.9g} s earlier than the row above: rows must be in order of "
            f"arrival; sort the file by {column}"
        )

    def check(self, any_rate: bool) -> None:
        """What only the whole file can tell."""
        if not self.rows:
            reasons = "; ".join(self.dropped_rows()) or "only a header"
            raise ValueError(f"no request to run ({reasons}): a trace needs at least one row with tokens both ways")
        times = [row.arrival_time for row in self.rows]
        check_span(times, self.format.time_unit)
        if not (any_rate or self.format.declares_unit):
            check_rate(times, self.format.time_unit)

    def dropped_rows(self) -> list[str]:
        return [f"rows dropped for 0 {side} tokens, as failed requests have: {n}" for side, n in self._dropped.items()]

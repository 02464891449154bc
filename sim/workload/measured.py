"""A measured run as a workload: its requests in the order they were sent, counted from the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sim.workload.rows import Reading, TraceRow


class Sent:
    """Requests of a result, which lists them in order of completion, or in none; given as rows at the file's end."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._rows: list[TraceRow] = []
        reading.at_end = self._in_order

    def add(self, row: TraceRow) -> None:
        self._rows.extend(self._reading.answered(row))

    def _in_order(self) -> Iterable[TraceRow]:
        rows = sorted(self._rows, key=lambda row: row.arrival_time)
        for row in rows:
            yield replace(row, arrival_time=row.arrival_time - rows[0].arrival_time)


def only_run(reading: Reading) -> None:
    """Refuses a second document: two runs have two clocks."""
    if reading.findings:
        raise ValueError("a second run must be read by itself: give one file at a time")

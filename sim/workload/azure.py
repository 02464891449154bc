"""Azure LLM inference traces: wall-clock arrivals and lengths, no content (Splitwise, ISCA 2024).

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Lines end in CRLF, the last one in nothing.
"""

from __future__ import annotations

import re
from datetime import datetime

from sim.workload.fields import column_picker, token_count
from sim.workload.lines import shown
from sim.workload.rows import Parse, TraceFormat, TraceRow

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?", re.ASCII)
_START = datetime(1, 1, 1)


def clock_ns(text: str) -> int:
    """Nanoseconds since year 1: integers, because a double of that size would lose the trace's 100 ns."""
    try:
        if matched := _CLOCK.fullmatch(text):
            since = datetime.fromisoformat(matched[1]) - _START
            return (since.days * 86_400 + since.seconds) * 10**9 + int((matched[2] or "").ljust(9, "0"))
    except ValueError:
        pass  # a month 13 looks right and is not
    raise ValueError(
        f"TIMESTAMP {shown(text)} must be a wall-clock time such as 2023-11-16 18:15:46.6805900: "
        "correct or remove the row"
    )


def parser(header: str) -> Parse:
    pick = column_picker(header, COLUMNS)
    first: int | None = None

    def parse(text: str) -> TraceRow:
        nonlocal first
        clock, prompt, output = pick(text)
        now = clock_ns(clock)
        first = now if first is None else first
        return TraceRow(
            (now - first) / 10**9, token_count("ContextTokens", prompt), token_count("GeneratedTokens", output)
        )

    return parse


AZURE = TraceFormat(
    name="azure",
    columns=COLUMNS,
    is_json=False,
    time_unit="wall-clock time",
    declares_unit=True,
    parser=parser,
    assumptions=("TIMESTAMP is wall-clock time, counted from the first row", "prompts share nothing"),
)

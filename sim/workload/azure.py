"""Azure LLM inference traces of 2023 to 2025: wall-clock arrivals and lengths, no content (Splitwise, ISCA 2024).

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Lines end in CRLF, the last one in nothing. Those of 2024 carry a time zone, those of 2025 also NumImages.
"""

from __future__ import annotations

import re
from datetime import datetime

from sim.workload.clock import WALL_CLOCK
from sim.workload.fields import column_picker, header_fields, token_count
from sim.workload.lines import shown
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
IMAGES = "NumImages"

_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII)
_START = datetime(1, 1, 1)


def clock_ns(text: str) -> int:
    """Nanoseconds since year 1, UTC: integers, because a double of that size would lose the trace's 100 ns."""
    try:
        if matched := _CLOCK.fullmatch(text):
            clock, fraction, sign, hours, minutes = matched.groups()
            since = datetime.fromisoformat(clock) - _START
            ahead = int(f"{sign}1") * (int(hours) * 3600 + int(minutes) * 60) if sign else 0
            return (since.days * 86_400 + since.seconds - ahead) * 10**9 + int((fraction or "").ljust(9, "0"))
    except ValueError:
        pass  # a month 13 looks right and is not
    raise ValueError(
        f"TIMESTAMP {shown(text)} must be a wall-clock time such as 2023-11-16 18:15:46.6805900: "
        "correct or remove the row"
    )


def parser(header: str, reading: Reading) -> Parse:
    has_images = IMAGES in header_fields(header)
    pick = column_picker(header, [*COLUMNS, IMAGES] if has_images else COLUMNS)
    first: int | None = None

    def parse(text: str) -> list[TraceRow]:
        nonlocal first
        clock, prompt, output, *images = pick(text)
        now = clock_ns(clock)
        first = now if first is None else first
        if any(token_count(IMAGES, each) for each in images):
            reading.note("requests with images, of which only ContextTokens are known")
        return reading.answered(
            TraceRow((now - first) / 10**9, token_count(COLUMNS[1], prompt), token_count(COLUMNS[2], output))
        )

    return parse


AZURE = TraceFormat(
    name="azure",
    columns=COLUMNS,
    shape=Shape.CSV,
    unit=WALL_CLOCK,
    declares_unit=True,
    parser=parser,
    assumptions=("TIMESTAMP is wall-clock time, counted from the first row", "prompts share nothing"),
)

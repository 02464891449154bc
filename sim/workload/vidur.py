"""Vidur's processed traces: arrivals in seconds and lengths, no content (Vidur, MLSys 2024).

    arrived_at,num_prefill_tokens,num_decode_tokens
    0.097829,169,205

Columns may stand in any order, among others.
"""

from __future__ import annotations

from sim.workload.clock import UNITS
from sim.workload.fields import column_picker, seconds, token_count
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


def parser(header: str, reading: Reading) -> Parse:
    pick = column_picker(header, COLUMNS)

    def parse(text: str) -> list[TraceRow]:
        arrived_at, prompt, output = pick(text)
        return reading.answered(
            TraceRow(
                seconds("arrived_at", arrived_at, reading.unit),
                token_count("num_prefill_tokens", prompt),
                token_count("num_decode_tokens", output),
            )
        )

    return parse


VIDUR = TraceFormat(
    name="vidur",
    columns=COLUMNS,
    shape=Shape.CSV,
    unit=UNITS["s"],
    parser=parser,
    assumptions=("prompts share nothing",),
)

"""Vidur's processed traces: arrivals in seconds and lengths, no content (Vidur, MLSys 2024).

    arrived_at,num_prefill_tokens,num_decode_tokens
    0.097829,169,205

Columns may stand in any order, among others.
"""

from __future__ import annotations

from sim.workload.fields import column_picker, time_value, token_count
from sim.workload.rows import Parse, TraceFormat, TraceRow

COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


def parser(header: str) -> Parse:
    pick = column_picker(header, COLUMNS)

    def parse(text: str) -> TraceRow:
        arrived_at, prompt, output = pick(text)
        return TraceRow(
            time_value("arrived_at", arrived_at),
            token_count("num_prefill_tokens", prompt),
            token_count("num_decode_tokens", output),
        )

    return parse


VIDUR = TraceFormat(
    name="vidur",
    columns=COLUMNS,
    is_json=False,
    time_unit="seconds",
    parser=parser,
    assumptions=("arrived_at is in seconds", "prompts share nothing"),
)

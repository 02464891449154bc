"""Mooncake traces: arrivals in milliseconds, lengths, and chained ids of 512 tokens (Mooncake, FAST 2025).

    {"timestamp": 3000, "input_length": 758, "output_length": 500, "hash_ids": [0, 1]}

`input_length` is the full prompt; equal ids are equal content after equal content, across the whole file. vLLM's
timed_trace is the same, of any unit and chunk size: neither stands in the file. Without hash_ids, as in GuideLLM's
minimal traces, not even a usual unit is known.
"""

from __future__ import annotations

from typing import Any

from sim.workload.clock import UNITS
from sim.workload.content import covering_ids
from sim.workload.fields import require, seconds, token_count
from sim.workload.lines import shown
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

LENGTHS = ("timestamp", "input_length", "output_length")
COLUMNS = (*LENGTHS, "hash_ids")


def parser(first: dict[str, Any], reading: Reading) -> Parse:
    columns, size = reading.format.columns, reading.content_size

    def parse(fields: dict[str, Any]) -> list[TraceRow]:
        require(fields, columns)
        for each in ("session_id", "hash_ids"):
            if each in fields and each not in columns:
                raise ValueError(f"{each} {shown(fields[each])} must stand in the first row too, or in none")
        num_prompt_tokens = token_count("input_length", fields["input_length"])
        ids = covering_ids("hash_ids", fields["hash_ids"], num_prompt_tokens, size, "input_length") if size else ()
        return reading.answered(
            TraceRow(
                seconds("timestamp", fields["timestamp"], reading.unit),
                num_prompt_tokens,
                token_count("output_length", fields["output_length"]),
                ids,
            )
        )

    return parse


MOONCAKE = TraceFormat(
    name="mooncake",
    columns=COLUMNS,
    shape=Shape.JSON,
    unit=UNITS["ms"],
    parser=parser,
    assumptions=("input_length is the full prompt", "hash_ids are shared by all requests"),
    content_size=512,
    takes_size=True,
    may_tick=True,
)

TIMED = TraceFormat(
    name="timed",
    columns=LENGTHS,
    shape=Shape.JSON,
    unit=None,
    parser=parser,
    assumptions=("input_length is the full prompt", "prompts share nothing"),
    may_tick=True,
)

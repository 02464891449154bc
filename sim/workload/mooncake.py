"""Mooncake traces: arrivals in milliseconds, lengths, and chained ids of 512 tokens (Mooncake, FAST 2025).

    {"timestamp": 3000, "input_length": 758, "output_length": 500, "hash_ids": [0, 1]}

`input_length` is the full prompt; equal ids are equal content after equal content, across the whole file.
"""

from __future__ import annotations

from typing import Any

from sim.workload.fields import json_object, time_value, token_count
from sim.workload.lines import shown
from sim.workload.rows import Parse, TraceFormat, TraceRow

COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids")
CONTENT_SIZE = 512

_MAX_ID = 2**64  # as wide as any hash these files hold


def hash_ids(value: Any, num_prompt_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"hash_ids {shown(value)} must be a list of whole numbers: correct or remove the row")
    if value and not -_MAX_ID < min(value) <= max(value) < _MAX_ID:
        raise ValueError(f"hash_ids {shown(value)} must have at most 64 bits each: number the contents from 0")
    expected = -(-num_prompt_tokens // CONTENT_SIZE)
    if len(value) != expected:
        raise ValueError(
            f"{len(value)} hash_ids for an input_length of {num_prompt_tokens} must be {expected}, one for each "
            f"{CONTENT_SIZE} tokens begun: check the block size of the trace"
        )
    return tuple(value)


def parse(text: str) -> TraceRow:
    fields = json_object(text)
    if missing := [column for column in COLUMNS if column not in fields]:
        raise ValueError(f"{shown(text)} has no {', '.join(missing)}: every row needs {', '.join(COLUMNS)}")
    num_prompt_tokens = token_count("input_length", fields["input_length"])
    return TraceRow(
        time_value("timestamp", fields["timestamp"]) / 1000,
        num_prompt_tokens,
        token_count("output_length", fields["output_length"]),
        hash_ids(fields["hash_ids"], num_prompt_tokens),
    )


def parser(first_line: str) -> Parse:
    return parse


MOONCAKE = TraceFormat(
    name="mooncake",
    columns=COLUMNS,
    is_json=True,
    time_unit="milliseconds",
    parser=parser,
    assumptions=(
        "timestamp is in milliseconds",
        "input_length is the full prompt",
        f"hash_ids stand for {CONTENT_SIZE} tokens each and are shared by all requests",
    ),
    content_size=CONTENT_SIZE,
    may_tick=True,
)

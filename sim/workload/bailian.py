"""Qwen-Bailian traces: arrivals in seconds, chats, and ids of 16 tokens (Wang et al., ATC 2025).

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
     "type": "text", "turn": 2, "hash_ids": [1089, 1090]}

`input_length` is the full prompt. An id stands for the 16 tokens alone, not for what comes before them; it is the same
across the whole file. A chat's root has no parent (-1) and gives its session the name.
"""

from __future__ import annotations

from typing import Any

from sim.workload.clock import UNITS
from sim.workload.content import covering_ids
from sim.workload.fields import name_text, require, seconds, token_count
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

COLUMNS = ("timestamp", "chat_id", "parent_chat_id", "input_length", "output_length", "hash_ids")
NO_PARENT = "-1"


class Chats:
    """Which row and which session each chat is in."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._rows: dict[str, int] = {}
        self._sessions: dict[str, str] = {}

    def __call__(self, fields: dict[str, Any]) -> list[TraceRow]:
        require(fields, COLUMNS)
        chat, parent = (name_text(each, fields[each]) for each in ("chat_id", "parent_chat_id"))
        if parent != NO_PARENT and parent not in self._sessions:
            self._reading.note("chats whose parent is not above them, read as the first of their session")
        session = self._sessions[chat] = self._sessions.get(parent, chat)
        found = self._reading.answered(self._row(fields, session, self._rows.get(parent)))
        if found:
            self._rows[chat] = self._reading.num_rows
        return found

    def _row(self, fields: dict[str, Any], session: str, parent: int | None) -> TraceRow:
        num_prompt_tokens = token_count("input_length", fields["input_length"])
        size = self._reading.content_size
        assert size is not None, "the format has a content size"
        return TraceRow(
            seconds("timestamp", fields["timestamp"], self._reading.unit),
            num_prompt_tokens,
            token_count("output_length", fields["output_length"]),
            covering_ids("hash_ids", fields["hash_ids"], num_prompt_tokens, size, "input_length"),
            class_name=name_text("type", fields.get("type", "default")),
            session=session,
            follows=() if parent is None else (parent,),
        )


def parser(first: dict[str, Any], reading: Reading) -> Parse:
    return Chats(reading)


BAILIAN = TraceFormat(
    name="bailian",
    columns=COLUMNS,
    shape=Shape.JSON,
    unit=UNITS["s"],
    parser=parser,
    assumptions=(
        "input_length is the full prompt",
        "hash_ids are shared by all requests",
        "turns come by the clock, as recorded, and do not wait for the answer before",
    ),
    content_size=16,
    takes_size=True,
    may_tick=True,
)

"""LLMServingSim workloads: arrivals in nanoseconds, lengths, token ids if any; a line is a request or a session.

    {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 4059740, "input_tok_ids": [1, 2, 3]}
    {"session_id": "s0", "arrival_time_ns": 0, "sub_requests": [
        {"input_toks": 1472, "output_toks": 133, "tool_duration_ns": 127348767}, ...]}

`input_toks` is the full prompt; a sub-request follows `tool_duration_ns` of the one before it after that one's answer.
Its server runs (requests.jsonl) have arrival_time instead, in seconds since 1970.
"""

from __future__ import annotations

from typing import Any

from sim.workload.clock import UNITS
from sim.workload.fields import content_list, list_of, name_text, require, seconds, token_count
from sim.workload.measured import Sent
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

COLUMNS = ("arrival_time_ns",)
LENGTHS = ("input_toks", "output_toks")
NS = UNITS["ns"]


class Lines:
    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._ids: dict[int, int] = {}  # one object for each token id, however often it is read

    def __call__(self, fields: dict[str, Any]) -> list[TraceRow]:
        require(fields, COLUMNS)
        start = seconds("arrival_time_ns", fields["arrival_time_ns"], NS)
        if "sub_requests" not in fields:
            return self._row(fields, start)
        session = name_text("session_id", fields.get("session_id", ""))
        return self._session(session, start, list_of("sub_requests", fields["sub_requests"], dict))

    def _session(self, session: str, start: float, calls: list[dict[str, Any]]) -> list[TraceRow]:
        rows: list[TraceRow] = []
        delay = 0.0
        for call in calls:
            follows = (self._reading.num_rows + len(rows) - 1,) if rows else ()
            found = self._row(call, 0.0 if rows else start + delay, session, follows, delay if rows else None)
            pause = seconds("tool_duration_ns", call.get("tool_duration_ns", 0), NS)
            delay = pause if found else delay + pause
            rows.extend(found)
        return rows

    def _row(
        self,
        fields: dict[str, Any],
        arrival_time: float,
        session: str = "",
        follows: tuple[int, ...] = (),
        delay: float | None = None,
    ) -> list[TraceRow]:
        require(fields, LENGTHS)
        num_prompt_tokens = token_count("input_toks", fields["input_toks"])
        return self._reading.answered(
            TraceRow(
                arrival_time,
                num_prompt_tokens,
                token_count("output_toks", fields["output_toks"]),
                self._tokens(fields.get("input_tok_ids"), num_prompt_tokens),
                session=session,
                follows=follows,
                delay=delay,
            )
        )

    def _tokens(self, value: object, num_prompt_tokens: int) -> tuple[int, ...]:
        """Each token is a content of its own: its id says it all."""
        if value is None:
            return ()
        ids = content_list("input_tok_ids", value)
        if len(ids) != num_prompt_tokens:
            raise ValueError(
                f"{len(ids)} input_tok_ids for {num_prompt_tokens} input_toks must be as many: correct the row"
            )
        return tuple(map(self._ids.setdefault, ids, ids))


def parser(first: dict[str, Any], reading: Reading) -> Parse:
    return Lines(reading)


LLMSERVINGSIM = TraceFormat(
    name="llmservingsim",
    columns=COLUMNS,
    shape=Shape.JSON,
    unit=NS,
    declares_unit=True,
    parser=parser,
    assumptions=("input_toks is the full prompt", "input_tok_ids are of one tokenizer"),
    content_size=1,
    in_order=False,
)


def run_parser(first: dict[str, Any], reading: Reading) -> Parse:
    sent = Sent(reading)

    def parse(fields: dict[str, Any]) -> list[TraceRow]:
        require(fields, LLMSERVINGSIM_RUN.columns)
        prompt, output = (token_count(each, fields[each]) for each in LENGTHS)
        sent.add(TraceRow(seconds("arrival_time", fields["arrival_time"], reading.unit), prompt, output))
        return []

    return parse


LLMSERVINGSIM_RUN = TraceFormat(
    name="llmservingsim-run",
    columns=("arrival_time", *LENGTHS),
    shape=Shape.JSON,
    unit=UNITS["s"],
    declares_unit=True,
    parser=run_parser,
    assumptions=("arrival_time is counted from the first request", "prompts share nothing"),
    in_order=False,
)

"""aiperf's profile_export.jsonl as a workload: start times in nanoseconds since 1970 and lengths, a request a line.

{"metadata": {"request_start_ns": ..., "benchmark_phase": "profiling", "conversation_id": ..., "was_cancelled": false},
 "metrics": {"input_sequence_length": {"value": 700, "unit": "tokens"}, ...}, "error": null}
"""

from __future__ import annotations

from typing import Any

from sim.workload.clock import UNITS
from sim.workload.fields import name_text, require, token_count
from sim.workload.lines import shown
from sim.workload.measured import Sent
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

COLUMNS = ("metadata", "metrics")
START, PHASE = ("request_start_ns", "timestamp_ns"), ("benchmark_phase", "credit_phase")  # now, and in 2025
PROMPT, OUTPUT, SERVER_PROMPT = "input_sequence_length", "output_sequence_length", "usage_prompt_tokens"
NS = UNITS["ns"].per_second


def parser(first: dict[str, Any], reading: Reading) -> Parse:
    sent, epoch = Sent(reading), _start(first)
    reading.findings.append(f"prompts are as long as {PROMPT} says")

    def parse(fields: dict[str, Any]) -> list[TraceRow]:
        metadata, metrics = _objects(fields)
        if reason := _left_out(fields, metadata):
            reading.drop(reason)
            return []
        prompt, output = _tokens(metrics, PROMPT), _tokens(metrics, OUTPUT)
        if SERVER_PROMPT in metrics and abs(_tokens(metrics, SERVER_PROMPT) - prompt) > prompt / 10:
            reading.note(f"requests whose {SERVER_PROMPT}, the server's own count, differs by more than a tenth")
        # Integers until the epoch is gone: a double of today's nanoseconds is 256 of them wide.
        session = name_text("conversation_id", metadata.get("conversation_id") or "")
        sent.add(TraceRow((_start(fields) - epoch) / NS, prompt, output, session=session))
        return []

    return parse


def _objects(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    require(fields, COLUMNS)
    metadata, metrics = fields["metadata"], fields["metrics"]
    if not isinstance(metadata, dict) or not isinstance(metrics, dict):
        raise ValueError(f"metadata {shown(metadata)} and metrics must be JSON objects: fetch the file again")
    return metadata, metrics


def _start(fields: dict[str, Any]) -> int:
    metadata, _ = _objects(fields)
    value = _either(metadata, START)
    if type(value) is int and 0 <= value < 2**63:
        return value
    raise ValueError(f"{START[0]} {shown(value)} must be a whole number of nanoseconds: correct or remove the row")


def _either(metadata: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((metadata[name] for name in names if name in metadata), None)


def _left_out(fields: dict[str, Any], metadata: dict[str, Any]) -> str:
    if _either(metadata, PHASE) not in ("profiling", None):
        return "being warm-up"
    if fields.get("error") is not None:
        return "an error noted"
    return "being cancelled" if metadata.get("was_cancelled") else ""


def _tokens(metrics: dict[str, Any], tag: str) -> int:
    measured = metrics.get(tag)
    return token_count(tag, measured.get("value") if isinstance(measured, dict) else measured)


AIPERF_RESULT = TraceFormat(
    name="aiperf-result",
    columns=COLUMNS,
    shape=Shape.JSON,
    unit=UNITS["ns"],
    declares_unit=True,
    parser=parser,
    assumptions=(
        "arrivals are when the client sent, as the measured server let it",
        "request_start_ns is counted from the first request",
        "prompts share nothing",
    ),
    in_order=False,
)

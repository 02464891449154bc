"""aiperf's profile_export.jsonl: a request a line; epoch nanoseconds, and metrics that carry their unit.

Files of 2025 say ttft, timestamp_ns and credit_phase.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from calibration.importers.files import read_lines, source_of, stem_of
from calibration.records import MeasuredRequest, MeasuredRun

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
TTFT = ("time_to_first_token", "ttft")
PROMPT = ("usage_prompt_tokens", "input_sequence_length")  # the server's own count first
OUTPUT = ("usage_completion_tokens", "output_sequence_length")


def is_aiperf(fields: dict[str, Any]) -> bool:
    return "metadata" in fields and "metrics" in fields


def read_aiperf(path: Path) -> MeasuredRun:
    """Warm-up is left out; failed and cancelled requests are kept as such, where their lengths are known."""
    rows = [row for row in read_lines(path) if _phase(path, row) in ("profiling", None)]
    if not rows:
        raise ValueError(f"{str(path)!r} holds warm-up requests only")
    begin = min(_start(path, row) for row in rows)
    # Integers until the epoch is gone: a double of today's nanoseconds is 256 of them wide.
    found = [_request(path, index, (_start(path, row) - begin) * 1e-9, row) for index, row in enumerate(rows)]
    requests = sorted((each for each in found if each is not None), key=lambda request: request.arrival_time)
    return MeasuredRun(stem_of(path), requests, source=source_of(path), findings=_findings(found, requests))


def _phase(path: Path, row: dict[str, Any]) -> Any:
    if not isinstance(row.get("metadata"), dict) or not isinstance(row.get("metrics"), dict):
        raise ValueError(f"{str(path)!r} is not aiperf's: each line needs the objects metadata and metrics")
    return row["metadata"].get("benchmark_phase", row["metadata"].get("credit_phase"))


def _start(path: Path, row: dict[str, Any]) -> int:
    value = row["metadata"].get("request_start_ns", row["metadata"].get("timestamp_ns"))
    if type(value) is not int:
        raise ValueError(f"{str(path)!r}: request_start_ns {value!r} must be a whole number of nanoseconds")
    return value


def _request(path: Path, index: int, arrival: float, row: dict[str, Any]) -> MeasuredRequest | None:
    metadata, metrics = row["metadata"], row["metrics"]
    name = f"request-{index}"
    prompt, output = _count(metrics, PROMPT), _count(metrics, OUTPUT)
    if not prompt:
        return None
    cached = _count(metrics, ("usage_prompt_cache_read_tokens",))
    known = None if cached is None else min(cached, prompt)
    if metadata.get("was_cancelled") or row.get("error") is not None or not output:
        outcome = "aborted" if metadata.get("was_cancelled") else "failed"
        return MeasuredRequest(name, arrival, prompt, 0, outcome=outcome, num_cached_tokens=known)
    first = arrival + _seconds(path, metrics, TTFT)
    gaps = _gaps(path, metrics)
    times = tuple(accumulate(gaps, initial=first)) if 0 < len(gaps) < output else ()
    last = times[-1] if times else arrival + _seconds(path, metrics, ("request_latency",))
    return MeasuredRequest(
        name, arrival, prompt, output, first, max(first, last), times, num_cached_tokens=known, max_tokens=output
    )


def _count(metrics: dict[str, Any], tags: tuple[str, ...]) -> int | None:
    told = next((metrics[tag] for tag in tags if tag in metrics), None)
    return int(told["value"] if isinstance(told, dict) else told) if told is not None else None


def _seconds(path: Path, metrics: dict[str, Any], tags: tuple[str, ...]) -> float:
    told = next((metrics[tag] for tag in tags if tag in metrics), None)
    if not isinstance(told, dict) or told.get("unit") not in SECONDS:
        raise ValueError(f"{str(path)!r}: {tags[0]} must have a value and a unit of {', '.join(SECONDS)}, not {told!r}")
    return float(told["value"]) * SECONDS[told["unit"]]


def _gaps(path: Path, metrics: dict[str, Any]) -> list[float]:
    told = metrics.get("inter_chunk_latency")
    if not told:
        return []
    if not isinstance(told.get("value"), list) or told.get("unit") not in SECONDS:
        raise ValueError(f"{str(path)!r}: inter_chunk_latency must be a list with a unit of {', '.join(SECONDS)}")
    return [float(each) * SECONDS[told["unit"]] for each in told["value"]]


def _findings(found: list[MeasuredRequest | None], requests: list[MeasuredRequest]) -> tuple[str, ...]:
    failed = sum(not each.is_completed for each in requests)
    said = ["arrivals are when the client sent"]
    if failed:
        said.append(f"{failed} of {len(requests)} requests failed or were cancelled, and are masked")
    if lost := len(found) - len(requests):
        said.append(f"{lost} requests have no prompt length, and are left out")
    return tuple(said)

"""GuideLLM 0.8 reports: one JSON object, a benchmark a load; epoch seconds, and milliseconds where the name says so.

Reports that were saved with their requests give records; sampled ones, whose lists are empty, give totals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibration.importers.files import need, read_object, source_of, stem_of
from calibration.records import MeasuredRequest, MeasuredRun
from calibration.summaries import MeasuredSummary, Stats, checked

OUTCOMES = {"successful": "completed", "errored": "failed", "incomplete": "aborted"}
PERCENTILES = {"p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}


def is_guidellm(fields: dict[str, Any]) -> bool:
    return isinstance(fields.get("benchmarks"), list) and "metadata" in fields


def read_guidellm(path: Path) -> list[MeasuredRun | MeasuredSummary]:
    """A run a benchmark. Raises ValueError for a report without any."""
    benchmarks = read_object(path)["benchmarks"]
    if not benchmarks:
        raise ValueError(f"{str(path)!r} holds no benchmark: it was saved before the first one ended")
    return [_read(path, index, each) for index, each in enumerate(benchmarks)]


def _read(path: Path, index: int, benchmark: dict[str, Any]) -> MeasuredRun | MeasuredSummary:
    need(path, benchmark, ("requests", "metrics", "config"))
    name = f"{stem_of(path)}-{index}"
    return _run(path, name, benchmark) if benchmark["requests"].get("successful") else _summary(path, name, benchmark)


def _run(path: Path, name: str, benchmark: dict[str, Any]) -> MeasuredRun:
    listed = [(OUTCOMES[kind], each) for kind in OUTCOMES for each in benchmark["requests"].get(kind) or []]
    usable = [(outcome, each) for outcome, each in listed if _is_usable(each)]
    begin = min(each["request_start_time"] for _, each in usable)
    requests = sorted((_request(path, begin, *each) for each in usable), key=lambda request: request.arrival_time)
    return MeasuredRun(name, requests, source=source_of(path), findings=_findings(listed, usable))


def _is_usable(fields: dict[str, Any]) -> bool:
    return fields.get("request_start_time") is not None and bool(fields.get("prompt_tokens"))


def _request(path: Path, begin: float, outcome: str, fields: dict[str, Any]) -> MeasuredRequest:
    need(path, fields, ("request_id", "request_start_time", "prompt_tokens", "output_tokens"))
    arrival = fields["request_start_time"] - begin
    prompt, cached = fields["prompt_tokens"], fields.get("cached_tokens")
    known = None if cached is None else min(cached, prompt)
    if outcome != "completed":
        return MeasuredRequest(fields["request_id"], arrival, prompt, 0, outcome=outcome, num_cached_tokens=known)
    need(path, fields, ("time_to_first_token_ms", "request_latency"))
    first, last = arrival + fields["time_to_first_token_ms"] / 1e3, arrival + fields["request_latency"]
    return MeasuredRequest(
        fields["request_id"], arrival, prompt, fields["output_tokens"], first, last, num_cached_tokens=known
    )


def _findings(listed: list[Any], usable: list[Any]) -> tuple[str, ...]:
    failed = sum(outcome != "completed" for outcome, _ in usable)
    late = max(each.get("request_dispatch_delay") or 0.0 for _, each in usable)
    found = ["arrivals are when the client sent"]
    if late > 0.1:
        found.append(f"the client sent up to {late:.3g} s after it meant to: that wait is not in these times")
    if failed:
        found.append(f"{failed} of {len(usable)} requests failed or did not end, and are masked")
    if len(usable) < len(listed):
        found.append(f"{len(listed) - len(usable)} requests were never sent, and are left out")
    return tuple(found)


def _summary(path: Path, name: str, benchmark: dict[str, Any]) -> MeasuredSummary:
    metrics, strategy = benchmark["metrics"], benchmark["config"].get("strategy") or {}
    totals = metrics.get("request_totals") or {}
    summary = MeasuredSummary(
        name=name,
        tool="guidellm",
        num_completed=totals.get("successful") or 0,
        num_failed=(totals.get("errored") or 0) + (totals.get("incomplete") or 0),
        duration=benchmark.get("duration"),
        offered_rate=strategy.get("rate"),
        request_rate=_stats(metrics, "requests_per_second").mean,
        input_token_rate=_stats(metrics, "prompt_tokens_per_second").mean,
        output_token_rate=_stats(metrics, "output_tokens_per_second").mean,
        prompt_tokens=_stats(metrics, "prompt_token_count"),
        output_tokens=_stats(metrics, "output_token_count"),
        ttft=_stats(metrics, "time_to_first_token_ms").times(1e-3),
        tpot=_stats(metrics, "inter_token_latency_ms").times(1e-3),  # what others call TPOT; its own counts the TTFT
        e2e=_stats(metrics, "request_latency"),
        source=source_of(path),
        findings=("the report lists no requests, as sampled ones do: totals only",),
    )
    return checked(summary)


def _stats(metrics: dict[str, Any], name: str) -> Stats:
    told = (metrics.get(name) or {}).get("successful")
    if not told:
        return Stats()
    percentiles = told.get("percentiles") or {}
    named = {ours: percentiles.get(theirs) for ours, theirs in PERCENTILES.items()}
    return Stats(mean=told.get("mean"), **named, min=told.get("min"), max=told.get("max"), std=told.get("std_dev"))

"""Totals of one run, as `vllm bench serve`, SGLang's bench_serving and InferenceX write them.

All three say mean_, median_ and pNN_ of each latency; vLLM and SGLang in milliseconds (the name ends in _ms),
InferenceX in seconds. SGLang writes a line a run and, even with its arrays, no start times: totals are all it gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibration.importers.files import need, read_lines, read_object, source_of, stem_of
from calibration.summaries import MeasuredSummary, Stats, checked, stats

E2E = ("e2el", "e2e_latency")
QUANTILES = {"mean": "mean", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "std": "std"}


def is_sglang(fields: dict[str, Any]) -> bool:
    return "completed" in fields and "total_output_tokens_retokenized" in fields


def is_totals(fields: dict[str, Any]) -> bool:
    """vLLM's without details, or InferenceX's."""
    return {"completed", "request_throughput"} <= fields.keys() or is_aggregated(fields)


def is_aggregated(fields: dict[str, Any]) -> bool:
    """InferenceX's agg_bmk.json: per GPU, without counts."""
    return {"conc", "tput_per_gpu", "isl", "osl"} <= fields.keys()


def read_sglang(path: Path) -> list[MeasuredSummary]:
    """A summary a line."""
    rows = read_lines(path)
    names = [stem_of(path) + (f"-{index}" if len(rows) > 1 else "") for index in range(len(rows))]
    return [_summary(path, name, row, "sglang") for name, row in zip(names, rows, strict=True)]


def read_totals(path: Path) -> MeasuredSummary:
    fields = read_object(path)
    if is_aggregated(fields):
        return _aggregated(path, fields)
    tool = "vllm" if any(name.endswith("_ms") for name in fields) else "inferencex"
    return _summary(path, stem_of(path), fields, tool)


def _summary(path: Path, name: str, fields: dict[str, Any], tool: str) -> MeasuredSummary:
    need(path, fields, ("completed", "duration", "total_input_tokens", "total_output_tokens"))
    completed, duration = fields["completed"], fields["duration"]
    if not duration > 0:
        raise ValueError(f"{str(path)!r}: duration {duration} must be above 0 seconds")
    summary = MeasuredSummary(
        name=name,
        tool=tool,
        num_completed=completed,
        num_failed=_failed(fields),
        duration=duration,
        offered_rate=_rate(fields.get("request_rate")),
        max_concurrency=fields.get("max_concurrency"),
        request_rate=completed / duration,
        input_token_rate=fields["total_input_tokens"] / duration,
        output_token_rate=fields["total_output_tokens"] / duration,
        prompt_tokens=_lengths(fields, "input_lens", fields["total_input_tokens"]),
        output_tokens=_lengths(fields, "output_lens", fields["total_output_tokens"]),
        ttft=_latency(fields, ("ttft",)),
        tpot=_latency(fields, ("tpot",)),
        itl=_latency(fields, ("itl",)),
        e2e=_latency(fields, E2E),
        source=source_of(path),
        findings=_findings(fields),
    )
    return checked(summary)


def _aggregated(path: Path, fields: dict[str, Any]) -> MeasuredSummary:
    """Rates are given per GPU; `conc` requests were kept in flight."""
    num_gpus = (fields.get("tp") or 1) * (fields.get("dp") or 1)
    output = fields.get("output_tput_per_gpu")
    summary = MeasuredSummary(
        name=stem_of(path),
        tool="inferencex",
        num_completed=fields["conc"],
        max_concurrency=fields["conc"],
        output_token_rate=None if output is None else output * num_gpus,
        prompt_tokens=Stats(mean=fields["isl"]),
        output_tokens=Stats(mean=fields["osl"]),
        ttft=_latency(fields, ("ttft",)),
        tpot=_latency(fields, ("tpot",)),
        itl=_latency(fields, ("itl",)),
        e2e=_latency(fields, E2E),
        source=source_of(path),
        findings=(f"the number of requests is not told; at least the {fields['conc']} in flight", *_findings(fields)),
    )
    return checked(summary)


def _latency(fields: dict[str, Any], tags: tuple[str, ...]) -> Stats:
    for tag in tags:
        for ending, factor in (("_ms", 1e-3), ("", 1.0)):
            told = {ours: fields.get(f"{theirs}_{tag}{ending}") for theirs, ours in QUANTILES.items()}
            known = {name: float(value) for name, value in told.items() if value is not None}
            if known:
                return Stats(**known).times(factor)
    return Stats()


def _lengths(fields: dict[str, Any], array: str, total: int) -> Stats:
    if fields.get(array):
        return stats([each for each in fields[array] if each])
    return Stats(mean=total / fields["completed"]) if fields["completed"] else Stats()


def _failed(fields: dict[str, Any]) -> int:
    if fields.get("failed") is not None:
        return int(fields["failed"])
    if fields.get("num_prompts") is not None:
        return max(0, int(fields["num_prompts"]) - int(fields["completed"]))
    return sum(map(bool, fields.get("errors") or ()))


def _rate(value: Any) -> float | None:
    """None where all were sent at once."""
    return None if value in (None, "inf", "Infinity") or value == float("inf") else float(value)


def _findings(fields: dict[str, Any]) -> tuple[str, ...]:
    found = ["totals only: no request can be told from another"]
    if (cap := fields.get("max_concurrency") or fields.get("conc")) is not None:
        found.append(f"at most {cap} requests were in flight: arrivals followed from answers")
    return tuple(found)

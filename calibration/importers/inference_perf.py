"""inference-perf: a folder of stage_N_lifecycle_metrics.json, one a load, in seconds (whatever its documents say).

Its TPOT before mid-2026 is about half the truth: it is recomputed from E2E, TTFT and lengths, and the difference said.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from calibration.importers.files import need, read_object, source_of
from calibration.summaries import MeasuredSummary, Stats, checked

_STAGE = re.compile(r"stage_(\d+)_lifecycle_metrics\.json")
QUANTILES = {"mean": "mean", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "min": "min", "max": "max"}


def is_inference_perf(fields: dict[str, Any]) -> bool:
    return "load_summary" in fields and "successes" in fields


def stages(folder: Path) -> list[Path]:
    """The client's files of its stages, in order; those of the server beside them are of other windows."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STAGE.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def read_inference_perf(path: Path) -> list[MeasuredSummary]:
    """Of a folder, or of one stage's file."""
    paths = stages(path) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{str(path)!r} holds no stage_N_lifecycle_metrics.json: give inference-perf's report folder")
    return [_read(each) for each in paths]


def _read(path: Path) -> MeasuredSummary:
    told = read_object(path)
    need(path, told, ("load_summary", "successes"))
    load, done = told["load_summary"], told["successes"]
    need(path, done, ("count", "latency", "throughput", "output_len"))
    latency, throughput = done["latency"] or {}, done["throughput"] or {}
    summary = MeasuredSummary(
        name=path.name.split("_lifecycle")[0],
        tool="inference-perf",
        num_completed=done["count"],
        num_failed=(told.get("failures") or {}).get("count") or 0,
        duration=load.get("send_duration"),
        offered_rate=load.get("requested_rate"),
        request_rate=throughput.get("requests_per_sec"),
        input_token_rate=throughput.get("input_tokens_per_sec"),
        output_token_rate=throughput.get("output_tokens_per_sec"),
        prompt_tokens=_stats(done.get("prompt_len")),
        output_tokens=_stats(done["output_len"]),
        ttft=_stats(latency.get("time_to_first_token")),
        tpot=_stats(latency.get("time_per_output_token")),
        itl=_stats(latency.get("inter_token_latency")),
        e2e=_stats(latency.get("request_latency")),
        source=source_of(path),
        findings=_findings(load),
    )
    return checked(summary)


def _stats(told: dict[str, Any] | None) -> Stats:
    return Stats(**{ours: told.get(theirs) for theirs, ours in QUANTILES.items()}) if told else Stats()


def _findings(load: dict[str, Any]) -> tuple[str, ...]:
    found = ["output tokens are counted again from the text"]
    requested, achieved = load.get("requested_rate"), load.get("achieved_rate")
    if requested and achieved and achieved < 0.95 * requested:
        found.append(
            f"the client sent {achieved:.4g} of {requested:.4g} requests a second: its workers were all busy, and what "
            "waited in it is not in these times"
        )
    return tuple(found)

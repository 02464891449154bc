"""servetwin's own results, as --json writes them: of a simulation or of a live run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibration.importers.files import need, read_object, source_of, stem_of
from calibration.summaries import MeasuredSummary, Stats

QUANTILES = ("mean", "p50", "p90", "p95", "p99", "min", "max")
NEEDED = ("num_completed", "num_requests", "duration", "ttft", "tpot", "itl", "e2e")


def is_own(fields: dict[str, Any]) -> bool:
    return "metrics" in fields and "servetwin" in (fields.get("manifest") or {})


def read_own(path: Path) -> MeasuredSummary:
    fields = read_object(path)
    told, manifest = fields["metrics"], fields["manifest"]
    need(path, told, NEEDED)
    return MeasuredSummary(
        name=stem_of(path),
        tool=f"servetwin {manifest['servetwin']}, {manifest.get('body', 'simulator')}",
        num_completed=told["num_completed"],
        num_failed=told["num_requests"] - told["num_completed"],
        duration=told["duration"],
        request_rate=told["num_completed"] / told["duration"],
        input_token_rate=told.get("input_throughput"),
        output_token_rate=told.get("output_throughput"),
        ttft=_stats(told["ttft"]),
        tpot=_stats(told["tpot"]),
        itl=_stats(told["itl"]),
        e2e=_stats(told["e2e"]),
        source=source_of(path),
    )


def _stats(told: dict[str, Any] | None) -> Stats:
    return Stats(**{name: told.get(name) for name in QUANTILES}) if told else Stats()

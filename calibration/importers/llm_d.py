"""llm-d's Benchmark Report, versions 0.1, 0.2 and 0.2.1, YAML or JSON: read, and written as 0.2.1.

Every statistic carries its units, so nothing has to be guessed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from calibration.importers.files import read_text, source_of, stem_of
from calibration.summaries import MeasuredSummary, Stats, checked

FACTORS = {"s": 1.0, "ms": 1e-3, "s/token": 1.0, "ms/token": 1e-3, "count": 1.0, "tokens/s": 1.0, "queries/s": 1.0}
STATISTICS = {"mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "min": "min", "max": "max",
              "stddev": "std"}  # fmt: skip
LATENCIES = {
    "time_to_first_token": ("ttft", "s"),
    "time_per_output_token": ("tpot", "s/token"),
    "inter_token_latency": ("itl", "s/token"),
    "request_latency": ("e2e", "s"),
}
RATES = {"request_rate": "queries/s", "input_token_rate": "tokens/s", "output_token_rate": "tokens/s"}


def is_llm_d(fields: dict[str, Any]) -> bool:
    return "version" in fields and ("results" in fields or {"metrics", "scenario"} <= fields.keys())


def read_document(path: Path) -> dict[str, Any]:
    """YAML, of which JSON is a part."""
    import yaml

    try:
        fields = yaml.safe_load(read_text(path))
    except yaml.YAMLError:
        raise ValueError(f"{str(path)!r} is neither YAML nor JSON") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{str(path)!r} holds no mapping, but a {type(fields).__name__}")
    return fields


def read_llm_d(path: Path) -> MeasuredSummary:
    """Raises ValueError for an unknown version or unit, and for a report without requests' latencies."""
    fields = read_document(path)
    version = str(fields.get("version"))
    if version not in ("0.1", "0.2", "0.2.1"):
        raise ValueError(f"{str(path)!r} is a Benchmark Report of version {version!r}; known: 0.1, 0.2, 0.2.1")
    told = fields["metrics"] if version == "0.1" else _aggregate(path, fields)
    requests, latency = told.get("requests") or {}, told.get("latency") or {}
    failed = (requests.get("failures") or 0) + (requests.get("incomplete") or 0)
    rates = told.get("throughput") or {}
    summary = MeasuredSummary(
        name=stem_of(path),
        tool="llm-d-benchmark",
        num_completed=requests.get("total", 0) - failed,
        num_failed=failed,
        duration=_duration(fields, told),
        request_rate=_rate(path, rates, "requests_per_sec", "request_rate"),
        input_token_rate=_rate(path, rates, "input_tokens_per_sec", "input_token_rate"),
        output_token_rate=_rate(path, rates, "output_tokens_per_sec", "output_token_rate"),
        prompt_tokens=_stats(path, requests.get("input_length")),
        output_tokens=_stats(path, requests.get("output_length")),
        ttft=_stats(path, latency.get("time_to_first_token")),
        tpot=_stats(path, latency.get("time_per_output_token")),
        itl=_stats(path, latency.get("inter_token_latency")),
        e2e=_stats(path, latency.get("request_latency")),
        source=source_of(path),
    )
    return checked(summary)


def _aggregate(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] | None = ((fields["results"] or {}).get("request_performance") or {}).get("aggregate")
    if not found:
        raise ValueError(
            f"{str(path)!r} has no results.request_performance.aggregate: nothing was measured of requests"
        )
    return found


def _rate(path: Path, told: dict[str, Any], old: str, new: str) -> float | None:
    """0.1 gives plain numbers, later versions statistics."""
    return told[old] if old in told else _stats(path, told.get(new)).mean


def _duration(fields: dict[str, Any], told: dict[str, Any]) -> float | None:
    if "time" in told:
        return (told["time"] or {}).get("duration")
    text = str(((fields.get("run") or {}).get("time") or {}).get("duration") or "")
    return float(text[2:-1]) if text.startswith("PT") and text.endswith("S") and "M" not in text[2:] else None


def _stats(path: Path, told: dict[str, Any] | None) -> Stats:
    if not told:
        return Stats()
    if told.get("units") not in FACTORS:
        raise ValueError(f"{str(path)!r}: units {told.get('units')!r} are unknown here; known: {', '.join(FACTORS)}")
    factor = FACTORS[told["units"]]
    return Stats(**{ours: told[theirs] for theirs, ours in STATISTICS.items() if told.get(theirs) is not None}).times(
        factor
    )


# -- writing ----------------------------------------------------------------------------------------------------------


def benchmark_report(summary: MeasuredSummary) -> dict[str, Any]:
    """A Benchmark Report 0.2.1; what is not known is left out."""
    latency = {theirs: _told(getattr(summary, ours), units) for theirs, (ours, units) in LATENCIES.items()}
    rates = {name: _told(Stats(mean=getattr(summary, name)), units) for name, units in RATES.items()}
    requests = {
        "total": summary.num_completed + summary.num_failed,
        "failures": summary.num_failed,
        "input_length": _told(summary.prompt_tokens, "count"),
        "output_length": _told(summary.output_tokens, "count"),
    }
    aggregate = {
        "requests": _known(requests),
        "latency": _known(latency),
        "throughput": _known(rates),
    }
    return {"version": "0.2.1", "run": _run(summary), "results": {"request_performance": {"aggregate": aggregate}}}


def _run(summary: MeasuredSummary) -> dict[str, Any]:
    uid = hashlib.sha256(repr(summary).encode()).hexdigest()[:32]
    run: dict[str, Any] = {"uid": uid, "description": f"{summary.name}, measured by {summary.tool}"}
    if summary.findings:
        run["keywords"] = list(summary.findings)
    return run


def _told(stats: Stats, units: str) -> dict[str, Any] | None:
    """A mean is asked for: where only the median is known, there is nothing that can be said."""
    if stats.mean is None:
        return None
    names = {ours: theirs for theirs, ours in STATISTICS.items()}
    return {"units": units} | {names[name]: getattr(stats, name) for name in stats.known}


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}

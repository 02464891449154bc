"""LLMServingSim's runs of real vLLM servers: a folder with requests.jsonl, meta.json and timeseries.csv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibration.importers.files import need, read_columns, read_lines, read_object, source_of
from calibration.records import MeasuredRequest, MeasuredRun, MeasuredSeries

FIELDS = ("request_id", "input_toks", "output_toks", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
LIMITS = ("max_num_seqs", "max_num_batched_tokens")


def is_llmservingsim(folder: Path) -> bool:
    return folder.is_dir() and (folder / "requests.jsonl").is_file()


def read_llmservingsim(folder: Path) -> MeasuredRun:
    """A request arrives when the engine queued it: arrival_time is of another clock, rounded to the loop's turns."""
    paths = [folder / name for name in ("requests.jsonl", "meta.json", "timeseries.csv") if (folder / name).is_file()]
    rows = read_lines(paths[0])
    for row in rows:
        need(paths[0], row, FIELDS)
    begin = min(row["queued_ts"] for row in rows)
    requests = sorted((_request(row, begin) for row in rows), key=lambda request: request.arrival_time)
    meta = read_object(folder / "meta.json") if (folder / "meta.json").is_file() else {}
    series = _series(folder / "timeseries.csv") if (folder / "timeseries.csv").is_file() else MeasuredSeries()
    return MeasuredRun(folder.name, requests, series=series, engine=_engine(meta), source=source_of(*paths))


def _request(row: dict[str, Any], begin: float) -> MeasuredRequest:
    queued, scheduled, first, last = (row[name] - begin for name in FIELDS[3:])
    return MeasuredRequest(
        row["request_id"],
        queued,
        row["input_toks"],
        row["output_toks"],
        first,
        last,
        queued_time=queued,
        scheduled_time=scheduled,
        max_tokens=row["output_toks"],
    )


def _series(path: Path) -> MeasuredSeries:
    rows = read_columns(path, ("t", "running", "waiting", "kv_cache_pct"))
    times, running, waiting = (tuple(row[name] for row in rows) for name in ("t", "running", "waiting"))
    return MeasuredSeries(times, running, waiting, tuple(row["kv_cache_pct"] / 100 for row in rows))


def _engine(meta: dict[str, Any]) -> dict[str, Any]:
    given, cache = meta.get("engine_kwargs") or {}, meta.get("kv_cache") or {}
    engine: dict[str, Any] = {name: given[name] for name in LIMITS if given.get(name) is not None}
    if given.get("max_model_len") is not None:
        engine["max_model_len"] = given["max_model_len"]
    if cache.get("num_gpu_blocks"):
        engine["num_blocks"] = cache["num_gpu_blocks"] - 1  # one is the null block
        engine["block_size"] = cache["block_size"]
        engine["enable_prefix_caching"] = cache["enable_prefix_caching"]
    return engine

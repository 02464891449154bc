"""What a vLLM server says of itself: its line for each step, and its metrics as Prometheus text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from calibration.importers.files import read_columns, read_text
from calibration.records import MeasuredStep

COLUMNS = (
    "context_requests", "context_tokens", "generation_requests", "generation_tokens", "elapsed_ms", "kv_usage_percent"
)  # fmt: skip
_SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{(.*)\})?\s+(\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def read_steps(path: Path) -> tuple[MeasuredStep, ...]:
    """vLLM's --enable-logging-iteration-details as CSV. `elapsed` waits for the device; the host works beside it."""
    return tuple(
        MeasuredStep(
            num_prefills=int(row["context_requests"]),
            num_prefill_tokens=int(row["context_tokens"]),
            num_decodes=int(row["generation_tokens"]),
            duration=row["elapsed_ms"] / 1e3,
            kv_usage=row["kv_usage_percent"] / 100,
        )
        for row in read_columns(path, COLUMNS)
    )


def read_counters(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Counters by name, labels summed over; and the engine limits that vllm:cache_config_info tells."""
    counters: dict[str, float] = {}
    engine: dict[str, Any] = {}
    for name, labels, value in _samples(read_text(path)):
        if name.endswith("cache_config_info"):
            engine = cache_limits(labels)
        elif name.endswith(("_total", "_count", "_sum")):
            counters[name] = counters.get(name, 0.0) + value
    return counters, engine


def _samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    found = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and not line.startswith("#"):
            found.append((match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return found


def cache_limits(labels: dict[str, str]) -> dict[str, Any]:
    """One of the blocks is vLLM's null block, which holds nothing."""
    engine: dict[str, Any] = {}
    if labels.get("num_gpu_blocks", "None").isdigit():
        engine["num_blocks"] = int(labels["num_gpu_blocks"]) - 1
    if labels.get("block_size", "None").isdigit():
        engine["block_size"] = int(labels["block_size"])
    if labels.get("enable_prefix_caching") in ("True", "False"):
        engine["enable_prefix_caching"] = labels["enable_prefix_caching"] == "True"
    return engine

"""Results of `vllm bench serve --save-detailed`: one JSON object, arrays of one entry a request, times in seconds.

Beside RUN.json may lie RUN.steps.csv (the engine's lines of --enable-logging-iteration-details) and RUN.prom (its
metrics at the end): they are read too.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from calibration.importers.files import need, read_object, source_of, stem_of
from calibration.importers.vllm_server import read_counters, read_steps
from calibration.records import MeasuredRequest, MeasuredRun

ARRAYS = ("start_times", "input_lens", "output_lens", "ttfts", "itls")


def is_vllm_bench(fields: dict[str, Any]) -> bool:
    return {"num_prompts", "total_input_tokens", "request_throughput"} <= fields.keys()


def read_vllm_bench(path: Path) -> MeasuredRun:
    """Raises ValueError for results without details, and for arrays that do not go together."""
    fields = read_object(path)
    need(path, fields, ARRAYS)
    lengths = {len(fields[name]) for name in ARRAYS}
    if len(lengths) > 1:
        raise ValueError(f"{str(path)!r}: {', '.join(ARRAYS)} must have one entry a request, not {sorted(lengths)}")
    requests = sorted(_requests(path, fields), key=lambda request: request.arrival_time)
    steps, metrics = _beside(path, ".steps.csv"), _beside(path, ".prom")
    counters, engine = read_counters(metrics) if metrics else ({}, {})
    return MeasuredRun(
        name=stem_of(path),
        requests=requests,
        steps=read_steps(steps) if steps else (),
        engine=engine,
        counters=counters,
        source=source_of(path, *filter(None, (steps, metrics))),
        findings=_findings(fields, requests),
    )


def _beside(path: Path, ending: str) -> Path | None:
    names = (stem_of(path) + ending, stem_of(path) + ending + ".gz")
    return next((found for name in names if (found := path.with_name(name)).is_file()), None)


def _requests(path: Path, fields: dict[str, Any]) -> list[MeasuredRequest]:
    errors = fields.get("errors") or [""] * len(fields["start_times"])
    begin = min(fields["start_times"], default=0.0)
    rows = zip(*(fields[name] for name in ARRAYS), errors, strict=False)
    try:
        return [_request(f"request-{index}", begin, *row) for index, row in enumerate(rows)]
    except TypeError:
        raise ValueError(f"{str(path)!r}: {', '.join(ARRAYS)} must hold numbers, itls lists of them") from None


def _request(
    name: str, begin: float, start: float, prompt: int, output: int, ttft: float, gaps: list[float], error: str
) -> MeasuredRequest:
    arrival = start - begin
    if error or not output:
        return MeasuredRequest(name, arrival, prompt, 0, outcome="failed")
    times = tuple(accumulate(gaps, initial=arrival + ttft))
    # `bench serve` asks for exactly what it counts unless answers may end by themselves; then the counts vary anyway.
    return MeasuredRequest(name, arrival, prompt, output, times[0], times[-1], times, max_tokens=output)


def _findings(fields: dict[str, Any], requests: list[MeasuredRequest]) -> tuple[str, ...]:
    failed = sum(not request.is_completed for request in requests)
    found = [f"{failed} of {len(requests)} requests failed and are masked"] if failed else []
    if (cap := fields.get("max_concurrency")) is not None:
        found.append(f"at most {cap} requests were in flight: arrivals followed from answers")
    return tuple(found)

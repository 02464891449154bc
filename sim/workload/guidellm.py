"""GuideLLM reports as workloads: start times in seconds since 1970 and lengths of the requests that succeeded.

{"metadata": {...}, "benchmarks": [{"requests": {"successful": [{"request_start_time": ..., "prompt_tokens": ...,
 "output_tokens": ..., "info": {"conversation_id": ..., "turn_index": 0}}], "errored": [], "incomplete": []}}]}
"""

from __future__ import annotations

from typing import Any

from sim.workload.clock import UNITS
from sim.workload.fields import list_of, name_text, require, seconds, token_count
from sim.workload.measured import Sent, only_run
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

COLUMNS = ("request_start_time", "prompt_tokens", "output_tokens")


def parser(first: dict[str, Any], reading: Reading) -> Parse:
    sent = Sent(reading)

    def parse(report: dict[str, Any]) -> list[TraceRow]:
        only_run(reading)
        reading.findings.append("arrivals are when the client sent, as the measured server let it")
        requests = _requests(report)
        for outcome in ("errored", "incomplete"):
            for _ in _listed(requests, outcome):
                reading.drop(f"being {outcome}")
        for fields in _listed(requests, "successful"):
            sent.add(_row(fields, reading))
        return []

    return parse


def _requests(report: dict[str, Any]) -> dict[str, Any]:
    require(report, ("benchmarks",))
    benchmarks = list_of("benchmarks", report["benchmarks"], dict)
    listed: list[dict[str, Any]] = [each["requests"] for each in benchmarks if isinstance(each.get("requests"), dict)]
    full = [requests for requests in listed if _listed(requests, "successful")]
    if not full:
        raise ValueError(
            f"the report's {len(benchmarks)} benchmarks list no successful request, as sampled reports do: "
            "save all requests"
        )
    if len(full) > 1:
        raise ValueError(f"the report holds {len(full)} benchmarks with requests: leave one, each is its own workload")
    return full[0]


def _listed(requests: dict[str, Any], outcome: str) -> list[dict[str, Any]]:
    return list_of(f"requests.{outcome}", requests.get(outcome) or [], dict)


def _row(fields: dict[str, Any], reading: Reading) -> TraceRow:
    require(fields, COLUMNS)
    info = fields.get("info")
    session = info.get("conversation_id") if isinstance(info, dict) else None
    return TraceRow(
        seconds("request_start_time", fields["request_start_time"], reading.unit),
        token_count("prompt_tokens", fields["prompt_tokens"]),
        token_count("output_tokens", fields["output_tokens"]),
        session=name_text("conversation_id", session or ""),
    )


GUIDELLM = TraceFormat(
    name="guidellm",
    columns=("benchmarks", "metadata"),
    shape=Shape.JSON,
    unit=UNITS["s"],
    declares_unit=True,
    parser=parser,
    assumptions=("request_start_time is counted from the first request", "prompts share nothing"),
    in_order=False,
)

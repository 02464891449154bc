"""Results of `vllm bench serve --save-result --save-detailed` as workloads: send times in seconds and lengths.

One JSON object; arrays of one entry a request. Failed requests keep their slot, with an error or no output.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from sim.workload.clock import UNITS
from sim.workload.fields import list_of, seconds, token_count
from sim.workload.lines import shown
from sim.workload.measured import Sent, only_run
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

ARRAYS = ("start_times", "input_lens", "output_lens")


def parser(first: dict[str, Any], reading: Reading) -> Parse:
    sent = Sent(reading)

    def parse(run: dict[str, Any]) -> list[TraceRow]:
        only_run(reading)
        starts, prompts, outputs = _arrays(run)
        errors = list_of("errors", run.get("errors", []), object)
        reading.findings.append(_cap(run.get("max_concurrency")))
        for start, prompt, output, error in zip_longest(starts, prompts, outputs, errors[: len(starts)], fillvalue=""):
            if error:
                reading.drop("an error noted")
            else:
                sent.add(TraceRow(seconds("start_times", start, reading.unit), *_lengths(prompt, output)))
        return []

    return parse


def _arrays(run: dict[str, Any]) -> list[list[Any]]:
    if missing := [name for name in ARRAYS if name not in run]:
        raise ValueError(
            f"the result has no {', '.join(missing)}: run vllm bench serve with --save-detailed; versions before "
            "start_times cannot tell when requests came"
        )
    arrays = [list_of(name, run[name], object) for name in ARRAYS]
    if len({len(each) for each in arrays}) > 1:
        raise ValueError(f"{', '.join(ARRAYS)} must have one entry a request, not {[len(each) for each in arrays]}")
    return arrays


def _lengths(prompt: object, output: object) -> tuple[int, int]:
    return token_count("input_lens", prompt), token_count("output_lens", output)


def _cap(max_concurrency: object) -> str:
    if max_concurrency is None:
        return "arrivals are when the client sent, with no cap on requests in flight"
    return (
        f"arrivals are when the client sent, at most {shown(max_concurrency)} in flight: the server measured set their "
        "pace, and a faster one would have been sent more"
    )


VLLM_BENCH = TraceFormat(
    name="vllm-bench",
    columns=("num_prompts", "total_input_tokens", "request_throughput"),
    shape=Shape.JSON,
    unit=UNITS["s"],
    declares_unit=True,
    parser=parser,
    assumptions=("start_times are counted from the first request", "prompts share nothing"),
    in_order=False,
)

"""Whatever a benchmark tool wrote: its reader is found by what the file holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from calibration.importers.aiperf import is_aiperf, read_aiperf
from calibration.importers.bench_totals import is_sglang, is_totals, read_sglang, read_totals
from calibration.importers.files import read_text
from calibration.importers.guidellm import is_guidellm, read_guidellm
from calibration.importers.inference_perf import is_inference_perf, read_inference_perf, stages
from calibration.importers.llm_d import is_llm_d, read_document, read_llm_d
from calibration.importers.llmservingsim import is_llmservingsim, read_llmservingsim
from calibration.importers.own import is_own, read_own
from calibration.importers.vllm_bench import ARRAYS, is_vllm_bench, read_vllm_bench
from calibration.records import MeasuredRun
from calibration.summaries import MeasuredSummary

Result = MeasuredRun | MeasuredSummary


def _has_details(fields: dict[str, Any]) -> bool:
    return is_vllm_bench(fields) and set(ARRAYS) <= fields.keys()


READERS: dict[str, tuple[Callable[[dict[str, Any]], bool], Callable[[Path], Result | Sequence[Result]]]] = {
    "vLLM bench serve": (_has_details, read_vllm_bench),
    "SGLang bench_serving": (is_sglang, read_sglang),
    "totals of vLLM bench serve, or InferenceX": (is_totals, read_totals),
    "GuideLLM": (is_guidellm, read_guidellm),
    "aiperf": (is_aiperf, read_aiperf),
    "inference-perf": (is_inference_perf, read_inference_perf),
    "llm-d Benchmark Report": (is_llm_d, read_llm_d),
    "servetwin": (is_own, read_own),
}


def read_results(path: Path) -> list[Result]:
    """All runs in a file or folder. Raises ValueError, of one line, for what no tool known here wrote."""
    if path.is_dir():
        return _read_folder(path)
    fields = _first_object(path)
    for tool, (is_its, read) in READERS.items():
        if is_its(fields):
            return _listed(tool, path, read)
    raise ValueError(f"{str(path)!r} is no result known here; known: {', '.join(READERS)}, LLMServingSim's run folders")


def _read_folder(path: Path) -> list[Result]:
    if is_llmservingsim(path):
        return _listed("LLMServingSim", path, read_llmservingsim)
    if stages(path):
        return _listed("inference-perf", path, read_inference_perf)
    raise ValueError(f"{str(path)!r} holds no run known here: give a result file, or inference-perf's report folder")


def _first_object(path: Path) -> dict[str, Any]:
    """Of the whole document, or of its first line where each line is one."""
    text = read_text(path)
    for part in (text.split("\n", 1)[0], text):
        try:
            value = json.loads(part)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return read_document(path)


def _listed(tool: str, path: Path, read: Callable[[Path], Result | Sequence[Result]]) -> list[Result]:
    try:
        found = read(path)
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{str(path)!r} looks like {tool}'s, but a field is not what that tool writes: "
            f"{type(error).__name__}: {error}"
        ) from error
    return [found] if isinstance(found, MeasuredRun | MeasuredSummary) else list(found)

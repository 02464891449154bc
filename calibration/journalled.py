"""A live run's journal as steps: what each one computed and how long it took, for costs to be held against."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from sim.cost.work import StepWork


class TimedStep(NamedTuple):
    """From the decision to its update: device, and the engine's turn around it. One step in flight at a time."""

    work: StepWork
    duration: float


def timed_steps(lines: Iterable[str]) -> list[TimedStep]:
    """Raises ValueError for a journal of overlapping steps: a step's time is not its own there."""
    reader = _Reader()
    return [step for line in lines if (step := reader.read(json.loads(line))) is not None]


class _Reader:
    def __init__(self) -> None:
        self._known: dict[str, int] = {}  # tokens of each request, prompt and answer
        self._begun: tuple[StepWork, float] | None = None

    def read(self, line: dict[str, Any]) -> TimedStep | None:
        if "add" in line and "refused" not in line:
            self._known[line["add"]] = line["prompt"]
        elif "plan" in line:
            if self._begun is not None:
                raise ValueError("the journal has two steps in flight: record it with async_depth 1")
            self._begun = self._work(line), line["now"]
        elif "update" in line and self._begun is not None:
            (work, begin), self._begun = self._begun, None
            return TimedStep(work, line["now"] - begin)
        elif "fail" in line:
            self._begun = None
        return None

    def _work(self, line: dict[str, Any]) -> StepWork:
        """As sim.executor counts it from a plan."""
        decodes = context = prefills = pairs = prefill_context = sampled = tokens = 0
        for name, start, num, *_ in line["chunks"]:
            tokens += num
            if start + num >= self._known[name]:
                sampled += 1
                self._known[name] += 1
            if num == 1:
                decodes, context = decodes + 1, context + start + 1
            else:
                prefills += 1
                pairs += num * (2 * start + num + 1)
                prefill_context += start + num
        return StepWork(tokens, len(line["chunks"]), sampled, decodes, context, prefills, pairs, prefill_context)

"""What a live run's journal tells: of each step what it computed and how long it took, of each request what was asked
and when its tokens came.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from policies.config import EngineConfig
from policies.journal import request_of
from policies.prompt import RecordedPrompt
from policies.types import Request
from sim.cost.work import StepWork


class TimedStep(NamedTuple):
    """From the end of the step before, or from the decision where the engine was idle, to its own end: the device, and
    the engine's turn around it. One step in flight at a time."""

    work: StepWork
    duration: float
    end: float = 0.0


@dataclass(slots=True)
class Told:
    """`steps` in their order; `requests` as they reached the engine; `tokens`: when each request's came; `keys`: of the
    blocks that its answer filled."""

    config: EngineConfig = field(default_factory=EngineConfig)
    steps: list[TimedStep] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    tokens: dict[str, list[float]] = field(default_factory=dict)
    keys: dict[str, list[int]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)  # prompt and answer so far
    _begun: tuple[StepWork, list[str], float] | None = None
    _last_end: float | None = None  # of the step that the next one follows without a pause

    @classmethod
    def of(cls, lines: Iterable[str]) -> Told:
        """Raises ValueError for a journal of overlapping steps: a step's time is not its own there."""
        told = cls()
        for line in lines:
            told._read(json.loads(line))
        return told

    def _read(self, line: dict[str, Any]) -> None:
        if "config" in line:
            self.config = EngineConfig.from_dict(line["config"])
        elif "add" in line and "refused" not in line:
            self.requests.append(request_of(line))
            self.tokens[line["add"]] = []
            self._sizes[line["add"]] = line["prompt"]
        elif "plan" in line:
            self._begin(line)
        elif "idle" in line:
            self._last_end = None
        elif "update" in line and self._begun is not None:
            self._end(line["now"], line.get("keys", {}))
        elif "fail" in line:
            self._begun = self._last_end = None

    def _begin(self, line: dict[str, Any]) -> None:
        if self._begun is not None:
            raise ValueError("the journal has two steps in flight: record it with async_depth 1")
        begin = line["now"] if self._last_end is None else self._last_end
        self._begun = (*self._work(line), begin)

    def _end(self, now: float, keys: Mapping[str, Sequence[int]]) -> None:
        assert self._begun is not None
        (work, sampled, begin), self._begun, self._last_end = self._begun, None, now
        for name in sampled:
            self.tokens[name].append(now)
        for name, new in keys.items():
            self.keys.setdefault(name, []).extend(new)
        self.steps.append(TimedStep(work, now - begin, now))

    def _work(self, line: dict[str, Any]) -> tuple[StepWork, list[str]]:
        """As sim.executor counts it from a plan, and whom the step gives a token."""
        decodes = context = prefills = pairs = prefill_context = tokens = 0
        sampled = []
        for name, start, num, *_ in line["chunks"]:
            tokens += num
            if start + num >= self._sizes[name]:
                sampled.append(name)
                self._sizes[name] += 1
            if num == 1:
                decodes, context = decodes + 1, context + start + 1
            else:
                prefills += 1
                pairs += num * (2 * start + num + 1)
                prefill_context += start + num
        work = StepWork(tokens, len(line["chunks"]), len(sampled), decodes, context, prefills, pairs, prefill_context)
        return work, sampled

    def asked(self) -> list[tuple[Request, int]]:
        """Each request with the tokens it was answered, its prompt with the keys that the answer added."""
        return [(self._whole(each), max(1, len(self.tokens[each.request_id]))) for each in self.requests]

    def _whole(self, request: Request) -> Request:
        prompt = request.prompt
        assert isinstance(prompt, RecordedPrompt)
        return replace(request, prompt=replace(prompt, keys=(*prompt.keys, *self.keys.get(request.request_id, ()))))

    def latencies(self) -> dict[str, float]:
        """Seconds, of all who were answered: from the intended arrival to the ends of steps. Rates a second."""
        arrivals = {request.request_id: request.arrival_time for request in self.requests}
        answered = {name: times for name, times in self.tokens.items() if times}
        ttft = np.array([times[0] - arrivals[name] for name, times in answered.items()])
        e2e = np.array([times[-1] - arrivals[name] for name, times in answered.items()])
        tpot = np.array([(t[-1] - t[0]) / (len(t) - 1) for t in answered.values() if len(t) > 1])
        span = max(times[-1] for times in answered.values()) - min(arrivals.values())
        return {
            **{f"ttft.{name}": value for name, value in _figures(ttft).items()},
            **{f"tpot.{name}": value for name, value in _figures(tpot).items() if name != "p50"},
            **{f"e2e.{name}": value for name, value in _figures(e2e).items()},
            "request_throughput": len(answered) / span,
            "output_throughput": sum(map(len, answered.values())) / span,
        }


def timed_steps(lines: Iterable[str]) -> list[TimedStep]:
    """Raises ValueError for a journal of overlapping steps."""
    return Told.of(lines).steps


def _figures(values: np.typing.NDArray[np.float64]) -> dict[str, float]:
    return {"mean": float(values.mean()), "p50": float(np.median(values)), "p99": float(np.percentile(values, 99))}

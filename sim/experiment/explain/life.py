"""One request's way through an engine, heard from a journal line by line, as spans of time without a gap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from policies.engine import EngineCore
from policies.types import RequestState, Status
from sim.experiment.explain.blame import (
    BUDGET,
    NEXT_STEP,
    NOTHING,
    PREFILLS,
    Cause,
    Chunk,
    shares,
    why_not_done,
    why_waiting,
)

FRONT_END = "front end"
QUEUE = "queue"
PREFILL = "own prefill"
DECODE = "decode"
BEHIND = "behind others' prefills"
PASSED_OVER = "running, not served"
PREEMPTED = "preempted"
RECOMPUTED = "computed again"
GROUP = "done, its group is not"
STREAMING = "streaming"

Line = Mapping[str, Any]


class Span(NamedTuple):
    """Seconds on the journal's clock."""

    begin: float
    end: float
    stage: str
    cause: Cause = Cause(NOTHING)

    @property
    def duration(self) -> float:
        return self.end - self.begin


class Step(NamedTuple):
    """One in flight, or equal ones. Prompt tokens computed are by request."""

    begin: float
    repeat: int
    num_decodes: int
    prefills: Mapping[str, int]


class Served(NamedTuple):
    """The time of a step in which the request took part."""

    begin: float
    end: float
    stage: str
    step: Step


@dataclass(slots=True)
class Ours:
    """Where the request stands; it waits as `waiting` says, unless it is in a step in flight."""

    state: RequestState
    waiting: tuple[str, Cause]
    in_flight: dict[int, str] = field(default_factory=dict)  # by step, what is done in it
    num_preemptions: int = 0


class Life:
    """Hears every line from the first on; `request_id` is the one whose life is told."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.classes: dict[str, str] = {}
        self.ours: Ours | None = None
        self.arrival_time = self.finish_time = 0.0  # up to here its time is told
        self.reason = ""  # why it left, once it has
        self._prompts: dict[str, int] = {}
        self._steps: dict[int, Step] = {}
        self._last_end = 0.0
        self._paces: dict[int, list[float]] = {}  # of steps of decodes alone, by how many
        self._told: list[Span | Served] = []

    @property
    def num_prompt_tokens(self) -> int:
        return self._prompts[self.request_id]

    def hear(self, line: Line, engine: EngineCore) -> bool:
        """True when the life is over. `engine` stands as it does behind the line."""
        if "add" in line:
            self._added(line, engine)
        elif "plan" in line or "idle" in line:
            self._planned(line, engine)
        elif "update" in line or "fail" in line:
            self._stepped(line)
        elif "reset" in line and self.ours is not None:
            self._yielded(self.ours, line, engine)
        if any(name == self.request_id for name, _ in line.get("left", ())):
            self._leave(line)
        return bool(self.reason)

    def _added(self, line: Line, engine: EngineCore) -> None:
        name, now = line["add"], line["now"]
        self.classes[name], self._prompts[name] = line.get("class", "default"), line["prompt"]
        if name != self.request_id:
            return
        self.arrival_time = self.finish_time = line["arrival"]
        self._tell(Span(self.arrival_time, now, FRONT_END))
        if "refused" in line:
            self.reason = "rejected"
            return
        state = next(each for each in engine.states if each.request_id == name)
        self.ours = Ours(state, (QUEUE, Cause(NEXT_STEP)))

    def _planned(self, line: Line, engine: EngineCore) -> None:
        chunks = line.get("chunks", ())
        if "plan" in line:
            self._steps[line["plan"]] = self._step(line)
        ours = self.ours
        if ours is None or self._yielded(ours, line, engine):
            return
        if not ours.in_flight:
            self._wait_until(ours, line["now"])
        own = next((chunk for chunk in chunks if chunk[0] == self.request_id), None)
        if own is None:
            ours.waiting = _waiting(ours.state, engine, line)
        else:
            ours.in_flight[line["plan"]] = self._stage(own, ours.state)

    def _yielded(self, ours: Ours, line: Line, engine: EngineCore) -> bool:
        """Whether it lost its place: from then on it waits, though a step of its may be in flight."""
        if ours.state.num_preemptions == ours.num_preemptions:
            return False
        ours.num_preemptions = ours.state.num_preemptions
        self._stop(ours, line["now"])
        ours.waiting = _waiting(ours.state, engine, line)
        return True

    def _stop(self, ours: Ours, now: float) -> None:
        """Whatever is done for it, or not done, ends here."""
        for step_id, stage in ours.in_flight.items():
            self._serve_until(ours, self._steps[step_id], stage, now)
        ours.in_flight.clear()
        self._wait_until(ours, now)

    def _step(self, line: Line) -> Step:
        prefills = {chunk[0]: chunk[2] for chunk in line["chunks"] if not self._is_decode(chunk)}
        return Step(line["now"], line["repeat"], len(line["chunks"]) - len(prefills), prefills)

    def _is_decode(self, chunk: Chunk) -> bool:
        name, start, num_tokens, *_ = chunk
        return bool(num_tokens == 1 and start >= self._prompts[name])

    def _stage(self, chunk: Chunk, state: RequestState) -> str:
        if chunk[1] < state.num_lost_tokens:
            return RECOMPUTED
        return DECODE if self._is_decode(chunk) else PREFILL

    def _stepped(self, line: Line) -> None:
        step_id = line["update"] if "update" in line else line["fail"]
        step, now = self._steps.pop(step_id), line["now"]
        if not step.prefills:
            pace = (now - max(step.begin, self._last_end)) / step.repeat
            self._paces.setdefault(step.num_decodes, []).append(pace)
        self._last_end, ours = now, self.ours
        if ours is not None and step_id in ours.in_flight:
            self._serve_until(ours, step, ours.in_flight.pop(step_id), now)
            if ours.state.status is Status.RUNNING:
                ours.waiting = (PASSED_OVER, Cause(NEXT_STEP))

    def _leave(self, line: Line) -> None:
        self.reason = next(reason for name, reason in line["left"] if name == self.request_id)
        assert self.ours is not None, f"{self.request_id} leaves and never came"
        self._stop(self.ours, line["now"])

    def _wait_until(self, ours: Ours, now: float) -> None:
        self._tell(Span(self.finish_time, now, *ours.waiting))

    def _serve_until(self, ours: Ours, step: Step, stage: str, now: float) -> None:
        """With steps in flight ahead of each other, a step takes from the end of the one before."""
        self._wait_until(ours, step.begin)
        self._tell(Served(self.finish_time, now, stage, step))

    def _tell(self, told: Span | Served) -> None:
        """Of waits that go on alike one span is made."""
        if told.end <= told.begin:
            return
        last = self._told[-1] if self._told else None
        if isinstance(told, Span) and isinstance(last, Span) and last[2:] == told[2:]:
            self._told[-1] = told._replace(begin=last.begin)
        else:
            self._told.append(told)
        self.finish_time = told.end

    # -- afterwards -----------------------------------------------------------------------------------------------

    def spans(self) -> Iterator[Span]:
        """From arrival to leaving, each beginning where the one before ends."""
        for each in self._told:
            if isinstance(each, Span):
                yield each
            else:
                yield from self._divided(each)

    def _divided(self, served: Served) -> Iterator[Span]:
        """Its own part of a step, and the part behind others' prefills."""
        begin, end, stage, step = served
        others = {name: num for name, num in step.prefills.items() if name != self.request_id}
        excess = max(0.0, end - begin - self._pace(served))
        behind = excess * sum(others.values()) / max(1, sum(step.prefills.values()))
        middle = end - behind
        if middle > begin:
            yield Span(begin, middle, stage)
        if end > middle:
            yield Span(middle, end, BEHIND, Cause(PREFILLS, shares(others)))

    def _pace(self, served: Served) -> float:
        """What decodes alone would take, as many as are in the step or as near as there are; else by their tokens."""
        step = served.step
        if not step.num_decodes:
            return 0.0
        if not self._paces:
            whole = step.num_decodes + sum(step.prefills.values())
            return (served.end - served.begin) * step.num_decodes / whole
        nearest = min(self._paces, key=lambda num: (abs(num - step.num_decodes), num))
        return median(self._paces[nearest]) * step.repeat


def _waiting(state: RequestState, engine: EngineCore, line: Line) -> tuple[str, Cause]:
    if state.status is not Status.RUNNING:
        return PREEMPTED if state.status is Status.PREEMPTED else QUEUE, why_waiting(state, engine, line)
    if state.stop_reason is not None:
        return GROUP, why_not_done(engine)
    return PASSED_OVER, Cause(BUDGET, shares({chunk[0]: chunk[2] for chunk in line.get("chunks", ())}))

"""Every input and every decision, as lines of JSON; replay them and find the first difference.

A journal holds keyed hashes of blocks, never tokens or text. Inputs: add, abort, update (times, who stopped), fail,
reset. Decisions: what `add` answered, each plan with its new blocks, who left. A repeated step is one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from policies.config import EngineConfig
from policies.engine import EngineCore, Policies
from policies.prompt import RecordedPrompt
from policies.types import Context, FinishReason, Outcome, Request, RequestState, StepOutput, StepPlan

VERSION = 1
Line = dict[str, Any]
Write = Callable[[str], object]


class RecordingEngine(EngineCore):
    """An engine that tells `write` each input and decision, a line each."""

    def __init__(self, config: EngineConfig, policies: Policies, secret: bytes, write: Write) -> None:
        super().__init__(config, policies, secret)
        self._write = write
        self._num_blocks_told: dict[str, int] = {}
        self._num_keys_told: dict[str, int] = {}
        self._tell({"journal": VERSION, "config": config.to_dict()})

    def add(self, request: Request, now: float) -> Outcome:
        outcome = super().add(request, now)
        line: Line = {"add": request.request_id, "now": now, **_request_fields(request)}
        if self._partitions is not None:
            line["part"] = self._partitions.part(request.context)
        if outcome.accepted:
            chain = self._states[request.request_id].chain
            line |= {"keys": _runs(chain.keys), "counts_from": chain.counts_from}
            self._num_keys_told[request.request_id] = len(chain.keys)
        else:
            line["refused"] = outcome.reason
        self._tell(line)
        return outcome

    def abort(self, request_id: str, now: float) -> bool:
        num_left = len(self._records)
        known = super().abort(request_id, now)
        self._tell({"abort": request_id, "now": now, "known": known} | self._left_since(num_left))
        return known

    def schedule(self, now: float, repeats: Callable[[StepPlan, int], int] | None = None) -> StepPlan | None:
        num_left = len(self._records)
        plan = super().schedule(now, repeats)
        line = {"idle": True, "now": now} if plan is None else self._plan_line(plan)
        self._tell(line | self._left_since(num_left))
        return plan

    def update(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        num_left = len(self._records)
        states = [self._states[name] for name in output.token_ids if name in self._states]
        super().update(plan, output, now)
        line: Line = {"update": plan.step_id, "now": now}
        if output.stopped:
            line["stopped"] = {name: reason.value for name, reason in output.stopped.items()}
        keys = {state.request_id: new for state in states if (new := self._new_keys(state))}
        if keys:
            line["keys"] = keys
        self._tell(line | self._left_since(num_left))

    def fail(self, plan: StepPlan, now: float) -> list[str]:
        num_left = len(self._records)
        failed = super().fail(plan, now)
        self._tell({"fail": plan.step_id, "now": now, "failed": failed} | self._left_since(num_left))
        return failed

    def reset_prefix_cache(self, now: float, reset_running: bool = False) -> bool:
        num_left = len(self._records)
        done = super().reset_prefix_cache(now, reset_running)
        self._tell({"reset": reset_running, "now": now, "done": done} | self._left_since(num_left))
        return done

    def _plan_line(self, plan: StepPlan) -> Line:
        for entry in plan.admitted:
            self._num_blocks_told[entry.request_id] = 0
        line: Line = {"plan": plan.step_id, "now": plan.time, "repeat": plan.repeat}
        line["chunks"] = [self._chunk(c.request_id, c.start, c.num_tokens, c.block_ids) for c in plan.chunks]
        if plan.admitted:
            line["admitted"] = [list(entry) for entry in plan.admitted]
        if plan.preempted:
            line["preempted"] = list(plan.preempted)
        if plan.transfers:
            line["transfers"] = [list(entry) for entry in plan.transfers]
        if plan.num_padding_tokens:
            line["padding"] = plan.num_padding_tokens
        return line

    def _chunk(self, request_id: str, start: int, num_tokens: int, block_ids: Sequence[int]) -> list[Any]:
        told = self._num_blocks_told[request_id]
        if len(block_ids) == told:
            return [request_id, start, num_tokens]
        self._num_blocks_told[request_id] = len(block_ids)
        return [request_id, start, num_tokens, list(block_ids[told:])]

    def _new_keys(self, state: RequestState) -> list[int]:
        """Keys of blocks that became full by tokens only a live body knows."""
        if state.chain.counts_from is not None:
            return []
        state.chain.extend(state.num_tokens // self.config.block_size)
        told = self._num_keys_told[state.request_id]
        self._num_keys_told[state.request_id] = len(state.chain.keys)
        return state.chain.keys[told:]

    def _left_since(self, num_records: int) -> Line:
        left = [[each.request_id, each.reason.value] for each in self._records[num_records:]]
        for name, _ in left:
            self._num_keys_told.pop(name, None)
            self._num_blocks_told.pop(name, None)
        return {"left": left} if left else {}

    def _tell(self, line: Line) -> None:
        self._write(json.dumps(line, separators=(",", ":")))


def _request_fields(request: Request) -> Line:
    fields: Line = {
        "arrival": request.arrival_time,
        "prompt": request.prompt.num_tokens,
        "max_tokens": request.max_tokens,
    }
    optional = {
        "client": (request.client_id, ""),
        "class": (request.class_name, "default"),
        "priority": (request.priority, 0),
        "deadline": (request.deadline, None),
        "predicted": (request.predicted_output_tokens, None),
    }
    return fields | {name: value for name, (value, default) in optional.items() if value != default}


def _runs(keys: Sequence[int]) -> list[list[int]]:
    """[first, count] for each run of consecutive keys: a prompt of content ids is a few of them."""
    runs = []
    for _, run in groupby(enumerate(keys), lambda pair: pair[1] - pair[0]):
        members = list(run)
        runs.append([members[0][1], len(members)])
    return runs


# -- replay -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a replay first decided otherwise, and how things stood."""

    line_number: int
    expected: str
    found: str
    state: str

    def __str__(self) -> str:
        return (
            f"line {self.line_number} differs\n"
            f"  journal: {self.expected}\n"
            f"  replay:  {self.found}\n"
            f"  state:   {self.state}"
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay came to."""

    num_lines: int
    num_decisions: int
    divergence: Divergence | None


class Followed(NamedTuple):
    """A line, and the engine as it stands behind it; to be read, not called. `divergence` ends a replay."""

    line: Line
    engine: EngineCore
    divergence: Divergence | None = None


def follow(lines: Iterable[str], build: Callable[[EngineConfig, Write], EngineCore]) -> Iterator[Followed]:
    """Feed the inputs of a journal to a fresh engine, line by line, up to the first that comes out different.

    Raises ValueError for what is not a journal, or is cut short in the middle of a line.
    """
    found: list[str] = []
    engine: EngineCore | None = None
    plans: dict[int, StepPlan] = {}
    for number, (text, line) in enumerate(_parsed(lines), 1):
        if engine is None:
            engine = build(_config_of(line), found.append)
        else:
            _feed(engine, line, plans, number)
        if found != [text]:
            shown = " | ".join(found) or "nothing"
            yield Followed(line, engine, Divergence(number, text, shown, _describe(engine)))
            return
        yield Followed(line, engine)
        engine.drain_records()
        found.clear()
    if engine is None:
        raise ValueError("the journal is empty: expected a first line with its version and configuration")


def replay(lines: Iterable[str], build: Callable[[EngineConfig, Write], EngineCore]) -> Replayed:
    """Follow a journal to its end, or to the first line that comes out different; raises as `follow` does."""
    num_lines = num_decisions = 0
    for num_lines, (line, _, divergence) in enumerate(follow(lines, build), 1):
        if divergence is not None:
            return Replayed(num_lines, num_decisions, divergence)
        num_decisions += "plan" in line or "add" in line or "idle" in line
    return Replayed(num_lines, num_decisions, None)


def _parsed(lines: Iterable[str]) -> Iterator[tuple[str, Line]]:
    for number, raw in enumerate(lines, 1):
        text = raw.rstrip("\n")
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"line {number} of the journal is not JSON: is the file whole?") from None
        if not isinstance(line, dict):
            raise ValueError(f"line {number} of the journal is not an object: is this a journal?")
        yield text, line


def _config_of(line: Line) -> EngineConfig:
    if line.get("journal") != VERSION or not isinstance(line.get("config"), dict):
        raise ValueError(f"not a journal of version {VERSION}: the first line must hold 'journal' and 'config'")
    return EngineConfig.from_dict(line["config"])


def _feed(engine: EngineCore, line: Line, plans: dict[int, StepPlan], number: int) -> None:
    try:
        _feed_one(engine, line, plans)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"line {number} of the journal cannot be replayed ({reason}): is the file whole?") from None


def _feed_one(engine: EngineCore, line: Line, plans: dict[int, StepPlan]) -> None:
    now = line["now"]
    if "add" in line:
        engine.add(request_of(line), now)
    elif "abort" in line:
        engine.abort(line["abort"], now)
    elif "plan" in line or "idle" in line:
        plan = engine.schedule(now, lambda plan, limit: min(limit, line.get("repeat", 1)))
        if plan is not None:
            plans[plan.step_id] = plan
    elif "update" in line:
        engine.update(plans.pop(line["update"]), _output(line), now)
    elif "fail" in line:
        engine.fail(plans.pop(line["fail"]), now)
    elif "reset" in line:
        engine.reset_prefix_cache(now, line["reset"])
    else:
        raise KeyError("a known kind of line")


def request_of(line: Line) -> Request:
    keys = [key for first, count in line.get("keys", ()) for key in range(first, first + count)]
    return Request(
        request_id=line["add"],
        arrival_time=line["arrival"],
        prompt=RecordedPrompt(line["prompt"], tuple(keys), line.get("counts_from")),
        max_tokens=line["max_tokens"],
        client_id=line.get("client", ""),
        class_name=line.get("class", "default"),
        priority=line.get("priority", 0),
        deadline=line.get("deadline"),
        predicted_output_tokens=line.get("predicted"),
        context=Context(tenant=str(line["part"])) if "part" in line else Context(),
    )


def _output(line: Line) -> StepOutput:
    stopped = {name: FinishReason(reason) for name, reason in line.get("stopped", {}).items()}
    return StepOutput(0.0, stopped, line.get("keys", {}))


def _describe(engine: EngineCore) -> str:
    running = ", ".join(f"{state.request_id}@{state.num_computed_tokens}" for state in engine.running)
    kv = engine.kv
    return (
        f"step {engine.next_step_id}; running [{running}]; {len(engine.scheduling)} waiting; "
        f"{kv.num_free} of {kv.num_blocks} blocks free, {kv.num_idle_cached} of them cached"
    )

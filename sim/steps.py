"""Plays a scripted workload step by step, without a clock, and writes every decision as vLLM's recorder does.

The outputs are forced, so that nothing but the scheduler decides. Traces of vLLM's own scheduler in the same format are
the test that a preset decides as vLLM does.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from policies.catalogue import build, preset
from policies.config import EngineConfig
from policies.engine import PrefixStats
from policies.kv import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from policies.prompt import TokenPrompt
from policies.types import Context, FinishReason, Request, RequestRecord, Sampling, StepOutput, StepPlan

Line = dict[str, Any]

# What vLLM's recorder assumes for settings that a workload leaves out.
DEFAULTS: Line = {
    "block_size": 16,
    "num_blocks": 65,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 128,
    "max_num_active_seqs": None,
    "max_model_len": 1024,
    "policy": "fcfs",
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "hash_algo": "sha256_cbor",
    "max_steps": 2000,
    "async": False,
}
PHASES = ("before_schedule", "during_execute")
OPERATIONS = ("reset_prefix_cache", "reset_running_requests")


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request of the script. Steps count from 0."""

    request: Request
    arrival_step: int
    cancel_step: int | None
    cancel_phase: str
    output_token_ids: tuple[int, ...]
    salt: str


@dataclass(frozen=True, slots=True)
class Script:
    """A workload file: settings (as in vLLM), requests, and resets by step."""

    name: str
    settings: Line
    requests: tuple[ScriptedRequest, ...]
    actions: tuple[Line, ...]

    @property
    def last_step(self) -> int:
        """The last step at which something is to happen."""
        steps = [each.arrival_step for each in self.requests]
        return max(steps + [each.cancel_step or 0 for each in self.requests], default=0)


def engine_config(settings: Mapping[str, Any], preset_name: str) -> EngineConfig:
    """vLLM's settings as ours; vLLM counts its null block in `num_blocks`."""
    values = preset("vllm-v1-priority" if settings["policy"] == "priority" else preset_name)
    # A script speaks to the scheduler behind the front end's back: what can never run waits forever, as it does there.
    values |= {"refuse_unfittable": False, "isolation": "tenant"}
    allocation = "paged_full_prompt" if settings["scheduler_reserve_full_isl"] else "paged"
    same = (
        "block_size", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching", "enable_chunked_prefill",
        "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
    )  # fmt: skip
    return EngineConfig(
        **values
        | {name: settings[name] for name in same}
        | {
            "num_blocks": settings["num_blocks"] - 1,
            "max_num_seqs": settings["max_num_active_seqs"] or settings["max_num_seqs"],
            "allocation": f"{allocation},watermark={settings['watermark']}",
            "async_depth": 2 if settings["async"] else 1,
        }
    )


# -- reading ------------------------------------------------------------------------------------------------------


def read_script(path: Path, header: Mapping[str, Any] | None = None) -> Script:
    """Settings that the file leaves out are those of a trace's header, if given, or the recorder's.

    Raises ValueError, one line, for what is missing or does not make sense.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a readable workload ({error}); expected JSON with 'config' and 'requests'"
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
        raise ValueError(f"{path}: not a scheduler workload; expected an object with 'config' and 'requests'")
    known = {name: value for name, value in (header or {}).items() if name in DEFAULTS}
    settings = {**DEFAULTS, **known, **document.get("config", {})}
    for name, value in settings.items():
        if name not in DEFAULTS:
            raise ValueError(f"{path}: unknown setting {name!r}; known: {', '.join(DEFAULTS)}")
        kinds = (int, type(None)) if name == "max_num_active_seqs" else (type(DEFAULTS[name]),)
        if type(value) not in kinds and not (kinds == (float,) and type(value) is int):
            raise ValueError(f"{path}: setting {name} ({value!r}) must be {kinds[0].__name__}")
    last_index = {row.get("id"): index for index, row in enumerate(document["requests"]) if isinstance(row, dict)}
    try:
        requests = tuple(_scripted(row, last_index[row["id"]]) for row in document["requests"])
        actions = tuple(_action(row) for row in document.get("actions", ()))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a request or action lacks or misuses the field {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return Script(path.name.removesuffix(".json").removesuffix(".workload"), settings, requests, actions)


def _scripted(row: Line, index: int) -> ScriptedRequest:
    salt = row.get("cache_salt") or ""
    phase = row.get("cancel_phase") or PHASES[0]
    if phase not in PHASES:
        raise ValueError(f"request {row['id']!r} has cancel_phase {phase!r}; known: {', '.join(PHASES)}")
    request = Request(
        request_id=str(row["id"]),
        arrival_time=float(row["arrival_step"]),
        prompt=TokenPrompt(tuple(_token(value) for value in row["prompt_token_ids"])),
        max_tokens=int(row["max_tokens"]),
        priority=row.get("priority") or 0,
        context=Context(tenant=salt),
        sampling=Sampling(stop_token_ids=tuple(row.get("stop_token_ids") or ())),
    )
    given = row.get("output_token_ids")
    output = (
        tuple(given)
        if given
        else tuple(10 + (10003 * (index + 1) + 7919 * k) % 30000 for k in range(row["max_tokens"]))
    )
    return ScriptedRequest(request, row["arrival_step"], row.get("cancel_step"), phase, output, salt)


def _token(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"token id {value!r} must be an integer")
    return value


def _action(row: Line) -> Line:
    if row["op"] not in OPERATIONS:
        raise ValueError(f"unknown op {row['op']!r}; known: {', '.join(OPERATIONS)}")
    return {"step": int(row["step"]), **row}


# -- playing ------------------------------------------------------------------------------------------------------


def play(script: Script, preset_name: str) -> Iterator[Line]:
    """Header, one line a step, footer."""
    player = _Player(script, preset_name)
    yield {"header": True, "name": script.name, "preset": preset_name, "config": script.settings, "null_block": 0}
    yield from player.steps()
    yield player.footer()


class _Player:
    def __init__(self, script: Script, preset_name: str) -> None:
        self._script = script
        self._engine = build(engine_config(script.settings, preset_name))
        self._engine.kv.events = []
        self._by_id = {each.request.request_id: each for each in script.requests}
        self._in_flight: deque[StepPlan | None] = deque()
        self._finished: list[str] = []  # ids not yet told to the workers
        self._stats = (PrefixStats(), PrefixStats())
        self._tables: dict[str, int] = {}  # blocks of each request's table that were told
        self._num_steps = 0

    def steps(self) -> Iterator[Line]:
        for step in range(self._script.settings["max_steps"]):
            self._num_steps = step + 1
            line = self._play_step(step)
            if line is not None:
                yield line
            if step >= self._script.last_step and not self._engine.has_work and not self._finished:
                return

    def footer(self) -> Line:
        free, live = self._engine.kv.num_free, list(self._engine.states)
        held = {block for state in live for block in state.block_ids}
        leaked = self._engine.kv.num_blocks - free - len(held)
        return {"footer": True, "steps": self._num_steps, "drained": not live, "free_blocks": free, "leaked": leaked}

    def _play_step(self, step: int) -> Line | None:
        now, engine = float(step), self._engine
        arrived = [each.request for each in self._script.requests if each.arrival_step == step]
        for request in arrived:
            engine.add(request, now)
        line: Line = {"step": step, "arrived": [request.request_id for request in arrived]}
        line["aborts"] = self._aborts(step, PHASES[0])
        line["actions"], reset = self._actions(step)
        if not engine.has_work and not self._finished:
            return None
        told, self._finished = sorted(self._finished), []
        plan = engine.schedule(now)
        line.update(self._decisions(plan, reset, told))
        line["aborts"] += self._aborts(step, PHASES[1])
        line.update(self._update(plan, now))
        line["after"] = self._state()
        return line

    def _aborts(self, step: int, phase: str) -> list[Line]:
        ids = [
            each.request.request_id
            for each in self._script.requests
            if each.cancel_step == step and each.cancel_phase == phase
        ]
        if not ids:
            return []
        free = self._engine.kv.num_free
        aborted = [each for each in ids if self._engine.abort(each, float(step))]
        self._collect()
        return [{"ids": ids, "aborted": aborted, "freed_blocks": self._engine.kv.num_free - free}]

    def _actions(self, step: int) -> tuple[list[Line], list[str]]:
        """What was done, and whom a reset threw out."""
        done: list[Line] = []
        thrown_out: list[str] = []
        for action in self._script.actions:
            if action["step"] == step:
                running = action["op"] == OPERATIONS[1] or bool(action.get("reset_running_requests"))
                if running:
                    thrown_out += [state.request_id for state in self._engine.running]
                done.append({**action, "ok": self._engine.reset_prefix_cache(float(step), running)})
        return done, thrown_out

    def _decisions(self, plan: StepPlan | None, thrown_out: list[str], told: list[str]) -> Line:
        plan = plan or StepPlan(step_id=-1, time=0.0)
        admitted = {each.request_id: each for each in plan.admitted}
        new: list[Line] = []
        continued: list[Line] = []
        for chunk in plan.chunks:
            entry = admitted.get(chunk.request_id)
            known = 0 if entry else self._tables[chunk.request_id]
            self._tables[chunk.request_id] = len(chunk.block_ids)
            blocks = list(chunk.block_ids[known:])
            if entry and not entry.resumed:
                new.append({"id": chunk.request_id, "cached_tokens": entry.num_cached_tokens, "block_ids": blocks})
            else:
                continued.append(
                    {"id": chunk.request_id, "resumed": bool(entry), "computed": chunk.start, "new_block_ids": blocks}
                )
        return {
            "num_scheduled_tokens": [[chunk.request_id, chunk.num_tokens] for chunk in plan.chunks],
            "total": plan.num_tokens,
            "new": new,
            "cont": continued,
            "preempted": sorted([*plan.preempted, *thrown_out]),
            "finished_notified": told,
        }

    def _update(self, plan: StepPlan | None, now: float) -> Line:
        """Apply the output that is due: of this step, or of the one before under asynchronous scheduling."""
        self._in_flight.append(plan)
        if len(self._in_flight) < self._engine.config.async_depth:
            return {"outputs": [], "kv_events": []}
        due = self._in_flight.popleft()
        outputs = self._apply(due, now) if due else []
        if self._engine.config.async_depth > 1 and not (due and due.request_ids):
            return {"outputs": [], "kv_events": []}  # an empty step is not sent to the device, so nothing comes back
        return {"stats": self._make_stats(), "outputs": outputs, "kv_events": self._events()}

    def _apply(self, plan: StepPlan, now: float) -> list[list[Any]]:
        before = {state.request_id: (state, state.num_output_tokens) for state in self._engine.states}
        tokens: dict[str, list[int]] = {}
        stopped: dict[str, FinishReason] = {}
        for chunk in plan.chunks:
            if chunk.samples and chunk.request_id in before:
                scripted, num = self._by_id[chunk.request_id], before[chunk.request_id][1]
                token = scripted.output_token_ids[min(num, len(scripted.output_token_ids) - 1)]
                tokens[chunk.request_id] = [token]
                sampling = scripted.request.sampling
                if sampling is not None and token in sampling.stop_token_ids:
                    stopped[chunk.request_id] = FinishReason.STOP
        self._engine.update(plan, StepOutput(0.0, stopped, tokens), now)
        reasons = {record.request_id: record.reason.value for record in self._collect()}
        return [
            [chunk.request_id, tokens[chunk.request_id], reasons.get(chunk.request_id)]
            for chunk in plan.chunks
            if chunk.request_id in tokens
            and before[chunk.request_id][0].num_output_tokens > before[chunk.request_id][1]
        ]

    def _collect(self) -> list[RequestRecord]:
        records = self._engine.drain_records()
        self._finished += [record.request_id for record in records]
        return records

    def _make_stats(self) -> Line:
        engine = self._engine
        now = (engine.prefix_stats, engine.prefix_stats_resumed)
        fresh, resumed = (
            [a - b for a, b in zip(new, old, strict=True)] for new, old in zip(now, self._stats, strict=True)
        )
        self._stats = now
        return {
            "running": len(engine.running),
            "waiting": len(engine.scheduling),
            "skipped_waiting": 0,
            "kv_usage": self._usage(),
            "prefix": fresh,
            "prefix_preempted": resumed,
        }

    def _usage(self) -> float:
        return round(1 - self._engine.kv.num_free / self._engine.kv.num_blocks, 6)

    def _events(self) -> list[Line]:
        events, self._engine.kv.events = self._engine.kv.events or [], []
        return [self._event(event) for event in events]

    def _event(self, event: KVEvent) -> Line:
        match event:
            case BlocksStored(keys, parent, request_id, first_index):
                salt = self._by_id[request_id].salt
                extra = [[salt] if salt and first_index + i == 0 else None for i in range(len(keys))]
                return {"type": "BlockStored", "hashes": [_short(key) for key in keys],
                        "parent": None if parent is None else _short(parent), "extra_keys": extra}  # fmt: skip
            case BlocksRemoved(keys):
                return {"type": "BlockRemoved", "hashes": [_short(key) for key in keys]}
            case AllBlocksCleared():
                return {"type": "AllBlocksCleared"}

    def _state(self) -> Line:
        engine, blocks = self._engine, self._engine.kv.blocks
        states = list(engine.states)
        return {
            "running": [state.request_id for state in engine.running],
            "waiting": [state.request_id for state in engine.scheduling.candidates(engine.view, 0.0)],
            "free_blocks": engine.kv.num_free,
            "usage": self._usage(),
            "free_queue": [[block.block_id, int(block.key is not None)] for block in engine.kv.free_order()],
            "blocks": {
                state.request_id: [
                    [block_id, blocks[block_id].ref_count, int(blocks[block_id].key is not None)]
                    for block_id in state.block_ids
                ]
                for state in states
            },
            "requests": {
                state.request_id: [
                    state.status.value, state.num_computed_tokens, state.num_tokens, state.num_preemptions
                ]
                for state in states
            },
        }  # fmt: skip


def _short(key: int) -> int:
    return key & (2**64 - 1)


# -- checking -----------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> Iterator[Line]:
    """Lines of a trace, plain or gzipped. Raises ValueError for a file that is not one, or is cut short."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as file:
            for number, text in enumerate(file, 1):
                try:
                    yield json.loads(text)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}: line {number} is not JSON ({error.msg}): is the file whole?") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a trace ({error})") from None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two traces part."""

    step: str
    field: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"first difference at {self.step}, {self.field}: expected {self.expected}, found {self.found}"


def check(script_path: Path, trace_path: Path, preset_name: str) -> int | Difference:
    """Play a script as its trace was recorded, and compare."""
    lines = read_trace(trace_path)
    header = next(lines, None)
    if not header or not header.get("header"):
        raise ValueError(f"{trace_path}: not a scheduler trace; expected a first line with 'header' and 'config'")
    played = play(read_script(script_path, header.get("config")), preset_name)
    next(played)
    return compare(lines, played)


def compare(expected: Iterator[Line], found: Iterator[Line]) -> int | Difference:
    """Number of equal steps, or the first difference; both without their headers.

    Hashes count by structure: as numbered by first appearance.
    """
    names, num_steps = (_Names(), _Names()), 0
    for number, (want, have) in enumerate(zip_longest(expected, found)):
        place = f"step {(want or have or {}).get('step', f'line {number + 1}')}"
        if want is None or have is None:
            ends = ("the end", "one more line")
            return Difference(place, "length", *(ends if want is None else ends[::-1]))
        difference = _difference(names[0].numbered(want), names[1].numbered(have), "")
        if difference:
            return Difference("the footer" if want.get("footer") else place, *difference)
        num_steps += "step" in want
    return num_steps


class _Names:
    """Replaces the hashes of one trace by numbers, in order of first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def numbered(self, line: Line) -> Line:
        return {**line, "kv_events": [self._event(event) for event in line.get("kv_events", ())]}

    def _event(self, event: Line) -> Line:
        named = dict(event)
        if event.get("parent") is not None:
            named["parent"] = self._number(event["parent"])
        if "hashes" in event:
            named["hashes"] = [self._number(value) for value in event["hashes"]]
        return named

    def _number(self, value: int) -> int:
        return self._numbers.setdefault(value, len(self._numbers))


def _difference(want: Any, have: Any, path: str) -> tuple[str, Any, Any] | None:
    """Where two values part, as deep as both have the same shape."""
    if want == have:
        return None
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(want, dict) and isinstance(have, dict):
        names = [*want, *(name for name in have if name not in want)]
        pairs = [(name, want.get(name, "nothing"), have.get(name, "nothing")) for name in names]
    elif isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
        pairs = list(zip(range(len(want)), want, have, strict=True))
    for name, a, b in pairs:
        if a != b:
            return _difference(a, b, f"{path}.{name}" if path else str(name))
    return path or "line", want, have

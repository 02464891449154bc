"""Plays a script on an engine; each step's decisions and state as one line of the recorder's format."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from policies.catalogue import build
from policies.engine import PrefixStats
from policies.kv import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from policies.types import FinishReason, RequestRecord, StepOutput, StepPlan
from sim.steps.script import OPERATIONS, PHASES, Line, Script, ScriptedRequest, engine_config


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
        self._bearers: dict[str, ScriptedRequest] = {}  # id -> who bears it now, or bore it last
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
        arrived = [each for each in self._script.requests if each.arrival_step == step]
        for each in arrived:
            engine.add(each.request, now)
            self._bearers[each.request.request_id] = each
        line: Line = {"step": step, "arrived": [each.request.request_id for each in arrived]}
        line["aborts"] = self._aborts(step, PHASES[0])
        line["actions"], reset = self._actions(step)
        if not engine.has_work and not self._finished:
            return None
        told, self._finished = sorted(set(self._finished)), []
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
                scripted, num = self._bearers[chunk.request_id], before[chunk.request_id][1]
                token = self._script.outputs[chunk.request_id].token(num)
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
                salt = self._bearers[request_id].salt
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

"""Weka's kv-cache-tester sessions, as of Claude Code: turns of an agent and its sub-agents, in a closed loop.

    {"id": "trace_0003", "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "type": "n", "in": 9526, "out": 363, "hash_ids": [1, 2, ...], "api_time": 2.81, "think_time": 0.0},
        {"t": 134.2, "type": "subagent", "duration_ms": 126015, "requests": [{"t": 0.0, "type": "n", ...}]}]}

A file holds one session, or one a line; hash_runs [[first, number], ...] may stand for hash_ids. `in` is the full
prompt; ids stand for whole blocks, so that up to 63 tokens of a prompt have none. Seconds count from the session's
start: when sessions start is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from typing import Any

from sim.workload.clock import UNITS
from sim.workload.fields import list_of, name_text
from sim.workload.lines import shown
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow
from sim.workload.weka_calls import (
    COLUMNS,
    LOOSE,
    Agent,
    Call,
    Run,
    Turn,
    block_size,
    common_length,
    main_calls,
    rest,
    sub_agents,
    turns,
)

SCOPES = ("local", "global")

_SESSION_BITS = 64  # below them, a session's own ids


class SessionFile:
    """Sessions so far: their names, and what they held, to know a copy."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._seen: set[bytes] = set()
        self._names: set[str] = set()
        reading.has_starts = False

    def __call__(self, fields: dict[str, Any]) -> list[TraceRow]:
        size, is_global = block_size(fields), scope(fields) == "global"
        self._check_size(size)
        entries = list_of("requests", fields["requests"], dict)
        main, agents = main_calls(entries, size), sub_agents(entries, size)
        name = name_text("id", fields.get("id", f"session-{len(self._names)}"))
        if self._is_copy(name, blake2b(repr((main, agents)).encode()).digest()):
            return []
        return self._rows(name, turns(self._answered(main), self._answering(agents)), is_global)

    def _answered(self, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        return tuple(
            call
            for call in calls
            if self._reading.answered(TraceRow(0.0, call.num_prompt_tokens, call.num_output_tokens))
        )

    def _answering(self, agents: Iterable[Agent]) -> list[Agent]:
        found = [replace(agent, calls=self._answered(agent.calls)) for agent in agents]
        return [agent for agent in found if agent.calls]

    def _check_size(self, size: int) -> None:
        if self._reading.content_size not in (None, size):
            raise ValueError(
                f"block_size ({size}) differs from the {self._reading.content_size} before it or asked for: "
                "read sessions of each block size by themselves"
            )
        self._reading.content_size = size

    def _is_copy(self, name: str, digest: bytes) -> bool:
        if digest in self._seen:
            self._reading.note("sessions dropped as copies of another but for the id")
            return True
        if name in self._names:
            raise ValueError(f"session {shown(name)} stands twice, with different requests: give each its own id")
        self._seen.add(digest)
        self._names.add(name)
        return False

    def _rows(self, session: str, found: list[Turn], is_global: bool) -> list[TraceRow]:
        base = self._reading.num_rows
        namer = Namer(self._reading, 0 if is_global else len(self._seen) << _SESSION_BITS)
        places = {id(turn.call): base + index for index, turn in enumerate(found)}
        self._note(found)
        return [
            TraceRow(
                0.0 if turn.after else turn.call.time - found[0].call.time,
                turn.call.num_prompt_tokens,
                turn.call.num_output_tokens,
                namer.ids(turn, base + index),
                class_name=turn.class_name,
                session=session,
                follows=tuple(places[id(call)] for call in turn.after),
                delay=turn.delay if turn.after else None,
            )
            for index, turn in enumerate(found)
        ]

    def _note(self, found: list[Turn]) -> None:
        for turn in found:
            if any(call.api_time is None for call in turn.after):
                self._reading.note("waits that hold the service time before them, which was not measured")
            elif any(call.end > turn.call.time + 1 for call in turn.after):
                self._reading.note("requests recorded before the answer that they wait for here")


def scope(fields: dict[str, Any]) -> str:
    found = fields.get("hash_id_scope")
    if found in SCOPES:
        return str(found)
    raise ValueError(
        f"hash_id_scope {shown(found)} must be local (ids mean something within their session only) or global: "
        "add it to the session"
    )


class Namer:
    """Content ids of a session; what a prompt has in common with the one before is named by the same objects."""

    def __init__(self, reading: Reading, base: int) -> None:
        self._reading = reading
        self._base = base
        self._last: dict[str, tuple[tuple[Run, ...], tuple[int, ...]]] = {}

    def ids(self, turn: Turn, index: int) -> tuple[int, ...]:
        call, size = turn.call, self._reading.content_size
        assert size is not None, "set by the first session"
        if not call.runs or not self._reading.keeps(index):
            return ()
        self._reading.spend(-(-call.num_prompt_tokens // size))
        ids = self._whole(turn.class_name, call.runs)
        if len(ids) * size < call.num_prompt_tokens:
            return (*ids, (index << _SESSION_BITS) + LOOSE)
        return ids

    def _whole(self, thread: str, runs: tuple[Run, ...]) -> tuple[int, ...]:
        last_runs, last_ids = self._last.get(thread, ((), ()))
        common, base = common_length(last_runs, runs), self._base
        new = chain.from_iterable(range(base + first, base + first + num) for first, num in rest(runs, common))
        ids = (*last_ids[:common], *new)
        self._last[thread] = (runs, ids)
        return ids


def parser(first: dict[str, Any], reading: Reading) -> Parse:
    return SessionFile(reading)


WEKA = TraceFormat(
    name="weka",
    columns=COLUMNS,
    shape=Shape.JSON,
    unit=UNITS["s"],
    declares_unit=True,
    takes_size=True,  # if it is the files' own
    parser=parser,
    assumptions=(
        "in is the full prompt; hash_ids stand for whole blocks, and what is behind the last one is a prompt's own",
        "a request comes its think time after the answer before; a sub-agent's caller goes on when it is done",
    ),
    in_order=False,
)

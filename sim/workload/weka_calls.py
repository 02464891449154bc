"""Weka's sessions, call by call: what each says, and which answers it waits for.

A completed sub-agent's `t` is when it was done (t - duration_ms is within a second of the turn that called it, in 57 of
the published 59), that of one launched in the background is when it began. Its requests count from there, or, in traces
published by others, from the session's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

from sim.workload.fields import content_list, list_of, require, time_value, token_count
from sim.workload.lines import shown

COLUMNS = ("requests", "block_size")
CALL = ("t", "in", "out")
MAIN, SUBAGENT = "main", "subagent"
LOOSE = 2**63  # recorded ids are below it; from it on, names of the tokens behind the last whole block


class Run(NamedTuple):
    """Ids first, first + 1, ..."""

    first: int
    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `time` in seconds from the session's start; `position` among those of its agent."""

    position: int
    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    runs: tuple[Run, ...]
    api_time: float | None
    think_time: float | None

    @property
    def end(self) -> float:
        """When it was answered; when it was sent, where that was not measured."""
        return self.time + (self.api_time or 0.0)


@dataclass(frozen=True, slots=True)
class Agent:
    """A sub-agent: `before` main calls stand above it, and the next waits for it if it was `awaited`."""

    before: int
    start: float
    end: float
    awaited: bool
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A call, the calls it waits for and how long it takes from the last of their answers."""

    call: Call
    after: tuple[Call, ...]
    delay: float
    class_name: str


# From JSON


def main_calls(entries: Sequence[dict[str, Any]], size: int) -> tuple[Call, ...]:
    return _calls([each for each in entries if each.get("type") != SUBAGENT], size)


def sub_agents(entries: Sequence[dict[str, Any]], size: int) -> tuple[Agent, ...]:
    found, num_main = [], 0
    for each in entries:
        if each.get("type") != SUBAGENT:
            num_main += 1
        elif calls := _calls(list_of("requests", each.get("requests"), dict), size):
            found.append(_agent(each, num_main, calls))
    return tuple(found)


def _calls(entries: Sequence[dict[str, Any]], size: int) -> tuple[Call, ...]:
    calls = tuple(_call(position, each, size) for position, each in enumerate(entries))
    for earlier, later in pairwise(calls):
        if later.time < earlier.time:
            raise ValueError(f"t {later.time:g} is earlier than {earlier.time:g} above it: sort the requests by t")
    return calls


def _call(position: int, fields: dict[str, Any], size: int) -> Call:
    require(fields, CALL)
    num_prompt_tokens = token_count("in", fields["in"])
    return Call(
        position,
        time_value("t", fields["t"]),
        num_prompt_tokens,
        token_count("out", fields["out"]),
        _runs(fields, num_prompt_tokens, size),
        *(None if fields.get(each) is None else time_value(each, fields[each]) for each in ("api_time", "think_time")),
    )


def _runs(fields: dict[str, Any], num_prompt_tokens: int, size: int) -> tuple[Run, ...]:
    runs = packed_runs(fields["hash_runs"]) if "hash_runs" in fields else runs_of(fields.get("hash_ids"))
    number, whole = sum(run.number for run in runs), num_prompt_tokens // size
    if runs and number not in (whole, -(-num_prompt_tokens // size)):
        raise ValueError(
            f"{number} hash_ids for {num_prompt_tokens} tokens must be {whole}, one for each {size}: check block_size"
        )
    return runs


def block_size(fields: dict[str, Any]) -> int:
    require(fields, COLUMNS)
    size = token_count("block_size", fields["block_size"])
    if not 1 <= size <= 2**20:
        raise ValueError(f"block_size ({size}) must be from 1 to {2**20} tokens: correct the session")
    return size


def packed_runs(value: object) -> tuple[Run, ...]:
    pairs = list_of("hash_runs", value, list)
    for pair in pairs:
        whole = len(pair) == 2 and type(pair[0]) is type(pair[1]) is int
        if not whole or not 0 <= pair[0] < LOOSE or not 1 <= pair[1] < LOOSE - pair[0]:
            raise ValueError(f"hash_runs {shown(pair)} must be [first id, number of ids]: fetch the file again")
    return tuple(Run(*pair) for pair in pairs)


def runs_of(value: object) -> tuple[Run, ...]:
    runs: list[Run] = []
    for each in content_list("hash_ids", value or []):
        if not 0 <= each < LOOSE:
            raise ValueError(f"hash_ids {shown(each)} must be from 0 to {LOOSE - 1}: number the contents from 0")
        if runs and each == runs[-1].first + runs[-1].number:
            runs[-1] = Run(runs[-1].first, runs[-1].number + 1)
        else:
            runs.append(Run(each, 1))
    return tuple(runs)


def _agent(fields: dict[str, Any], num_main: int, calls: tuple[Call, ...]) -> Agent:
    require(fields, ("t",))
    time, duration = time_value("t", fields["t"]), fields.get("duration_ms")
    start = time if duration is None else max(0.0, time - time_value("duration_ms", duration) / 1000)
    if calls[0].time > max(0.0, start - 1):  # counted from the session's start, as recorded: to the second
        return Agent(num_main, calls[0].time, calls[-1].end, duration is not None, calls)
    moved = tuple(replace(call, time=call.time + start) for call in calls)
    return Agent(num_main, start, max(time, moved[-1].end), duration is not None, moved)


# Who waits for whom


def turns(main: tuple[Call, ...], agents: Sequence[Agent]) -> list[Turn]:
    """In order of time, so that what a call waits for stands above it."""
    found = [*_main_turns(main, agents), *chain.from_iterable(_agent_turns(main, agent) for agent in agents)]
    return sorted(found, key=lambda turn: turn.call.time)


def _main_turns(main: tuple[Call, ...], agents: Sequence[Agent]) -> Iterable[Turn]:
    earlier: Call | None = None
    for call in main:
        joined = [agent for agent in agents if _is_joined(agent, earlier, call)]
        if joined:
            after = (*([earlier] if earlier else []), *(agent.calls[-1] for agent in joined))
            ends = [agent.end for agent in joined] + ([earlier.end] if earlier else [])
            yield Turn(call, after, max(0.0, call.time - max(ends)), MAIN)
        else:
            yield _next(earlier, call, MAIN)
        earlier = call


def _is_joined(agent: Agent, earlier: Call | None, call: Call) -> bool:
    """The first call of the main agent below one that was awaited and had ended."""
    is_first = (earlier is None or earlier.position < agent.before) and agent.before <= call.position
    return agent.awaited and is_first and agent.end <= call.time and agent.calls[-1].time < call.time


def _agent_turns(main: tuple[Call, ...], agent: Agent) -> Iterable[Turn]:
    callers = [call for call in main if call.time <= agent.start]
    first = agent.calls[0]
    if callers:
        yield Turn(first, (callers[-1],), max(0.0, agent.start - callers[-1].end), SUBAGENT)
    else:
        yield Turn(first, (), 0.0, SUBAGENT)
    for earlier, later in pairwise(agent.calls):
        yield _next(earlier, later, SUBAGENT)


def _next(earlier: Call | None, call: Call, class_name: str) -> Turn:
    """think_time counts from the last answer whose time was measured: only then is it the wait after the one before."""
    if earlier is None:
        return Turn(call, (), 0.0, class_name)
    measured = earlier.api_time is not None and call.position == earlier.position + 1
    if measured and call.think_time is not None:
        return Turn(call, (earlier,), call.think_time, class_name)
    return Turn(call, (earlier,), max(0.0, call.time - earlier.end), class_name)


def common_length(some: tuple[Run, ...], others: tuple[Run, ...]) -> int:
    """Ids with which both begin."""
    length = 0
    for one, other in zip(some, others, strict=False):
        if one.first != other.first:
            break
        length += min(one.number, other.number)
        if one.number != other.number:
            break
    return length


def rest(runs: tuple[Run, ...], skip: int) -> Iterable[Run]:
    """Runs without their first `skip` ids."""
    for first, number in runs:
        if number > skip:
            yield Run(first + skip, number - skip)
        skip = max(0, skip - number)

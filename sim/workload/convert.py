"""Workloads as files that other tools read: Mooncake's JSON lines and Vidur's CSV.

Both know open loops only, and no more than times, lengths and, in Mooncake's, content ids. What a file cannot hold is
lost only where the caller says so.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path

from policies.prompt import ContentPrompt, LengthPrompt
from policies.types import Request
from sim.files import whole_file
from sim.workload.mooncake import MOONCAKE
from sim.workload.sessions import Sessions
from sim.workload.vidur import COLUMNS
from sim.workload.workload import Workload

SESSIONS, CLIENTS, CLASSES, PRIORITIES, CONTENTS = "sessions", "clients", "classes", "priorities", "contents"
LOSSES = (SESSIONS, CLIENTS, CLASSES, PRIORITIES)


def write_mooncake(workload: Workload, path: Path, *, drop: Collection[str] = ()) -> int:
    """Times in milliseconds. Returns the content size: a reader must be told if it is not 512.

    `drop`: what may be lost, of sessions, clients, classes and priorities. Raises ValueError for what would be lost and
    is not in it, and for a closed loop.
    """
    _check(workload, drop, LOSSES)
    size = _content_size(workload)
    unused = count(_first_unused(workload))
    with whole_file(path) as file:
        for item in workload.items:
            request = item.request
            row = {
                "timestamp": _milliseconds(request.arrival_time),
                "input_length": request.prompt.num_tokens,
                "output_length": item.num_output_tokens,
                "hash_ids": _hash_ids(request, size, unused),
            }
            file.write(json.dumps(row) + "\n")
    return size


def write_vidur(workload: Workload, path: Path, *, drop: Collection[str] = ()) -> None:
    """Times in seconds; of contents too, `drop` must say that they may be lost."""
    _check(workload, drop, (*LOSSES, CONTENTS))
    with whole_file(path) as file:
        file.write(",".join(COLUMNS) + "\n")
        for item in workload.items:
            request = item.request
            file.write(f"{request.arrival_time!r},{request.prompt.num_tokens},{item.num_output_tokens}\n")


def _check(workload: Workload, drop: Collection[str], losses: Collection[str]) -> None:
    if unknown := sorted(set(drop) - set(losses)):
        raise ValueError(f"unknown drop {unknown[0]!r}; known: {', '.join(losses)}")
    if isinstance(workload, Sessions):
        raise ValueError(
            f"workload {workload.name!r} is a closed loop: its {len(workload.follow_ups)} follow-ups come when others "
            "are answered, and the file has room for times only; write an open loop"
        )
    lost = [loss for loss in losses if loss not in drop and any(_has(item.request, loss) for item in workload.items)]
    if lost:
        raise ValueError(
            f"workload {workload.name!r} has {', '.join(lost)}, which the file cannot hold: say so with drop={lost}"
        )


def _has(request: Request, loss: str) -> bool:
    return {
        SESSIONS: bool(request.context.session),
        CLIENTS: bool(request.client_id or request.context.user or request.context.application),
        CLASSES: request.class_name != "default",
        PRIORITIES: request.priority != 0 or request.deadline is not None,
        CONTENTS: not isinstance(request.prompt, LengthPrompt),
    }[loss]


def _milliseconds(seconds: float) -> float | int:
    """To the nanosecond; whole ones as integers, as in the original."""
    value = round(seconds * 1000, 6)
    return int(value) if value.is_integer() else value


def _content_size(workload: Workload) -> int:
    sizes = sorted({prompt.content_size for prompt in _with_contents(workload)})
    if len(sizes) > 1:
        raise ValueError(f"workload {workload.name!r} has content ids of {sizes} tokens: write one size at a time")
    assert MOONCAKE.content_size is not None, "the format has one"
    return sizes[0] if sizes else MOONCAKE.content_size


def _first_unused(workload: Workload) -> int:
    return 1 + max((max(prompt.content_ids, default=-1) for prompt in _with_contents(workload)), default=-1)


def _with_contents(workload: Workload) -> list[ContentPrompt]:
    prompts = [item.request.prompt for item in workload.items]
    return [prompt for prompt in prompts if isinstance(prompt, ContentPrompt)]


def _hash_ids(request: Request, content_size: int, unused: Iterator[int]) -> list[int]:
    """A prompt known by its length gets ids that nobody else has."""
    prompt = request.prompt
    if isinstance(prompt, ContentPrompt):
        return list(prompt.content_ids)
    if isinstance(prompt, LengthPrompt):
        return [next(unused) for _ in range(-(-prompt.num_tokens // content_size))]
    raise ValueError(
        f"request {request.request_id} has a prompt of token ids or keys, not of content ids: give it ContentPrompt"
    )

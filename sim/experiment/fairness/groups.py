"""Whom fairness is among: classes, or clients without their names; and a workload with some of them left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from policies.types import Request
from sim.workload.every import every_item, follow_ups
from sim.workload.sessions import Sessions
from sim.workload.workload import Workload

OTHERS = "(others)"
MOST = 6  # groups of their own: each is played alone; the rest are pooled
BY: dict[str, Callable[[Request], str]] = {
    "class": lambda request: request.class_name,
    "client": lambda request: request.client_id,
}


def kind_of_groups(workload: Workload, by: str | None) -> str:
    """`class` or `client`: as asked, or the first of which there are several. Raises ValueError where there are not."""
    if by is not None and by not in BY:
        raise ValueError(f"cannot be fair by {by!r}; known: {', '.join(BY)}")
    for kind in BY if by is None else (by,):
        if len({BY[kind](item.request) for item in every_item(workload)}) > 1:
            return kind
    raise ValueError(
        f"workload {workload.name!r} has one {by or 'class and one client'}: nobody to be fair among; "
        "assign some (--transform classes,interactive=0.7,batch=0.3 or tenants=8)"
    )


def groups_of(workload: Workload, kind: str) -> dict[str, str]:
    """Request id -> group. Clients are numbered by how much they send, the most first: their names stay unsaid."""
    name_of, items = BY[kind], every_item(workload)
    sent = Counter[str]()
    for item in items:
        sent[name_of(item.request)] += item.request.prompt.num_tokens + item.num_output_tokens
    ranked = sorted(sent, key=lambda name: (-sent[name], name))
    labels = {name: name if kind == "class" else f"client {rank}" for rank, name in enumerate(ranked[:MOST], 1)}
    return {item.request.request_id: labels.get(name_of(item.request), OTHERS) for item in items}


def names_of(groups: Sequence[str]) -> list[str]:
    """In a stable order, the pooled last."""
    return sorted(set(groups), key=lambda name: (name == OTHERS, name))


def only(workload: Workload, keeps: Callable[[str], bool]) -> Workload:
    """The requests that are kept, by id, at the same times. Raises ValueError where one waits for another's answer."""
    items = [item for item in workload.items if keeps(item.request.request_id)]
    if not isinstance(workload, Sessions):
        return replace(workload, items=items)
    following = [each for each in follow_ups(workload) if keeps(each.item.request.request_id)]
    if any(not keeps(cause) for each in following for cause in each.after):
        raise ValueError("a session is of several groups: groups must be of whole sessions to be played alone")
    return replace(workload, items=items, follow_ups=following)

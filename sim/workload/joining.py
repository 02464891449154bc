"""Workloads one after another, in one: when each begins, who is who, and whose content is the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from policies.prompt import ContentPrompt, Prompt
from sim.workload.every import every_item, follow_ups, with_requests, with_times
from sim.workload.sessions import Sessions
from sim.workload.workload import WorkItem, Workload


def concatenate(
    parts: Sequence[Workload], gap: float | None = None, *, shares_content: bool = False, name: str = "joined"
) -> Workload:
    """Each part begins `gap` seconds after the last arrival of the one before; unless told, a mean gap of that one.

    Request ids met before get a number in front. Content ids of the parts are kept apart unless `shares_content`, as
    files and generators all count from 0. Sessions still running when a part begins go on beside it.
    """
    if gap is not None and not 0 <= gap <= 1e9:
        raise ValueError(f"gap ({gap:g}) between workloads must be a number of seconds from 0 to 1e9")
    placed: list[Workload] = []
    names: set[str] = set()
    next_content = 0
    for part in parts:
        part = part if not placed else _after(placed[-1], part, gap)
        part = part if not placed or shares_content else _from_content(part, next_content)
        part = _renamed(part, names)
        names.update(item.request.request_id for item in every_item(part))
        next_content = max([next_content, *(1 + max(ids) for ids in _content(part))])
        placed.append(part)
    return _merged(placed, name, shares_content)


def _after(before: Workload, part: Workload, gap: float | None) -> Workload:
    if not (before.items and part.items):
        return part
    if gap is None:
        gap = 1 / before.rate if 0 < before.rate < math.inf else 0.0
    shift = before.items[-1].request.arrival_time + gap - part.items[0].request.arrival_time
    return with_times(part, lambda time: time + shift)


def _renamed(part: Workload, taken: set[str]) -> Workload:
    """With the first number in front that makes all names new, if any must be."""
    names = [item.request.request_id for item in every_item(part)]
    prefixes = ("" if number == 0 else f"{number}:" for number in count())
    prefix = next(each for each in prefixes if taken.isdisjoint(each + name for name in names))
    if not prefix:
        return part
    items = [_named(item, prefix) for item in part.items]
    if not isinstance(part, Sessions):
        return replace(part, items=items)
    following = [
        replace(each, item=_named(each.item, prefix), after=tuple(prefix + cause for cause in each.after))
        for each in part.follow_ups
    ]
    return replace(part, items=items, follow_ups=following)


def _named(item: WorkItem, prefix: str) -> WorkItem:
    return replace(item, request=replace(item.request, request_id=prefix + item.request.request_id))


def _content(part: Workload) -> Iterator[tuple[int, ...]]:
    for item in every_item(part):
        prompt = item.request.prompt
        if isinstance(prompt, ContentPrompt) and prompt.content_ids:
            yield (*prompt.content_ids, *prompt.continuation)


def _from_content(part: Workload, first: int) -> Workload:
    """With all its content ids moved, the lowest to `first`."""
    shift = first - min((min(ids) for ids in _content(part)), default=first)
    return with_requests(part, lambda request: replace(request, prompt=_moved(request.prompt, shift)))


def _moved(prompt: Prompt, shift: int) -> Prompt:
    if not isinstance(prompt, ContentPrompt):
        return prompt
    ids = tuple(each + shift for each in prompt.content_ids)
    return replace(prompt, content_ids=ids, continuation=tuple(each + shift for each in prompt.continuation))


def _merged(parts: Sequence[Workload], name: str, shares_content: bool) -> Workload:
    items = [item for part in parts for item in part.items]
    following = [each for part in parts for each in follow_ups(part)]
    findings = dict.fromkeys(finding for part in parts for finding in part.findings)
    content = "the same content ids mean the same" if shares_content else "their content kept apart"
    told = (*findings, f"{len(parts)} workloads one after another, {len(items) + len(following)} requests, {content}")
    source = " + ".join(part.source for part in parts) + f"; shares_content={shares_content}"
    if not following:
        return Workload(name, items, told, source)
    ways = {part.goes_on for part in parts if isinstance(part, Sessions)}
    if len(ways) > 1:
        raise ValueError("sessions that end at a refusal and sessions that go on cannot be joined: make them alike")
    return Sessions(name, items, told, source, following, goes_on=ways.pop())

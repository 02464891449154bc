"""Puts what a recipe draws on a clock, or in a loop where requests wait for answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.workload.arrivals import Arrivals
from sim.workload.recipe import Draw, Link
from sim.workload.sessions import FollowUp, Sessions
from sim.workload.users import Users
from sim.workload.workload import WorkItem, Workload, mean_rate, work_items

ENOUGH = 100  # arrivals, beyond which Poisson ones keep their rate


def assemble(
    name: str, draw: Draw, process: Arrivals | Users, max_tokens: int, seed: int, findings: Sequence[str], source: str
) -> Workload:
    """Sessions if any request waits for another, else a plain workload."""
    begins = _begins(draw)
    links = _links(draw, begins, process, seed)
    starts = process.starts(len(begins), seed) if isinstance(process, Users) else process.times(len(begins), seed)
    items = _items(draw, [index for index, link in enumerate(links) if link is None], starts, max_tokens)
    findings = (_said(process, draw, len(begins)), *_missed(process, starts), *findings)
    if not any(links):
        return Workload(name, items, tuple(findings), source)
    first = [item for item, link in zip(items, links, strict=True) if link is None]
    follow_ups = [
        FollowUp(item, tuple(map(str, link.after)), link.delay)
        for item, link in zip(items, links, strict=True)
        if link is not None
    ]
    return Sessions(name, first, tuple(findings), source, follow_ups, goes_on=isinstance(process, Users))


def _begins(draw: Draw) -> list[int]:
    """Where each session begins."""
    if draw.links is None:
        return list(range(len(draw.prompts)))
    return [index for index, link in enumerate(draw.links) if link is None]


def _links(draw: Draw, begins: Sequence[int], process: Arrivals | Users, seed: int) -> list[Link | None]:
    links = list(draw.links or [None] * len(draw.prompts))
    if isinstance(process, Users):
        for begin, link in zip(begins, process.links(_ends(links, begins), seed), strict=True):
            links[begin] = link
    return links


def _ends(links: Sequence[Link | None], begins: Sequence[int]) -> list[tuple[int, ...]]:
    """Of each session, the requests that none of it waits for."""
    waited_for = {cause for link in links if link is not None for cause in link.after}
    return [
        tuple(index for index in range(begin, end) if index not in waited_for)
        for begin, end in zip(begins, [*begins[1:], len(links)], strict=True)
    ]


def _items(draw: Draw, first: Sequence[int], starts: Sequence[float], max_tokens: int) -> list[WorkItem]:
    """Those that wait have an arrival time of 0 until they come."""
    arrivals = [0.0] * len(draw.prompts)
    for index, start in zip(first, starts, strict=True):
        arrivals[index] = start
    items = work_items(arrivals, draw.prompts, draw.outputs, max_tokens, draw.contexts)
    if draw.class_names is None:
        return items
    return [
        replace(item, request=replace(item.request, class_name=class_name))
        for item, class_name in zip(items, draw.class_names, strict=True)
    ]


def _said(process: Arrivals | Users, draw: Draw, num_sessions: int) -> str:
    if isinstance(process, Users):
        return f"arrivals are {process}"
    if draw.links is None:
        return f"arrivals are {process} at {process.rate:g} requests a second"
    return (
        f"beginnings of sessions are {process} at {process.rate:g} a second; {len(draw.prompts)} requests in "
        f"{num_sessions} sessions, each after the answer before it"
    )


def _missed(process: Arrivals | Users, starts: Sequence[float]) -> list[str]:
    """A run that sees only part of a day, or few bursts, has another rate than was asked for."""
    if isinstance(process, Users) or len(starts) < ENOUGH:
        return []
    rate = mean_rate(len(starts), starts[-1])
    if abs(rate / process.rate - 1) <= 0.1:
        return []
    return [f"these {len(starts)} come at {rate:.3g} a second: too few to see the mean of {process.rate:g}"]

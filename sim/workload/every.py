"""Every item of a workload, those included that follow from answers: looked at, or changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from policies.types import Request
from sim.workload.sessions import FollowUp, Sessions
from sim.workload.workload import WorkItem, Workload


def follow_ups(workload: Workload) -> Sequence[FollowUp]:
    return workload.follow_ups if isinstance(workload, Sessions) else ()


def every_item(workload: Workload) -> list[WorkItem]:
    return [*workload.items, *(each.item for each in follow_ups(workload))]


def with_items(workload: Workload, change: Callable[[WorkItem], WorkItem]) -> Workload:
    """The same workload of changed items; it must stay in order of arrival."""
    items = [change(item) for item in workload.items]
    if not isinstance(workload, Sessions):
        return replace(workload, items=items)
    following = [replace(each, item=change(each.item)) for each in workload.follow_ups]
    return replace(workload, items=items, follow_ups=following)


def with_requests(workload: Workload, change: Callable[[Request], Request]) -> Workload:
    return with_items(workload, lambda item: replace(item, request=change(item.request)))


def with_times(workload: Workload, change: Callable[[float], float]) -> Workload:
    """Only of those that come by the clock: the others come after answers."""
    requests = [item.request for item in workload.items]
    moved = [replace(request, arrival_time=change(request.arrival_time)) for request in requests]
    items = [replace(item, request=request) for item, request in zip(workload.items, moved, strict=True)]
    return replace(workload, items=items)

"""What a workload asks of a body: its rate as a share of the largest one that the body keeps up with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from policies.config import EngineConfig
from sim.cost import StepCost
from sim.simulate import simulate
from sim.workload.workload import WorkItem, Workload


def largest_rate(config: EngineConfig, workload: Workload, cost: StepCost) -> float:
    """Requests a second of a simulated body that has as much to do as it can take: all requests are there from the
    start, and answers count until the last request is let in.

    Raises ValueError for a workload that does not fill the body.
    """
    items = open_items(workload)
    begun = [replace(item, request=replace(item.request, arrival_time=0.0)) for item in items]
    run = simulate(config, Workload("all at once", begun), cost)
    last_in = max(record.first_scheduled_time or 0.0 for record in run.records)
    num = sum(record.finish_time <= last_in for record in run.records)
    if num < len(items) // 4:
        raise ValueError(
            f"{workload.name}: {len(items)} requests do not fill a body of {config.max_num_seqs} seats: take more "
            "requests, or a lower max_num_seqs"
        )
    return num / last_in


def at_rate(workload: Workload, rate: float) -> Workload:
    """The same requests in the same rhythm, from 0 on, `rate` a second."""
    items = open_items(workload)
    first = items[0].request.arrival_time
    by = (workload.rate if workload.duration else rate) / rate
    moved = [
        replace(item, request=replace(item.request, arrival_time=(item.request.arrival_time - first) * by))
        for item in items
    ]
    return Workload(workload.name, moved, workload.findings, workload.source)


def open_items(workload: Workload) -> Sequence[WorkItem]:
    """Raises ValueError where arrivals follow from answers: they have no rate of their own."""
    if len(workload.initial()) < workload.num_requests:
        raise ValueError(f"{workload.name}: requests that follow from answers have no rate: take another workload")
    return workload.initial()

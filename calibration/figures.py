"""What a run came to, measured or simulated, by the same definitions: the ones that errors are taken of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.records import MeasuredRun
from sim.conventions import tpot
from sim.metrics import Distribution
from sim.simulate import Run
from sim.timings import timings

Floats = NDArray[np.float64]
LATENCIES = ("ttft", "tpot", "e2e")
MEASURES = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of completed requests, by id. Seconds; TPOT by the convention `vllm`, nan for answers of one token."""

    ids: tuple[str, ...]
    arrivals: Floats
    ttft: Floats
    tpot: Floats
    e2e: Floats

    def only(self, chosen: Collection[str]) -> Latencies:
        kept = np.array([request_id in chosen for request_id in self.ids], dtype=bool)
        ids = tuple(request_id for request_id, is_in in zip(self.ids, kept, strict=True) if is_in)
        return Latencies(ids, self.arrivals[kept], self.ttft[kept], self.tpot[kept], self.e2e[kept])

    @property
    def throughput(self) -> float:
        """Requests a second, first arrival to last token."""
        return len(self.ids) / float((self.arrivals + self.e2e).max() - self.arrivals.min())

    def distribution(self, name: str) -> Distribution:
        return Distribution.of(getattr(self, name))


def measured(run: MeasuredRun) -> Latencies:
    done = sorted(run.completed, key=lambda request: request.request_id)
    return Latencies(
        tuple(each.request_id for each in done),
        np.array([each.arrival_time for each in done]),
        np.array([each.ttft for each in done]),
        np.array([each.tpot for each in done]),
        np.array([each.e2e for each in done]),
    )


def simulated(run: Run) -> Latencies:
    """In the same order of requests as `measured`."""
    found = timings(run)
    ids = [record.request_id for record in found.records]
    order = np.array([i for i in sorted(range(len(ids)), key=ids.__getitem__) if found.completed[i]], dtype=np.int64)
    arrivals, firsts, lasts = (each[order] for each in (found.arrivals, found.firsts, found.lasts))
    per_token = tpot("vllm", arrivals, firsts, lasts, found.nums[order])
    return Latencies(tuple(ids[i] for i in order), arrivals, firsts - arrivals, per_token, lasts - arrivals)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run. `name` reads `ttft mean`, `throughput`, ..."""

    name: str
    recorded: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.recorded - 1.0 if self.recorded else float("nan")


def compare(recorded: Latencies, predicted: Latencies) -> list[Figure]:
    found = [Figure("throughput", recorded.throughput, predicted.throughput)]
    for name in LATENCIES:
        ours, theirs = predicted.distribution(name), recorded.distribution(name)
        found += [Figure(f"{name} {each}", getattr(theirs, each), getattr(ours, each)) for each in MEASURES]
    return found

"""How long a launch takes: medians over replays of a CUDA graph, or, without a GPU, one run that says nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

Launch = Callable[[int], object]  # the how-manieth of a graph's launches: each reads other memory

MIN_REPLAYS, MAX_REPLAYS = 20, 200
MEASURING_TIME = 0.03  # of one point, s


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one launch; `spread` is the interquartile range over the median."""

    time: float
    spread: float
    num_replays: int


class Clock(Protocol):
    def time(self, launch: Launch, num_launches: int) -> Timing: ...


class GraphClock:
    """`num_launches` in one graph, replayed: neither the host's time nor a warm cache is in it."""

    def time(self, launch: Launch, num_launches: int) -> Timing:
        launch(0)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(num_launches):
                launch(index)
        first = self._replay(graph, 2)[1]
        wanted = int(MEASURING_TIME / max(first, 1e-6))
        times = self._replay(graph, min(max(wanted, MIN_REPLAYS), MAX_REPLAYS))
        low, median, high = statistics.quantiles(times, n=4)
        return Timing(median / num_launches, (high - low) / median, len(times))

    def _replay(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]


class HostClock:
    """Runs the launch once. The interpreter's time is not the kernel's."""

    def time(self, launch: Launch, num_launches: int) -> Timing:
        begin = time.perf_counter()
        launch(0)
        return Timing(time.perf_counter() - begin, 0.0, 1)

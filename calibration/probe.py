"""How fast the machine is just then: a small fixed piece of the body's own work, done again between steps.

A shared machine is faster and slower by a tenth from one second to the next, by its neighbours' caches and its clock.
The probe is slowed nearly as steps are (`sensitivity`, from the calibration's own loads, says how nearly), so that
times over its time are the body's own. Measurements and live runs are both told in it; what it takes itself is no part
of a step, and a simulation of a probed run is told to take it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

import torch

from backend.device import LiveExecutor
from backend.start import Body
from calibration.parts import Passing
from policies.types import Request, StepOutput, StepPlan

TOKENS = 8  # that pass the layers: long enough to be slowed by what slows steps
EVERY = 4  # steps
PAUSE = 2.0  # times the median: the machine was away, which happens to a probe as rarely as it is short

Work = Callable[[], object]


def probe_of(body: Body) -> Work | None:
    """None on a GPU, which nobody else is on: it keeps its speed."""
    if body.device.type != "cpu":
        return None
    decoder, token_ids = body.loaded.decoder, torch.arange(TOKENS)
    return lambda: decoder.hidden(token_ids, Passing())


class Probing:
    """An executor that does the work behind every so many steps. `times`: what it took, seconds of wall clock."""

    def __init__(self, executor: LiveExecutor, work: Work | None) -> None:
        self.times: list[float] = []
        self._executor = executor
        self._work = work
        self._num_steps = 0

    def check(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        self._executor.check(request, length, answer)

    def add(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        self._executor.add(request, length, answer)

    def discard(self, request_id: str) -> None:
        self._executor.discard(request_id)

    def execute(self, plan: StepPlan) -> StepOutput:
        output = self._executor.execute(plan)
        self._num_steps += 1
        if self._work is not None and self._num_steps % EVERY == 0:
            begin = time.perf_counter()
            with torch.inference_mode():
                self._work()
            self.times.append(time.perf_counter() - begin)
        return output


def usual(times: Sequence[float]) -> float:
    """Their mean, pauses of the machine left out; 1 where there are none."""
    if not times:
        return 1.0
    most = PAUSE * median(times)
    return fmean(time for time in times if time <= most)


def without_probes(durations: Sequence[float], probes: Sequence[float]) -> list[float]:
    """Of steps in their order, what they took but for the probes behind them."""
    own = list(durations)
    for index, probe in enumerate(probes):
        own[EVERY * (index + 1) - 1] -= probe
    return own

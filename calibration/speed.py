"""How fast the machine is now, beside how fast it was when its body was calibrated: a load of then, served again.

A machine drifts, by its neighbours and its clock, by more than a simulation is off. What a live run is held against is
the machine that it met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backend.executor import TorchExecutor
from backend.start import Body
from calibration.journalled import TimedStep
from calibration.points import Load
from calibration.served import Service, serve
from sim.cost.body import BodyCost

SECONDS = 0.8  # of each load, each time that it is served again
ROUNDS = 2
WANTED = (2, 8)  # clients: few, and many


def shares(cost: BodyCost, services: Sequence[Service]) -> dict[str, float]:
    """Times of all steps over their prices, by the number of clients."""
    by_clients: dict[str, list[TimedStep]] = {}
    for service in services:
        by_clients.setdefault(str(service.load.num_clients), []).extend(service.steps)
    return {num: round(_share(cost, steps), 5) for num, steps in by_clients.items()}


class Speed:
    """Call it for how much longer steps take now than when the costs were measured."""

    def __init__(self, body: Body, executor: TorchExecutor, cost: BodyCost, longest: int) -> None:
        self._then: Mapping[str, float] = cost.costs.about["served"]
        known = [int(num) for num in self._then]
        self._loads = ROUNDS * [Load(num, SECONDS) for num in WANTED if num in known] or [Load(max(known), SECONDS)]
        self._body, self._executor, self._cost, self._longest = body, executor, cost, longest

    def __call__(self) -> float:
        now = shares(self._cost, list(serve(self._body, self._executor, self._loads, self._longest)))
        return sum(share / self._then[num] for num, share in now.items()) / len(now)


def _share(cost: BodyCost, steps: Sequence[TimedStep]) -> float:
    prices = sum(cost.host_time(step.work) + cost.device_time(step.work) for step in steps)
    return sum(step.duration for step in steps) / prices

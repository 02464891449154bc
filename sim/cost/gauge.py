"""How much of a run's device time was extrapolated: asked of each step beside its price, which stays the same."""

from __future__ import annotations

from sim.cost.measured import MeasuredCost
from sim.cost.work import StepWork


class Gauge:
    """A measured cost that remembers what it was asked."""

    def __init__(self, cost: MeasuredCost) -> None:
        self._cost = cost
        self._total = 0.0
        self._beyond: dict[str, float] = {}

    @property
    def provenance(self) -> str:
        return self._cost.provenance

    @property
    def band(self) -> float:
        return self._cost.band

    def host_time(self, work: StepWork) -> float:
        return self._cost.host_time(work)

    def device_time(self, work: StepWork) -> float:
        parts = self._cost.part_times(work)
        self._total += sum(parts)
        for name, time in self._cost.extrapolated(work, parts).items():
            self._beyond[name] = self._beyond.get(name, 0.0) + time
        return self._cost.total(work, parts)

    @property
    def shares(self) -> dict[str, float]:
        """Of the device's time, by operation, largest first."""
        ordered = sorted(self._beyond.items(), key=lambda item: -item[1])
        return {name: time / self._total for name, time in ordered}

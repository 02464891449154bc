"""How much of a run's device time was extrapolated: asked of each step beside its price, which stays the same."""

from __future__ import annotations

from sim.cost.measured import MeasuredCost
from sim.cost.work import StepWork

NEAR = 16  # tokens between which contexts are taken to be as far from what was measured


class Gauge:
    """A measured cost that remembers what it was asked."""

    def __init__(self, cost: MeasuredCost) -> None:
        self._cost = cost
        self._total = 0.0
        self._beyond: dict[str, float] = {}
        self._far: dict[tuple[int, int], bool] = {}

    @property
    def provenance(self) -> str:
        return self._cost.provenance

    @property
    def band(self) -> float:
        return self._cost.band

    def host_time(self, work: StepWork) -> float:
        return self._cost.host_time(work)

    def device_time(self, work: StepWork) -> float:
        if self._cost.is_plain(work) and not self._is_far(work):
            time = self._cost.device_time(work)
            self._total += time / self._cost.scale
            return time
        parts = self._cost.part_times(work)
        self._total += sum(parts)
        for name, time in self._cost.extrapolated(work, parts).items():
            self._beyond[name] = self._beyond.get(name, 0.0) + time
        return self._cost.total(work, parts)

    def _is_far(self, work: StepWork) -> bool:
        """Whether anything of a step of plain decodes was extrapolated; asked once for contexts about as long."""
        about = (work.num_decodes, work.decode_context // work.num_decodes // NEAR)
        known = self._far.get(about)
        if known is None:
            known = self._far[about] = bool(self._cost.extrapolated(work, self._cost.part_times(work)))
        return known

    @property
    def shares(self) -> dict[str, float]:
        """Of the device's time, by operation, largest first."""
        ordered = sorted(self._beyond.items(), key=lambda item: -item[1])
        return {name: time / self._total for name, time in ordered}

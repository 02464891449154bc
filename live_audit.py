"""The leakage audit on a live body: the same trials, on real KV, timed by the clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from backend.start import start
from live_runner import authenticated
from liverun import play
from policies.catalogue import preset
from sim.experiment.isolation.audit import Probing, Times, first_token_times, measure, pace_of
from sim.experiment.isolation.channels import Pace, Sizes
from sim.experiment.isolation.scopes import Scope
from sim.setup import Setup
from sim.workload.workload import Workload

MODEL = "tiny"  # unless another is named


@dataclass(frozen=True, slots=True)
class LiveProber:
    """A Prober. Victim, attacker and others come with API keys of their own, and their bodies lie."""

    device: str = "cpu"
    name: str = "live"

    def pace(self, setup: Setup, sizes: Sizes) -> Pace:
        return pace_of(setup, sizes, self._play)

    def probe(self, probings: Sequence[Probing]) -> Iterator[Times]:
        for probing in probings:
            yield measure(probing, self._play)

    def can_play(self, scope: Scope) -> bool:
        """One engine on one device: nobody has a replica of his own."""
        return not scope.dedicated

    def _play(self, setup: Setup, workload: Workload) -> Mapping[str, float]:
        settings = {**(preset(setup.preset) if setup.preset else {}), **setup.engine}
        model = MODEL if setup.model == Setup().model else setup.model
        body = start(model, self.device, settings, setup.dtype, setup.gpu_memory_utilization, setup.seed)
        run, _ = play(body, authenticated(workload))
        return first_token_times(run)

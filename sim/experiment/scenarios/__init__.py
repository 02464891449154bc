"""Named cases, each with a rule that it must keep and a verdict, played alike on either body.

A scenario is a `Scenario` in a file here, and its name in this list.
"""

from __future__ import annotations

from sim.experiment.scenarios.controlled import COLD_UNIQUE, COMPETING_CLASSES, MIXED_LENGTHS, REPEATED_PREFIXES
from sim.experiment.scenarios.operational import CANCELLATION_STORM, EVICTION_PRESSURE, LONG_PROMPT
from sim.experiment.scenarios.scenario import LIVE, SIMULATED, Scale, Scenario, Verdict, play
from sim.experiment.scenarios.tenants import CROSS_TENANT, TWO_TENANTS
from sim.workload.spec import hint

__all__ = ["LIVE", "SCENARIOS", "SIMULATED", "Scale", "Scenario", "Verdict", "named", "play"]

SCENARIOS = (
    COLD_UNIQUE, REPEATED_PREFIXES, MIXED_LENGTHS, COMPETING_CLASSES,
    CANCELLATION_STORM, LONG_PROMPT, EVICTION_PRESSURE, TWO_TENANTS, CROSS_TENANT,
)  # fmt: skip


def named(names: list[str]) -> tuple[Scenario, ...]:
    """Those of these names, or all. Raises ValueError for a name there is not."""
    if names == ["all"]:
        return SCENARIOS
    known = {each.name: each for each in SCENARIOS}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown scenario {name!r}; known: all, {', '.join(known)}{hint(name, known)}")
    return tuple(known[name] for name in names)

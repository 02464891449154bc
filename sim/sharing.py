"""Whether tenants may share prefixes: where they do, somebody has decided it, in words that every report prints."""

from __future__ import annotations

from policies.catalogue import make
from policies.config import EngineConfig
from policies.interfaces import CrossesTenants
from sim.workload.every import every_item
from sim.workload.workload import Workload


def check_sharing(config: EngineConfig, workload: Workload) -> None:
    """Raises ValueError if several tenants share prefixes and nobody has said why they may."""
    isolation = make("isolation", config.isolation)
    crosses = isinstance(isolation, CrossesTenants) and isolation.crosses_tenants
    if config.threat_decision or not config.enable_prefix_caching or not crosses:
        return
    num_tenants = len({item.request.context.tenant for item in every_item(workload)})
    if num_tenants > 1:
        raise ValueError(
            f"isolation {config.isolation!r} lets {num_tenants} tenants find out by its speed what others asked: "
            f"choose tenant (--isolation tenant), or write down why they may (--threat-decision TEXT)"
        )

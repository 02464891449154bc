"""Who may share a prefix with whom, from everybody to nobody, each with what an engine must be told for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sim.setup import Setup

NOTHING_KEPT = "caching off"
UNDECIDED = "none given: they share for this comparison only"


@dataclass(frozen=True, slots=True)
class Scope:
    """Who may share, as settings of an engine. `num_tenants` in a value stands for how many there are.

    `dedicated`: a replica for each tenant.
    """

    name: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    dedicated: bool = False

    def of(self, setup: Setup, num_tenants: int) -> Setup:
        values = {n: v.format(num_tenants=num_tenants) if isinstance(v, str) else v for n, v in self.engine.items()}
        decision = setup.engine.get("threat_decision") or UNDECIDED
        changed = replace(setup, engine={**setup.engine, "threat_decision": decision, **values})
        if not self.dedicated:
            return changed
        return replace(changed, num_replicas=num_tenants, routing="pinned,exclusive=true")


SCOPES = (
    Scope("global", {"isolation": "global"}),
    Scope("application", {"isolation": "application"}),
    Scope("tenant", {"isolation": "tenant"}),
    Scope("user", {"isolation": "user"}),
    Scope("session", {"isolation": "session"}),
    Scope("request", {"isolation": "request"}),
    Scope("hard partition", {"isolation": "partition,parts={num_tenants}"}),
    Scope("dedicated workers", {"isolation": "tenant"}, dedicated=True),
    Scope(NOTHING_KEPT, {"isolation": "no_reuse", "enable_prefix_caching": False}),
)


def scopes_of(setup: Setup, names: Sequence[str] = ()) -> tuple[Scope, ...]:
    """All of them, and first the setup's own where it is none of these; or those named."""
    own = str(setup.engine.get("isolation", "global"))
    heads = {str(scope.engine["isolation"]).partition(",")[0] for scope in SCOPES}
    every = SCOPES if own.partition(",")[0] in heads else (Scope(own, {"isolation": own}), *SCOPES)
    known = {scope.name: scope for scope in every}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown scope {name!r}; known: {', '.join(known)}")
    return tuple(known[name] for name in names or known)

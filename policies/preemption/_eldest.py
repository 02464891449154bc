"""The eldest of the running yields to nobody: whatever a policy prefers, one request always gets to its end."""

from __future__ import annotations

from collections.abc import Sequence

from policies.types import RequestState


def all_but_the_eldest(candidates: Sequence[RequestState]) -> Sequence[RequestState]:
    """A single one stays, as there is no other."""
    if len(candidates) < 2:
        return candidates
    eldest = min(state.sequence for state in candidates)
    return [state for state in candidates if state.sequence != eldest]

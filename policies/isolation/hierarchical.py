"""What stands before a barrier is shared widely, what follows only within the tenant (as asked for in vLLM #37961).

Fits prompts that begin with the operator's own instructions. A prompt shorter than the barrier is shared whole: set it
no higher than the instructions are long.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.prompt import Namespace
from policies.types import Context

FIRST_SCOPES = ("application", "global")


class SharedUpToBarrier:
    """`barrier`: tokens; the block that holds the first one after it is the tenant's. `first`: who shares what stands
    before it, the users of one application or everybody."""

    crosses_tenants = True

    def __init__(self, barrier: int = 512, first: str = "application") -> None:
        if barrier < 1:
            raise ValueError(f"barrier ({barrier}) must be at least 1 token: with none, choose tenant")
        if first not in FIRST_SCOPES:
            raise ValueError(f"first ({first!r}) must be one of: {', '.join(FIRST_SCOPES)}")
        self._barrier = barrier
        self._first = first

    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        own = Namespace(self._barrier, ("tenant", context.tenant))
        if self._first == "global":
            return (own,)
        if not context.application:
            return (Namespace(0, ("tenant", context.tenant)),)
        return (Namespace(0, ("application", context.application)), own)

"""Each tenant has a part of the pool to itself: nobody's use of memory shows in another's hits, or in its room.

Closes what a namespace leaves open: a shared pool tells by what is evicted that others are there. Waiting for slots and
for the device is still shared; `hol_skip` counts within a part.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.prompt import Namespace
from policies.types import Context


class PartitionedPool:
    """`parts`: equal shares of the pool, taken by tenants as they come; those who come later are refused."""

    def __init__(self, parts: int = 2) -> None:
        if parts < 1:
            raise ValueError(f"parts ({parts}) must be at least 1, a tenant each")
        self.parts = parts
        self._part_of: dict[str, int] = {}

    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        return (Namespace(0, ("tenant", context.tenant)),)

    def part(self, context: Context) -> int | None:
        if context.tenant not in self._part_of and len(self._part_of) < self.parts:
            self._part_of[context.tenant] = len(self._part_of)
        return self._part_of.get(context.tenant)

"""Prefixes are shared within a tenant; requests without one form a tenant of their own."""

from __future__ import annotations

from collections.abc import Sequence

from policies.prompt import Namespace
from policies.types import Context


class WithinTenant:
    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        return (Namespace(0, ("tenant", context.tenant)),)

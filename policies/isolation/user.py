"""Prefixes are shared among one user's requests; a request without a user shares with nobody."""

from __future__ import annotations

from collections.abc import Sequence

from policies.prompt import Namespace
from policies.types import Context


class WithinUser:
    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        if not context.user:
            return None
        return (Namespace(0, ("user", context.tenant, context.user)),)

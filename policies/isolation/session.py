"""Prefixes are shared within one session, from turn to turn; a request without a session shares with nobody."""

from __future__ import annotations

from collections.abc import Sequence

from policies.prompt import Namespace
from policies.types import Context


class WithinSession:
    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        if not context.session:
            return None
        return (Namespace(0, ("session", context.tenant, context.user, context.session)),)

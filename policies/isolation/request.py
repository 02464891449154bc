"""Only the same call, asked again, finds its blocks: a retry need not compute what its first try did.

The name of a call is the server's; a request without one shares with nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.prompt import Namespace
from policies.types import Context


class WithinRequest:
    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        if not context.request:
            return None
        return (Namespace(0, ("request", context.tenant, context.user, context.request)),)

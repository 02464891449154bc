"""Prefixes are shared among all who use one application, whichever tenant they are of; without one, with nobody.

System instructions are computed once an application. Tenants can find out what others asked it, as with `global`.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.prompt import Namespace
from policies.types import Context


class WithinApplication:
    crosses_tenants = True

    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        if not context.application:
            return None
        return (Namespace(0, ("application", context.application)),)

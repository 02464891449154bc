"""Nobody finds anybody else's blocks; a preempted request still finds its own."""

from __future__ import annotations

from collections.abc import Sequence

from policies.prompt import Namespace
from policies.types import Context


class NoReuse:
    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        return None

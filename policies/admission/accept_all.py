"""Everybody may wait, however long the queue is (vLLM's default)."""

from __future__ import annotations

from policies.interfaces import View
from policies.types import Admit, Request, Verdict


class AcceptAll:
    def decide(self, request: Request, view: View, now: float) -> Verdict:
        return Admit()

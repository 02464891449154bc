"""Whole prompts first, decodes only when no prompt can run (Orca, vLLM V0).

A step holds prompts or decodes, never both, so every new prompt stalls all decodes. A prompt is cut only if it alone
exceeds the budget. Not maximally stable: near saturation prompts crowd out the decodes that would free memory.
"""

from __future__ import annotations

from policies.step import Step


class PrefillFirst:
    repeats = True
    returns_together = False

    def __init__(self) -> None:
        self._owes_decode = False

    def compose(self, step: Step) -> None:
        """After a preemption the decodes go first: they free the memory that the next prompt would only fight over."""
        owed, self._owes_decode = self._owes_decode, False
        if owed:
            step.grant_running(limit=1, decoding=True)
            step.do_not_repeat()
        if not step.entries and not step.preempted and step.grant_running(step.token_budget, decoding=False):
            self._admit_prompts(step)
        if not step.entries and not step.preempted:
            step.grant_running(limit=1)
        self._owes_decode = bool(step.preempted)

    def _admit_prompts(self, step: Step) -> None:
        for state in step.candidates():
            num = step.uncached(state)
            if num > step.token_budget and step.entries:
                return
            step.admit(state, min(num, step.token_budget))

"""Whole prompts first, decodes only when no prompt can run (Orca, vLLM V0).

A step holds prompts or decodes, never both, so every new prompt stalls all decodes. A prompt is cut only if it alone
exceeds the budget. Not maximally stable: near saturation prompts crowd out the decodes that would free memory.
"""

from __future__ import annotations

from policies.step import Grant, Step


class PrefillFirst:
    repeats = True
    returns_together = False

    def compose(self, step: Step) -> None:
        self._continue_prompts(step)
        self._admit_prompts(step)
        if step.entries or step.preempted:
            return
        for state in step.running:
            num = min(step.remaining(state), step.token_budget)
            if num > 0 and step.grant(state, num) is not Grant.GRANTED:
                return

    def _continue_prompts(self, step: Step) -> None:
        for state in step.running:
            num = min(step.remaining(state), step.token_budget)
            if num > 0 and not state.is_decoding and step.grant(state, num) is not Grant.GRANTED:
                return

    def _admit_prompts(self, step: Step) -> None:
        for state in step.candidates():
            num = step.uncached(state)
            if num > step.token_budget and step.entries:
                return
            step.admit(state, min(num, step.token_budget))

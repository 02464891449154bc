"""A group is formed, padded, run to the end of its longest member, and answered together (request-level batching).

The baseline that continuous batching replaced: members that are done keep their slot and their memory, and are computed
as padding. A group starts when `group_size` requests wait (0: as many as may run), or when the first has waited
`max_wait` seconds.
"""

from __future__ import annotations

from policies.step import Step


class StaticBatches:
    repeats = True
    returns_together = True

    def __init__(self, group_size: int = 0, max_wait: float = 1.0) -> None:
        if group_size < 0:
            raise ValueError(f"group_size ({group_size}) must be 0 (as many as may run) or more")
        if not 0 <= max_wait < float("inf"):
            raise ValueError(f"max_wait ({max_wait}) must be a finite number of seconds, 0 or more")
        self.group_size = group_size
        self.max_wait = max_wait
        self._places = 0  # members still to be admitted
        self._is_padded = True  # the group's prompts have been filled up to the longest
        self._starts_at: float | None = None  # a group that is waited for

    def next_wakeup(self, now: float) -> float | None:
        return None if self._starts_at is None else max(now, self._starts_at)

    def compose(self, step: Step) -> None:
        """Prompts in as many steps as the budget asks for, then all members in lockstep."""
        if not step.num_running:
            self._places = self._form(step)
            self._is_padded = False
        step.grant_running(step.token_budget, decoding=False)
        if self._places:
            self._admit(step)
        if not step.entries and not step.preempted:
            self._decode(step)

    def _form(self, step: Step) -> int:
        """How many members the next group has; 0 while it is waited for."""
        size = min(self.group_size or step.config.max_num_seqs, step.config.max_num_seqs)
        self._starts_at = min((state.waiting_since for state in step.waiting), default=None)
        if self._starts_at is None:
            return 0
        self._starts_at += self.max_wait
        if step.num_waiting < size and step.now < self._starts_at:
            return 0
        self._starts_at = None
        return min(size, step.num_waiting)

    def _admit(self, step: Step) -> None:
        for state in step.candidates():
            if step.admit(state, min(step.uncached(state), step.token_budget)):
                self._places -= 1
            if not self._places:
                return
        if step.token_budget:
            self._places = 0  # memory holds no more: the group is what it is

    def _decode(self, step: Step) -> None:
        """One token each; members that are done, and the prompts' missing ends, are computed as padding."""
        if not self._is_padded:
            self._is_padded = True
            lengths = [state.num_prompt_tokens for state in step.running]
            step.pad(len(lengths) * max(lengths, default=0) - sum(lengths))
            step.do_not_repeat()
        step.grant_running(limit=1)
        step.pad(sum(state.stop_reason is not None for state in step.running))  # one that yielded has left

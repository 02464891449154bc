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
        self._waiting_since: float | None = None  # when somebody was first seen waiting for a group

    def next_wakeup(self, now: float) -> float | None:
        if self._waiting_since is None:
            return None
        return max(now, self._waiting_since + self.max_wait)

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
        if not step.num_waiting:
            self._waiting_since = None
            return 0
        if self._waiting_since is None:
            self._waiting_since = step.now
        if step.num_waiting < size and step.now < self._waiting_since + self.max_wait:
            return 0
        self._waiting_since = None
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
        step.pad(sum(state.stop_reason is not None for state in step.running))
        step.grant_running(limit=1)

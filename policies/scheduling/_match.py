"""The waiting by how much of them the cache holds now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from policies.interfaces import View
from policies.ordered import OrderedLine
from policies.types import RequestState

Line = OrderedLine[tuple[int, int]]  # by band and order of arrival


@dataclass(frozen=True, slots=True)
class MatchOrder:
    """SGLang's thresholds: see the knobs of lpm."""

    fallback_above: int = 128
    alike: int = 32
    next_to_nothing: int = 32
    aging: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fallback_above", "alike", "next_to_nothing"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 0 or more")
        if not 0 <= self.aging < float("inf"):
            raise ValueError(f"aging ({self.aging}) must be a number of tokens a second, 0 (off) or more")

    def bands(self, line: Line, view: View) -> Iterator[list[RequestState]]:
        """The most urgent band first; in each the longest match first, and last those who are put off."""
        waiting = line.snapshot()
        if len(waiting) <= self.fallback_above:
            waiting = [state for *_, state in sorted(self._ranked(waiting, view))]
        for _, band in groupby(waiting, key=lambda state: state.priority):
            yield list(band)

    def _ranked(self, waiting: list[RequestState], view: View) -> Iterator[tuple[int, bool, int, int, RequestState]]:
        seen, num_blocks = set[int](), -(-self.alike // view.block_size)
        for state in waiting:
            match, is_put_off = view.matched_tokens(state), False
            if num_blocks and match <= self.next_to_nothing and state.num_prompt_tokens >= num_blocks * view.block_size:
                key = state.chain.keys[num_blocks - 1]  # stands for its block and all before it
                is_put_off = key in seen
                seen.add(key)
            # Two that wait age alike, so only when they came makes a difference.
            rank = round(self.aging * state.arrival_time) - match
            yield state.priority, is_put_off, rank, state.sequence, state

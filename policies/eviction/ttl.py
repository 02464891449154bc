"""Blocks are forgotten once nobody has used them for a time; before that the one released longest ago goes.

Bounds how long a prefix can be found out, and keeps conversations for as long as their next turn may take. Forgetting
is punctual to the step: what is past its time is gone before the next lookup.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from policies.types import Block, RequestState


class TimeToLive:
    """`seconds`: how long a block may lie unused."""

    def __init__(self, seconds: float = 300.0) -> None:
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds ({seconds}) must be a finite time above 0; lru never forgets")
        self._seconds = seconds
        self._ends = OrderedDict[Block, float]()

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        self._ends[block] = now + self._seconds

    def discard(self, block: Block) -> None:
        del self._ends[block]

    def touch(self, block: Block) -> None:
        pass  # its time begins anew when it is released

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        return self._ends.popitem(last=False)[0]

    def expired(self, now: float) -> Sequence[Block]:
        gone = []
        while self._ends and next(iter(self._ends.values())) <= now:
            gone.append(self._ends.popitem(last=False)[0])
        return gone

    def next_wakeup(self, now: float) -> float | None:
        return next(iter(self._ends.values()), None)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._ends)

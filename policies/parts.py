"""A pool cut into parts of equal size, of which none takes what is another's: blocks held, cached or promised.

What one part does with its memory shows nowhere in another: not in its hits, not in its room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policies.interfaces import EvictionPolicy, Expires, HearsOfWaiting, Sized
from policies.types import Block, RequestState


class ByPart:
    """An eviction policy for each part; a request evicts from its own."""

    def __init__(self, evictions: Sequence[EvictionPolicy]) -> None:
        self.of = list(evictions)
        self.time_dependent = any(getattr(each, "time_dependent", False) for each in evictions)
        self._owner: dict[Block, int] = {}

    def fit(self, num_blocks: int, block_size: int) -> None:
        for each in self.of:
            if isinstance(each, Sized):
                each.fit(num_blocks // len(self.of), block_size)

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        self._owner[block] = holder.part
        self.of[holder.part].add(block, holder, now)

    def discard(self, block: Block) -> None:
        self.of[self._owner[block]].discard(block)

    def touch(self, block: Block) -> None:
        owner = self._owner.get(block)
        if owner is not None:
            self.of[owner].touch(block)

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        assert beneficiary is not None, "a part gives up blocks to its own requests only"
        return self.of[beneficiary.part].pop(beneficiary, now)

    def expired(self, now: float) -> Sequence[Block]:
        return [block for each in self.of if isinstance(each, Expires) for block in each.expired(now)]

    def waiting_changed(self, state: RequestState, waits: bool) -> None:
        listener = self.of[state.part]
        if isinstance(listener, HearsOfWaiting):
            listener.waiting_changed(state, waits)

    def next_wakeup(self, now: float) -> float | None:
        times = [each.next_wakeup(now) for each in self.of if hasattr(each, "next_wakeup")]
        return min((time for time in times if time is not None), default=None)

    def __len__(self) -> int:
        return sum(map(len, self.of))

    def __iter__(self) -> Iterator[Block]:
        """Part by part."""
        for each in self.of:
            yield from each


class Parts:
    """The books: each part's quota of blocks, and what of it is held or promised."""

    def __init__(self, num_blocks: int, evictions: ByPart) -> None:
        self.num = len(evictions.of)
        if num_blocks < self.num:
            raise ValueError(f"num_blocks ({num_blocks}) must be at least 1 for each of the {self.num} parts")
        self.quota = num_blocks // self.num
        self.num_held = [0] * self.num
        self.num_held_back = [0] * self.num
        self._evictions = evictions

    def num_available(self, state: RequestState) -> int:
        part = state.part
        return self.quota - self.num_held[part] - self.num_held_back[part] + state.num_held_blocks

    def num_unused(self, part: int) -> int:
        """Blocks it may take without evicting one of its own."""
        return self.quota - self.num_held[part] - len(self._evictions.of[part])

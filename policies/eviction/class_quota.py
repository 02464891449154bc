"""Each class of requests keeps its share of the cache: who is over it pays first. Within a class, the oldest goes.

A block belongs to the class of its last holder. Blocks that are held are nobody's cache and count for none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from policies.eviction._leaves import LeafHeap, Tree
from policies.types import Block, RequestState

MODES = ("soft", "hard", "protect")
OTHERS = ""  # classes that have no share of their own


class ClassQuota:
    """`shares`: of the pool, as `chat:0.5/batch:0.1`; other classes have together what is left.

    `mode`: soft lends what is not used, and takes from the class that is most over its share; hard lets no class keep
    more than its share, though there be room; protect takes the oldest of what is over any share, and what is within
    only when there is nothing else.
    """

    def __init__(self, shares: str = "", mode: str = "soft") -> None:
        if mode not in MODES:
            raise ValueError(f"mode ({mode!r}) must be one of: {', '.join(MODES)}")
        self._shares = _shares(shares)
        self._mode = mode
        tree = Tree()
        self._heaps = {name: LeafHeap(tree) for name in self._shares}
        self._quotas: dict[str, int] = {}
        self._num_released = 0

    def fit(self, num_blocks: int, block_size: int) -> None:
        self._quotas = {name: int(share * num_blocks) for name, share in self._shares.items()}

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        name = holder.request.class_name
        block.note = name if name in self._heaps else OTHERS
        self._num_released += 1
        self._heaps[block.note].add(block, self._num_released)

    def discard(self, block: Block) -> None:
        self._heaps[block.note].discard(block)

    def touch(self, block: Block) -> None:
        pass

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        for name in self._protected_last() if self._mode == "protect" else self._most_over_first():
            block = self._heaps[name].pop()
            if block is not None:
                return block
        raise AssertionError("no block is left to give up")

    def expired(self, now: float) -> Sequence[Block]:
        """In hard mode, what is over a share; a parent stays while another class has cached what hangs on it."""
        gone: list[Block] = []
        for name in self._heaps if self._mode == "hard" else ():
            while self._over(name) > 0 and (block := self._heaps[name].pop()) is not None:
                gone.append(block)
        return gone

    def _over(self, name: str) -> int:
        return len(self._heaps[name]) - self._quotas[name]

    def _most_over_first(self) -> list[str]:
        return sorted(self._heaps, key=self._over, reverse=True)

    def _protected_last(self) -> list[str]:
        """The oldest leaf first, of the classes that are over their share; then of the others."""
        oldest = {name: heap.peek() for name, heap in self._heaps.items()}
        there = [name for name, rank in oldest.items() if rank is not None]
        return sorted(there, key=lambda name: (self._over(name) <= 0, oldest[name]))

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def __iter__(self) -> Iterator[Block]:
        """Class by class."""
        for heap in self._heaps.values():
            yield from heap


def _shares(text: str) -> dict[str, float]:
    """Class -> share; those without one of their own stand at the end."""
    shares: dict[str, float] = {}
    for each in text.split("/") if text else ():
        name, colon, value = each.partition(":")
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if not name or not colon or not 0 <= share <= 1 or name in shares:
            raise ValueError(
                f"shares ({text!r}) must read class:share/class:share, each class once, shares from 0 to 1"
            )
        shares[name] = share
    if sum(shares.values()) > 1 + 1e-9:
        raise ValueError(f"shares ({text!r}) add up to {sum(shares.values()):g}: the pool is only 1")
    return shares | {OTHERS: max(0.0, 1.0 - sum(shares.values()))}

"""The block whose next use is farthest goes, of equals the deepest: no policy finds more (Belady 1966).

Offline: it must know the string of requests, in the order of their admission. On a fixed string of prompts it is
optimal though children must go before parents, as whatever uses a child uses its parents too. An eviction that changes
the schedule changes the string; then this is the optimum of the string that was recorded, and only a good guess.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from policies.eviction._leaves import ByKey, LeafHeap
from policies.types import Block, RequestState

Use = tuple[str, Sequence[int]]  # a request's id, and the keys it looks for


class Belady:
    """`journal`: of the run whose requests are known in advance; without one nothing is ever used again."""

    def __init__(self, journal: str = "") -> None:
        self._heap = LeafHeap()
        self._by_key = ByKey()
        self.know(recorded_string(journal) if journal else ())

    def know(self, string: Sequence[Use]) -> None:
        """All that will be asked for, from the beginning on."""
        self._string = string
        self._now = -1  # the turn that is being served
        self._turns: dict[str, list[int]] = {}
        self._uses: dict[int, list[int]] = {}
        for turn, (request_id, keys) in enumerate(string):
            self._turns.setdefault(request_id, []).append(turn)
            for key in keys:
                self._uses.setdefault(key, []).append(turn)

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        self._advance(holder)
        self._by_key.add(block)
        self._heap.add(block, self._rank(block))

    def discard(self, block: Block) -> None:
        self._heap.discard(block)
        self._by_key.discard(block)

    def touch(self, block: Block) -> None:
        pass

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        if beneficiary is not None:
            self._advance(beneficiary)
        block = self._heap.take()
        self._by_key.discard(block)
        return block

    def _rank(self, block: Block) -> tuple[int, int]:
        uses = self._uses.get(block.key, ()) if block.key is not None else ()
        at = bisect_right(uses, self._now)
        return -(uses[at] if at < len(uses) else len(self._string)), -block.depth

    def _advance(self, state: RequestState) -> None:
        """It is this request's turn, or was; blocks that should have served it and did not are of use only later."""
        turns = self._turns.get(state.request_id, ())
        if not turns:
            return
        last, self._now = self._now, max(self._now, turns[min(state.num_preemptions, len(turns) - 1)])
        for turn in range(last + 1, self._now + 1):
            for key in self._string[turn][1]:
                for block in self._by_key.of(key):
                    self._heap.rerank(block, self._rank(block))

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._heap)


def recorded_string(path: str) -> list[Use]:
    """The order of admission that a journal tells, and the keys of each prompt."""
    keys: dict[str, list[int]] = {}
    string: list[Use] = []
    try:
        for text in Path(path).read_text().splitlines():
            line: dict[str, Any] = json.loads(text)
            if "keys" in line and "add" in line:
                keys[line["add"]] = [key for first, num in line["keys"] for key in range(first, first + num)]
            string += [(name, keys[name]) for name, _, _ in line.get("admitted", ())]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not the journal of a run ({' '.join(str(error).split())[:200]})") from None
    return string

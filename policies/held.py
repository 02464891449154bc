"""Requests that admission keeps back: in lines of which only the first is asked again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from policies.types import RequestState

Line = OrderedDict[RequestState, None]


class HeldLines:
    """Each line in order of adding. Who is held without a line stands in one of its own."""

    def __init__(self) -> None:
        self._lines: dict[str | int, Line] = {}
        self._line_of: dict[RequestState, str | int] = {}

    def add(self, state: RequestState, line: str | None) -> None:
        name = state.sequence if line is None else line
        self._lines.setdefault(name, OrderedDict())[state] = None
        self._line_of[state] = name

    def discard(self, state: RequestState) -> None:
        name = self._line_of.pop(state)
        del self._lines[name][state]
        if not self._lines[name]:
            del self._lines[name]

    def num_in(self, line: str) -> int:
        return len(self._lines.get(line, ()))

    def ask(self, is_let_go: Callable[[RequestState], bool]) -> None:
        """Ask of the first in each line, in order of adding, and of the next as long as those before it leave."""
        heads = [(next(iter(line)).sequence, name) for name, line in self._lines.items()]
        heapify(heads)
        while heads:
            _, name = heappop(heads)
            if is_let_go(next(iter(self._lines[name]))) and name in self._lines:
                heappush(heads, (next(iter(self._lines[name])).sequence, name))

    def __len__(self) -> int:
        return len(self._line_of)

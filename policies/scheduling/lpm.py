"""LPM: the longest match with the cache is next, so that prefixes are used while they are there (SGLang).

As there, ties go by order of arrival; where more than `fallback_above` wait, all do. Of several that begin alike, and
find next to nothing, only the first keeps its place: the rest come last in this step, and find in the next one what it
leaves behind. Without aging a steady stream of hits starves whoever has none. Band first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from policies.interfaces import View
from policies.scheduling._match import Line, MatchOrder
from policies.types import RequestState


class LongestPrefixMatch:
    """`fallback_above`: with more waiting than this, first come first served.
    `alike`: tokens from the first on that are called beginning alike, in whole blocks; 0 is off.
    `next_to_nothing`: a match of so many tokens at most may be put off for one that begins alike.
    `aging`: tokens that a second since arrival counts for; 0 is off, as in SGLang.
    """

    reorders = True

    def __init__(
        self, fallback_above: int = 128, alike: int = 32, next_to_nothing: int = 32, aging: float = 0.0
    ) -> None:
        self._order = MatchOrder(fallback_above, alike, next_to_nothing, aging)
        self._line = Line()
        self.promises_a_turn = aging > 0

    def add(self, state: RequestState, now: float) -> None:
        self._line.add(state, (state.priority, state.sequence))

    def requeue(self, state: RequestState, now: float) -> None:
        self.add(state, now)

    def discard(self, state: RequestState) -> None:
        self._line.discard(state)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        return chain.from_iterable(self._order.bands(self._line, view))

    def __len__(self) -> int:
        return len(self._line)

"""Whoever enters must fit at the peak that is to come, as far as past answers tell (LightLLM's Past-Future scheduler).

Sorted by tokens still to come, the most first, memory is fullest just before one of them ends: the peak is
max_i (left_i * i + sum of what the first i hold). An answer's length is foretold from recent ones that were longer
than it is already: their `quantile`, where the paper draws one of them, so that decisions can be repeated.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from policies.allocation._blocks import blocks_for
from policies.interfaces import Promise, View
from policies.types import RequestState


class Growth(NamedTuple):
    """Tokens of KV that a request holds, and that are still to come."""

    held: int
    left: int


def peak_tokens(growths: Iterable[Growth]) -> int:
    """The most that all hold together, if each gains a token a step and is gone after its last."""
    peak = held = 0
    for num, growth in enumerate(sorted(growths, key=lambda growth: -growth.left), 1):
        held += growth.held
        peak = max(peak, growth.left * num + held)
    return peak


def peak_blocks(growths: Iterable[Growth], block_size: int) -> int:
    """The same in blocks, of which a begun one counts whole."""
    peak = whole = 0
    last_blocks = [0] * block_size  # how many hold so many tokens, less one, in their last block
    for num, growth in enumerate(sorted(growths, key=lambda growth: -growth.left), 1):
        blocks, in_last = divmod(growth.held + block_size - 1, block_size)
        whole += blocks
        last_blocks[in_last] += 1
        more, beyond = divmod(growth.left, block_size)
        peak = max(peak, whole + num * more + sum(last_blocks[block_size - beyond :]) * (beyond > 0))
    return peak


class PastFuture:
    """`quantile`: of recent answers, from 0 to 1; 1 is the longest. `window`: how many are recent."""

    shares_blocks = True
    depends_on_progress = True

    def __init__(self, quantile: float = 0.9, window: int = 1000) -> None:
        if not 0 <= quantile <= 1:
            raise ValueError(f"quantile ({quantile}) must be from 0 to 1")
        if window < 1:
            raise ValueError(f"window ({window}) must be at least 1 answer")
        self.quantile = quantile
        self._recent = deque[int]()
        self._sorted: list[int] = []
        self._window = window

    def finished(self, state: RequestState, now: float) -> None:
        if state.num_output_tokens == 0:
            return
        if len(self._recent) == self._window:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]
        self._recent.append(state.num_output_tokens)
        insort(self._sorted, state.num_output_tokens)

    def foretold(self, state: RequestState) -> int:
        """Output tokens in all; up to its limit where no recent answer was longer than it is."""
        longer = bisect_right(self._sorted, state.num_output_tokens)
        num_longer = len(self._sorted) - longer
        if not num_longer:
            return state.token_limit
        return min(self._sorted[longer + int(self.quantile * (num_longer - 1))], state.token_limit)

    def promise(self, state: RequestState, num_hit_tokens: int, num_new_tokens: int, view: View) -> Promise:
        now = blocks_for(num_hit_tokens + num_new_tokens, view)
        required = max(now, blocks_for(state.num_tokens, view))
        if not view.running:
            return Promise(now, required)
        peak = peak_blocks([self._growth(each) for each in (*view.running, state)], view.block_size)
        used = view.num_blocks - view.num_free_blocks
        return Promise(now, max(required, min(peak - used, view.num_blocks)))

    def _growth(self, state: RequestState) -> Growth:
        """The last token's KV is never computed."""
        return Growth(state.num_tokens, max(0, self.foretold(state) - state.num_output_tokens - 1))

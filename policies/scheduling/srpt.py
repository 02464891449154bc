"""SRPT: the least predicted work left is next (Schrage, 1968; on predictions: Shahout et al., TRAIL, 2025).

Work is the prompt's tokens and the answer's, each at its price, less what is computed; the answer's length is
`predicted_output_tokens`, or `max_tokens` where nothing is predicted, never the true one. Nobody ages: a steady stream
of short requests starves the long ones. Band first.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.ordered import OrderedLine
from policies.types import RequestState

_BITS = 64


class ShortestRemaining:
    """`error`: predictions are off by up to this share, either way, evenly; drawn by order of adding.
    `input_price`, `output_price`: what a token adds to the work; by time, a prompt's tokens are nearly free.
    """

    reorders = False

    def __init__(self, error: float = 0.0, input_price: int = 0, output_price: int = 1) -> None:
        if not 0 <= error <= 1:
            raise ValueError(f"error ({error}) must be a share of the length, from 0 (exact) to 1")
        for name, value in (("input_price", input_price), ("output_price", output_price)):
            if value < 0:
                raise ValueError(f"{name} ({value}) must be 0 (free) or more")
        self._error = error
        self._input_price = input_price
        self._output_price = output_price
        self._line = OrderedLine[tuple[int, int, int]]()

    def add(self, state: RequestState, now: float) -> None:
        self._line.add(state, (state.priority, self._work_left(state), state.sequence))

    def requeue(self, state: RequestState, now: float) -> None:
        self.add(state, now)

    def discard(self, state: RequestState) -> None:
        self._line.discard(state)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        return iter(self._line)

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return (waiting.priority, self._work_left(waiting)) < (running.priority, self._work_left(running))

    def _work_left(self, state: RequestState) -> int:
        prompt = max(0, state.num_prompt_tokens - state.num_computed_tokens)
        answer = max(0, self._predicted(state) - state.num_output_tokens)
        return self._input_price * prompt + self._output_price * answer

    def _predicted(self, state: RequestState) -> int:
        predicted = state.request.predicted_output_tokens
        length = state.request.max_tokens if predicted is None else predicted
        return round(length * (1 + self._error * _spread(state.sequence))) if self._error else length

    def __len__(self) -> int:
        return len(self._line)


def _spread(number: int) -> float:
    """Between -1 and 1, evenly, the same for the same number (splitmix64; Steele et al., 2014)."""
    mask = (1 << _BITS) - 1
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & mask
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    return (mixed ^ mixed >> 31) / (1 << (_BITS - 1)) - 1

"""Who runs and who waits, by class or by client: kept from the first time that a policy asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from policies.types import Request, RequestState, Status


@dataclass(slots=True)
class Totals:
    """Of one class or client. The waiting stand in line, the preempted with them; the held are kept by admission.

    Tokens are those of prompt and output so far; blocks, what they fill, a begun one counting whole.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_waiting_blocks: int = 0
    num_held: int = 0
    num_held_tokens: int = 0


class TotalsBy:
    """Totals by a name that requests carry. Names of whom nobody is left are forgotten."""

    def __init__(self, name_of: Callable[[Request], str], block_size: int, states: Iterable[RequestState]) -> None:
        self._name_of = name_of
        self._block_size = block_size
        self._totals: dict[str, Totals] = {}
        for state in states:
            self.count(state, 1)

    def of(self, name: str) -> Totals:
        return self._totals.get(name) or Totals()

    def all(self) -> dict[str, Totals]:
        return dict(self._totals)

    def count(self, state: RequestState, num: int) -> None:
        """Add it by its status (1), or take it off (-1)."""
        name, tokens = self._name_of(state.request), num * state.num_tokens
        totals = self._totals.setdefault(name, Totals())
        if state.status is Status.RUNNING:
            totals.num_running += num
        elif state.status is Status.HELD:
            totals.num_held += num
            totals.num_held_tokens += tokens
        else:
            totals.num_waiting += num
            totals.num_waiting_tokens += tokens
            totals.num_waiting_blocks += num * -(-state.num_tokens // self._block_size)
        if not (totals.num_running or totals.num_waiting or totals.num_held):
            del self._totals[name]

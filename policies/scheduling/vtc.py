"""VTC: the client that has been served least is next (Sheng et al., Fairness in Serving LLMs, OSDI 2024).

A client's counter grows by what is computed for it, chunk by chunk: input tokens by `input_price`, output tokens by
`output_price`, both divided by its weight. Whoever comes back from idling is lifted to the least counter of those who
wait, so that nobody saves up. Band first, then client, then first come first served. One whole number a client is kept
for as long as the engine lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from policies.interfaces import View
from policies.scheduling._clients import ClientLines, Lines, Shares
from policies.scheduling._served import Served, Tariff
from policies.types import RequestState, Status

LIFTS = ("paper", "artifact", "none")


class VirtualTokenCounter:
    """`lift`: `paper`: where nobody waits, to the client that last left the line; `artifact`: only to those who wait;
    `none`: never, which is least-counter-first.
    `input_price`, `output_price`: of a token.
    `charge_cached`: prompt tokens found in the cache are paid for too, as in the artifact.
    `charge_recompute`: tokens computed again after a preemption are paid for again.
    `weights`: shares of clients, `a:2/b:1`; 1 unless given.
    """

    reorders = True
    promises_a_turn = True

    def __init__(
        self,
        lift: str = "paper",
        input_price: int = 1,
        output_price: int = 2,
        charge_cached: bool = False,
        charge_recompute: bool = False,
        weights: str = "",
    ) -> None:
        if lift not in LIFTS:
            raise ValueError(f"lift ({lift!r}) must be one of {', '.join(LIFTS)}")
        self._lift = lift
        self._shares = Shares(weights)
        self._served = Served(Tariff(input_price, output_price, charge_cached, charge_recompute))
        self._lines = ClientLines()
        self._counters: dict[str, int] = {}
        self._last_left: str | None = None  # the client of whoever was let in last

    def add(self, state: RequestState, now: float) -> None:
        client = state.request.client_id
        if not self._lines.has(client):
            self._catch_up(client)
        self._lines.add(state, now)

    def _catch_up(self, client: str) -> None:
        """Nobody gains by having been away."""
        self._settle()
        counters = self._counters
        own = counters.setdefault(client, 0)
        if self._lift == "none":
            return
        floor = min((counters[other] for other in self._lines.waiting), default=0)
        if self._lift == "paper" and not len(self._lines) and self._last_left is not None:
            floor = counters[self._last_left]
        counters[client] = max(own, floor)

    def requeue(self, state: RequestState, now: float) -> None:
        self._lines.requeue(state, now)

    def discard(self, state: RequestState) -> None:
        self._lines.discard(state)
        if state.status is not Status.FINISHED:
            self._served.admit(state)
            self._last_left = state.request.client_id

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        self._settle()
        ahead = dict[str, int]()  # what the prompts let in by this step will cost
        for _, lines in self._lines.bands():
            yield from self._by_counter(lines, ahead)

    def _settle(self) -> None:
        for client, due in self._served.collect().items():
            self._counters[client] += due * self._shares.per_token(client)

    def _by_counter(self, lines: Lines, ahead: dict[str, int]) -> Iterator[RequestState]:
        """The head of the client with the least counter; of equal ones, whose head came first."""
        heads = []
        for client, line in lines.items():
            rest = iter(line)
            head = next(rest)
            heads.append((self._counters[client] + ahead.get(client, 0), head.sequence, client, head, rest))
        heapify(heads)
        while heads:
            counter, _, client, state, rest = heads[0]
            yield state
            if state.status is Status.RUNNING:
                due = self._served.prefill_due(state) * self._shares.per_token(client)
                ahead[client] = ahead.get(client, 0) + due
                counter += due
            following = next(rest, None)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, (counter, following.sequence, client, following, rest))

    def __len__(self) -> int:
        return len(self._lines)

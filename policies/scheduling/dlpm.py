"""DLPM: the longest match first, among clients with credit left (Cao et al., Locality-aware Fair Scheduling, 2025).

Each client has a deficit account: what is computed for it is taken off, and when nobody with credit waits, all in debt
get `quantum` tokens, again and again until somebody is out of it. A large quantum is LPM, a small one nearly VTC.
Cached tokens are free: that is what locality is for. Band first. Refills count once somebody was let in by them.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.scheduling._match import Line, MatchOrder
from policies.scheduling._served import Served, Tariff
from policies.types import RequestState, Status


class DeficitLongestPrefixMatch:
    """`quantum`: tokens of a refill, and what a client begins with: a newcomer with none would wait for all others.
    `input_price`, `output_price`: of a token.
    `charge_cached`, `charge_recompute`: whether tokens found in the cache, or computed again, are paid for.
    `fallback_above`: with more waiting than this, order of arrival instead of the match, as in lpm.
    `aging`: tokens that a second since arrival counts for; with 0 a client's hits may starve its own misses.
    `forget_after`: seconds without a request after which a client is a newcomer again, its debt forgiven.
    """

    reorders = True

    def __init__(
        self,
        quantum: int = 4096,
        input_price: int = 1,
        output_price: int = 1,
        charge_cached: bool = False,
        charge_recompute: bool = False,
        fallback_above: int = 128,
        aging: float = 0.0,
        forget_after: float = 3600.0,
    ) -> None:
        if quantum < 1:
            raise ValueError(f"quantum ({quantum}) must be at least 1 token")
        if not forget_after >= 0:
            raise ValueError(f"forget_after ({forget_after}) must be a number of seconds, 0 or more")
        self._quantum = quantum
        self._forget_after = forget_after
        self._served = Served(Tariff(input_price, output_price, charge_cached, charge_recompute))
        self._order = MatchOrder(fallback_above, aging=aging)
        self._line = Line()
        self.promises_a_turn = aging > 0
        self._credit: dict[str, int] = {}  # whoever is not in it has a quantum
        self._last_seen: dict[str, float] = {}  # the longest ago first
        self._refills: dict[str, int] = {}  # of the present step, of which nobody has made use yet

    def add(self, state: RequestState, now: float) -> None:
        client = state.request.client_id
        self._forget(now)
        self._last_seen.pop(client, None)
        self._last_seen[client] = now
        self._line.add(state, (state.priority, state.sequence))

    def _forget(self, now: float) -> None:
        while self._last_seen:
            client, seen = next(iter(self._last_seen.items()))
            if now - seen <= self._forget_after:
                return
            self._settle()  # what it owes is forgotten with it
            del self._last_seen[client]
            self._credit.pop(client, None)

    def requeue(self, state: RequestState, now: float) -> None:
        self._line.add(state, (state.priority, state.sequence))

    def discard(self, state: RequestState) -> None:
        self._line.discard(state)
        if state.status is Status.FINISHED:
            return
        self._served.admit(state)
        for client, tokens in self._refills.items():
            self._credit[client] = self._credit.get(client, self._quantum) + tokens
        self._refills.clear()

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        self._settle()
        self._refills.clear()
        credit = dict(self._credit)
        for band in self._order.bands(self._line, view):
            yield from self._passes(band, credit)

    def _settle(self) -> None:
        for client, due in self._served.collect().items():
            if client in self._last_seen:
                self._credit[client] = self._credit.get(client, self._quantum) - due

    def _passes(self, waiting: list[RequestState], credit: dict[str, int]) -> Iterator[RequestState]:
        """Whoever has credit, in order; then refills, and whoever has credit by then."""
        while waiting:
            indebted = list[RequestState]()
            for state in waiting:
                client = state.request.client_id
                if credit.get(client, self._quantum) <= 0:
                    indebted.append(state)
                    continue
                yield state
                if state.status is Status.RUNNING:
                    credit[client] = credit.get(client, self._quantum) - self._served.prefill_due(state)
            if indebted:
                self._refill({state.request.client_id: None for state in indebted}, credit)
            waiting = indebted

    def _refill(self, waiting: dict[str, None], credit: dict[str, int]) -> None:
        """As many refills as bring the first of the waiting out of debt; whoever is out of it gets no more."""
        rounds = min(self._rounds(credit[client]) for client in waiting)
        for client, tokens in credit.items():
            if tokens <= 0:
                refill = min(rounds, self._rounds(tokens)) * self._quantum
                credit[client] = tokens + refill
                self._refills[client] = self._refills.get(client, 0) + refill

    def _rounds(self, credit: int) -> int:
        return -credit // self._quantum + 1

    def __len__(self) -> int:
        return len(self._line)

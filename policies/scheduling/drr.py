"""DRR: clients take turns of `quantum` tokens (Shreedhar and Varghese, 1995; as MDRR in the artifact of VTC).

Nobody knows what an answer will cost, so whoever has credit may go on until it is used up, and what was too much is
taken off later turns. A turn that ends with an empty line forfeits the rest. Band first, then client, then first come
first served. A turn counts once somebody was let in by it.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.interfaces import View
from policies.scheduling._clients import ClientLines, Lines, Shares
from policies.scheduling._served import Served, Tariff
from policies.types import RequestState, Status


class DeficitRoundRobin:
    """`quantum`: tokens a turn, times the client's weight.
    `input_price`, `output_price`: of a token.
    `charge_cached`, `charge_recompute`: whether tokens found in the cache, or computed again, are paid for.
    `weights`: shares of clients, `a:2/b:1`; 1 unless given.
    """

    reorders = True
    promises_a_turn = True

    def __init__(
        self,
        quantum: int = 2048,
        input_price: int = 1,
        output_price: int = 2,
        charge_cached: bool = False,
        charge_recompute: bool = False,
        weights: str = "",
    ) -> None:
        if quantum < 1:
            raise ValueError(f"quantum ({quantum}) must be at least 1 token")
        self._quantum = quantum
        self._shares = Shares(weights)
        self._served = Served(Tariff(input_price, output_price, charge_cached, charge_recompute))
        self._lines = ClientLines()
        self._credit: dict[str, int] = {}
        self._holder: dict[int, str] = {}  # band -> whose turn it is, or was last
        self._grants: dict[str, int] = {}  # of turns in the present step, until somebody is let in by them

    def add(self, state: RequestState, now: float) -> None:
        client = state.request.client_id
        if not self._lines.has(client):
            self._settle()
            self._credit[client] = min(0, self._credit.get(client, 0))
        self._lines.add(state, now)

    def requeue(self, state: RequestState, now: float) -> None:
        self._lines.requeue(state, now)

    def discard(self, state: RequestState) -> None:
        client, is_admitted = state.request.client_id, state.status is not Status.FINISHED
        if is_admitted:
            self._lines.turn_to(state)
            self._holder[state.priority] = client
            self._served.admit(state)
            for name, tokens in self._grants.items():
                self._credit[name] += tokens
            self._grants.clear()
        self._lines.discard(state)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        self._settle()
        self._grants.clear()
        credit = dict(self._credit)
        for band, lines in self._lines.bands():
            yield from self._turns(self._ring(band, lines, credit), lines, credit)

    def _settle(self) -> None:
        for client, due in self._served.collect().items():
            self._credit[client] -= due

    def _turns(self, ring: list[str], lines: Lines, credit: dict[str, int]) -> Iterator[RequestState]:
        rests = {client: iter(lines[client]) for client in ring}
        while ring:
            at = self._next_turn(ring, credit)
            client, *others = ring[at:] + ring[:at]
            ring = others
            for state in rests[client]:
                yield state
                if state.status is Status.RUNNING:
                    credit[client] -= self._served.prefill_due(state)
                    if credit[client] <= 0:
                        ring = [*others, client]
                        break

    def _ring(self, band: int, lines: Lines, credit: dict[str, int]) -> list[str]:
        """Whose turn it is comes first, or last if it has used up its credit."""
        first, *others = lines
        if credit[first] <= 0 and self._holder.get(band) == first:
            return [*others, first]
        return [first, *others]

    def _next_turn(self, ring: list[str], credit: dict[str, int]) -> int:
        """Go round until somebody has credit, a quantum at each visit. Returns its place in the ring."""
        rounds = [0 if credit[client] > 0 else -credit[client] // self._turn(client) + 1 for client in ring]
        fewest = min(rounds)
        chosen = rounds.index(fewest)
        for at, client in enumerate(ring):
            visits = fewest if at <= chosen else fewest - 1
            if visits > 0:
                credit[client] += visits * self._turn(client)
                self._grants[client] = self._grants.get(client, 0) + visits * self._turn(client)
        return chosen

    def _turn(self, client: str) -> int:
        return self._quantum * self._shares.weight(client)

    def __len__(self) -> int:
        return len(self._lines)

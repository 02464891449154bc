"""WFQ: classes share by weight, each request tagged with when it would end (self-clocked; Golestani, 1994).

A tag is the class's last tag, or the clock if that is later, plus the request's cost over the class's weight; the least
tag is next, and the clock is the tag of whoever was let in last. Costs are known beforehand, so they count the whole
prompt and `predicted_output_tokens`, or `max_tokens` where nothing is predicted; nothing is corrected afterwards. So
short requests go before long ones, cached tokens are paid for, and a wrong prediction is the class's gain or loss.
Whoever comes back from a preemption has paid. Band first, then class, then first come first served.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from policies.interfaces import View
from policies.scheduling._clients import ClientLines, Lines, Shares
from policies.scheduling._served import Tariff
from policies.types import RequestState, Status


class WeightedFairQueueing:
    """`weights`: shares of classes, `interactive:4/batch:1`; 1 unless given.
    `input_price`, `output_price`: of a token.
    `charge_recompute`: whoever was preempted pays for what is computed again.
    """

    reorders = False
    promises_a_turn = True

    def __init__(
        self, weights: str = "", input_price: int = 1, output_price: int = 2, charge_recompute: bool = False
    ) -> None:
        self._tariff = Tariff(input_price, output_price, charge_recompute=charge_recompute)
        self._shares = Shares(weights)
        self._lines = ClientLines(by_class=True)
        self._clock = 0
        self._tags: dict[str, int] = {}  # of whoever was let in last, or where the class began to wait

    def add(self, state: RequestState, now: float) -> None:
        name = state.request.class_name
        if not self._lines.has(name):
            self._tags[name] = max(self._clock, self._tags.get(name, 0))
        self._lines.add(state, now)

    def requeue(self, state: RequestState, now: float) -> None:
        self._lines.requeue(state, now)

    def discard(self, state: RequestState) -> None:
        self._lines.discard(state)
        if state.status is not Status.FINISHED:
            tag = self._tags[state.request.class_name] = self._tag(state)
            self._clock = max(self._clock, tag)

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        for _, lines in self._lines.bands():
            yield from self._by_tag(lines)

    def _by_tag(self, lines: Lines) -> Iterator[RequestState]:
        heads = []
        for line in lines.values():
            rest = iter(line)
            head = next(rest)
            heads.append((self._tag(head), head.sequence, head, rest))
        heapify(heads)
        while heads:
            *_, state, rest = heads[0]
            yield state
            following = next(rest, None)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, (self._tag(following), following.sequence, following, rest))

    def _tag(self, state: RequestState) -> int:
        name = state.request.class_name
        return self._tags[name] + self._cost(state) * self._shares.per_token(name)

    def _cost(self, state: RequestState) -> int:
        tariff, request = self._tariff, state.request
        if state.num_preemptions:
            return tariff.input_price * state.num_lost_tokens if tariff.charge_recompute else 0
        predicted = request.predicted_output_tokens
        num_outputs = request.max_tokens if predicted is None else predicted
        return tariff.input_price * state.num_prompt_tokens + tariff.output_price * num_outputs

    def __len__(self) -> int:
        return len(self._lines)

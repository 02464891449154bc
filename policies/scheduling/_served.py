"""What requests have been served, read off their states: nobody has to be told of every step."""

from __future__ import annotations

from dataclasses import dataclass

from policies.types import RequestState, Status


@dataclass(frozen=True, slots=True)
class Tariff:
    """Prices in whole units, so that sums are exact. Prompt tokens found in the cache, and tokens that a preemption
    made the engine compute again, are free unless said: neither is the client's doing."""

    input_price: int = 1
    output_price: int = 2
    charge_cached: bool = False
    charge_recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("input_price", "output_price"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 0 (free) or more")
        if not self.input_price + self.output_price:
            raise ValueError("input_price and output_price are both 0: nobody would ever pay; raise one of them")


class Served:
    """Of those admitted: what they owe since they were last asked. Chunk by chunk, steps in flight included."""

    def __init__(self, tariff: Tariff) -> None:
        self._tariff = tariff
        self._charged: dict[RequestState, int] = {}

    def admit(self, state: RequestState) -> None:
        self._charged.setdefault(state, 0)

    def collect(self) -> dict[str, int]:
        """Client -> what it owes beyond the last time; those who have left are asked for the last time."""
        owed, left = dict[str, int](), list[RequestState]()
        charged, input_price, output_price = self._charged, self._tariff.input_price, self._tariff.output_price
        for state, paid in charged.items():
            reached, prompt = state.num_computed_tokens, state.num_prompt_tokens
            if reached < state.num_lost_tokens:
                reached = state.num_lost_tokens
            if reached < prompt:
                due = input_price * reached
            else:  # computing the last token known yields the next one
                due = input_price * prompt + output_price * (reached - prompt + 1)
            if state.num_cached_tokens or state.num_preemptions:
                due += self._corrections(state)
            if due != paid:
                charged[state] = due
                client = state.request.client_id
                owed[client] = owed.get(client, 0) + due - paid
            if state.status is Status.FINISHED:
                left.append(state)
        for state in left:
            del charged[state]
        return owed

    def _corrections(self, state: RequestState) -> int:
        tariff, tokens = self._tariff, 0
        if not tariff.charge_cached:
            tokens -= state.num_cached_tokens + state.num_spared_tokens
        if tariff.charge_recompute:
            tokens += state.num_recomputed_tokens
        return tariff.input_price * tokens

    def prefill_due(self, state: RequestState) -> int:
        """What its prompt will cost one that has just been admitted: nothing of it is computed yet."""
        computed = max(state.num_computed_tokens, state.num_lost_tokens)
        return self._tariff.input_price * max(0, state.num_prompt_tokens - computed)

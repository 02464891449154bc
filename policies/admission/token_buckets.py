"""Tokens a second to each client: estimated and reserved when a request enters, settled when it leaves.

A bucket is kept as the time at which it will be full (GCRA, ATM Forum 1996): nothing is summed up from step to step.
The whole prompt and `output_share` of `max_tokens` are reserved; what was not used comes back, and what was used
besides is owed. Who finds too little waits in line, or is refused with the time to come back.
"""

from __future__ import annotations

from policies.interfaces import View
from policies.named import rates_by_name
from policies.types import Admit, Hold, Reject, Request, RequestState, Verdict


class TokenBuckets:
    """`rate`: tokens a second; `rates`: of single clients, as `alice:1000/bob:500`. `burst`: seconds of its rate that a
    bucket holds. `by_class`: classes are the clients. `output_share`: of max_tokens that is reserved. `long_prompt`,
    `surcharge`: prompt tokens beyond so many (0: none) cost so much more each. `uncached_only`: prompt tokens found in
    the cache come back at the end. `waits`: who finds too little waits, or else is refused."""

    steady = True

    def __init__(
        self,
        rate: float = 1000.0,
        rates: str = "",
        burst: float = 10.0,
        by_class: bool = False,
        output_share: float = 1.0,
        long_prompt: int = 0,
        surcharge: float = 1.0,
        uncached_only: bool = False,
        waits: bool = True,
    ) -> None:
        for name, value in (("rate", rate), ("burst", burst)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} ({value}) must be a finite number above 0")
        if not 0 <= output_share <= 1:
            raise ValueError(f"output_share ({output_share}) must be a share of max_tokens: 0 to 1")
        if long_prompt < 0 or not 0 <= surcharge < float("inf"):
            raise ValueError(f"long_prompt ({long_prompt}) and surcharge ({surcharge}) must be 0 or more, and finite")
        self.rate = rate
        self.rates = rates_by_name("rates", rates)
        self.burst = burst
        self.by_class = by_class
        self.output_share = output_share
        self.long_prompt = long_prompt
        self.surcharge = surcharge
        self.uncached_only = uncached_only
        self.waits = waits
        self._full_at: dict[str, float] = {}  # when the bucket will be full; who is not here, his is
        self._reserved: dict[str, float] = {}  # tokens, by request
        self._ready_at: dict[str, float] = {}  # of the first who waits for each bucket
        self._num_swept = 16

    def decide(self, request: Request, view: View, now: float) -> Verdict:
        client = self._client(request)
        ready_at = self._ready(client, self._estimate(request), now)
        if ready_at <= now and not view.num_held(client):
            return self._enter(request, now)
        if self.waits:
            return Hold(client)
        return Reject("its quota of tokens is used up", ready_at - now)

    def release(self, request: Request, view: View, now: float) -> Verdict:
        client = self._client(request)
        self._ready_at[client] = self._ready(client, self._estimate(request), now)
        if self._ready_at[client] > now:
            return Hold(client)
        del self._ready_at[client]
        return self._enter(request, now)

    def next_wakeup(self, now: float) -> float | None:
        return min(self._ready_at.values(), default=None)

    def finished(self, state: RequestState, now: float) -> None:
        """Settle: the bucket is moved to where it would stand if what was used had been known."""
        client = self._client(state.request)
        self._ready_at.pop(client, None)  # he may have been the first who waited
        reserved = self._reserved.pop(state.request_id, None)
        if reserved is None:
            return
        cached = state.num_cached_tokens if self.uncached_only else 0
        used = self._price(state.num_prompt_tokens) * (1 - cached / state.num_prompt_tokens) + state.num_output_tokens
        self._full_at[client] = self._full_at.get(client, now) + (used - reserved) / self._rate(client)

    def tokens_left(self, client: str, now: float) -> float:
        """Below 0: what it owes."""
        rate = self._rate(client)
        return rate * (self.burst - max(0.0, self._full_at.get(client, now) - now))

    def _enter(self, request: Request, now: float) -> Admit:
        client, estimate = self._client(request), self._estimate(request)
        self._sweep(now)
        self._reserved[request.request_id] = estimate
        self._full_at[client] = max(self._full_at.get(client, now), now) + estimate / self._rate(client)
        return Admit()

    def _sweep(self, now: float) -> None:
        """Forget the full buckets, each time that their number has doubled."""
        if len(self._full_at) > 2 * self._num_swept:
            self._full_at = {client: at for client, at in self._full_at.items() if at > now}
            self._num_swept = max(16, len(self._full_at))

    def _ready(self, client: str, num_tokens: float, now: float) -> float:
        """When the bucket holds so many tokens, or is full: what is larger than a bucket takes a whole one."""
        full_at = self._full_at.get(client)
        return now if full_at is None else full_at - max(0.0, self.burst - num_tokens / self._rate(client))

    def _estimate(self, request: Request) -> float:
        return self._price(request.prompt.num_tokens) + self.output_share * request.max_tokens

    def _price(self, num_prompt_tokens: int) -> float:
        beyond = max(0, num_prompt_tokens - self.long_prompt) if self.long_prompt else 0
        return num_prompt_tokens + self.surcharge * beyond

    def _client(self, request: Request) -> str:
        return request.class_name if self.by_class else request.client_id

    def _rate(self, client: str) -> float:
        return self.rates.get(client, self.rate)

"""What was measured of a server, whatever tool took it: one record a request, one a step, and the run around them.

Times are seconds from the run's own start, as the client saw them unless said; counts are tokens. Importers make these
records, and nothing behind them knows the tool: fits, validation and reports read them alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

OUTCOMES = ("completed", "failed", "aborted", "rejected")
LIMITS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")

# A token takes between 20 us (a small model, many GPUs) and 20 s (a starved one). Outside, the unit is wrong.
FASTEST_TOKEN, SLOWEST_TOKEN = 20e-6, 20.0


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """One request. None where the tool does not say.

    `token_times`: of each piece of the answer, the first included; as many as tokens where each came by itself.
    `queued_time`, `scheduled_time`: the engine's, on the same clock. `content_ids`: as of a trace, each standing for
    the run's `content_size` tokens of the prompt. `max_tokens`: what the client asked for, where it is known.
    """

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_time: float | None = None
    last_token_time: float | None = None
    token_times: tuple[float, ...] = ()
    outcome: str = "completed"
    num_cached_tokens: int | None = None
    max_tokens: int | None = None
    class_name: str = "default"
    queued_time: float | None = None
    scheduled_time: float | None = None
    content_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        where = f"request {self.request_id!r}"
        if self.outcome not in OUTCOMES:
            raise ValueError(f"{where}: unknown outcome {self.outcome!r}; known: {', '.join(OUTCOMES)}")
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 0:
            raise ValueError(
                f"{where} has {self.num_prompt_tokens} prompt and {self.num_output_tokens} output tokens: "
                "a prompt has at least 1, an answer 0 or more"
            )
        if self.num_cached_tokens is not None and not 0 <= self.num_cached_tokens <= self.num_prompt_tokens:
            raise ValueError(f"{where}: {self.num_cached_tokens} cached of {self.num_prompt_tokens} prompt tokens")
        if self.outcome == "completed":
            self._check_completed(where)
        self._check_order(where)

    def _check_completed(self, where: str) -> None:
        if self.first_token_time is None or self.last_token_time is None or not self.num_output_tokens:
            raise ValueError(f"{where} is completed, but has no first token, last token or output: mark it failed")
        if len(self.token_times) > self.num_output_tokens:
            raise ValueError(f"{where} has {len(self.token_times)} token times for {self.num_output_tokens} tokens")

    def _check_order(self, where: str) -> None:
        ends = [time for time in (self.first_token_time, self.last_token_time) if time is not None]
        times = [self.arrival_time, *ends]
        if not all(map(math.isfinite, (*times, *self.token_times))):
            raise ValueError(f"{where} has a time that is not finite: leave it out where it was not measured")
        if any(later < earlier for earlier, later in (*pairwise(times), *pairwise(self.token_times))):
            raise ValueError(f"{where} has times out of order: arrival, first token, ..., last token must not go back")

    @property
    def is_completed(self) -> bool:
        return self.outcome == "completed"

    @property
    def ttft(self) -> float:
        """Of a completed request, as `e2e` and `tpot`."""
        assert self.first_token_time is not None, "only completed requests are asked"
        return self.first_token_time - self.arrival_time

    @property
    def e2e(self) -> float:
        assert self.last_token_time is not None, "only completed requests are asked"
        return self.last_token_time - self.arrival_time

    @property
    def tpot(self) -> float:
        """By the convention `vllm`; nan where the answer is one token."""
        num = self.num_output_tokens
        return (self.e2e - self.ttft) / (num - 1) if num > 1 else math.nan


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One line of an engine's step log. `kv_usage`: share of the pool, after the step was scheduled."""

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    duration: float
    kv_usage: float | None = None

    def __post_init__(self) -> None:
        if min(self.num_prefills, self.num_prefill_tokens, self.num_decodes) < 0:
            raise ValueError(
                f"a step counts {self.num_prefills}, {self.num_prefill_tokens}, {self.num_decodes}: below 0"
            )
        if not 0.0 <= self.duration < math.inf:
            raise ValueError(f"a step of {self.duration} s: its duration must be finite, 0 or more")

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decodes


@dataclass(frozen=True, slots=True)
class MeasuredSeries:
    """What was sampled at `times`; empty where it was not."""

    times: tuple[float, ...] = ()
    running: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    kv_usage: tuple[float, ...] = ()  # shares of the pool

    def __post_init__(self) -> None:
        for name in ("running", "waiting", "kv_usage"):
            if (num := len(getattr(self, name))) not in (0, len(self.times)):
                raise ValueError(f"the series {name} has {num} values at {len(self.times)} times: they must be as many")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One load on one server. Requests in order of arrival.

    `engine`: settings of EngineConfig by name, as far as they are known; see `limits_missing`. `num_blocks` counts
    usable blocks. `counters`: of a metrics endpoint, grown over the run. `source`: files and their sha256.
    """

    name: str
    requests: Sequence[MeasuredRequest]
    steps: Sequence[MeasuredStep] = ()
    series: MeasuredSeries = MeasuredSeries()
    engine: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    content_size: int | None = None
    source: str = ""
    findings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.completed:
            raise ValueError(f"run {self.name!r} has no completed request: there is nothing to learn from it")
        arrivals = [request.arrival_time for request in self.requests]
        if any(later < earlier for earlier, later in pairwise(arrivals)):
            raise ValueError(f"run {self.name!r} must list requests in order of arrival: sort them by arrival_time")
        if any(request.content_ids for request in self.requests) and not self.content_size:
            raise ValueError(f"run {self.name!r} has content ids: say content_size, the tokens each stands for")
        self._check_units()

    def _check_units(self) -> None:
        """Milliseconds taken for seconds, or the reverse, give tokens that no server makes."""
        times = [each.e2e / each.num_output_tokens for each in self.completed]
        typical = median(times)
        if not FASTEST_TOKEN <= typical <= SLOWEST_TOKEN:
            raise ValueError(
                f"run {self.name!r}: {typical:.3g} s a token is not plausible ({FASTEST_TOKEN:g} to "
                f"{SLOWEST_TOKEN:g}): times must be seconds; were they milliseconds?"
            )

    @property
    def completed(self) -> list[MeasuredRequest]:
        return [request for request in self.requests if request.is_completed]

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(each.last_token_time or 0.0 for each in self.completed) - self.requests[0].arrival_time

    @property
    def rate(self) -> float:
        """Requests a second that arrived, over the time in which they did."""
        span = self.requests[-1].arrival_time - self.requests[0].arrival_time
        return (len(self.requests) - 1) / span if span else math.inf

    @property
    def limits_missing(self) -> tuple[str, ...]:
        """Engine limits without which no queue can be told from a slow step."""
        return tuple(name for name in LIMITS if name not in self.engine)

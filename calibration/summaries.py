"""What a benchmark tool says of a run in totals: means, percentiles, rates. Seconds and tokens, whatever the file had.

Where a tool keeps each request, `summary_of` makes the same totals of its records, so all tools compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from calibration.records import FASTEST_TOKEN, SLOWEST_TOKEN, MeasuredRun

TPOT_TOLERANCE = 0.10  # between what is reported and what E2E, TTFT and lengths say


@dataclass(frozen=True, slots=True)
class Stats:
    """Of one quantity over the completed requests; None where the tool does not say."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    min: float | None = None
    max: float | None = None
    std: float | None = None

    def __post_init__(self) -> None:
        for name in self.known:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}: it must be a finite number, 0 or more")
        order = [
            value for name in ("min", "p50", "p90", "p95", "p99", "max") if (value := getattr(self, name)) is not None
        ]
        if any(later < earlier * (1 - 1e-9) for earlier, later in pairwise(order)):
            raise ValueError(f"percentiles go down: {', '.join(f'{value:g}' for value in order)}")

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is not None)

    @property
    def typical(self) -> float | None:
        return self.mean if self.mean is not None else self.p50

    def times(self, factor: float) -> Stats:
        """In another unit."""
        return Stats(**{name: getattr(self, name) * factor for name in self.known})


@dataclass(frozen=True, slots=True)
class MeasuredSummary:
    """One load on one server, in totals. TPOT by the convention `vllm`: first token left out."""

    name: str
    tool: str
    num_completed: int
    num_failed: int = 0
    duration: float | None = None
    offered_rate: float | None = None  # requests a second that were to be sent
    max_concurrency: int | None = None
    request_rate: float | None = None  # completed a second
    input_token_rate: float | None = None
    output_token_rate: float | None = None
    prompt_tokens: Stats = Stats()
    output_tokens: Stats = Stats()
    ttft: Stats = Stats()
    tpot: Stats = Stats()
    itl: Stats = Stats()
    e2e: Stats = Stats()
    source: str = ""
    findings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_completed < 1:
            raise ValueError(f"run {self.name!r} has no completed request: there is nothing to learn from it")
        self._check_units()
        early, late = self.ttft.typical, self.e2e.typical
        if early is not None and late is not None and early > late * (1 + 1e-9):
            raise ValueError(f"run {self.name!r}: TTFT {early:g} s is above E2E {late:g} s: are their units the same?")

    def _check_units(self) -> None:
        """Milliseconds taken for seconds, or the reverse, give tokens that no server makes."""
        time, num = self.e2e.typical, self.output_tokens.typical
        if time is None or not num:
            return
        if not FASTEST_TOKEN <= time / num <= SLOWEST_TOKEN:
            raise ValueError(
                f"run {self.name!r}: {time / num:.3g} s a token is not plausible ({FASTEST_TOKEN:g} to "
                f"{SLOWEST_TOKEN:g}): times must be seconds; were they milliseconds?"
            )

    @property
    def implied_tpot(self) -> float | None:
        """(E2E - TTFT) over the tokens after the first, of means; None where they are not all known."""
        num = self.output_tokens.mean
        if self.e2e.mean is None or self.ttft.mean is None or num is None or num <= 1:
            return None
        return (self.e2e.mean - self.ttft.mean) / (num - 1)


def checked(summary: MeasuredSummary) -> MeasuredSummary:
    """With TPOT recomputed where the tool's own does not agree with its other figures, and the finding said.

    inference-perf before mid-2026 reports about half the truth. Its percentiles go with its mean.
    """
    implied, told = summary.implied_tpot, summary.tpot.mean
    if implied is None:
        return summary
    if told is None:
        return summary if summary.tpot.known else replace(summary, tpot=Stats(mean=implied))
    if abs(told / implied - 1.0) <= TPOT_TOLERANCE:
        return summary
    finding = (
        f"TPOT is reported as {told * 1e3:.3g} ms, but E2E, TTFT and lengths say {implied * 1e3:.3g} ms: the latter is "
        "taken, and percentiles of TPOT and ITL are left out"
    )
    return replace(summary, tpot=Stats(mean=implied), itl=Stats(), findings=(*summary.findings, finding))


def summary_of(run: MeasuredRun, tool: str = "") -> MeasuredSummary:
    """The totals of a run whose requests are known one by one."""
    done = run.completed
    gaps = [later - earlier for each in done for earlier, later in pairwise(each.token_times)]
    duration = run.duration
    return MeasuredSummary(
        name=run.name,
        tool=tool,
        num_completed=len(done),
        num_failed=len(run.requests) - len(done),
        duration=duration,
        offered_rate=run.rate if math.isfinite(run.rate) else None,
        request_rate=len(done) / duration,
        input_token_rate=sum(each.num_prompt_tokens for each in done) / duration,
        output_token_rate=sum(each.num_output_tokens for each in done) / duration,
        prompt_tokens=stats([each.num_prompt_tokens for each in done]),
        output_tokens=stats([each.num_output_tokens for each in done]),
        ttft=stats([each.ttft for each in done]),
        tpot=stats([each.tpot for each in done if each.num_output_tokens > 1]),
        itl=stats(gaps),
        e2e=stats([each.e2e for each in done]),
        source=run.source,
        findings=run.findings,
    )


def stats(values: Sequence[float]) -> Stats:
    """Of a sample, percentiles interpolated as numpy does; all None of an empty one."""
    import numpy as np

    if not values:
        return Stats()
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = np.percentile(array, (50, 90, 95, 99)).tolist()
    return Stats(float(array.mean()), p50, p90, p95, p99, float(array.min()), float(array.max()), float(array.std()))

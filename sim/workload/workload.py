"""What arrives, when, and how long each true answer is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from policies.prompt import Prompt
from policies.types import Context, Request, RequestRecord


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A request and its true output length, which only the executor may see.

    `patience`: seconds after arrival until its client cancels, if it is not answered by then; None waits for ever.
    """

    request: Request
    num_output_tokens: int
    patience: float | None = None


@dataclass(frozen=True)
class Workload:
    """Items in order of arrival, with what was assumed or done to get them.

    `source` is a file's name and sha256, or a generator with its parameters: enough to get the same items again.
    """

    name: str
    items: Sequence[WorkItem]
    findings: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        arrivals = [item.request.arrival_time for item in self.items]
        if not all(map(math.isfinite, arrivals)):
            raise ValueError(f"workload {self.name!r} has arrival times that are not finite: check how they were made")
        if any(later < earlier for earlier, later in pairwise(arrivals)):
            raise ValueError(f"workload {self.name!r} must list items in order of arrival: sort them by arrival_time")

    def initial(self) -> Sequence[WorkItem]:
        """Items known before anything has run: all of them, as the loop is open."""
        return self.items

    def on_outcome(self, record: RequestRecord, now: float) -> Sequence[WorkItem]:
        """Items that follow from a finished request: none, as the loop is open."""
        return ()

    @property
    def num_requests(self) -> int:
        """All that can come, those included that follow from outcomes."""
        return len(self.items)

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last."""
        if not self.items:
            return 0.0
        return self.items[-1].request.arrival_time - self.items[0].request.arrival_time

    @property
    def rate(self) -> float:
        """Requests a second over `duration`; infinite where all arrive at once."""
        return mean_rate(len(self.items), self.duration)


def mean_rate(num_requests: int, duration: float) -> float:
    if num_requests == 0:
        return 0.0
    return num_requests / duration if duration > 0 else math.inf


def output_limit(outputs: Sequence[int], max_tokens: int | None) -> tuple[int, str]:
    """The max_tokens that every request gets, and the finding that says so.

    One limit for all, because a limit of its own would tell policies how long each answer is.
    """
    longest = max(outputs, default=1)
    if max_tokens is None:
        return longest, f"max_tokens is {longest} for every request, the largest output length"
    if max_tokens < 1:
        raise ValueError(f"max_tokens ({max_tokens}) must be at least 1")
    num_cut = sum(output > max_tokens for output in outputs)
    return max_tokens, f"max_tokens is {max_tokens} for every request, as given; answers cut short: {num_cut}"


def work_items(
    arrivals: Sequence[float],
    prompts: Sequence[Prompt],
    outputs: Sequence[int],
    max_tokens: int,
    contexts: Sequence[Context] | None = None,
) -> list[WorkItem]:
    """Requests named "0", "1", ... in the order given; a tenant is its own client."""
    contexts = contexts or [Context()] * len(arrivals)
    return [
        WorkItem(Request(str(index), arrival, prompt, max_tokens, client_id=context.tenant, context=context), output)
        for index, (arrival, prompt, output, context) in enumerate(
            zip(arrivals, prompts, outputs, contexts, strict=True)
        )
    ]

"""What a workload is like: how often and how evenly it comes, how long its texts are, what a cache could find.

The index of dispersion counts arrivals in windows from the first one; the last window may not be full, as in the
published figures. Of a closed loop only the requests that come by the clock have times beforehand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from policies.prompt import ContentPrompt
from policies.types import Request
from sim.workload.sessions import Sessions
from sim.workload.workload import WorkItem, Workload

TOP = 10


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """Tokens a request."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: int


@dataclass(frozen=True, slots=True)
class ArrivalFacts:
    """`rate` and `duration` as Workload has them; `cv` of the gaps between arrivals, 1 where they are Poisson.

    `dispersion_10s`: variance over mean of the arrivals in 10 s, 1 where they are Poisson. NaN where too few arrive.
    """

    num: int
    duration: float
    rate: float
    cv: float
    dispersion_1s: float
    dispersion_10s: float
    dispersion_60s: float


@dataclass(frozen=True, slots=True)
class ReuseFacts:
    """Shares of prompt tokens, of content ids and of requests that a cache which forgets nothing would have found."""

    tokens: float
    blocks: float
    requests: float


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """`reuse` is None where prompts have no content ids; requests without a session are none in `num_sessions`."""

    num_requests: int
    arrivals: ArrivalFacts
    prompts: LengthFacts
    outputs: LengthFacts
    reuse: ReuseFacts | None
    num_sessions: int
    turns: float  # requests a session
    num_by_class: Mapping[str, int]
    num_clients: int
    top_clients: float  # share of all requests that the ten busiest clients send


def describe(workload: Workload) -> WorkloadFacts:
    items = every_item(workload)
    if not items:
        raise ValueError(f"workload {workload.name!r} has no request to describe: give it one")
    requests = [item.request for item in items]
    sessions = Counter(request.context.session for request in requests if request.context.session)
    clients = Counter(request.client_id for request in requests if request.client_id)
    return WorkloadFacts(
        num_requests=len(items),
        arrivals=arrival_facts(workload),
        prompts=length_facts([request.prompt.num_tokens for request in requests]),
        outputs=length_facts([item.num_output_tokens for item in items]),
        reuse=reuse_facts(requests),
        num_sessions=len(sessions),
        turns=sessions.total() / len(sessions) if sessions else 0.0,
        num_by_class=Counter(request.class_name for request in requests),
        num_clients=len(clients),
        top_clients=sum(num for _, num in clients.most_common(TOP)) / len(items),
    )


def every_item(workload: Workload) -> list[WorkItem]:
    """Follow-ups behind all that come by the clock, each behind what it follows."""
    follow_ups = workload.follow_ups if isinstance(workload, Sessions) else ()
    return [*workload.items, *(each.item for each in follow_ups)]


def length_facts(lengths: Sequence[int]) -> LengthFacts:
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    return LengthFacts(float(np.mean(lengths)), p50, p90, p99, max(lengths))


def arrival_facts(workload: Workload) -> ArrivalFacts:
    times = np.array([item.request.arrival_time for item in workload.items])
    times -= times[0]
    gaps = np.diff(times)
    cv = float(gaps.std() / gaps.mean()) if gaps.any() else float("nan")
    dispersions = [_dispersion(times, window) for window in (1, 10, 60)]
    return ArrivalFacts(len(times), workload.duration, workload.rate, cv, *dispersions)


def _dispersion(times: np.ndarray[tuple[int], np.dtype[np.float64]], window: int) -> float:
    if times[-1] < window:
        return float("nan")
    counts = np.bincount((times // window).astype(np.int64))
    return float(counts.var() / counts.mean())


# What a cache could find


def reuse_facts(requests: Sequence[Request]) -> ReuseFacts | None:
    """Prompts in the order given, each at once; what answers add to a cache does not count."""
    seen = Seen()
    num_tokens = num_blocks = found_tokens = found_blocks = found_requests = 0
    for request in requests:
        prompt = request.prompt
        num_tokens += prompt.num_tokens
        if isinstance(prompt, ContentPrompt):
            found = seen.find(prompt.content_ids, request.context.session)
            num_blocks += len(prompt.content_ids)
            found_blocks += found
            found_tokens += min(found * prompt.content_size, prompt.num_tokens)
            found_requests += found > 0
    if num_blocks == 0:
        return None
    return ReuseFacts(found_tokens / num_tokens, found_blocks / num_blocks, found_requests / len(requests))


class Seen:
    """Content ids seen so far, each known with all that stood before it."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], int] = {}
        self._last: dict[str, tuple[tuple[int, ...], list[int]]] = {}

    def find(self, ids: tuple[int, ...], session: str) -> int:
        """How many leading ids were seen; from now on, all are."""
        last_ids, last_names = self._last.get(session, ((), []))
        # Most of a turn is the turn before: what they have in common needs no look.
        common = common_length(last_ids, ids)
        names, found = last_names[:common], common
        for content in ids[common:]:
            key = (names[-1] if names else -1, content)
            if found == len(names) and key in self._names:
                found += 1
            names.append(self._names.setdefault(key, len(self._names)))
        if session:
            self._last[session] = (ids, names)
        return found


def common_length(some: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Ids with which both begin: slices are compared faster than a loop runs."""
    low, high = 0, min(len(some), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if some[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

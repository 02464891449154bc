"""Replications of a load at any rate, so that rates can be compared under the same luck.

A built-in workload is drawn anew with each seed. A recording is resampled: where requests share nothing, blocks of
consecutive ones are drawn (moving-block bootstrap; Kunsch, 1989), so that lengths and bursts stay together; where they
share prefixes or follow from answers, windows of it are taken whole. Gaps are counted in those usual at that time of
the recording: how its rate drifts belongs to a plan over the day, not to a rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.prompt import LengthPrompt
from sim.setup import Setup
from sim.workload.every import every_item
from sim.workload.sessions import Sessions
from sim.workload.streams import stream
from sim.workload.workload import WorkItem, Workload

Floats = NDArray[np.float64]

BLOCK = 50  # requests drawn together
DRIFT = 500  # gaps around each, whose mean is what is usual at that time
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are


class Source(Protocol):
    """Gives replication `index` of about `length` requests, `rate` of them a second in the mean.

    `whole`: the load as it came. `told`: how replications come about.
    """

    @property
    def whole(self) -> Workload: ...
    @property
    def told(self) -> str: ...
    def draw(self, rate: float, index: int, length: int) -> Workload: ...


def source_of(setup: Setup) -> Source:
    """Raises ValueError for a load that has no rate of its own to change."""
    if setup.arrivals is not None and setup.arrivals.startswith("closed"):
        raise ValueError("a closed loop comes at the rate that the server allows: give open arrivals to find a rate")
    if any(each.startswith("scale_rate") for each in setup.transforms):
        raise ValueError("scale_rate changes the rate that is sought: leave it out, or give --rate")
    whole = replace(setup, rate=None).load()
    if setup.trace is None:
        return Drawn(setup, whole)
    if isinstance(whole, Sessions) or not all(isinstance(i.request.prompt, LengthPrompt) for i in whole.items):
        return Windows.of(whole)
    return Blocks.of(whole, setup.seed)


@dataclass(frozen=True)
class Drawn:
    """A built-in workload; a rate is one of requests, whatever its clock counts."""

    setup: Setup
    whole: Workload
    told: str = "each replication draws arrivals and lengths anew"

    def draw(self, rate: float, index: int, length: int) -> Workload:
        starts = rate * len(self.whole.items) / self.whole.num_requests
        return replace(self.setup, rate=starts, seed=self.setup.seed + index, num_requests=length).load()


@dataclass(frozen=True)
class Blocks:
    """A recording of requests that share nothing."""

    whole: Workload
    gaps: Floats  # before each request, in mean gaps
    seed: int
    told: str = (
        f"each replication is drawn from the recording in blocks of {BLOCK} requests, their lengths and bursts as "
        "recorded and the drift of the rate left out"
    )

    @classmethod
    def of(cls, whole: Workload, seed: int) -> Blocks:
        return cls(whole, unit_gaps([item.request.arrival_time for item in whole.items]), seed)

    def draw(self, rate: float, index: int, length: int) -> Workload:
        """Blocks come without return until all have come: so replications are as alike as the recording lets them."""
        num = len(self.gaps)
        num_blocks, wanted = max(1, num // BLOCK), -(-length // BLOCK)
        numbers = range(index * wanted, (index + 1) * wanted)
        orders = {turn: self._order(turn, num_blocks) for turn in {number // num_blocks for number in numbers}}
        begins = [orders[number // num_blocks][number % num_blocks] * BLOCK for number in numbers]
        chosen = (np.array(begins)[:, None] + np.arange(BLOCK)).ravel()[:length] % num
        times = at_rate(self.gaps[chosen], rate)
        items = [
            _placed(self.whole.items[position], time, str(number))
            for number, (position, time) in enumerate(zip(chosen.tolist(), times.tolist(), strict=True))
        ]
        return Workload(self.whole.name, items)

    def _order(self, turn: int, num_blocks: int) -> NDArray[np.int64]:
        return stream(self.seed, f"blocks {turn}").permutation(num_blocks)


@dataclass(frozen=True)
class Windows:
    """A recording whose requests hang together: consecutive ones, with all that follows from them."""

    whole: Workload
    gaps: Floats  # before each that comes by the clock, in mean gaps
    told: str = (
        "each replication is a window of the recording, with the drift of its rate left out; its cache is cold at first"
    )

    @classmethod
    def of(cls, whole: Workload) -> Windows:
        return cls(whole, unit_gaps([item.request.arrival_time for item in whole.items]))

    def draw(self, rate: float, index: int, length: int) -> Workload:
        num = len(self.gaps)
        share = num / self.whole.num_requests
        size = min(num, max(1, math.ceil(length * share)))
        first = int((num - size) * (index * GOLDEN % 1.0))
        times = at_rate(self.gaps[first : first + size], rate * share)
        items = [
            _placed(item, time, item.request.request_id)
            for item, time in zip(self.whole.items[first : first + size], times.tolist(), strict=True)
        ]
        return _with_followers(self.whole, items)


def _with_followers(whole: Workload, items: list[WorkItem]) -> Workload:
    if not isinstance(whole, Sessions):
        return Workload(whole.name, items)
    known = {item.request.request_id for item in items}
    following = []
    for each in whole.follow_ups:
        if known.issuperset(each.after):
            known.add(each.item.request.request_id)
            following.append(each)
    return Sessions(whole.name, items, follow_ups=following, goes_on=whole.goes_on)


def _placed(item: WorkItem, time: float, name: str) -> WorkItem:
    return replace(item, request=replace(item.request, request_id=name, arrival_time=time))


def unit_gaps(times: Sequence[float]) -> Floats:
    """The gap before each arrival over the mean of the gaps around it; 1 in the mean.

    Raises ValueError where all arrive at once.
    """
    if len(times) < 2 or times[-1] <= times[0]:
        raise ValueError("all requests of the recording arrive at once: it has no gaps to come at another rate")
    gaps = np.diff(np.asarray(times), prepend=times[0])
    gaps[0] = gaps[1:].mean()
    ones, around = np.ones(min(DRIFT, len(gaps))), np.ones(len(gaps))
    usual = np.convolve(gaps, ones, "same") / np.convolve(around, ones, "same")
    relative: Floats = gaps / np.where(usual > 0.0, usual, gaps.mean())
    scaled: Floats = relative / relative.mean()
    return scaled


def at_rate(gaps: Floats, rate: float) -> Floats:
    """Arrival times, exactly so many a second in the mean."""
    times: Floats = np.cumsum(gaps) * (len(gaps) / (rate * gaps.sum()))
    return times


# -- a rate over time -------------------------------------------------------------------------------------------------


def surged(workload: Workload, first: int, num: int, factor: float) -> Workload:
    """`num` requests from the `first` on come `factor` times as fast; those after them as before, and earlier for it.

    Raises ValueError where requests follow from answers: they come when those do.
    """
    if isinstance(workload, Sessions):
        raise ValueError("requests follow from answers: they do not come faster than those")
    times = np.array([item.request.arrival_time for item in workload.items])
    gaps = np.diff(times, prepend=0.0)
    gaps[first : first + num] /= factor
    moved = [
        _placed(item, time, item.request.request_id)
        for item, time in zip(workload.items, np.cumsum(gaps).tolist(), strict=True)
    ]
    return replace(workload, items=moved)


def heaviest_part(workload: Workload, num: int) -> int:
    """Where the `num` consecutive requests begin that bring the most tokens a second."""
    times = np.array([item.request.arrival_time for item in workload.items])
    tokens = np.cumsum([0, *(item.request.prompt.num_tokens + item.num_output_tokens for item in workload.items)])
    begins = np.arange(max(1, len(times) - num))
    ends = np.minimum(begins + num, len(times) - 1)
    spans = times[ends] - times[begins]
    return int(np.argmax((tokens[ends] - tokens[begins]) / np.where(spans > 0.0, spans, np.inf)))


def part(workload: Workload, first: int, num: int, factor: float) -> Workload:
    """`num` requests as they came, all times from the first on divided by `factor`."""
    chosen = workload.items[first : first + num]
    begin = chosen[0].request.arrival_time
    items = [_placed(i, (i.request.arrival_time - begin) / factor, i.request.request_id) for i in chosen]
    return _with_followers(workload, items)


def day_curve(workload: Workload, num_parts: int = 24) -> list[float]:
    """Requests a second in equal parts of a recording's time, fewer where a part would hold under 50 requests."""
    times = [item.request.arrival_time for item in every_item(workload)]
    num_parts = max(1, min(num_parts, len(times) // 50))
    counts, edges = np.histogram(times, num_parts)
    rates: list[float] = (counts / (edges[1] - edges[0])).tolist()
    return rates

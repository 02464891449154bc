"""Queues with classes that theory can solve: the simulator must agree, and see a mistake of 2 %.

As in tests/sim/test_theory.py a step costs the same whatever is in it and one request runs at a time. So it costs no
time to compute again what a preemption took away: all of it is one step, which yields the next token as any other does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from policies.config import EngineConfig
from sim.cost import AffineCost
from sim.simulate import simulate
from sim.workload.workload import WorkItem, Workload
from tests.theory import (
    SLOW_STEPS,
    Bug,
    Floats,
    Input,
    Lengths,
    Quantity,
    Queue,
    Visits,
    Window,
    check,
    geometric,
)
from tests.worlds import request

MEAN = 400  # tokens
TOKEN = 1 / MEAN  # seconds
RATE = 0.5
NUM_RUNS = 50
Ranks = NDArray[np.int64]


def two_lengths(short: int, long: int, share_of_long: float) -> Lengths:
    values, shares = np.array([short, long]), np.array([1 - share_of_long, share_of_long])
    return Lengths(
        "two lengths",
        float(shares @ values),
        float(shares @ values**2),
        lambda rng, num: values[(rng.random(num) < share_of_long).astype(int)],
    )


# -- who comes before whom --------------------------------------------------------------------------------------------

URGENT_SHARE = 3 / 8


def by_arrival(given: Input) -> Ranks:
    """Three eighths are urgent (0), by the last bits of when they came: no other draw has to be made."""
    bits: Ranks = np.floor(given.arrivals * 2**24).astype(np.int64) % 8
    return (bits >= 8 * URGENT_SHARE).astype(np.int64)


def by_length(given: Input) -> Ranks:
    return np.searchsorted(np.unique(given.lengths), given.lengths).astype(np.int64)


# -- reference queues -------------------------------------------------------------------------------------------------


def one_after_another(given: Input, ranks: Callable[[Input], Ranks]) -> Visits:
    """Whoever is served is served to the end; then it is the first to come of the least rank."""
    arrivals, services, rank_of = given.arrivals.tolist(), (given.lengths * TOKEN).tolist(), ranks(given).tolist()
    starts, waiting, now, num = [0.0] * len(arrivals), list[tuple[int, int]](), 0.0, 0
    for _ in range(len(arrivals)):
        if not waiting:
            now = max(now, arrivals[num])
        while num < len(arrivals) and arrivals[num] <= now:
            heappush(waiting, (rank_of[num], num))
            num += 1
        _, who = heappop(waiting)
        starts[who] = now
        now += services[who]
    began = np.array(starts)
    return Visits(given.arrivals, began, began + given.lengths * TOKEN, given.lengths)


def making_way(given: Input, ranks: Callable[[Input], Ranks], token: float) -> Visits:
    """Whoever has the least rank is served at once, and the others go on later where they were (preemptive-resume)."""
    arrivals, left, rank_of = given.arrivals.tolist(), (given.lengths * token).tolist(), ranks(given).tolist()
    ends, present, now = [0.0] * len(arrivals), list[tuple[int, int]](), 0.0
    for num, arrival in enumerate((*arrivals, float("inf"))):
        while present and now < arrival:
            who = present[0][1]
            served = min(left[who], arrival - now)
            now += served
            left[who] -= served
            if left[who] <= 0:
                ends[who] = now
                heappop(present)
        if num < len(arrivals):
            now = max(now, arrival)
            heappush(present, (rank_of[num], num))
    return Visits(given.arrivals, given.arrivals, np.array(ends), given.lengths)


# -- the simulator as such a queue ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankedQueue(Queue):
    """`ranks` become priorities; lengths are predicted as they are."""

    ranks: Callable[[Input], Ranks] = by_arrival
    scheduling: str = "priority"
    preempts: bool = False

    def simulate(self, given: Input, bug: Bug) -> Visits:
        items = [
            WorkItem(
                request(number, 1, max_tokens=10**6, arrival_time=arrival, predicted_output_tokens=length,
                        priority=rank if self.scheduling == "priority" else 0),
                length,
            )
            for number, (arrival, length, rank) in enumerate(
                zip(given.arrivals.tolist(), given.lengths.tolist(), self.ranks(given).tolist(), strict=True)
            )
        ]  # fmt: skip
        config = EngineConfig(
            num_blocks=1, block_size=2**20, max_model_len=2**20, max_num_batched_tokens=2**20, max_num_seqs=1,
            enable_prefix_caching=False, scheduling=self.scheduling, preempt_for_waiting=self.preempts,
        )  # fmt: skip
        run = simulate(config, Workload("ranked", items), AffineCost(self.cost.per_step * bug.slower))
        records = sorted(run.records, key=lambda record: int(record.request_id))
        starts = np.array([record.first_scheduled_time for record in records], dtype=np.float64)
        return Visits(given.arrivals, starts, np.array([record.finish_time for record in records]), given.lengths)


def mean_waits(visits: Visits, window: Window, ranks: Callable[[Input], Ranks]) -> Floats:
    chosen = visits.within(window)
    of = ranks(Input(chosen.arrivals, chosen.lengths))
    waits = chosen.starts - chosen.arrivals
    return np.array([waits[of == rank].sum() / max(1, (of == rank).sum()) for rank in (0, 1)])


def mean_sojourns(visits: Visits, window: Window, ranks: Callable[[Input], Ranks]) -> Floats:
    chosen = visits.within(window)
    of = ranks(Input(chosen.arrivals, chosen.lengths))
    stays = chosen.departures - chosen.arrivals
    return np.array([stays[of == rank].sum() / max(1, (of == rank).sum()) for rank in (0, 1)])


def check_sees(queue: Queue) -> None:
    check(queue)
    with pytest.raises(AssertionError, match="outside"):
        check(queue, SLOW_STEPS)


def cobham(loads: list[float], residual: float) -> list[float]:
    """W_k = W_0 / ((1 - sigma_{k-1}) (1 - sigma_k)); `residual` is W_0, half the sum of rate times second moment."""
    sums = np.cumsum([0.0, *loads]).tolist()
    return [residual / ((1 - before) * (1 - upto)) for before, upto in pairwise(sums)]


def test_the_closed_forms_keep_the_conservation_law() -> None:
    """T11: the sum of load times wait is what it is without classes."""
    loads = [0.2, 0.3, 0.1]
    waits = cobham(loads, residual=0.5)
    assert sum(load * wait for load, wait in zip(loads, waits, strict=True)) == pytest.approx(0.6 * 0.5 / (1 - 0.6))


def test_priority_waits_as_cobham_says() -> None:
    """T9."""
    lengths = geometric(MEAN)
    residual = RATE * lengths.second_moment * TOKEN**2 / 2
    waits = cobham([RATE * URGENT_SHARE, RATE * (1 - URGENT_SHARE)], residual)
    queue = RankedQueue(
        rate=RATE,
        lengths=lengths,
        cost=AffineCost(per_step=TOKEN),
        max_num_seqs=1,
        reference=partial(one_after_another, ranks=by_arrival),
        measure=partial(mean_waits, ranks=by_arrival),
        quantities=tuple(
            Quantity(f"wait of {name}", wait, 0.01 * wait) for name, wait in zip("01", waits, strict=True)
        ),
        num_runs=2 * NUM_RUNS,
        num_customers=30_000,
        control=TOKEN,
    )
    check_sees(queue)


def test_shortest_first_on_true_lengths_waits_as_cobham_says_of_lengths_as_classes() -> None:
    lengths = two_lengths(200, 1200, 0.2)
    residual = RATE * lengths.second_moment * TOKEN**2 / 2
    waits = cobham([RATE * 0.8 * 200 * TOKEN, RATE * 0.2 * 1200 * TOKEN], residual)
    queue = RankedQueue(
        rate=RATE,
        lengths=lengths,
        cost=AffineCost(per_step=TOKEN),
        max_num_seqs=1,
        reference=partial(one_after_another, ranks=by_length),
        measure=partial(mean_waits, ranks=by_length),
        quantities=tuple(
            Quantity(f"wait of {name}", wait, 0.01 * wait) for name, wait in zip("01", waits, strict=True)
        ),
        num_runs=NUM_RUNS,
        num_customers=30_000,
        control=TOKEN,
        ranks=by_length,
        scheduling="srpt",
    )
    check_sees(queue)


def test_those_who_make_way_stay_as_long_as_preemptive_resume_says() -> None:
    """T10. Nobody makes way in the middle of a step, so steps are fewer, and what half of one adds is allowed for."""
    token, lengths = 0.01, geometric(100)
    loads, square = [RATE * URGENT_SHARE, RATE * (1 - URGENT_SHARE)], lengths.second_moment * token**2
    sums = np.cumsum([0.0, *loads])
    stays = [
        float(1 / (1 - sums[k]) + RATE * (URGENT_SHARE, 1)[k] * square / (2 * (1 - sums[k]) * (1 - sums[k + 1])))
        for k in (0, 1)
    ]
    queue = RankedQueue(
        rate=RATE,
        lengths=lengths,
        cost=AffineCost(per_step=token),
        max_num_seqs=1,
        reference=partial(making_way, ranks=by_arrival, token=token),
        measure=partial(mean_sojourns, ranks=by_arrival),
        quantities=tuple(
            Quantity(f"stay of {name}", stay, 0.01 * stay, rounding=token / 2)
            for name, stay in zip("01", stays, strict=True)
        ),
        num_runs=NUM_RUNS,
        num_customers=30_000,
        control=token,
        preempts=True,
    )
    check_sees(queue)

"""What queueing theory says of the simulator, and an interval around what the simulator did.

An estimate has two levels, as in double sampling (Cochran, 1977) and multilevel Monte Carlo (Giles, 2008). Many cheap
customers visit a reference queue, which serves in continuous time and knows nothing of steps or blocks. A few visit
both that queue and the simulator, with the same arrivals and lengths, and the ratio of the two corrects the first mean.
Neither level uses the closed form under test, so that the interval is one for the simulator's own mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
import simpy
from numpy.typing import NDArray
from scipy import stats

from policies.catalogue import build
from policies.config import EngineConfig
from policies.engine import EngineCore
from policies.journal import Write
from policies.types import Request, RequestRecord
from sim.cost import AffineCost, StepCost
from sim.executor import SimulatedExecutor
from sim.replica import Process, Replica
from sim.simulate import simulate
from sim.workload.generate import from_lengths
from sim.workload.workload import Workload

Floats = NDArray[np.float64]

SIGNIFICANCE = 1e-4  # of a whole check, however many quantities it has
NUM_PAIRED, NUM_PAIRED_CUSTOMERS = 16, 64  # runs of simulator and reference on the same input
MOST_PRESENT = 64


# -- closed forms ---------------------------------------------------------------------------------------------------


def pollaczek_khinchine(rate: float, mean: float, second_moment: float) -> float:
    """Mean wait in M/G/1, first come, first served."""
    return rate * second_moment / (2 * (1 - rate * mean))


def erlang_c(num_servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/c; `offered` is rate times mean service, below c."""
    blocking = 1.0
    for servers in range(1, num_servers + 1):  # Erlang B, by its recursion
        blocking = offered * blocking / (servers + offered * blocking)
    return num_servers * blocking / (num_servers - offered * (1 - blocking))


def product_form(rate: float, mean_tokens: float, step_time: Callable[[int], float], most: int = 2000) -> Floats:
    """Probability of n present where each of n gets one token every step_time(n) seconds."""
    present = np.arange(1, most + 1)
    factors = rate * mean_tokens * np.array([step_time(n) for n in range(1, most + 1)]) / present
    weights: Floats = np.concatenate(([1.0], np.cumprod(factors)))
    return np.asarray(weights / weights.sum())


# -- input ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """A distribution of answer lengths in tokens, with its exact moments."""

    name: str
    mean: float
    second_moment: float
    draw: Callable[[np.random.Generator, int], NDArray[np.int64]] = field(repr=False)

    def __str__(self) -> str:
        return self.name


def fixed(tokens: int) -> Lengths:
    return Lengths("fixed", tokens, tokens**2, lambda rng, num: np.full(num, tokens))


def uniform(most: int) -> Lengths:
    """1, ..., most."""
    second_moment = (most + 1) * (2 * most + 1) / 6
    return Lengths("uniform", (most + 1) / 2, second_moment, lambda rng, num: rng.integers(1, most + 1, num))


def geometric(mean: int) -> Lengths:
    return Lengths("geometric", mean, 2 * mean**2 - mean, lambda rng, num: rng.geometric(1 / mean, num))


def hyper_geometric(short: int, long: int, share_of_long: float) -> Lengths:
    """Mostly short, sometimes long, each geometric: the discrete hyper-exponential."""
    means, shares = np.array([short, long]), np.array([1 - share_of_long, share_of_long])
    return Lengths(
        "hyper-geometric",
        float(shares @ means),
        float(shares @ (2 * means**2 - means)),
        lambda rng, num: rng.geometric(1 / means[(rng.random(num) < share_of_long).astype(int)]),
    )


class Input(NamedTuple):
    arrivals: Floats
    lengths: NDArray[np.int64]

    @property
    def window(self) -> tuple[float, float]:
        """The middle of the run: it starts empty, and drains when nobody arrives any more."""
        edge = len(self.arrivals) // 20
        return float(self.arrivals[edge]), float(self.arrivals[-edge - 1])


class Visits(NamedTuple):
    """Those served, in order of arrival, in seconds; `lengths` are the tokens they came with."""

    arrivals: Floats
    starts: Floats
    departures: Floats
    lengths: NDArray[np.int64]

    def within(self, window: tuple[float, float]) -> Visits:
        chosen = (self.arrivals >= window[0]) & (self.arrivals <= window[1])
        return Visits(self.arrivals[chosen], self.starts[chosen], self.departures[chosen], self.lengths[chosen])


# -- reference queues -----------------------------------------------------------------------------------------------


def single_server(given: Input, service_time: float) -> Visits:
    """Lindley's recursion: a wait is the height of a random walk above its lowest point so far."""
    services = given.lengths * service_time
    walk = np.concatenate(([0.0], np.cumsum(services[:-1] - np.diff(given.arrivals))))
    starts = given.arrivals + (walk - np.minimum.accumulate(walk))
    return Visits(given.arrivals, starts, starts + services, given.lengths)


def many_servers(given: Input, service_time: float, num_servers: int) -> Visits:
    """First come, first served, by whoever is free first."""
    free_at, starts = [0.0] * num_servers, list[float]()
    services = given.lengths * service_time
    for arrival, service in zip(given.arrivals.tolist(), services.tolist(), strict=True):
        start = max(arrival, free_at[0])
        heapreplace(free_at, start + service)
        starts.append(start)
    return Visits(given.arrivals, np.array(starts), np.array(starts) + services, given.lengths)


def shared_server(given: Input, step_time: Callable[[int], float]) -> Visits:
    """Each of n present gets 1 / step_time(n) tokens a second: everybody's work is measured on one common clock."""
    pace = [step_time(n) for n in range(256)]
    departures = [0.0] * len(given.lengths)
    last: list[tuple[float, int]] = []  # (tokens on the common clock at which it leaves, who)
    now = tokens = 0.0
    for who, (arrival, length) in enumerate(zip(given.arrivals.tolist(), given.lengths.tolist(), strict=True)):
        while last:
            end = now + (last[0][0] - tokens) * pace[len(last)]
            if end > arrival:
                tokens += (arrival - now) / pace[len(last)]
                break
            tokens, leaver = heappop(last)
            departures[leaver] = now = end
        now = arrival
        heappush(last, (tokens + length, who))
    while last:
        now += (last[0][0] - tokens) * pace[len(last)]
        tokens, leaver = heappop(last)
        departures[leaver] = now
    return Visits(given.arrivals, given.arrivals, np.array(departures), given.lengths)


# -- what is measured -----------------------------------------------------------------------------------------------

Window = tuple[float, float]


def mean_wait(visits: Visits, window: Window) -> Floats:
    chosen = visits.within(window)
    return np.array([np.mean(chosen.starts - chosen.arrivals)])


def time_per_token(visits: Visits, window: Window, edges: tuple[int, ...] = ()) -> Floats:
    """Sojourn over length: of all together, and of each class of lengths between the edges."""
    chosen = visits.within(window)
    sojourns, classes = chosen.departures - chosen.arrivals, np.digitize(chosen.lengths, edges)
    num_classes = len(edges) + 1 if edges else 0
    masks = [np.ones(len(classes), bool), *(classes == each for each in range(num_classes))]
    return np.array([sojourns[mask].sum() / max(1, chosen.lengths[mask].sum()) for mask in masks])


def occupancy(visits: Visits, window: Window) -> Floats:
    """Share of the window in which n are present, for n = 0, 1, ..., MOST_PRESENT."""
    times = np.clip(np.concatenate((visits.arrivals, visits.departures)), *window)
    order = np.argsort(times, kind="stable")  # who arrives and leaves at one instant was there for no time
    present = np.cumsum(np.repeat((1, -1), len(visits.arrivals))[order])
    weights = np.diff(times[order], append=window[1])
    shares = np.bincount(np.minimum(present, MOST_PRESENT), weights, MOST_PRESENT + 1)
    return shares / (window[1] - window[0])


def factorial_moments(shares: Floats, most: int) -> Floats:
    """E[N], E[N(N-1)], ...: the powers of the mean if, and only if, N is Poisson."""
    present = np.arange(len(shares), dtype=np.float64)
    products = np.cumprod([present - k for k in range(most)], axis=0)
    return np.array(products @ shares)


# -- the check ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bug:
    """A small mistake planted in the simulator: 1 is none."""

    name: str
    slower: float = 1.0  # steps take longer
    longer: float = 1.0  # answers are longer
    lost_every: int = 0  # one arrival in so many is dropped

    def __str__(self) -> str:
        return self.name


NO_BUG = Bug("none")
SLOW_STEPS = Bug("steps 2 % slower", slower=1.02)
LONG_ANSWERS = Bug("answers 2 % longer", longer=1.02)
LOST_ARRIVALS = Bug("one arrival in 50 lost", lost_every=50)


class Quantity(NamedTuple):
    """What theory says, and how well it is to be met.

    `precision`: the largest half-width of the interval. `rounding`: what half a step adds, as an engine serves whole
    tokens at step boundaries and theory does not; 0 where the two are the same.
    """

    name: str
    value: float
    precision: float
    rounding: float = 0.0


@dataclass(frozen=True)
class Queue:
    """A queue that theory can solve, as a reference and as a simulation."""

    rate: float
    lengths: Lengths
    cost: AffineCost
    max_num_seqs: int
    reference: Callable[[Input], Visits]
    measure: Callable[[Visits, Window], Floats]
    quantities: tuple[Quantity, ...]
    num_runs: int = 100  # of the reference
    num_customers: int = 10_000  # a run
    control: float | None = None  # service time of the single server whose wait, known exactly, is a control variate

    def draw(self, seed: int, num: int) -> Input:
        rng = np.random.Generator(np.random.Philox(seed))
        return Input(np.cumsum(rng.standard_exponential(num)) / self.rate, self.lengths.draw(rng, num))

    def simulate(self, given: Input, bug: Bug) -> Visits:
        """One run: prompts are a token, so that an answer of n tokens takes n steps, the first of them its prefill."""
        kept = np.arange(len(given.lengths))
        if bug.lost_every:
            kept = kept[kept % bug.lost_every != bug.lost_every // 2]
        lengths = np.rint(given.lengths[kept] * bug.longer).astype(int)
        config = EngineConfig(
            num_blocks=self.max_num_seqs,
            block_size=2**20,  # a block a request: memory is never short
            max_model_len=2**20,
            max_num_seqs=self.max_num_seqs,
            enable_prefix_caching=False,
        )
        cost = AffineCost(self.cost.per_step * bug.slower, self.cost.per_token * bug.slower)
        workload = from_lengths(given.arrivals[kept].tolist(), [1] * len(kept), lengths.tolist())
        records = sorted(simulate(config, workload, cost).records, key=lambda record: int(record.request_id))
        assert len(records) == len(kept), "a request was not answered"
        starts = np.array([record.first_scheduled_time for record in records], dtype=np.float64)
        departures = np.array([record.finish_time for record in records])
        return Visits(given.arrivals[kept], starts, departures, given.lengths[kept])


@cache
def reference_means(queue: Queue) -> tuple[Floats, Floats]:
    """Means over many customers of the reference, and half-widths of their intervals.

    What known means explain of the variation is taken out by regression (control variates).
    """
    rows, controls = [], []
    for run in range(queue.num_runs):
        given = queue.draw(1_000_000 + run, queue.num_customers)
        rows.append(queue.measure(queue.reference(given), given.window))
        controls.append([1.0, *_excesses(queue, given)])
    found, design = np.array(rows), np.array(controls)
    coefficients, _, rank, _ = np.linalg.lstsq(design, found, rcond=1e-12)
    freedom = queue.num_runs - int(rank)
    errors = np.sqrt(((found - design @ coefficients) ** 2).sum(axis=0) / freedom / queue.num_runs)
    return coefficients[0], errors * _quantile(queue, freedom)


def _excesses(queue: Queue, given: Input) -> list[float]:
    """Over their known means: gaps, lengths, squared lengths, and the wait at one server that takes the same input."""
    lengths, num = given.lengths.astype(np.float64), len(given.lengths)
    excesses = [
        given.arrivals[-1] * queue.rate / num - 1,
        lengths.mean() / queue.lengths.mean - 1,
        (lengths**2).mean() / queue.lengths.second_moment - 1,
    ]
    if queue.control is not None:
        service, square = queue.lengths.mean * queue.control, queue.lengths.second_moment * queue.control**2
        wait = mean_wait(single_server(given, queue.control), given.window)[0]
        excesses.append(wait / pollaczek_khinchine(queue.rate, service, square) - 1)
    return excesses


def paired_ratios(queue: Queue, bug: Bug) -> tuple[Floats, Floats]:
    """Simulator over reference on the same input, and half-widths of the intervals of these ratios."""
    simulated, expected = [], []
    for run in range(NUM_PAIRED):
        given = queue.draw(run, NUM_PAIRED_CUSTOMERS)
        simulated.append(queue.measure(queue.simulate(given, bug), given.window))
        expected.append(queue.measure(queue.reference(given), given.window))
    found, base = np.array(simulated), np.array(expected)
    ratios = found.sum(axis=0) / base.sum(axis=0)
    errors = (found - ratios * base).std(axis=0, ddof=1) / np.sqrt(NUM_PAIRED) / base.mean(axis=0)
    return ratios, errors * _quantile(queue, NUM_PAIRED - 1)


def _quantile(queue: Queue, freedom: int) -> float:
    """Half of the significance for each level, shared by the quantities (Bonferroni), two-sided."""
    return float(stats.t.ppf(1 - SIGNIFICANCE / 4 / len(queue.quantities), freedom))


def check(queue: Queue, bug: Bug = NO_BUG) -> None:
    """Raises AssertionError where theory lies outside an interval, or an interval is wider than it may be."""
    means, mean_widths = reference_means(queue)
    ratios, ratio_widths = paired_ratios(queue, bug)
    found = means * ratios
    widths = mean_widths * ratios + means * ratio_widths + mean_widths * ratio_widths
    for quantity, value, width in zip(queue.quantities, found, widths, strict=True):
        shown = f"{quantity.name} is {value:.5f} +- {width:.5f}, theory says {quantity.value:.5f}"
        assert abs(value - quantity.value) <= width + quantity.rounding, f"{shown}: outside"
    for quantity, width in zip(queue.quantities, widths, strict=True):
        assert width <= quantity.precision, f"{quantity.name} is known within {width:.5f}: too wide"


# -- runs that are interfered with ----------------------------------------------------------------------------------

Act = tuple[float, Callable[[Replica], object]]


class Played(NamedTuple):
    records: list[RequestRecord]
    step_ends: list[float]
    engine: EngineCore


def simulate_with(
    config: EngineConfig,
    workload: Workload,
    cost: StepCost,
    acts: Sequence[Act] = (),
    journal: Write | None = None,
) -> Played:
    """As `simulate`, with hands on the replica at given times, in order: a cancellation, a reset of its cache.

    Arrivals are to be multiples of a power of two, so that their differences are exact.
    """
    env, records = simpy.Environment(), list[RequestRecord]()
    executor = SimulatedExecutor(cost, overlap=config.async_depth > 1)
    replica = Replica(env, build(config, journal), executor, records.append)
    for item in workload.items:
        executor.expect(item.request, item.num_output_tokens)
    arrivals = [(item.request.arrival_time, partial(_submit, item.request)) for item in workload.items]
    for each in (arrivals, acts):
        env.process(_play(env, replica, each))
    env.run()
    return Played(records, list(replica.step_ends), replica.engine)


def cancel(time: float, request_id: str) -> Act:
    return time, lambda replica: replica.cancel(request_id)


def _submit(request: Request, replica: Replica) -> None:
    replica.submit(request)


def _play(env: simpy.Environment, replica: Replica, acts: Sequence[Act]) -> Process:
    for time, act in acts:
        if time > env.now:
            yield env.timeout(time - env.now)
        act(replica)

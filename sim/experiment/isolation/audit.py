"""The leakage audit: the same trials under every scope and through every channel, and what an attacker learns.

One protocol, whatever the body: `measure` builds the trials, has them played, and reads the probes' times. A body is
whoever plays a workload and tells when each request had its first token.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple, Protocol

from policies.config import EngineConfig
from policies.types import Request
from sim.experiment.isolation.channels import (
    CHANNELS,
    NUM_TENANTS,
    POSITIVE,
    VICTIM,
    Channel,
    Pace,
    Sizes,
    others,
    trials,
)
from sim.experiment.isolation.leakage import LEVEL, Leak, leak
from sim.experiment.isolation.price import prepared
from sim.experiment.isolation.scopes import SCOPES, Scope, scopes_of
from sim.experiment.statistics import holm
from sim.setup import Setup
from sim.simulate import Run
from sim.timings import timings
from sim.workload.workload import WorkItem, Workload

Play = Callable[[Setup, Workload], Mapping[str, float]]  # seconds to the first token, by request id; nan: never

NUM_TRIALS = 250  # of each kind
LOADS = (0.2,)
NUM_LONG, NUM_OTHERS, APART = 3, 8, 0.5  # requests of the pilot, and seconds between them


@dataclass(frozen=True, slots=True)
class Probing:
    """A cell of the audit: what is played, and what is asked."""

    setup: Setup
    scope: str
    channel: Channel
    sizes: Sizes
    num_trials: int
    load: float
    pace: Pace
    seed: int


class Times(NamedTuple):
    """Of the probes, by the truth of their trials."""

    yes: list[float]
    no: list[float]


class Prober(Protocol):
    """A body that is audited; results come in their order."""

    @property
    def name(self) -> str: ...

    def pace(self, setup: Setup, sizes: Sizes) -> Pace: ...
    def probe(self, probings: Sequence[Probing]) -> Iterator[Times]: ...
    def can_play(self, scope: Scope) -> bool: ...


def measure(probing: Probing, play: Play) -> Times:
    each = probing
    asked = trials(each.channel, each.sizes, each.num_trials, each.pace, each.load, each.seed)
    found = play(each.setup, asked.workload)
    by_truth = {truth: [found[name] for name, it in asked.truths.items() if it is truth] for truth in (True, False)}
    return Times(by_truth[True], by_truth[False])


def pace_of(setup: Setup, sizes: Sizes, play: Play) -> Pace:
    """From a pilot: long prompts one by one, then others' requests. Raises ValueError for prompts that do not fit."""
    long = CHANNELS["queueing"].trial(0, True, VICTIM, sizes)[0].prompt
    first = [WorkItem(Request(f"long {i}", i * APART, long, 1, context=VICTIM), 1) for i in range(NUM_LONG)]
    rest = others(sizes, 1.0, NUM_OTHERS, setup.seed)
    moved = [
        replace(each, request=replace(each.request, arrival_time=(NUM_LONG + i) * APART)) for i, each in enumerate(rest)
    ]
    found = play(setup, Workload("pilot of an audit", [*first, *moved], source="pilot"))
    alone = min(found[each.request.request_id] for each in first)
    if math.isnan(alone):
        raise ValueError(f"a prompt of {sizes.prompt_tokens} tokens is not answered at all: audit with shorter ones")
    return Pace(alone, sum(found[each.request.request_id] for each in rest) / len(rest))


def simulated(setup: Setup, workload: Workload) -> Mapping[str, float]:
    """As a client of the simulator sees it, front end included."""
    return first_token_times(prepared(setup, workload).run())


def first_token_times(run: Run) -> dict[str, float]:
    """From the intended arrival, as the client sees it."""
    found = timings(run)
    waits = (found.firsts - found.arrivals).tolist()
    return {record.request_id: wait for record, wait in zip(found.records, waits, strict=True)}


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulator, on as many processes as there are cores unless said otherwise."""

    num_workers: int = 0
    name: str = "simulated"

    def pace(self, setup: Setup, sizes: Sizes) -> Pace:
        return pace_of(setup, sizes, simulated)

    def probe(self, probings: Sequence[Probing]) -> Iterator[Times]:
        num = min(self.num_workers or os.cpu_count() or 1, len(probings))
        play = partial(measure, play=simulated)
        if num <= 1:
            yield from map(play, probings)
            return
        with ProcessPoolExecutor(num, multiprocessing.get_context("spawn")) as pool:
            yield from pool.map(play, probings)

    def can_play(self, scope: Scope) -> bool:
        return True


# -- the audit --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """One scope, channel and load. `p_value`: among all of the audit (Holm)."""

    scope: str
    channel: str
    question: str
    load: float
    leak: Leak
    p_value: float

    @property
    def leaks(self) -> bool:
        return self.p_value < 1.0 - LEVEL


@dataclass(frozen=True, slots=True)
class Audit:
    """`found`: of every scope and channel, the positive control under its own name. `body`: simulated or live.

    `isolation`: the setup's own, whatever was audited besides.
    """

    body: str
    found: tuple[Found, ...]
    sizes: Sizes
    pace: Pace
    num_blocks: int
    block_size: int
    isolation: str
    threat_decision: str
    not_played: tuple[str, ...] = ()

    @property
    def num_trials(self) -> int:
        return self.found[0].leak.num_no

    def of(self, scope: str, channel: str, load: float | None = None) -> Found:
        """At the first load, unless another is named."""
        return next(
            each for each in self.found if each.scope == scope and each.channel == channel and load in (None, each.load)
        )


def audit(
    setup: Setup,
    prober: Prober,
    *,
    scopes: Sequence[Scope] = (),
    channels: Sequence[Channel] = (POSITIVE, *CHANNELS.values()),
    num_trials: int = NUM_TRIALS,
    loads: Sequence[float] = LOADS,
    sizes: Sizes | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Audit:
    """Every channel under every scope and load; `tick` hears of each that is done.

    Raises ValueError for what cannot be played.
    """
    sizes = sizes or Sizes()
    _check(num_trials, loads)
    bare, block_size = small(setup, sizes)
    scopes = scopes or scopes_of(setup)
    played = [scope for scope in scopes if prober.can_play(scope)]
    pace = prober.pace(SCOPES[-1].of(bare, NUM_TENANTS), sizes)
    cells = [
        Probing(scope.of(bare, NUM_TENANTS), scope.name, channel, sizes, num_trials, load, pace, setup.seed)
        for scope, channel, load in product(played, channels, loads)
    ]
    leaks = []
    for cell, times in zip(cells, prober.probe(cells), strict=True):
        leaks.append(leak(*times, cell.channel.slower, setup.seed))
        tick()
    p_values = holm({str(number): each.p_value for number, each in enumerate(leaks)})
    found = tuple(
        Found(cell.scope, cell.channel.name, cell.channel.question, cell.load, it, p_values[str(number)])
        for number, (cell, it) in enumerate(zip(cells, leaks, strict=True))
    )
    own, decision = setup.engine.get("isolation", EngineConfig().isolation), cells[0].setup.engine["threat_decision"]
    absent = tuple(scope.name for scope in scopes if scope not in played)
    return Audit(prober.name, found, sizes, pace, sizes.num_blocks(block_size), block_size, own, decision, absent)


def small(setup: Setup, sizes: Sizes) -> tuple[Setup, int]:
    """One engine whose pool the audit's flood just fills: a larger pool only takes a larger flood."""
    block_size = int(setup.engine.get("block_size", 16))
    bare = replace(
        setup, trace=None, workload=None, transforms=(), arrivals=None, rate=None, num_requests=None, slo=None,
        num_replicas=1, routing="round_robin",
        engine={**setup.engine, "num_blocks": sizes.num_blocks(block_size)},
    )  # fmt: skip
    return bare, block_size


def _check(num_trials: int, loads: Sequence[float]) -> None:
    if num_trials < 2:
        raise ValueError(f"trials ({num_trials}) must be at least 2 of each kind, better {NUM_TRIALS}")
    for load in loads:
        if not 0.0 <= load < 1.0:
            raise ValueError(f"load ({load}) must be a share of the time, from 0 to below 1")

"""Steps as a server takes them: engine, threads and streams around the device, under loads that fill it more and more.

Parts tell what a step is made of; this tells what becomes of them in service, where one step follows another, caches
hold what the last one left, and the threads of one process share their time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from backend.executor import TorchExecutor
from backend.front import Front
from backend.start import Body
from calibration.journalled import TimedStep, timed_steps
from calibration.points import Load
from calibration.probe import Probing, probe_of, usual, without_probes
from calibration.quiet import Usage, others
from policies.catalogue import build
from policies.config import EngineConfig
from policies.journal import Write
from policies.prompt import TokenPrompt
from policies.types import Request
from sim.cost.work import StepWork

NUM_LONE = 12  # requests that meet an idle server
FIGURES = ("rate", "ask", "deliver", "others", "probe")
GAP = 0.02  # seconds a client sleeps before each of these


class Service(NamedTuple):
    """What one load showed. `rate`: answers a second. `ask`: seconds from a client's intended time to the engine, of an
    idle server only; `deliver`: from the end of a step to its tokens' being there."""

    load: Load
    rate: float
    steps: Sequence[TimedStep]
    ask: float | None
    deliver: float
    others: float  # cores that worked for other processes meanwhile
    probe: float = 1.0  # mean seconds of the probe between steps, which are told without it; 1 where there is none

    def to_dict(self) -> dict[str, Any]:
        steps = [[*work, float(f"{duration:.6g}")] for work, duration, _ in self.steps]
        return {"load": list(self.load), "steps": steps} | {name: getattr(self, name) for name in FIGURES}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Service:
        steps = [TimedStep(StepWork(*counts), duration) for *counts, duration in values["steps"]]
        return cls(load=Load(*values["load"]), steps=steps, **{name: values[name] for name in FIGURES})


def serve(body: Body, executor: TorchExecutor, loads: Sequence[Load], longest: int, seed: int = 0) -> Iterator[Service]:
    """Each load on a fresh engine; prompts and answers as random as their lengths, up to `longest` tokens together."""
    rng = np.random.default_rng(seed)
    for load in loads:
        yield asyncio.run(_serve(body, executor, load, longest, np.random.default_rng(rng.integers(2**32))))


async def _serve(body: Body, executor: TorchExecutor, load: Load, longest: int, rng: np.random.Generator) -> Service:
    journal: list[str] = []
    since = Usage.now()
    config = replace(body.config, async_depth=1, max_num_seqs=max(body.config.max_num_seqs, load.num_clients))
    probing = Probing(executor, probe_of(body))
    async with Front(build(config, journal.append), probing) as front:
        clients = Clients(front, rng, body.model.vocab_size, longest)
        await (clients.crowd(load) if load.num_clients else clients.lone())
        delivered, ends = front.delivered, front.replica.step_ends
        deliver = fmean(there - end for there, end in zip(delivered, ends, strict=True))
    ask = None if load.num_clients else _ask_time(journal)
    rate = len(clients) / (delivered[-1] - ends[0])
    steps = own_steps(timed_steps(journal), probing.times)
    return Service(load, rate, steps, ask, deliver, round(others(since), 3), usual(probing.times))


def own_steps(steps: Sequence[TimedStep], probes: Sequence[float]) -> list[TimedStep]:
    durations = without_probes([step.duration for step in steps], probes)
    return [step._replace(duration=max(1e-7, own)) for step, own in zip(steps, durations, strict=True)]


class Open(NamedTuple):
    """Requests of the same kind at Poisson times, equal for equal seeds: so many a second, for so long."""

    rate: float
    seconds: float
    longest: int
    seed: int


def play_open(body: Body, executor: TorchExecutor, config: EngineConfig, load: Open, write: Write) -> None:
    """Until all are answered."""
    asyncio.run(_play_open(body, executor, config, load, write))


async def _play_open(body: Body, executor: TorchExecutor, config: EngineConfig, load: Open, write: Write) -> None:
    async with Front(build(config, write), executor, _Clock()) as front:
        clients = Clients(front, np.random.default_rng(load.seed), body.model.vocab_size, load.longest)
        await clients.come(load.rate, load.seconds)


class _Clock:
    """Seconds from now on."""

    def __init__(self) -> None:
        self._origin = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._origin


class Clients:
    """Ask for random answers to random prompts, of lengths as likely in each octave."""

    def __init__(self, front: Front, rng: np.random.Generator, vocab_size: int, longest: int) -> None:
        self._front = front
        self._rng = rng
        self._vocab_size = vocab_size
        self._longest = longest
        self._num_asked = 0

    def __len__(self) -> int:
        return self._num_asked

    async def crowd(self, load: Load) -> None:
        until = time.monotonic() + load.seconds
        await asyncio.gather(*(self._keep_asking(until) for _ in range(load.num_clients)))

    async def _keep_asking(self, until: float) -> None:
        while time.monotonic() < until:
            await self._ask(self._front.clock())

    async def lone(self) -> None:
        for _ in range(NUM_LONE):
            intended = self._front.clock() + GAP
            await asyncio.sleep(GAP)
            await self._ask(intended)

    async def come(self, rate: float, seconds: float) -> None:
        """All is drawn before the first arrives: it does not hang on how quickly answers come."""
        intended, waits = 0.0, []
        while (intended := intended + self._rng.exponential(1.0 / rate)) < seconds:
            waits.append(self._arrive(intended, self._request(intended)))
        await asyncio.gather(*waits)

    async def _arrive(self, intended: float, request: Request) -> None:
        await asyncio.sleep(max(0.0, intended - self._front.clock()))
        await self._front.ask(request, length=request.max_tokens).whole()

    async def _ask(self, intended: float) -> None:
        request = self._request(intended)
        await self._front.ask(request, length=request.max_tokens).whole()

    def _request(self, intended: float) -> Request:
        """`max_tokens` is its length: a policy that looks at it knows more than it would of a user's request."""
        name, self._num_asked = f"served-{self._num_asked}", self._num_asked + 1
        num_prompt, num_output = self._length(8, self._longest * 3 // 4), self._length(4, self._longest // 8)
        tokens = TokenPrompt(tuple(self._rng.integers(0, self._vocab_size, num_prompt).tolist()))
        return Request(name, intended, tokens, max_tokens=num_output)

    def _length(self, least: int, most: int) -> int:
        return int(np.exp(self._rng.uniform(np.log(least), np.log(max(least + 1, most)))))


def _ask_time(journal: Sequence[str]) -> float:
    """Of requests that found the server idle: nobody else was there."""
    added = (line for line in map(json.loads, journal) if "add" in line)
    return fmean(line["now"] - line["arrival"] for line in added)

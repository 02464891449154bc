"""Who plays a setup once: the simulator, or a live body that somebody hands in."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from sim.setup import Setup


class Outcome(NamedTuple):
    """One run, as figures: `metrics` are Summary's as a dictionary, nested."""

    manifest: dict[str, Any]
    metrics: dict[str, Any]


class Runner(Protocol):
    """Plays setups; results come in their order. Raises ValueError for a setup that cannot be."""

    def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]: ...


def play(setup: Setup) -> Outcome:
    """In the simulator, in this process."""
    from sim.commands import Prepared

    prepared = Prepared.of(setup)
    return Outcome(prepared.manifest, prepared.summary(prepared.run()).to_dict())


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulator, on as many processes as there are cores unless said otherwise. Equal results on any number."""

    num_workers: int = 0

    def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]:
        num = min(self.num_workers or os.cpu_count() or 1, len(setups))
        if num <= 1:
            yield from map(play, setups)
            return
        with ProcessPoolExecutor(num, multiprocessing.get_context("spawn")) as pool:
            yield from pool.map(play, setups)


def seeded(setup: Setup, num: int, first: int = 0) -> list[Setup]:
    """The same setup under consecutive seeds, from its own on: arms that share seeds share every draw."""
    return [replace(setup, seed=setup.seed + first + index) for index in range(num)]

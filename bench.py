"""`servetwin bench`: what `simulate` does with a live body. Same settings, workload, figures, report; real steps."""

from __future__ import annotations

import platform
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from backend.start import Body, start
from liverun import OnRecord, Pace, play
from policies.catalogue import build, preset
from policies.config import EngineConfig
from policies.journal import Replayed, Write, replay
from sim.capacity import Demand
from sim.commands import Outputs, journals, progress, write_outputs
from sim.cost import AffineCost
from sim.match import Match, match
from sim.metrics import Summary, summarise
from sim.models import Model
from sim.report import Banded, print_run
from sim.setup import Setup, basis, memory_wanted, versions
from sim.sharing import check_sharing
from sim.simulate import Run, simulate
from sim.warmth import counted
from sim.workload.workload import Workload

# Settings that say how a simulation passes its time: a live run's passes by itself.
SIMULATED_ONLY = (
    "gpu", "costs", "cuda_graphs", "routing", "load_staleness", "host_bandwidth_gb_s", "front_end_times",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bench:
    """A setup, the body that will run it, and its workload. The setup says what the body settled."""

    setup: Setup
    body: Body
    workload: Workload

    @classmethod
    def of(cls, setup: Setup, device: str) -> Bench:
        """Raises ValueError, one line, for what only a simulation can do."""
        _check_live(setup)
        setup.objectives()
        workload = setup.load()
        settings = {**(preset(setup.preset) if setup.preset else {}), **setup.engine}
        check_sharing(EngineConfig.from_dict({"max_model_len": 1, **settings}), workload)  # before a model is loaded
        body = start(setup.model, device, settings, setup.dtype, setup.gpu_memory_utilization, setup.seed)
        settled = {name: getattr(body.config, name) for name in ("num_blocks", "max_model_len")}
        return cls(replace(setup, engine={**setup.engine, **settled}), body, workload)

    @property
    def config(self) -> EngineConfig:
        return self.body.config

    @property
    def manifest(self) -> dict[str, Any]:
        """As a simulated run's, but for the body and what it is made of."""
        return {
            **basis(self.setup, self.config, self.workload, self._memory()),
            "body": "live",
            "profile": self._profile(),
            "front_end": "off" if self.setup.front_end == "off" else "live",
            "versions": versions("numpy", "torch"),
        }

    def run(
        self, journal: Write | None = None, on_record: OnRecord | None = None, workload: Workload | None = None
    ) -> tuple[Run, Pace]:
        """With the setup's workload, or another form of it; only what counts, where the cache is prepared first."""
        warmth = self.setup.warmth
        played = warmth.played(workload or self.workload)
        run, pace = play(self.body, played, journal, on_record)
        return counted(run, warmth.num_left_out(played)), pace

    def summary(self, run: Run) -> Summary:
        seen = replace(run, clients=(), deliveries=None) if self.setup.front_end == "off" else run
        return summarise(seen, self.setup.convention, self.setup.objectives())

    def _memory(self) -> Demand:
        """Weights and KV as they lie here, whatever they are stored in elsewhere."""
        shape = self.body.model
        known = {each.name for each in fields(Model)} - {"dtype", "kv_dtype"}
        values = {each.name: getattr(shape, each.name) for each in fields(shape) if each.name in known}
        wanted = memory_wanted(self.config, self.workload, Model(**values))
        return replace(wanted, weight_bytes=self.body.weight_bytes, kv_bytes_per_token=self.body.kv_bytes_per_token)

    def _profile(self) -> dict[str, Any]:
        dtype = str(self.body.dtype).removeprefix("torch.")
        return {
            "provenance": "live",
            "model": self.body.model.name,
            "gpu": device_name(self.body.device),
            "tensor_parallel": 1,
            "dtype": dtype,
            "kv_dtype": dtype,
        }


def run_bench(setup: Setup, device: str, outputs: Outputs) -> int:
    """0, or 1 if the journal of the run does not replay equal. Files appear only when they are whole."""
    bench = Bench.of(setup, device)
    with progress(bench.workload.name, bench.workload.num_requests) as tick, ExitStack() as stack:
        write, *_ = journals(stack, outputs.journal, num_replicas=1) or [None]
        run, pace = bench.run(write, tick)
    found = Banded(bench.workload.name, bench.summary(run))
    write_outputs(bench, run, found, outputs)
    twin = None if outputs.journal is None else Twin.of(outputs.journal, bench, run)
    if not outputs.owns_stdout:
        _print(bench, found, pace, outputs.journal, twin)
    return int(twin is not None and twin.replayed.divergence is not None)


@dataclass(frozen=True, slots=True)
class Twin:
    """What a journal says of the two bodies: the same inputs give the same decisions; the same workload, so many."""

    replayed: Replayed
    match: Match
    cost: AffineCost  # of the simulated steps, fitted to the live ones

    @classmethod
    def of(cls, journal: Path, bench: Bench, run: Run) -> Twin:
        lines, simulated, cost = journal.read_text().splitlines(), list[str](), fitted(run)
        played = bench.setup.warmth.played(bench.workload)
        simulate(bench.config, played, cost, simulated.append, jumps=False)
        return cls(replay(lines, build), match(lines, simulated), cost)

    def __str__(self) -> str:
        replayed = self.replayed.divergence or f"equal, {self.replayed.num_decisions:,} decisions"
        return (
            f"replayed: {replayed}\n"
            f"free-running match: {self.match} (simulated from the workload alone, a step taking "
            f"{1e3 * self.cost.per_step:.3g} ms + {1e6 * self.cost.per_token:.3g} us a token, fitted to this run)"
        )


def fitted(run: Run) -> AffineCost:
    """The line through the durations of a live run's steps, by their tokens; neither part below 0."""
    ends = np.asarray(run.step_ends)
    begins = np.array([sample.time for sample in run.samples])
    tokens = np.array([sample.num_tokens for sample in run.samples], dtype=np.float64)
    durations = ends - np.maximum(begins, np.concatenate(([-np.inf], ends[:-1])))  # the device takes one at a time
    if len(tokens) < 2 or tokens.min() == tokens.max():
        return AffineCost(float(durations.mean()) if len(durations) else 0.0)
    slope = max(0.0, float(np.polyfit(tokens, durations, 1)[0]))
    return AffineCost(max(0.0, float(durations.mean() - slope * tokens.mean())), slope)


def _print(bench: Bench, found: Banded, pace: Pace, journal: Path | None, twin: Twin | None) -> None:
    console = Console()
    say = partial(console.print, highlight=False, markup=False)
    print_run(console, found, bench.manifest)
    say(str(pace))
    ignored = [name for name in SIMULATED_ONLY if getattr(bench.setup, name) != getattr(Setup(), name)]
    if ignored:
        say(f"not used by a live run: {', '.join(ignored)}")
    if twin is not None:
        say(f"journal: {journal} (servetwin replay {journal})")
        say(str(twin))


def _check_live(setup: Setup) -> None:
    for name in ("num_replicas", "tensor_parallel"):
        if getattr(setup, name) != 1:
            raise ValueError(f"{name} ({getattr(setup, name)}) must be 1: bench runs one engine on one device")
    if setup.kv_dtype != "auto":
        raise ValueError(f"kv_dtype ({setup.kv_dtype!r}) must be auto: bench keeps KV in the type of the weights")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, one thread)"

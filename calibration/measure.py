"""Measures what the live body runs, part by part, in a random order: what a profile of our own kernels is fitted to.

Each point is taken a few times, far apart, on new inputs. A CPU is timed by its thread's clock, which other work on
the machine disturbs little, a GPU by its events. Ceilings are taken before, between and after; each line is written as
it is measured, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from backend.executor import TorchExecutor
from backend.start import Body
from calibration.journalled import TimedStep
from calibration.parts import Call, Parts, weights_of
from calibration.points import Grid, Load, Point
from calibration.probe import probe_of
from calibration.quiet import MOST
from calibration.served import Service, serve
from calibration.source import kernel_hash

Tick = Callable[[], object]
LARGE_BYTES = 200e6  # of weights
RECORDED = ("layers", "decode", "skewed", "prefill", "write", "gemm")  # no result of theirs goes to the host
NOISY = 1.3  # wall time over thread time: so much of the machine was somebody else's
SCHEMA = 3


class Stopwatch(Protocol):
    def time(self, call: Callable[[], object]) -> tuple[float, float]:
        """Seconds the device was busy, and of wall clock."""


class ThreadClock:
    """CPU seconds of the thread that calls."""

    def time(self, call: Callable[[], object]) -> tuple[float, float]:
        wall, busy = time.perf_counter(), time.thread_time()
        call()
        return time.thread_time() - busy, time.perf_counter() - wall


class EventClock:
    """Of the GPU, whose L2 is filled with something else before.

    Parts that wait for nothing are recorded as a graph and replayed: what their launches take from the host is part of
    a step in service, and is seen there.
    """

    def __init__(self, device: torch.device) -> None:
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.empty(size, dtype=torch.uint8, device=device)

    def time(self, call: Callable[[], object]) -> tuple[float, float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._other.zero_()
        torch.cuda.synchronize()
        wall = time.perf_counter()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3, time.perf_counter() - wall

    def recorded(self, call: Callable[[], object]) -> tuple[float, float]:
        call()  # compiles, and settles workspaces
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.time(graph.replay)


@dataclass(frozen=True, slots=True)
class Taken:
    """One measurement. `wall` over `seconds` tells how much the thread had to wait for a core; `probe`: what the probe
    took just before, 1 where there is none."""

    point: Point
    seconds: float
    wall: float
    load: float  # of the machine, as its one-minute average
    probe: float = 1.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """All of one body. `ceilings`: copy in bytes a second and matrix products in FLOP/s, at the start, ... the end."""

    about: Mapping[str, Any]
    taken: Sequence[Taken]
    ceilings: Sequence[Mapping[str, float]]
    services: Sequence[Service] = ()

    @property
    def waited(self) -> float:
        """Wall time over busy time, the median."""
        ratios = [each.wall / each.seconds for each in self.taken if each.seconds > 1e-4 and each.point.part != "loop"]
        return float(np.median(ratios)) if ratios else 1.0

    @property
    def others(self) -> float:
        """Cores that other processes used while we served, in the mean."""
        return float(np.mean([service.others for service in self.services])) if self.services else 0.0

    @property
    def is_noisy(self) -> bool:
        return self.waited > NOISY or self.others > MOST

    @property
    def drift(self) -> float:
        """The largest change of a ceiling, as a share."""
        rates = np.array([[each["copy"], each["gemm"]] for each in self.ceilings])
        return float((rates.max(axis=0) / rates.min(axis=0) - 1.0).max())

    def times(self, part: str) -> dict[tuple[int, ...], list[float]]:
        """By counts, in the order of the first measurement; as if the machine had always had its median speed."""
        usual = float(np.median([each.probe for each in self.taken]))
        found: dict[tuple[int, ...], list[float]] = {}
        for each in self.taken:
            if each.point.part == part:
                found.setdefault(each.point.counts, []).append(each.seconds * usual / each.probe)
        return found

    @property
    def probe(self) -> float:
        """What the probe takes in service, in the median: the speed that costs are told for."""
        return float(np.median([service.probe for service in self.services]))

    def served(self, sensitivity: float) -> list[Sequence[TimedStep]]:
        """Steps of each service, at that speed, to which they are so sensitive."""
        by = [(self.probe / service.probe) ** sensitivity for service in self.services]
        return [
            [step._replace(duration=step.duration * factor) for step in service.steps]
            for factor, service in zip(by, self.services, strict=True)
        ]


def measure(
    body: Body,
    grid: Grid,
    out: Path,
    tick: Tick = lambda: None,
    seed: int = 0,
    executor: TorchExecutor | None = None,
) -> Measurement:
    """Take every point `num_repeats` times, then serve each load. What `out` holds already, of the same body, is not
    taken again. `executor`: the body's, if there is one already: on a GPU another would find no memory.

    Raises ValueError if `out` is of another body or another grid.
    """
    points = points_for(body, grid, seed)
    executor = executor or body.executor()
    about = {**describe(body, num_measurements(body, grid)), "longest_served": longest_served(body, grid)}
    before = resumed(out, about)
    clock: Stopwatch = ThreadClock() if body.device.type == "cpu" else EventClock(body.device)
    with out.open("a") as file:
        if not before.about:
            _write(file, {"about": about})
        if order := _order(points, grid.num_repeats, before, seed):
            _run(body, Parts(body, executor, seed), clock, order, file, tick)
        _serve(body, executor, grid, grid.loads[len(before.services) :], file, tick)
    return read_measurement(out)


def points_for(body: Body, grid: Grid, seed: int = 0) -> list[Point]:
    """Those that the body has room for."""
    pool_tokens = body.config.num_blocks * body.config.block_size
    return grid.points(body.config.max_model_len, weights_of(body), seed, pool_tokens)


def longest_served(body: Body, grid: Grid) -> int:
    return min(grid.longest_served, body.config.max_model_len)


def num_measurements(body: Body, grid: Grid) -> int:
    """So often `measure` calls `tick`, if nothing was measured before."""
    return len(points_for(body, grid)) * grid.num_repeats + len(grid.loads)


def _run(body: Body, parts: Parts, clock: Stopwatch, order: Sequence[Point], file: Any, tick: Tick) -> None:
    halfway, probe = len(order) // 2, probe_of(body)
    with torch.inference_mode():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for part in dict.fromkeys(point.part for point in order):  # the first call of each kind loads code
                parts.call(next(point for point in order if point.part == part))()
            _write(file, {"ceilings": ceilings(body.device, body.dtype, clock)})
            for index, point in enumerate(order):
                call = parts.call(point)
                speed = clock.time(probe)[0] if probe is not None else 1.0
                _write(file, _line(point, *_timed(call, clock, point), speed))
                tick()
                if index == halfway:
                    _write(file, {"ceilings": ceilings(body.device, body.dtype, clock)})
            _write(file, {"ceilings": ceilings(body.device, body.dtype, clock)})
        finally:
            torch.set_num_threads(threads)


def _serve(body: Body, executor: TorchExecutor, grid: Grid, loads: Sequence[Load], file: Any, tick: Tick) -> None:
    for service in serve(body, executor, loads, longest_served(body, grid)):
        _write(file, {"service": service.to_dict()})
        tick()


def _timed(call: Call, clock: Stopwatch, point: Point) -> tuple[float, float]:
    if point.part == "loop":  # it times itself, by the wall clock
        seconds = float(call())  # type: ignore[arg-type]
        return seconds, seconds
    if point.part in ("prepare", "hash"):  # the host's work, whatever the device
        return ThreadClock().time(call)
    if isinstance(clock, EventClock) and point.part in RECORDED:
        return clock.recorded(call)
    return clock.time(call)


def _order(points: Sequence[Point], num_repeats: int, before: Measurement, seed: int) -> list[Point]:
    done = Counter(each.point for each in before.taken)
    rng = np.random.default_rng(seed)
    rounds = [[points[i] for i in rng.permutation(len(points))] for _ in range(num_repeats)]
    return [point for index, each in enumerate(rounds) for point in each if done[point] <= index]


def grid_for(body: Body) -> str:
    """The name of the grid that a body is measured on in about a minute."""
    if body.device.type == "cuda":
        return "cuda"
    return "cpu" if body.weight_bytes < LARGE_BYTES else "cpu-large"


def ceilings(device: torch.device, dtype: torch.dtype, clock: Stopwatch) -> dict[str, float]:
    """The best of a few copies and matrix products, larger than any cache."""
    num, side = (32 * 2**20, 1024) if device.type == "cpu" else (2**30, 8192)
    source = torch.ones(num, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, device=device).to(dtype)
    copy = min(clock.time(lambda: target.copy_(source))[0] for _ in range(3))
    product = min(clock.time(lambda: a @ a)[0] for _ in range(3))
    return {"copy": 2 * num / copy, "gemm": 2 * side**3 / product}


def describe(body: Body, num_points: int) -> dict[str, Any]:
    """Device, model, versions, and the code that was measured: measurements of different ones do not mix."""
    cuda = body.device.type == "cuda"
    device = torch.cuda.get_device_name(body.device) if cuda else f"cpu ({platform.machine()})"
    shape = body.model
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    return {
        "schema": SCHEMA,
        "device": device,
        "model": {"name": shape.name, **{name: getattr(shape, name) for name in sizes}},
        "dtype": str(body.dtype).removeprefix("torch."),
        "block_size": body.config.block_size,
        "max_model_len": body.config.max_model_len,
        "kernels": kernel_hash(),
        "clock": "cuda events, L2 flushed" if cuda else "thread time, one thread",
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
        "num_measurements": num_points,
    }


# -- files ------------------------------------------------------------------------------------------------------------


def resumed(path: Path, about: Mapping[str, Any]) -> Measurement:
    """What the file holds; nothing if there is none. A last line that was cut off is taken away."""
    if not path.is_file() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Measurement({}, (), ())
    text = path.read_text()
    if not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
    found = read_measurement(path)
    if found.about != about:
        other = [name for name in about if found.about.get(name) != about[name]]
        raise ValueError(
            f"{path}: measured with another {', '.join(other) or 'setting'}: write elsewhere, or remove it"
        )
    return found


def read_measurement(path: Path) -> Measurement:
    """Raises ValueError for what `measure` did not write."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        about = next(line["about"] for line in lines if "about" in line)
        figures = ("seconds", "wall", "load", "probe")
        taken = [Taken(Point(line["part"], tuple(line["counts"])), *(line[name] for name in figures))
                 for line in lines if "part" in line]  # fmt: skip
        services = [Service.from_dict(line["service"]) for line in lines if "service" in line]
        return Measurement(about, taken, [line["ceilings"] for line in lines if "ceilings" in line], services)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, StopIteration, ValueError) as error:
        raise ValueError(f"{path}: not a measurement ({type(error).__name__}: {error}): measure again") from None


def _line(point: Point, seconds: float, wall: float, probe: float) -> dict[str, Any]:
    told = {"part": point.part, "counts": point.counts, "seconds": seconds, "wall": wall}
    return {**told, "load": round(os.getloadavg()[0], 2), "probe": probe}


def _write(file: Any, value: Mapping[str, Any]) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()

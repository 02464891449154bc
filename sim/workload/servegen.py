"""ServeGen's client pools: of each client and window a rate, the shape of its gaps, how long texts are (NSDI 2026).

    chunk-N-trace.csv     600,0.108,1.12,Gamma,0.797,11.37     window start (s), rate (1/s), CV, family, shape, scale
    chunk-N-dataset.json  {"0": {"input_tokens": "{45: 0.0097, ...}", "output_tokens": "{...}"}, "21600": {...}}

N is the client. A pool is a folder or a tar archive of these; requests are drawn from it. A window gets as many as its
rate says, at times whose gaps have the family and shape given: the scale is set by the window, as ServeGen sets it.
Prompt and output are drawn independently, where ServeGen uses one uniform for both and so makes long prompts have long
answers; in Azure's traces the two have rank correlation 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.workload.clock import UNITS
from sim.workload.fields import MAX_TOKENS, json_object, time_value
from sim.workload.lines import shown
from sim.workload.rows import File, Parse, Reading, Shape, TraceFormat, TraceRow
from sim.workload.streams import stream

FAMILIES = ("Gamma", "Weibull")
LENGTHS = ("input_tokens", "output_tokens")
MAX_WINDOW_REQUESTS = 10**6  # of one client; the busiest known has 11,267 in 600 s

_NAME = re.compile(r"(?:.*/)?chunk-(\d+)-(trace|dataset)\.\w+")
_PAIR = re.compile(r"\s*(\d+)(?:\.0*)?\s*:\s*([\d.eE+-]+)\s*")


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of one client's time with requests in it."""

    start: float
    rate: float
    family: str
    shape: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over whole numbers of tokens."""

    values: NDArray[np.int64]
    edges: NDArray[np.float64]  # cumulative, the last one 1

    def draw(self, generator: np.random.Generator, num: int) -> NDArray[np.int64]:
        return self.values[np.searchsorted(self.edges[:-1], generator.random(num), side="right")]


@dataclass(frozen=True, slots=True)
class Batch:
    """One client's requests in one window."""

    times: NDArray[np.float64]
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]


class Pool:
    """Clients by number."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._windows: dict[int, list[Window]] = {}
        self._texts: dict[int, dict[float, dict[str, Any]]] = {}
        self._lengths: dict[tuple[int, float, str], Lengths] = {}
        self._window_time: float | None = None
        reading.at_end = self.rows

    def __call__(self, file: File) -> list[TraceRow]:
        matched = _NAME.fullmatch(file.name)
        if matched is None:
            raise ValueError(f"{shown(file.name)} must be chunk-N-trace.csv or chunk-N-dataset.json: remove it")
        client, kind = int(matched[1]), matched[2]
        if client in (self._windows if kind == "trace" else self._texts):
            raise ValueError(f"client {client} has two {kind} files: choose the folder of one pool")
        if kind == "trace":
            self._windows[client] = self._read_windows(file.text)
        else:
            self._texts[client] = {
                time_value("window", start): _fields(start, each) for start, each in json_object(file.text).items()
            }
        return []

    # Reading

    def _read_windows(self, text: str) -> list[Window]:
        found, starts = [], []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                start, window = _window(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            starts.append(start)
            if window is not None:
                found.append(window)
        self._check_grid(starts)
        return found

    def _check_grid(self, starts: list[float]) -> None:
        steps = {later - earlier for earlier, later in pairwise(starts)}
        if self._window_time is not None:
            steps.add(self._window_time)
        if len(steps) > 1 or min(steps, default=1) <= 0:
            raise ValueError(f"windows must follow each other at one distance, not {shown(sorted(steps))} s")
        self._window_time = min(steps, default=None)

    # Drawing

    def rows(self) -> Iterator[TraceRow]:
        """In order of time; no more than wanted, as each depends on seed, client and window alone."""
        self._report()
        usable = [client for client in self._windows if client in self._texts]
        busy = sorted((window.start, client, window) for client in usable for window in self._windows[client])
        for _, group in groupby(busy, key=lambda each: each[0]):
            for row in self._merged([(client, window) for _, client, window in group]):
                if not self._reading.keeps(self._reading.num_rows):
                    return
                yield row

    def _report(self) -> None:
        mean = {client: sum(window.rate for window in windows) for client, windows in self._windows.items()}
        known = sum(rate for client, rate in mean.items() if client in self._texts)
        num = known * (self._window_time or 0.0)
        said = f"requests are drawn for {len(self._texts)} clients, seed {self._reading.options.seed}: {num:.0f} in all"
        self._reading.findings.append(said)
        if lost := [client for client in mean if client not in self._texts]:
            share = 1 - known / (sum(mean.values()) or 1.0)
            self._reading.findings.append(
                f"clients left out because their dataset is absent: {len(lost)}, {share:.1%} of all requests"
            )

    def _merged(self, clients: list[tuple[int, Window]]) -> Iterator[TraceRow]:
        batches = [self.batch(client, window) for client, window in clients]
        names = np.repeat([client for client, _ in clients], [len(batch.times) for batch in batches])
        times, prompts, outputs = (
            np.concatenate([getattr(batch, name) for batch in batches]) for name in ("times", "prompts", "outputs")
        )
        for index in np.argsort(times, kind="stable").tolist():
            lengths = int(prompts[index]), int(outputs[index])
            row = TraceRow(float(times[index]), *lengths, client=f"client-{names[index]}")
            yield from self._reading.answered(row)

    def batch(self, client: int, window: Window) -> Batch:
        def draws(name: str) -> np.random.Generator:
            return stream(self._reading.options.seed, f"servegen/{client}/{window.start:g}/{name}")

        times = window.start + self._arrivals(draws("arrivals"), window)
        prompts, outputs = (self._of(client, window.start, name).draw(draws(name), len(times)) for name in LENGTHS)
        return Batch(times, prompts, outputs)

    def _arrivals(self, generator: np.random.Generator, window: Window) -> NDArray[np.float64]:
        """Seconds from the window's start. One gap more than arrivals: neither begin nor end of a window is one."""
        span = self._window_time or 0.0
        num = int(window.rate * span + generator.random())
        if num > MAX_WINDOW_REQUESTS:
            raise ValueError(f"a rate of {window.rate:g} requests a second is {num} a window: no client is that busy")
        if window.family == "Gamma":
            gaps = generator.standard_gamma(window.shape, num + 1)
        else:
            gaps = generator.weibull(window.shape, num + 1)
        total = gaps.sum()
        return np.cumsum(gaps)[:-1] * (span / total if total > 0 else 0.0)

    def _of(self, client: int, time: float, name: str) -> Lengths:
        """Of the last dataset window that has begun; before all, of the first."""
        begun = [start for start in self._texts[client] if start <= time]
        start = max(begun) if begun else min(self._texts[client])
        key = (client, start, name)
        if key not in self._lengths:
            try:
                self._lengths[key] = lengths(self._texts[client][start][name])
            except ValueError as error:
                raise ValueError(f"client {client}, window {start:g}, {name}: {error}") from None
        return self._lengths[key]


def _window(line: str) -> tuple[float, Window | None]:
    """Its start, and itself if anybody asks in it."""
    cells = line.split(",")
    if len(cells) != 6:
        raise ValueError(f"{shown(line)} must have 6 fields, from window start to scale: fetch the file again")
    start, rate = time_value("window start", cells[0]), time_value("rate", cells[1])
    if rate == 0:
        return start, None
    family, shape = cells[3].strip(), time_value("shape", cells[4])
    if family not in FAMILIES or not 0 < shape < 1e6:
        raise ValueError(f"{shown(line)} must name a family, {' or '.join(FAMILIES)}, and a shape above 0: remove it")
    return start, Window(start, rate, family, shape)


def _fields(start: str, value: object) -> dict[str, Any]:
    if isinstance(value, dict) and all(name in value for name in LENGTHS):
        return value
    raise ValueError(f"window {shown(start)} must have {' and '.join(LENGTHS)}: fetch the file again")


def lengths(text: object) -> Lengths:
    """From "{45: 0.0097, 46: 0.0117}", a Python dict in a string."""
    matches = [_PAIR.fullmatch(each) for each in str(text).strip().strip("{}").split(",")]
    pairs = [(int(each[1]), float(each[2])) for each in matches if each is not None]
    total = sum(share for _, share in pairs)
    if len(pairs) < len(matches) or not 0.99 < total < 1.01 or any(share < 0 for _, share in pairs):
        raise ValueError(f"{shown(text)} must give each number of tokens a probability, 1 in all: fetch the file again")
    pairs.sort()
    if pairs[-1][0] > MAX_TOKENS:
        raise ValueError(f"{pairs[-1][0]} tokens are more than {MAX_TOKENS}: correct the distribution")
    values, shares = zip(*pairs, strict=True)
    edges = np.cumsum(shares) / total
    return Lengths(np.array(values, dtype=np.int64), edges)


def parser(first: File, reading: Reading) -> Parse:
    return Pool(reading)


SERVEGEN = TraceFormat(
    name="servegen",
    columns=("*chunk-*",),
    shape=Shape.FILES,
    unit=UNITS["s"],
    declares_unit=True,
    parser=parser,
    assumptions=("prompt and output lengths are drawn independently", "prompts share nothing"),
)

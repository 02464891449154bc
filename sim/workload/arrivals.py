"""When requests come: by the clock, evenly or in bursts; or, from a fixed number of users, after answers.

Burstiness is told by the coefficient of variation of the gaps: CV 1 is Poisson, above is burstier. vLLM's `burstiness`
is a gamma shape and runs the other way: CV = 1 / sqrt(burstiness), so its 0.25 is CV 2 here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.workload.bursts import CodeBursts
from sim.workload.recorded import recorded
from sim.workload.spec import parse
from sim.workload.streams import require_rate, stream, unit_arrivals
from sim.workload.users import Users

MAX_CV = 100.0
HOURS = 24


class Arrivals(Protocol):
    """Comes by the clock, at `rate` a second in the long run."""

    @property
    def rate(self) -> float: ...

    def times(self, num: int, seed: int) -> list[float]:
        """Seconds, rising; more of them only extend the sequence."""

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Poisson:
    rate: float

    def __str__(self) -> str:
        return "Poisson"

    def times(self, num: int, seed: int) -> list[float]:
        return _scaled(unit_arrivals(num, seed), self.rate)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps from a gamma distribution of shape 1 / cv**2."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _require("gamma", "cv", self.cv, 0.01, MAX_CV)

    def __str__(self) -> str:
        return f"gamma with CV {self.cv:g} (a burstiness of {self.cv**-2:g} in vLLM)"

    def times(self, num: int, seed: int) -> list[float]:
        shape = self.cv**-2
        return _scaled(np.cumsum(stream(seed, "arrivals").standard_gamma(shape, num)) / shape, self.rate)


@dataclass(frozen=True, slots=True)
class Weibull:
    """Gaps from a Weibull distribution: at equal CV fewer tiny gaps than gamma, and a longer tail."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _require("weibull", "cv", self.cv, 0.01, MAX_CV)

    def __str__(self) -> str:
        return f"Weibull with CV {self.cv:g}"

    def times(self, num: int, seed: int) -> list[float]:
        power = 1 / _weibull_shape(self.cv)
        gaps = stream(seed, "arrivals").standard_exponential(num) ** power
        return _scaled(np.cumsum(gaps) / math.gamma(1 + power), self.rate)


def _weibull_shape(cv: float) -> float:
    """Where Gamma(1 + 2/k) / Gamma(1 + 1/k)**2 - 1 is cv**2; it falls as k grows, so halving finds it."""
    low, high = 0.05, 200.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        excess = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle) - math.log1p(cv**2)
        low, high = (middle, high) if excess > 0 else (low, middle)
    return math.sqrt(low * high)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson at a high rate and at `low` times that rate by turns, for exponential times of mean `on` and `off`.

    A Markov-modulated Poisson process of two states; the rates are such that `rate` is the mean.
    """

    rate: float
    on: float
    off: float
    low: float = 0.0

    def __post_init__(self) -> None:
        _require("onoff", "on", self.on, 1e-3, 1e9)
        _require("onoff", "off", self.off, 1e-3, 1e9)
        _require("onoff", "low", self.low, 0.0, 1.0)

    def __str__(self) -> str:
        return f"on-off Poisson ({self.on:g} s on, {self.off:g} s at {self.low:g} times that rate, on average)"

    @property
    def on_rate(self) -> float:
        return self.rate * (self.on + self.off) / (self.on + self.low * self.off)

    def times(self, num: int, seed: int) -> list[float]:
        work = unit_arrivals(num, seed)
        rates = np.array([self.on_rate, self.on_rate * self.low])
        return _stretched(work, *self._phases(float(work[-1]) if num else 0.0, rates, seed))

    def _phases(
        self, work: float, rates: NDArray[np.float64], seed: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Durations and rates of as many phases as `work` arrivals are expected to fill."""
        generator = stream(seed, "phases")
        first = int(generator.random() * (self.on + self.off) >= self.on)
        means, num = np.array([self.on, self.off]), 64
        draws = generator.standard_exponential(num)
        while True:
            which = (np.arange(num) + first) % 2
            durations = draws * means[which]
            if durations @ rates[which] > work:
                return durations, rates[which]
            draws, num = np.concatenate([draws, generator.standard_exponential(num)]), 2 * num


@dataclass(frozen=True, slots=True)
class Day:
    """Poisson whose rate follows a day: 24 hourly factors, quietest at the start, `peak_to_mean` in the middle.

    `rate` is the mean over a whole `period`, in seconds; hours shrink with it. Factors follow the exponential of a
    cosine, which a service's day resembles: a long night, a rounded noon.
    """

    rate: float
    peak_to_mean: float
    period: float = 86_400.0

    def __post_init__(self) -> None:
        _require("day", "peak_to_mean", self.peak_to_mean, 1.0, HOURS / 2)
        _require("day", "period", self.period, 1.0, 1e9)

    def __str__(self) -> str:
        factors = self.factors()
        low, high = factors.min(), factors.max()
        return f"Poisson ({low:.2g} to {high:.3g} times the mean over {self.period:g} s, quietest first)"

    def factors(self) -> NDArray[np.float64]:
        """One an hour; their mean is 1."""
        cosine = -np.cos(2 * np.pi * np.arange(HOURS) / HOURS) - 1
        low, high = 0.0, 500.0
        for _ in range(100):
            sharpness = (low + high) / 2
            too_flat = 1 / np.exp(sharpness * cosine).mean() < self.peak_to_mean
            low, high = (sharpness, high) if too_flat else (low, sharpness)
        shape = np.exp(low * cosine)
        return np.asarray(shape / shape.mean())

    def times(self, num: int, seed: int) -> list[float]:
        work = unit_arrivals(num, seed)
        hour = self.period / HOURS
        days = math.ceil((float(work[-1]) if num else 0.0) / (self.rate * self.period)) + 1
        return _stretched(work, np.full(HOURS * days, hour), self.rate * np.tile(self.factors(), days))


PROCESSES: dict[str, Callable[..., Arrivals | Users]] = {
    "azure-code": CodeBursts,
    "closed": Users,
    "day": Day,
    "gamma": Gamma,
    "onoff": OnOff,
    "poisson": Poisson,
    "trace": recorded,
    "weibull": Weibull,
}


def parse_arrivals(text: str, rate: float | None, default_rate: float = 1.0) -> Arrivals | Users:
    """`poisson`, `gamma,cv=3`, `weibull,cv=2`, `onoff,on=10,off=30`, `day,peak_to_mean=2`, `azure-code`,
    `trace,file=day.csv`, `closed,users=32,think=5`.

    `rate` in requests a second, `default_rate` where it is None; a trace keeps its own, users have none.
    Raises ValueError of one line.
    """
    name = text.split(",")[0].split("=")[0].strip()
    make = parse("arrivals", text, PROCESSES, num_given=0 if name == "closed" else 1)
    if name == "closed":
        if rate is not None:
            raise ValueError(f"rate ({rate:g}) has no meaning for closed arrivals: users and think times set it")
        return make()
    if rate is not None or name != "trace":
        rate = default_rate if rate is None else rate
        require_rate(rate)
    return make(rate)


def _require(name: str, knob: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{knob} ({value:g}) of {name} arrivals must be from {low:g} to {high:g}")


def _scaled(unit: NDArray[np.float64], rate: float) -> list[float]:
    times: list[float] = (unit / rate).tolist()
    return times


def _stretched(work: NDArray[np.float64], durations: NDArray[np.float64], rates: NDArray[np.float64]) -> list[float]:
    """When each amount of `work` is done that piles up at `rates`, one after another for `durations`."""
    piles = np.cumsum(durations * rates)
    which = np.searchsorted(piles, work)
    left = piles[which] - work  # counted back from the end: a rate of 0 never stands there
    times = np.cumsum(durations)[which] - left / rates[which]
    in_order: list[float] = np.maximum.accumulate(times).tolist()  # where phases meet, rounding may swap two
    return in_order

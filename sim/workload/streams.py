"""Random draws: each stream has a generator of its own, so that a change to one never shifts another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_RATE, MAX_RATE = 1e-9, 1e9  # requests a second: one in 30 years, one a nanosecond


def stream(seed: int, name: str) -> np.random.Generator:
    """Draws depend on seed, name and index alone: more of them only extend the sequence."""
    if seed < 0:
        raise ValueError(f"seed ({seed}) must be 0 or more")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))))


def require_rate(rate: float) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(
            f"rate ({rate}) must be a finite number of requests a second above 0, from {MIN_RATE:g} to {MAX_RATE:g}"
        )


def poisson_arrivals(rate: float, num: int, seed: int) -> list[float]:
    """Seconds, from an empty start at 0: the first request comes after a gap too."""
    require_rate(rate)
    gaps = stream(seed, "arrivals").standard_exponential(num)
    return [float(time) for time in np.cumsum(gaps) / rate]


def lognormal_lengths(generator: np.random.Generator, num: int, median: int, sigma: float, most: int) -> list[int]:
    """Whole tokens from 1 to `most`; sigma is that of the logarithm."""
    lengths = np.exp(np.log(median) + sigma * generator.standard_normal(num))
    return [int(length) for length in np.clip(np.rint(lengths), 1, most)]


def weighted_choice(generator: np.random.Generator, num: int, weights: Sequence[float]) -> list[int]:
    """Indices; one uniform each, so that draw i never depends on how many are asked for."""
    edges = np.cumsum(weights) / np.sum(weights)
    return [int(index) for index in np.searchsorted(edges[:-1], generator.random(num), side="right")]

"""Random draws: each stream has a generator of its own, so that a change to one never shifts another.

Two policies see the same work because nothing here depends on what a run does: draw i of a stream belongs to request i,
and a keyed draw to the request of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

MIN_RATE, MAX_RATE = 1e-9, 1e9  # requests a second: one in 30 years, one a nanosecond


def stream(seed: int, name: str) -> np.random.Generator:
    """Draws depend on seed, name and index alone: more of them only extend the sequence."""
    _require_seed(seed)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))))


def keyed_uniforms(seed: int, name: str, keys: Iterable[str]) -> NDArray[np.float64]:
    """From 0 to below 1, of seed, name and key alone: a request keeps its draw whatever stands beside it."""
    _require_seed(seed)
    secret = blake2b(f"{seed}/{name}".encode()).digest()
    hashes = (blake2b(key.encode(), key=secret, digest_size=8).digest() for key in keys)
    return np.array([int.from_bytes(each, "big") >> 11 for each in hashes], dtype=np.float64) * 2.0**-53


def _require_seed(seed: int) -> None:
    if seed < 0:
        raise ValueError(f"seed ({seed}) must be 0 or more")


def require_rate(rate: float) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(
            f"rate ({rate}) must be a finite number of requests a second above 0, from {MIN_RATE:g} to {MAX_RATE:g}"
        )


def unit_arrivals(num: int, seed: int) -> NDArray[np.float64]:
    """Poisson arrivals at one a second, which every rate and every changing rate stretches: more load, same luck."""
    return np.cumsum(stream(seed, "arrivals").standard_exponential(num))


def poisson_arrivals(rate: float, num: int, seed: int) -> list[float]:
    """Seconds, from an empty start at 0: the first request comes after a gap too."""
    require_rate(rate)
    return [float(time) for time in unit_arrivals(num, seed) / rate]


def lognormal_lengths(generator: np.random.Generator, num: int, median: int, sigma: float, most: int) -> list[int]:
    """Whole tokens from 1 to `most`; sigma is that of the logarithm."""
    lengths = np.exp(np.log(median) + sigma * generator.standard_normal(num))
    return [int(length) for length in np.clip(np.rint(lengths), 1, most)]


def weighted_choice(generator: np.random.Generator, num: int, weights: Sequence[float]) -> list[int]:
    """Indices; one uniform each, so that draw i never depends on how many are asked for."""
    edges = np.cumsum(weights) / np.sum(weights)
    return [int(index) for index in np.searchsorted(edges[:-1], generator.random(num), side="right")]


def zipf_weights(num: int, exponent: float) -> list[float]:
    """Of ranks 1 to num; exponent 0 makes all alike."""
    return [(rank + 1) ** -exponent for rank in range(num)]

"""Measured times of one operation, checked before anything is fitted to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.cost.kinds import Kind

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

FEWEST = 12  # points that a fit needs, or figures about it
ABOVE_CEILING = 1.03  # of a ceiling: what no measurement can reach
LONGEST, SHORTEST = 1.0, 5e-7  # seconds of a typical launch
WELL_USED = 0.02  # of a ceiling, that the best row reaches at least: a thousandth means that times are in milliseconds
MOST_REJECTED = 0.2  # of all rows: more are no outliers


@dataclass(frozen=True, slots=True)
class Samples:
    """points [num, counts and sizes of the kind], times [num] in seconds."""

    kind: Kind
    points: Floats
    times: Floats

    def __post_init__(self) -> None:
        names = (*self.kind.counts, *self.kind.shape)
        if self.points.ndim != 2 or self.points.shape != (len(self.times), len(names)):
            raise ValueError(
                f"{self.kind.name}: points of shape {self.points.shape} for {len(self.times)} times: a column each of "
                f"{', '.join(names)} wanted"
            )
        if not len(self.times):
            raise ValueError(f"{self.kind.name}: no points")
        for what, values in (("count", self.points), ("time", self.times)):
            if not np.isfinite(values).all():
                raise ValueError(f"{self.kind.name}: a {what} is not a finite number")
            if values.min() < 0.0 or (what == "time" and values.min() == 0.0):
                raise ValueError(f"{self.kind.name}: a {what} of {values.min():g}: no measurement gives that")
        middle = float(np.median(self.times))
        if not SHORTEST <= middle <= LONGEST:
            raise ValueError(
                f"{self.kind.name}: half of all launches take over {middle:g} s: times are in seconds, are these?"
            )

    def where(self, chosen: Mask) -> Samples:
        return Samples(self.kind, self.points[chosen], self.times[chosen])

    def terms(self) -> Floats:
        """[num, terms]."""
        return np.array([self.kind.terms(*point) for point in self.points.tolist()])

    def column(self, name: str) -> Floats:
        return self.points[:, (*self.kind.counts, *self.kind.shape).index(name)]

    @property
    def hull(self) -> dict[str, tuple[float, float]]:
        names = (*self.kind.counts, *self.kind.shape)
        lows, highs = self.points.min(axis=0).tolist(), self.points.max(axis=0).tolist()
        return {name: (low, high) for name, low, high in zip(names, lows, highs, strict=True)}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device cannot exceed, from its datasheet or measured beside the samples."""

    bytes_per_second: float
    flops_per_second: float
    l2_bytes: float  # so many bytes may come from the cache


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be."""

    point: tuple[float, ...]
    time: float
    reason: str


def screened(samples: Samples, ceilings: Ceilings) -> tuple[Samples, list[Rejected]]:
    """Without the samples that beat a ceiling by more than 3 %, and those, each with its reason.

    Raises ValueError where the unit of the times must be another: no row comes near a ceiling, or many beat one.
    """
    terms = dict(zip(samples.kind.names, samples.terms().T, strict=True))
    none = np.zeros(len(samples.times))
    moved = sum((terms.get(name, none) for name in ("kv_bytes", "weight_bytes", "row_bytes")), none)
    bandwidth = np.maximum(moved - ceilings.l2_bytes, 0.0) / samples.times / ceilings.bytes_per_second
    compute = terms.get("flops", none) / samples.times / ceilings.flops_per_second
    _check_unit(samples.kind.name, np.maximum(bandwidth, compute))
    bad = (bandwidth > ABOVE_CEILING) | (compute > ABOVE_CEILING)
    reasons = [
        f"{100 * b:.0f} % of the memory's bandwidth" if b > ABOVE_CEILING else f"{100 * c:.0f} % of the peak FLOP/s"
        for b, c in zip(bandwidth[bad], compute[bad], strict=True)
    ]
    rejected = [
        Rejected(tuple(point), time, reason)
        for point, time, reason in zip(samples.points[bad].tolist(), samples.times[bad].tolist(), reasons, strict=True)
    ]
    return samples.where(~bad), rejected


def _check_unit(name: str, used: Floats) -> None:
    """`used`: of each row the share of the ceiling that it comes nearest to."""
    if used.max() < WELL_USED:
        raise ValueError(
            f"{name}: no row reaches {100 * WELL_USED:g} % of the device: times are in seconds, are these?"
        )
    if (beyond := float(np.mean(used > ABOVE_CEILING))) > MOST_REJECTED:
        raise ValueError(
            f"{name}: {100 * beyond:.0f} % of the rows beat the device's ceilings: another device's, or not in seconds?"
        )

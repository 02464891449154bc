"""How latencies are spread, by class of request: curves of what clients saw where there are clients, else engines.

A CDF of many values is thinned to values that really occurred, extremes included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.conventions import tpot
from sim.simulate import Run
from sim.timings import Timings, timings

Floats = NDArray[np.float64]

OTHERS = "other classes"
TAIL = 100  # greatest values that a thinned CDF keeps, all of them


@dataclass(frozen=True, slots=True)
class Latencies:
    """In seconds, an entry an answered request; nan where the convention gives it no TPOT."""

    ttft: Floats
    tpot: Floats
    e2e: Floats


class Curve(NamedTuple):
    x: Floats
    y: Floats


def largest_classes(runs: Iterable[Run], most: int) -> list[str]:
    """Those with most requests in all runs, by name: one less than `most` if that is too few for all."""
    counts = Counter(record.class_name for run in runs for record in run.records)
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    return sorted(ranked if len(ranked) <= most else ranked[: most - 1])


def by_class(run: Run, shown: Sequence[str], convention: str = "vllm") -> dict[str, Latencies]:
    """Of the classes shown, in their order, and of all others as one. Classes without an answer are left out."""
    found = timings(run)
    names = np.array([each.class_name if each.class_name in shown else OTHERS for each in found.records], dtype=str)
    groups = {name: _latencies(found, names == name, convention) for name in (*shown, OTHERS)}
    return {name: group for name, group in groups.items() if len(group.e2e)}


def _latencies(found: Timings, chosen: NDArray[np.bool_], convention: str) -> Latencies:
    done = found.completed & chosen
    arrivals, firsts, lasts = found.arrivals[done], found.firsts[done], found.lasts[done]
    return Latencies(
        firsts - arrivals, tpot(convention, arrivals, firsts, lasts, found.nums[done]), lasts - arrivals
    )  # fmt: skip


def cdf(values: Floats, most: int) -> Curve:
    """Steps from (least, 0) to (greatest, 1), nan left out; beyond `most` points, even ones and the greatest."""
    known = np.sort(values[~np.isnan(values)])
    num = len(known)
    if not num:
        return Curve(known, known)
    tail = min(TAIL, most // 4)
    keep = np.arange(num)
    if num >= most:
        keep = np.union1d(np.linspace(0, num - 1, most - tail - 1).astype(int), keep[-tail:])
    return Curve(np.append(known[0], known[keep]), np.append(0.0, (keep + 1) / num))

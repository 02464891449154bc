"""How long one operation takes, from a fit: priced terms times a factor that was found at the nodes of a grid.

Between nodes the factor is interpolated; beyond the measured range it fades to 1, half of it an octave, so that what is
extrapolated are the terms. For a model's shape all of it becomes a table that never falls as a count grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise

from sim.cost.kinds import Kind, octaves_beyond
from sim.cost.surface import Line, Surface, monotone

NORMS = (1.0, 2.0, 4.0, math.inf)


@dataclass(frozen=True, slots=True)
class Grid:
    """`axes`: nodes of some counts and sizes; `factors` at each of their combinations, the last axis fastest."""

    axes: Mapping[str, tuple[float, ...]]
    factors: tuple[float, ...]
    _surface: Surface = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        num_nodes = math.prod(len(nodes) for nodes in self.axes.values())
        if not self.axes or len(self.factors) != num_nodes or min(self.factors) <= 0.0:
            raise ValueError(f"{num_nodes} factors above 0 wanted for axes {list(self.axes)}, got {len(self.factors)}")
        if any(low >= high for nodes in self.axes.values() for low, high in pairwise(nodes)):
            raise ValueError(f"nodes of {list(self.axes)} must rise along each axis")
        object.__setattr__(self, "_surface", Surface(tuple(self.axes.values()), self.factors))

    def factor(self, point: Mapping[str, float], decays: bool) -> float:
        """Beyond the nodes the nearest factor, which fades with every octave if it `decays`."""
        known = [point[name] for name in self.axes]
        factor = self._surface.at(known)
        if not decays or factor == 1.0:
            return factor
        ends = [(nodes[0], nodes[-1]) for nodes in self.axes.values()]
        away = max(octaves_beyond(x, *end) for x, end in zip(known, ends, strict=True))
        return 1.0 + (factor - 1.0) * _halved(away)


@dataclass(frozen=True, slots=True)
class OpModel:
    """`prices`: seconds a unit of each term, in the order of kind.names. `norm` joins memory and compute: 1 adds them,
    infinity takes the larger. `grids` hold factors on the terms' time, all multiplied. `hull`: least and greatest of
    each count and size that was measured. `draws`: prices of bootstrap draws. 68 % of held-out points lay within
    e**`spread` of their prediction, beyond the measured range e**`far_spread`; a draw is off by `score` times that.
    """

    kind: Kind
    prices: tuple[float, ...]
    norm: float = 1.0
    grids: tuple[Grid, ...] = ()
    hull: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    draws: tuple[tuple[float, ...], ...] = ()
    spread: float = 0.0
    far_spread: float = 0.0
    score: float = 0.0

    def __post_init__(self) -> None:
        kind = self.kind
        if self.norm not in NORMS:
            raise ValueError(f"norm ({self.norm}) must be one of {', '.join(map(str, NORMS))}")
        for prices in (self.prices, *self.draws):
            if len(prices) != len(kind.names) or min(prices) < 0.0:
                raise ValueError(f"{kind.name}: {len(kind.names)} prices of 0 or more wanted, got {prices}")
        for name in (*self.hull, *(name for grid in self.grids for name in grid.axes)):
            if name not in self.names:
                raise ValueError(f"{kind.name} has no count or size {name!r}; it has {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers of a point: counts, then shape."""
        return (*self.kind.counts, *self.kind.shape)

    def terms_time(self, *point: float) -> float:
        """Seconds of the terms alone."""
        memory = compute = time = 0.0
        kind = self.kind
        for name, price, term in zip(kind.names, self.prices, kind.terms(*point), strict=True):
            if self.norm != 1.0 and name in kind.memory:
                memory += price * term
            elif self.norm != 1.0 and name in kind.compute:
                compute += price * term
            else:
                time += price * term
        return time + _joined(memory, compute, self.norm)

    def fitted_time(self, *point: float) -> float:
        """Seconds before they are made to rise with every count: what a fit is judged by, point by point."""
        time = self.terms_time(*point) * self._correction(point)
        return time * math.exp(self.score * self.spread_at(*point)) if self.score else time

    def _correction(self, point: Sequence[float]) -> float:
        named = dict(zip(self.names, point, strict=True))
        return math.prod(grid.factor(named, self.kind.decays) for grid in self.grids)

    def outside(self, *point: float) -> float:
        """Octaves beyond the measured range, in the count or size that is farthest."""
        farthest = 0.0
        for name, x, unit in zip(self.names, point, self.kind.units(*point), strict=True):
            if name in self.hull:
                farthest = max(farthest, octaves_beyond(x, *self.hull[name], unit))
        return farthest

    def drawn(self, number: int, score: float) -> OpModel:
        """With the prices of a bootstrap draw, and all times off by `score` times what held-out points were off by."""
        prices = self.draws[number % len(self.draws)] if self.draws else self.prices
        return replace(self, prices=prices, score=score)

    def spread_at(self, *point: float) -> float:
        """Of log times, 68 %: within the measured range, and added to it within the first octave outside."""
        far = min(1.0, self.outside(*point)) * self.far_spread
        return math.hypot(self.spread, far) if far else self.spread

    def shaped(self, *shape: float) -> ShapedOp:
        """For a model's sizes: fast to ask, and rising with every count."""
        nodes = [set(grid) for grid in self.kind.grid]
        for grid in self.grids:
            for known, name in zip(nodes, self.kind.counts, strict=True):
                known.update(grid.axes.get(name, ()))
        surface = Surface(tuple(tuple(sorted(known)) for known in nodes), ())
        times = tuple(self._fitted_times(surface.points(), shape))
        return ShapedOp(monotone(replace(surface, values=times)), self, shape)

    def _fitted_times(self, points: Sequence[tuple[float, ...]], shape: tuple[float, ...]) -> Iterator[float]:
        """As fitted_time; points that differ in no corrected count share their correction."""
        corrected = [any(name in grid.axes for grid in self.grids) for name in self.kind.counts]
        known: dict[tuple[float, ...], float] = {}
        for counts in points:
            key = tuple(compress(counts, corrected))
            if key not in known:
                known[key] = self._correction((*counts, *shape))
            time = self.terms_time(*counts, *shape) * known[key]
            yield time * math.exp(self.score * self.spread_at(*counts, *shape)) if self.score else time


@dataclass(frozen=True, slots=True)
class ShapedOp:
    """One launch for a model's shape, at any counts."""

    surface: Surface
    model: OpModel
    shape: tuple[float, ...]

    def time(self, *counts: float) -> float:
        """Seconds; beyond the last node in proportion."""
        time = self.surface.at(counts)
        for x, nodes in zip(counts, self.surface.axes, strict=True):
            if x > nodes[-1]:
                time *= x / nodes[-1]
        return time

    def line(self, first: float) -> Line:
        """With the first of two counts fixed: times by the other."""
        nodes, fixed = self.surface.axes[0], self.surface.fixed(0, first)
        beyond = max(1.0, first / nodes[-1])
        return Line(fixed.axes[0], tuple(beyond * time for time in fixed.values))

    def outside(self, *counts: float) -> float:
        return self.model.outside(*counts, *self.shape)


def _joined(memory: float, compute: float, norm: float) -> float:
    if norm == 1.0 or memory == 0.0 or compute == 0.0:
        return memory + compute
    low, high = min(memory, compute), max(memory, compute)
    if math.isinf(norm):
        return high
    share = (low / high) ** 2
    return high * (math.sqrt(1.0 + share) if norm == 2.0 else math.sqrt(math.sqrt(1.0 + share * share)))


def _halved(times: float) -> float:
    """2 ** -times, linear between whole numbers: the same bits on every machine."""
    whole = math.floor(times)
    return math.ldexp(1.0 - 0.5 * (times - whole), -whole)

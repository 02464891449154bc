"""A table of times that never falls as a count grows, read between its nodes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product


@dataclass(frozen=True, slots=True)
class Surface:
    """`values` lie at the nodes of all axes, the last axis varying fastest; nodes rise along each axis."""

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def at(self, point: Sequence[float]) -> float:
        """Linear in each count between nodes; outside, the value at the nearest edge.

        Where values do not fall along an axis, neither does this: it is their weighted mean, and weights only move on.
        """
        values: Sequence[float] = self.values
        for nodes, x in zip(self.axes, point, strict=True):
            size = len(values) // len(nodes)
            i, share = _place(nodes, x)
            low = values[i * size : (i + 1) * size]
            if share == 0.0:
                values = low
                continue
            high = values[(i + 1) * size : (i + 2) * size]
            values = [a + share * (b - a) for a, b in zip(low, high, strict=True)]
        return values[0]

    def fixed(self, axis: int, x: float) -> Surface:
        """The slice at x, an axis less."""
        nodes = self.axes[axis]
        inner = _size(self.axes[axis + 1 :])
        i, share = _place(nodes, x)
        values = [
            low if share == 0.0 else low + share * (self.values[at + inner] - low)
            for outer in range(_size(self.axes[:axis]))
            for at in range((outer * len(nodes) + i) * inner, (outer * len(nodes) + i + 1) * inner)
            for low in (self.values[at],)
        ]
        return Surface(self.axes[:axis] + self.axes[axis + 1 :], tuple(values))

    def points(self) -> list[tuple[float, ...]]:
        return list(product(*self.axes))


def _place(nodes: tuple[float, ...], x: float) -> tuple[int, float]:
    """The node at or below x, and how far x is on the way to the next; the nearest end for what lies outside."""
    if x <= nodes[0]:
        return 0, 0.0
    if x >= nodes[-1]:
        return len(nodes) - 1, 0.0
    i = bisect_right(nodes, x) - 1
    return i, (x - nodes[i]) / (nodes[i + 1] - nodes[i])


def _size(axes: tuple[tuple[float, ...], ...]) -> int:
    size = 1
    for nodes in axes:
        size *= len(nodes)
    return size


def monotone(surface: Surface) -> Surface:
    """The mean of the least rising surface above and the greatest beneath: rising along every axis, and near both."""
    above, beneath = list(surface.values), list(surface.values)
    for axis, nodes in enumerate(surface.axes):
        inner, step = _size(surface.axes[axis + 1 :]), _size(surface.axes[axis:])
        for start in range(0, len(above), step):
            for offset in range(start, start + inner):
                line = range(offset, offset + len(nodes) * inner, inner)
                for previous, here in pairwise(line):
                    above[here] = max(above[here], above[previous])
                for here, following in zip(reversed(line[:-1]), reversed(line[1:]), strict=True):
                    beneath[here] = min(beneath[here], beneath[following])
    return Surface(surface.axes, tuple(0.5 * (a + b) for a, b in zip(above, beneath, strict=True)))


@dataclass(frozen=True, slots=True)
class Line:
    """A table of one count; beyond its last node in proportion."""

    nodes: tuple[float, ...]
    times: tuple[float, ...]

    def at(self, x: float) -> float:
        nodes = self.nodes
        if x <= nodes[0]:
            return self.times[0]
        if x >= nodes[-1]:
            return self.times[-1] * (x / nodes[-1])
        i = bisect_right(nodes, x)
        low, before = self.times[i - 1], nodes[i - 1]
        return low + (x - before) / (nodes[i] - before) * (self.times[i] - low)

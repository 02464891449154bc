"""Prices of an operation's terms from measured times, and factors where the terms alone miss.

Prices: non-negative least squares on relative errors, reweighted by Huber's rule, so that a few odd rows weigh little
and each price means what its term says. A roofline joins memory and compute by a p-norm instead of adding them.
Factors: log residuals at the nodes of a grid, smoothed where there are few points. Which form an operation gets is
decided by cross-validation, in calibration/choose.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import least_squares, nnls
from scipy.sparse.linalg import spsolve

from calibration.samples import FEWEST, Floats, Samples
from sim.cost.kinds import Kind
from sim.cost.op_model import Grid, OpModel

HUBER = 0.05  # relative errors beyond it weigh by their size, not its square
ROUNDS = 15
FACTOR_ROUNDS = 4
NUM_DRAWS = 32
LARGEST_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Form:
    """How an operation is fitted. `grids`: nodes of the factors, by count or size; none: terms alone. `smooth`: what a
    change of slope between neighbouring nodes weighs against one point's error. `without`: terms left out.
    """

    name: str
    norm: float = 1.0
    grids: tuple[Mapping[str, tuple[float, ...]], ...] = ()
    smooth: float = 0.03
    without: tuple[str, ...] = ()


def fit(samples: Samples, form: Form, num_draws: int = 0, seed: int = 0) -> OpModel:
    """Raises ValueError where there are too few samples."""
    if len(samples.times) < FEWEST:
        raise ValueError(f"{samples.kind.name}: {len(samples.times)} points, a fit needs {FEWEST}: measure more")
    terms = samples.terms()
    prices, weights = _prices(samples, terms, form)
    grids: tuple[Grid, ...] = ()
    if form.grids:
        ratios = np.log(samples.times / _times(samples.kind, terms, prices, form.norm))
        grids = fitted_grids(samples, [_inside(nodes, samples) for nodes in form.grids], ratios, form.smooth)
    draws = _draws(samples, terms, form, prices, weights, num_draws, seed)
    return OpModel(samples.kind, tuple(prices.tolist()), form.norm, grids, samples.hull, draws)


def predicted(model: OpModel, samples: Samples) -> Floats:
    """Seconds of each sample."""
    return np.array([model.fitted_time(*point) for point in samples.points.tolist()])


# -- prices -----------------------------------------------------------------------------------------------------------


def _prices(samples: Samples, terms: Floats, form: Form) -> tuple[Floats, Floats]:
    """And the weight of each sample in the last round."""
    prices, weights = additive_prices(terms, samples.times, [n not in form.without for n in samples.kind.names])
    if form.norm == 1.0:
        return prices, weights
    return _roofline_prices(samples, terms, form.norm, prices), np.ones(len(samples.times))


def additive_prices(terms: Floats, times: Floats, allowed: Sequence[bool] | None = None) -> tuple[Floats, Floats]:
    """Prices of 0 or more that least miss in relative terms, and each sample's weight."""
    relative, scale = _scaled(terms if allowed is None else terms * np.asarray(allowed, dtype=np.float64), times)
    weights, prices = np.ones(len(times)), np.zeros(terms.shape[1])
    for _ in range(ROUNDS):
        prices = _weighted_nnls(relative, weights)
        errors = np.abs(relative @ prices - 1.0)
        weights = np.where(errors <= HUBER, 1.0, HUBER / np.maximum(errors, HUBER))
    return prices / scale, weights


def _weighted_nnls(relative: Floats, weights: Floats) -> Floats:
    """Prices for which each row's sum is nearest 1; the triangle of a QR holds all that matters of many rows."""
    root = np.sqrt(weights)
    triangle: Floats = np.asarray(np.linalg.qr(np.column_stack((relative * root[:, None], root)), mode="r"))
    prices: Floats = nnls(triangle[:, :-1], triangle[:, -1])[0]
    return prices


def _times(kind: Kind, terms: Floats, prices: Floats, norm: float) -> Floats:
    """As OpModel.terms_time, for all rows."""
    priced = terms * prices
    if norm == 1.0:
        return np.asarray(priced.sum(axis=1))
    groups = (kind.memory, kind.compute)
    memory, compute = (priced[:, np.array([n in group for n in kind.names])].sum(axis=1) for group in groups)
    rest = priced[:, np.array([n not in kind.memory + kind.compute for n in kind.names])].sum(axis=1)
    if math.isinf(norm):
        return np.asarray(rest + np.maximum(memory, compute))
    return np.asarray(rest + (memory**norm + compute**norm) ** (1.0 / norm))


def _roofline_prices(samples: Samples, terms: Floats, norm: float, start: Floats) -> Floats:
    """Least squares on log ratios, in logs of prices; from the additive ones, those of 0 from a thousandth."""
    typical = np.median(samples.times) / np.where(terms.any(axis=0), terms.mean(axis=0), 1.0)
    begin = np.log(np.maximum(start, 1e-3 * typical))

    def misses(logs: Floats) -> Floats:
        return np.log(_times(samples.kind, terms, np.exp(logs), norm) / samples.times)

    found = least_squares(misses, begin, loss="soft_l1", f_scale=HUBER)
    return np.exp(np.asarray(found.x))


def _draws(
    samples: Samples, terms: Floats, form: Form, prices: Floats, weights: Floats, num: int, seed: int
) -> tuple[tuple[float, ...], ...]:
    """Prices of bootstrap resamples, whole blocks of one shape at a time: rows of a shape share their errors.

    Each is one step of least squares from the fit, at the weights it ended with.
    """
    rng = np.random.default_rng(seed)
    blocks = _blocks(samples)
    draws = []
    for _ in range(num):
        counts = np.bincount(rng.integers(0, blocks.max() + 1, blocks.max() + 1), minlength=blocks.max() + 1)[blocks]
        draws.append(tuple(_redrawn(samples, terms, form, prices, weights * counts).tolist()))
    return tuple(draws)


def _redrawn(samples: Samples, terms: Floats, form: Form, prices: Floats, weights: Floats) -> Floats:
    if form.norm == 1.0:
        return additive_at(terms * (prices > 0.0), samples.times, weights)
    times, used = _times(samples.kind, terms, prices, form.norm), prices > 0.0
    step = 1e-4
    slopes = np.column_stack(
        [
            np.log(_times(samples.kind, terms, prices * np.where(np.arange(len(prices)) == i, 1 + step, 1), form.norm))
            - np.log(times)
            for i in np.flatnonzero(used)
        ]
    ) / math.log1p(step)  # fmt: skip
    misses, root = np.log(samples.times / times), np.sqrt(weights)
    misses = np.clip(misses, -HUBER, HUBER)
    moved = np.linalg.lstsq(slopes * root[:, None], misses * root, rcond=1e-6)[0]
    drawn = prices.copy()
    drawn[used] *= np.exp(np.clip(moved, -1.0, 1.0))
    return drawn


def additive_at(terms: Floats, times: Floats, weights: Floats) -> Floats:
    """Prices at given weights."""
    relative, scale = _scaled(terms, times)
    prices: Floats = _weighted_nnls(relative, weights) / scale
    return prices


def _scaled(terms: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Terms in units of each row's time, the largest of a column being 1, and what that took."""
    relative = terms / times[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0.0] = 1.0
    return relative / scale, scale


def _blocks(samples: Samples) -> np.typing.NDArray[np.int64]:
    """The number of each sample's shape; where there is one shape only, every sample is a block."""
    shape = samples.points[:, len(samples.kind.counts) :]
    numbers = np.unique(shape, axis=0, return_inverse=True)[1].ravel() if shape.shape[1] else np.zeros(1, dtype=int)
    return numbers if numbers.max() >= 7 else np.arange(len(samples.times))


# -- factors ----------------------------------------------------------------------------------------------------------


def _inside(nodes: Mapping[str, tuple[float, ...]], samples: Samples) -> dict[str, tuple[float, ...]]:
    """Nodes that samples surround, of counts and sizes that vary; the ends are those of the samples."""
    kept = {}
    for name in (*samples.kind.counts, *samples.kind.shape):
        low, high = samples.hull[name]
        if name in nodes and low < high:
            kept[name] = (low, *(x for x in nodes[name] if low < x < high), high)
    return kept


def fitted_grids(
    samples: Samples, grids: Sequence[Mapping[str, tuple[float, ...]]], ratios: Floats, smooth: float
) -> tuple[Grid, ...]:
    """Factors at the nodes of all grids at once: smooth log residuals, by least squares with Huber's weights."""
    grids = [axes for axes in grids if axes]
    here = sparse.hstack([_between([samples.column(n) for n in axes], list(axes.values())) for axes in grids]).tocsr()
    bend = sparse.block_diag([_bending(list(axes.values()), smooth) for axes in grids]).tocsr()
    weights, found = np.ones(len(ratios)), np.zeros(here.shape[1])
    for _ in range(FACTOR_ROUNDS):
        left = (here.T @ sparse.diags_array(weights) @ here + bend).tocsc()
        found = spsolve(left, here.T @ (weights * ratios))
        errors = np.abs(here @ found - ratios)
        weights = np.where(errors <= HUBER, 1.0, HUBER / np.maximum(errors, HUBER))
    limit = math.log(LARGEST_FACTOR)
    factors = np.exp(np.clip(found, -limit, limit)).tolist()
    ends = np.cumsum([math.prod(map(len, axes.values())) for axes in grids]).tolist()
    return tuple(
        Grid(dict(axes), tuple(factors[start:end])) for axes, start, end in zip(grids, [0, *ends], ends, strict=False)
    )


def _between(columns: list[Floats], axes: list[tuple[float, ...]]) -> sparse.csr_array:
    """[samples, nodes]: the weights with which Surface.at reads the nodes around each sample."""
    num = len(columns[0])
    at, weights = np.zeros((num, 1), dtype=np.int64), np.ones((num, 1))
    for column, axis in zip(columns, axes, strict=True):
        nodes = np.array(axis)
        i = np.clip(np.searchsorted(nodes, column, side="right") - 1, 0, len(nodes) - 2)
        share = np.clip((column - nodes[i]) / (nodes[i + 1] - nodes[i]), 0.0, 1.0)[:, None]
        at = np.hstack((at * len(nodes) + i[:, None], at * len(nodes) + i[:, None] + 1))
        weights = np.hstack((weights * (1.0 - share), weights * share))
    shape = (num, math.prod(len(axis) for axis in axes))
    rows = np.repeat(np.arange(num), at.shape[1])
    return sparse.csr_array((weights.ravel(), (rows, at.ravel())), shape=shape)


def _bending(axes: list[tuple[float, ...]], smooth: float) -> sparse.csr_array:
    """A tenth of what a bend costs is the price of a slope, and a thousandth that of being away from the terms."""
    sizes = [len(axis) for axis in axes]
    total = (sparse.eye_array(math.prod(sizes)) * (1e-3 * smooth)).tocsr()
    for axis, size in enumerate(sizes):
        before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
        for order, price in ((1, 0.1 * smooth), (2, smooth)):
            if size > order:
                steps = np.diff(np.eye(size), order, axis=0)
                whole = sparse.kron(sparse.kron(sparse.eye_array(before), steps), sparse.eye_array(after))
                total = total + price * (whole.T @ whole).tocsr()
    return total

"""From kernel tables of one model on one GPU to a cost of whole steps: no run is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from calibration.fit import Form, fit
from calibration.forms import MIXED_GRIDS
from calibration.importers.kernel_tables import ONCE, PER_LAYER, KernelTables
from calibration.samples import Floats, Samples
from sim.cost.graphs import LARGEST_CAPTURE, capture_sizes, padded_sizes
from sim.cost.op_model import OpModel, ShapedOp
from sim.cost.surface import Line, Surface, monotone
from sim.cost.tabled import OneLaunch, Skew, TabledCost

# Nodes of the tables that are asked; the prefixes and contexts between them cost in proportion.
STARTS = (0.0, 128.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
CONTEXTS = (16.0, *(2.0**power for power in range(6, 15)))
DECODES = tuple(2.0**power for power in range(9))
NONE = (0.0,)
BOTH = Form("additive, factors", grids=MIXED_GRIDS, smooth=0.01)


def tabled_cost(tables: KernelTables, lengths: Sequence[tuple[int, int]], largest_capture: int = 512) -> TabledCost:
    """`lengths`: prompt and output tokens of the requests that will be served: how far the contexts of those that run
    together lie apart. A step's counts tell their mean alone."""
    dense = [(times, 1 if name in ONCE else PER_LAYER[name] * tables.model.num_layers)
             for name, times in tables.dense.items()]  # fmt: skip
    return TabledCost(
        _summed(dense),
        _summed([(times, 1) for times in tables.heads.values()]),
        one_launch(tables.attention),
        tables.model.num_layers,
        skew_of(tables.skew, lengths) if len(tables.skew) else None,
        tuple(padded_sizes(capture_sizes(min(LARGEST_CAPTURE, largest_capture)))),
    )


def _summed(tables: Sequence[tuple[Mapping[float, float], int]]) -> Line:
    nodes = sorted(tables[0][0])
    times = tuple(sum(num * times[x] for times, num in tables) for x in nodes)
    return Line(tuple(nodes), times)


# -- attention --------------------------------------------------------------------------------------------------------


def one_launch(samples: Samples) -> OneLaunch:
    """Three kinds of launches, each from its own rows: kernels split decodes and chunks alone otherwise than both."""
    chunk, decodes = samples.column("chunk"), samples.column("decodes")
    alone, prefix = samples.where(chunk == 0.0), samples.where(decodes == 0.0)
    both = samples.where((chunk > 0.0) & (decodes > 0.0))
    fine = tuple(x for x in samples.kind.grid[0] if x > 0.0)
    decode_axes = (NONE, NONE, _nodes(alone, "decodes"), _nodes(alone, "context"))
    chunk_axes = (tuple(sorted({*fine, *_nodes(prefix, "chunk")})), _nodes(prefix, "start"), NONE, NONE)
    return OneLaunch(
        decodes=_tabled(_exact(alone, ("decodes", "context")), decode_axes),
        chunk=_tabled(_exact(prefix, ("chunk", "start")), chunk_axes),
        both=_tabled(fit(both, BOTH), (fine, STARTS, DECODES, CONTEXTS)),
    )


def _exact(samples: Samples, names: tuple[str, str]) -> OpModel:
    """Terms, and at every measured combination the factor that they miss by."""
    return fit(samples, Form("additive, factors", grids=({name: _nodes(samples, name) for name in names},)))


def _nodes(samples: Samples, name: str) -> tuple[float, ...]:
    return tuple(np.unique(samples.column(name)).tolist())


def _tabled(fitted: OpModel, axes: tuple[tuple[float, ...], ...]) -> ShapedOp:
    surface = Surface(axes, ())
    times = tuple(fitted.fitted_time(*point) for point in surface.points())
    return ShapedOp(monotone(replace(surface, values=times)), fitted, ())


# -- contexts that differ ---------------------------------------------------------------------------------------------


def skew_of(rows: Floats, lengths: Sequence[tuple[int, int]]) -> Skew:
    """From the rows most like these requests: a mean context within an octave of theirs."""
    contexts = np.concatenate([np.arange(prompt, prompt + output) for prompt, output in lengths])
    longest = longest_of(contexts)
    away = np.abs(np.log2(rows[:, 2] / contexts.mean()))
    like = rows[away <= max(1.0, float(away.min()))]
    beside = like[:, 1] > 0.0
    return Skew(_shares(like[~beside], longest), _shares(like[beside], longest), longest)


def _shares(rows: Floats, longest: Surface) -> Surface:
    """By number of decodes: medians of rows that are alike in their longest context, and lines between these."""
    nums, shares = np.unique(rows[:, 0]), []
    for num in nums:
        here = rows[rows[:, 0] == num]
        ratios = np.unique(here[:, 3])
        medians = [float(np.median(here[here[:, 3] == ratio, 4])) for ratio in ratios]
        shares.append(max(0.0, float(np.interp(longest.at((float(num),)), ratios, medians))))
    return Surface((tuple(nums.tolist()),), tuple(shares))


def longest_of(contexts: Floats) -> Surface:
    """The longest context of so many that run together, in means: the quantile n / (n + 1) of all tokens' contexts."""
    longest = np.quantile(contexts, [num / (num + 1.0) for num in DECODES]) / contexts.mean()
    return Surface((DECODES,), tuple(np.maximum(longest, 1.0).tolist()))

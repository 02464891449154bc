"""What one launch of each operation has to do, as terms that grow with every count: a fit gives each term a price.

Terms are plain arithmetic on floats, of one layer on one GPU. A kind holds what is fixed in a profile (head size, bytes
an element, the GPU's L2 and SMs); counts come with every call.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from sim.cost.formulas import decode_attention_bytes, prefill_attention_flops

TILE = 128  # rows of a query tile, and columns of a KV tile
WARM_RAMPS = ((0.4, 0.8), (0.8, 1.6), (1.6, 3.2))  # of the L2: where a table's loop begins to miss, and always misses


def octaves(x: float) -> float:
    """log2 of x > 0, linear between powers of two: the same bits on every machine."""
    mantissa, exponent = math.frexp(x)
    return exponent + 2.0 * mantissa - 2.0


def spaced(first: int, last: int, per_octave: int = 1) -> tuple[float, ...]:
    """Nodes from 2**first to 2**last, evenly between powers of two."""
    steps = [2.0**power * (1.0 + step / per_octave) for power in range(first, last) for step in range(per_octave)]
    return (*steps, 2.0**last)


def above(x: float, bound: float) -> float:
    return x - bound if x > bound else 0.0


def octaves_beyond(x: float, low: float, high: float, unit: float = 1.0) -> float:
    """How far x lies outside of a range; a unit is added to all, so that 0 is no infinity away."""
    if x > high:
        return octaves((unit + x) / (unit + high))
    return octaves((unit + low) / (unit + x)) if x < low else 0.0


def ramp(x: float, low: float, high: float) -> float:
    return min(1.0, above(x, low) / (high - low))


class Kind(Protocol):
    """An operation, as a fit sees it. `counts` change from step to step, `shape` is a model's."""

    name: ClassVar[str]
    counts: ClassVar[tuple[str, ...]]
    shape: ClassVar[tuple[str, ...]]
    names: ClassVar[tuple[str, ...]]  # of the terms
    memory: ClassVar[tuple[str, ...]]  # terms that a roofline sets against `compute`; other terms add
    compute: ClassVar[tuple[str, ...]]
    grid: ClassVar[
        tuple[tuple[float, ...], ...]
    ]  # by count, where times are tabled: close enough to be joined by lines
    decays: ClassVar[bool]  # a correction found inside the measured range fades beyond it

    def terms(self, *point: float) -> tuple[float, ...]:
        """Counts, then shape in; a value a name out, none falling as a count grows."""

    def units(self, *point: float) -> tuple[float, ...]:
        """What is little of each count and size: distances from a measured range are in octaves of this and more."""

    @property
    def constants(self) -> dict[str, Any]:
        """What is fixed, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Attention of one new token a sequence over its KV; `context` is a sequence's, the new token included.

    Loops that measure one launch again and again read a small KV from the L2, not from memory: "missed" terms count the
    bytes that come from memory all the same. A server reads other things in between: see `cold`.
    """

    name: ClassVar[str] = "decode attention"
    counts: ClassVar[tuple[str, ...]] = ("batch", "context")
    shape: ClassVar[tuple[str, ...]] = ("kv_heads", "group")
    names: ClassVar[tuple[str, ...]] = (
        *("launch", "kv_bytes", "missed_1", "missed_2", "missed_3", "items", "items_above_sms"),
        *("tiles", "context", "root_context", "octaves_of_context", "qo_bytes"),
    )
    memory: ClassVar[tuple[str, ...]] = ("kv_bytes", "missed_1", "missed_2", "missed_3")
    compute: ClassVar[tuple[str, ...]] = ("context", "root_context", "octaves_of_context")  # the longest chain
    grid: ClassVar[tuple[tuple[float, ...], ...]] = (spaced(0, 14), (1.0, *spaced(4, 21, 2)))
    decays: ClassVar[bool] = True

    head_dim: int
    kv_dtype_bytes: int
    l2_bytes: float
    num_sms: int
    is_cold: bool = False  # the loop cleared the L2: nothing is read from it

    def terms(self, *point: float) -> tuple[float, ...]:
        batch, context, kv_heads, group = point
        items = batch * kv_heads
        kv_bytes = decode_attention_bytes(1, 1, self.head_dim, self.kv_dtype_bytes) * items * context
        return (
            1.0,
            kv_bytes,
            *self._missed(kv_bytes),
            items,
            above(items, self.num_sms),
            items * math.ceil(context / TILE),
            context,
            math.sqrt(context),
            octaves(1.0 + context / 64.0),
            2.0 * 2.0 * items * group * self.head_dim,
        )

    def _missed(self, kv_bytes: float) -> tuple[float, ...]:
        if self.is_cold:
            return kv_bytes, kv_bytes, kv_bytes
        filled = kv_bytes / self.l2_bytes
        return tuple(kv_bytes * ramp(filled, *ends) for ends in WARM_RAMPS)

    def units(self, *point: float) -> tuple[float, ...]:
        return (1.0,) * len(point)

    @property
    def constants(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Causal attention of `chunk` new tokens of each sequence, of which `start` are in the cache already."""

    name: ClassVar[str] = "prefill attention"
    counts: ClassVar[tuple[str, ...]] = ("batch", "chunk", "start")
    shape: ClassVar[tuple[str, ...]] = ("kv_heads", "group")
    names: ClassVar[tuple[str, ...]] = (
        *("launch", "kv_bytes", "qo_bytes", "flops", "tiled_flops", "spread_64", "spread_128", "waves_64", "waves_128"),
        *("packed_spread", "row_tiles", "packed_tiles", "length", "root_length", "sequences"),
    )
    memory: ClassVar[tuple[str, ...]] = ()
    compute: ClassVar[tuple[str, ...]] = ()
    grid: ClassVar[tuple[tuple[float, ...], ...]] = (
        spaced(0, 12),
        (1.0, *spaced(4, 7), *spaced(8, 17, 4)),
        (0.0, *spaced(8, 20)),
    )
    decays: ClassVar[bool] = True

    head_dim: int
    kv_dtype_bytes: int
    num_sms: int

    def terms(self, *point: float) -> tuple[float, ...]:
        batch, chunk, start, kv_heads, group = point
        rows, length = batch * kv_heads * group, start + chunk
        small, large = self._tiles(rows, chunk, start, 64), self._tiles(rows, chunk, start, 128)
        packed = self._tiles(batch * kv_heads, chunk * group, start, TILE, group)
        return (
            1.0,
            decode_attention_bytes(1, 1, self.head_dim, self.kv_dtype_bytes) * batch * kv_heads * length,
            2.0 * 2.0 * rows * chunk * self.head_dim,
            self._flops(rows, chunk, start),
            large.num * large.flops,
            *(max(tiles.num, self.num_sms) * tiles.flops for tiles in (small, large)),
            *(math.ceil(tiles.num / self.num_sms) * self.num_sms * tiles.flops for tiles in (small, large)),
            max(packed.num, self.num_sms) * packed.flops,
            small.num,
            packed.num,
            length,
            math.sqrt(length),
            batch,
        )

    def _tiles(self, rows: float, queries: float, start: float, tile: int, group: float = 1.0) -> _Tiles:
        """Query tiles and the flops of each; one SM works on a tile, so that fewer tiles than SMs take as long."""
        per_row = math.ceil(queries / tile)
        tokens = tile / group  # of one tile: heads of a group lie side by side in it
        return _Tiles(rows * per_row, self._flops(group, tokens, start + 0.5 * (tokens + per_row * tokens)))

    def _flops(self, rows: float, chunk: float, start: float) -> float:
        return rows * chunk * (2.0 * start + chunk + 1.0) * prefill_attention_flops(1, 1, self.head_dim)

    def units(self, *point: float) -> tuple[float, ...]:
        return 1.0, 1.0, max(1.0, point[1]), 1.0, 1.0  # a prefix as long as the chunk is an octave

    @property
    def constants(self) -> dict[str, Any]:
        return asdict(self)


class _Tiles(NamedTuple):
    num: float
    flops: float


@dataclass(frozen=True, slots=True)
class Gemm:
    """m rows through a weight [n, k]."""

    name: ClassVar[str] = "gemm"
    counts: ClassVar[tuple[str, ...]] = ("m",)
    shape: ClassVar[tuple[str, ...]] = ("n", "k")
    names: ClassVar[tuple[str, ...]] = ("launch", "depth", "weight_bytes", "row_bytes", "flops")
    memory: ClassVar[tuple[str, ...]] = ("weight_bytes", "row_bytes")
    compute: ClassVar[tuple[str, ...]] = ("flops",)
    grid: ClassVar[tuple[tuple[float, ...], ...]] = ((*spaced(0, 3), *spaced(4, 18, 4)),)
    decays: ClassVar[bool] = False

    weight_dtype_bytes: int
    row_dtype_bytes: int = 2

    def terms(self, *point: float) -> tuple[float, ...]:
        m, n, k = point
        return 1.0, k, n * k * self.weight_dtype_bytes, m * (n + k) * self.row_dtype_bytes, 2.0 * m * n * k

    def units(self, *point: float) -> tuple[float, ...]:
        return (1.0,) * len(point)

    @property
    def constants(self) -> dict[str, Any]:
        return asdict(self)

"""Attention of a step in one launch, prefill chunk and decodes together, as kernels for ragged batches do it.

Beside a chunk a decode is a query tile of its own for every query head: its heads no longer share the KV that they
read, and its context is not split among SMs. So a step takes longer than its parts would, several times for many.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from sim.cost.formulas import decode_attention_bytes, prefill_attention_flops
from sim.cost.kinds import WARM_RAMPS, above, ramp, spaced

TILE = 64  # rows of a query tile


@dataclass(frozen=True, slots=True)
class Mixed:
    """One chunk of `chunk` tokens that `start` others precede (0: none), and `decodes` of `context` tokens each."""

    name: ClassVar[str] = "mixed attention"
    counts: ClassVar[tuple[str, ...]] = ("chunk", "start", "decodes", "context")
    shape: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[tuple[str, ...]] = (
        *("launch", "flops", "spread", "waves", "length", "row_tiles", "prefill_kv_bytes"),
        *("kv_bytes", "missed_1", "missed_2", "missed_3", "items", "items_above_sms", "context"),
        *("tiles_beside", "tiles_beside_spread", "tiles_beside_waves", "decodes_beside", "longest", "all_tiles"),
    )
    memory: ClassVar[tuple[str, ...]] = ()
    compute: ClassVar[tuple[str, ...]] = ()
    grid: ClassVar[tuple[tuple[float, ...], ...]] = (
        (0.0, 1.0, *spaced(4, 7), *spaced(8, 13, 2)),
        (0.0, *spaced(9, 17)[::2]),
        (0.0, *spaced(0, 10)),
        (0.0, *spaced(4, 16)[::2]),
    )
    decays: ClassVar[bool] = True

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype_bytes: int
    l2_bytes: float
    num_sms: int

    def terms(self, *point: float) -> tuple[float, ...]:
        chunk, start, decodes, context = point
        sms, is_mixed, decoding = self.num_sms, min(chunk, 1.0), min(decodes, 1.0)
        per_row = math.ceil(chunk / TILE)
        tiles, beside = self.num_heads * per_row, is_mixed * self.num_heads * decodes
        flops, flops_beside = self._tile(start + 0.5 * TILE * per_row), self._tile(context)
        last = is_mixed * self._tile(start + TILE * max(0, per_row - 1))
        kv_bytes, prefill_kv_bytes = self._kv_bytes(decodes * context), is_mixed * self._kv_bytes(start + chunk)
        filled = (kv_bytes + prefill_kv_bytes) / self.l2_bytes
        work = tiles * flops + beside * flops_beside
        return (
            1.0,
            self.num_heads * chunk * (2.0 * start + chunk + 1.0) * prefill_attention_flops(1, 1, self.head_dim),
            is_mixed * max(tiles, sms) * flops,
            math.ceil(tiles / sms) * sms * flops,
            is_mixed * (start + chunk),
            tiles,
            prefill_kv_bytes,
            kv_bytes,
            *(kv_bytes * ramp(filled, *ends) for ends in WARM_RAMPS),
            decodes * self.num_kv_heads,
            above(decodes * self.num_kv_heads, sms),
            decoding * context,
            beside * flops_beside,
            is_mixed * decoding * max(beside, sms) * flops_beside,
            math.ceil(beside / sms) * sms * flops_beside,
            is_mixed * decodes,
            is_mixed * max(start + chunk, decoding * context),
            max(work, sms * max(last, is_mixed * decoding * flops_beside)),
        )

    def _tile(self, context: float) -> float:
        """Flops of one query tile of one head that sees so many tokens before it."""
        return TILE * (2.0 * context + TILE + 1.0) * prefill_attention_flops(1, 1, self.head_dim)

    def _kv_bytes(self, num_tokens: float) -> float:
        return decode_attention_bytes(1, self.num_kv_heads, self.head_dim, self.kv_dtype_bytes) * num_tokens

    def units(self, *point: float) -> tuple[float, ...]:
        return 1.0, max(1.0, point[0]), 1.0, 1.0

    @property
    def constants(self) -> dict[str, Any]:
        return asdict(self)

"""Matrix products of a few rows on a CPU, by weights packed for them once.

A product packs its weights anew each time: for 2 to 64 rows that costs as much as the product. oneDNN takes them
packed (the same operator that torch.compile uses); what is packed lies in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

MIN_ROWS, MAX_ROWS = 2, 64  # outside, packing anew costs nothing that counts
MIN_OUTPUTS = 2048  # narrower ones lie in the cache, and gain nothing
MAX_BYTES = 2**30  # packed at most, in all


class PackedProducts:
    """x W^T, as `functional.linear`; equal to it but for rounding."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        """Packs fp32 weights that are wide enough, the first ones, as far as MAX_BYTES go."""
        self._packed: dict[int, Tensor] = {}
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return
        room = MAX_BYTES
        for weight in weights:
            if weight.dtype == torch.float32 and weight.shape[0] >= MIN_OUTPUTS and weight.nbytes <= room:
                room -= weight.nbytes
                self._packed[id(weight)] = torch.ops.mkldnn._reorder_linear_weight(weight, MAX_ROWS)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = self._packed.get(id(weight)) if MIN_ROWS <= len(x) <= MAX_ROWS else None
        if packed is None:
            return functional.linear(x, weight, bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product

"""The forms that each operation is tried in; calibration/choose.py picks one by cross-validation."""

from __future__ import annotations

import math

from calibration.fit import Form
from sim.cost.kinds import spaced

GROUPS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0)
HEADS = (1.0, 2.0, 4.0, 8.0)
FEW_BATCHES, FEW_CHUNKS = spaced(0, 8)[::2], (1.0, 16.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 16384.0)
ROWS = (1.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)

DECODE_GRID = ({"batch": spaced(0, 11), "context": (128.0, *spaced(8, 17)), "kv_heads": HEADS},)
PREFILL_GRIDS = (
    {"batch": spaced(0, 8), "chunk": (1.0, *spaced(4, 14)), "kv_heads": HEADS},
    {"batch": FEW_BATCHES, "chunk": FEW_CHUNKS, "group": GROUPS},
    {"chunk": FEW_CHUNKS, "kv_heads": HEADS, "group": GROUPS},
)
GEMM_GRID = ({"m": ROWS, "n": spaced(5, 16), "k": spaced(5, 16)},)

CHUNKS, STARTS = (0.0, 16.0, 64.0, 256.0, 1024.0, 2048.0), (0.0, 512.0, 2048.0, 8192.0, 16384.0)
DECODES, CONTEXTS = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0), (0.0, 16.0, 128.0, 1024.0, 4096.0, 16384.0)
FINE_CHUNKS, FINE_DECODES = (0.0, *spaced(4, 5), *spaced(6, 11)), (0.0, 1.0, 4.0, 16.0, 64.0, 128.0, 256.0)
MIXED_GRIDS = (
    {"chunk": CHUNKS, "start": STARTS, "decodes": DECODES, "context": CONTEXTS},
    {"chunk": FINE_CHUNKS, "start": (0.0, *spaced(7, 15)[::2], 16384.0)},
    {"decodes": FINE_DECODES, "context": (0.0, 16.0, *spaced(7, 15)[::2], 16384.0)},
    {"chunk": FINE_CHUNKS, "decodes": FINE_DECODES},
)

DECODE_FORMS = (
    Form("additive"),
    Form("additive, factors", grids=DECODE_GRID),
    Form("additive without the chain, factors", grids=DECODE_GRID, without=("context",)),
    Form("2-norm of bandwidth and chain, factors", norm=2.0, grids=DECODE_GRID),
)
PREFILL_FORMS = (Form("additive"), Form("additive, factors", grids=PREFILL_GRIDS, smooth=0.1))
GEMM_FORMS = (
    Form("2-norm roofline", norm=2.0),
    Form("2-norm roofline, factors", norm=2.0, grids=GEMM_GRID, smooth=0.3),
    Form("4-norm roofline, factors", norm=4.0, grids=GEMM_GRID, smooth=0.3),
    Form("maximum, factors", norm=math.inf, grids=GEMM_GRID, smooth=0.3),
)
MIXED_FORMS = (Form("additive"), Form("additive, factors", grids=MIXED_GRIDS, smooth=0.01))

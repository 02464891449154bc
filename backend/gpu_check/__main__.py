"""Are the kernels right and fast on this GPU? Under three minutes, and every stage is kept as soon as it ends.

    python -m backend.gpu_check [--out DIR] [--quick] [--time-limit SECONDS]
    python -m backend.gpu_check --device cpu     # every stage end to end in the interpreter: its times mean nothing

Writes DIR/gpu_check.json and, with what the sweep measured best, DIR/configs.json: rows for backend/kernels. Needs
torch, triton and numpy. A stage that throws is recorded, and the next one runs. Exits 1 if a kernel is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

DEFAULT_OUT = Path("benchmarks/results/gpu_check")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m backend.gpu_check", description="Check and time the kernels.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--quick", action="store_true", help="every second point, no peers, no sweep")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--time-limit", type=float, default=170.0, help="s; what the sweep may use up (170)")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu runs every stage in the interpreter, without times that count")
    from backend.gpu_check.stages import run_all

    return run_all(options.device, options.out, options.quick, options.time_limit)


if __name__ == "__main__":
    sys.exit(main())

"""Where tools mean different things by one name, the name of the tool goes with the figure.

    vllm       TPOT (last - first token) / (n - 1), answers of two tokens and more; ITL every gap, pooled (SGLang too)
    guidellm   TPOT (last token - start) / n, the wait for the first token included; ITL is vLLM's TPOT
    aiperf     TPOT and ITL are both vLLM's TPOT, one figure a request
    distserve  TPOT as vLLM's, 0 for an answer of one token; ITL every gap (DistServe, Sarathi, Vidur)

All count from the intended arrival, whatever their tool's clock starts with: a wait before sending is a wait.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CONVENTIONS = ("vllm", "guidellm", "aiperf", "distserve")


def check_convention(name: str) -> str:
    if name not in CONVENTIONS:
        raise ValueError(f"unknown convention {name!r}; known: {', '.join(CONVENTIONS)}")
    return name


def tpot(convention: str, arrivals: Floats, firsts: Floats, lasts: Floats, nums: Ints) -> Floats:
    """Seconds per output token of each answer; nan where the convention gives none."""
    if convention == "guidellm":
        return (lasts - arrivals) / np.maximum(nums, 1)
    single = 0.0 if convention == "distserve" else np.nan
    return np.where(nums > 1, (lasts - firsts) / np.maximum(nums - 1, 1), single)


def itl(convention: str, gaps: Floats, firsts: Floats, lasts: Floats, nums: Ints) -> Floats:
    """Seconds between tokens: of every gap, or one figure an answer."""
    if convention in ("vllm", "distserve"):
        return gaps
    several = nums > 1
    return (lasts[several] - firsts[several]) / (nums[several] - 1)

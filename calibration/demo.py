"""The second half of `servetwin demo`: this machine's own body, calibrated, simulated, played live, side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from backend.load import EMBEDDED, is_installed
from backend.start import start
from calibration.commands_body import twins
from calibration.source import kernel_hash
from sim.workload.generate import poisson

MODELS = ("smollm2-135m", "small")  # the first that is there
NUM_REQUESTS = 24
SEATS = 8
SHARE = 0.7  # of the largest rate
REPEATS = 3


def run_twin_demo(out: Path) -> int:
    """0 if every decision of the live runs came out again. Costs are kept in `out`: the next demo does not measure."""
    model = next(name for name in MODELS if name not in EMBEDDED or is_installed(name))
    settings = {"max_num_seqs": SEATS, "max_num_batched_tokens": 128, "max_model_len": 512, "num_blocks": 512}
    costs = out / f"{model}-{kernel_hash()}.json"
    kept = "kept" if costs.is_file() else "measured now, in about a minute"
    Console().print(
        f"\n{model} on this CPU, live and simulated (costs: {costs}, {kept})", style="bold underline", highlight=False
    )
    body = start(model, "cpu", settings)
    rng = np.random.default_rng(1)
    prompts, outputs = rng.integers(16, 96, NUM_REQUESTS).tolist(), rng.integers(8, 40, NUM_REQUESTS).tolist()
    load = poisson(prompts, outputs, rate=1.0, seed=3)
    found = twins(body, load, costs, [SHARE], REPEATS)
    return int(any(twin.divergences for twin in found.values()))

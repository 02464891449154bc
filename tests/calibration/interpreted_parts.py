"""A process of its own: parts of a step by the GPU's kernels, interpreted, beside the CPU's on the same inputs.

Prints the largest difference of each part, as JSON.
"""

from __future__ import annotations

import json

import torch

from backend.start import start
from calibration.parts import Parts
from calibration.points import Point

POINTS = (Point("decode", (3, 40)), Point("prefill", (20, 16)), Point("skewed", (4, 20, 50)))


def outputs(with_triton: bool, point: Point) -> list[torch.Tensor]:
    torch.manual_seed(1)
    body = start("tiny", "cpu", {"max_model_len": 128, "num_blocks": 64, "max_num_seqs": 4})
    with torch.inference_mode():
        found = Parts(body, body.executor(), seed=2, with_triton=with_triton).call(point)()
    assert isinstance(found, list)
    return found[:1]  # the kernels turn q and k in place: later layers would turn them again


def main() -> None:
    told = {}
    for point in POINTS:
        pairs = zip(outputs(True, point), outputs(False, point), strict=True)
        told[point.part] = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    print(json.dumps(told))


if __name__ == "__main__":
    main()

"""CUDA graphs, as vLLM V1 uses them: which steps replay one, at what padded size, and what a step without costs.

full        steps of decodes are one graph; others are pieces with attention between them (FULL_AND_PIECEWISE, default)
piecewise   every step is pieces
eager       no graph and no padding: each kernel is launched (--enforce-eager)

Steps larger than the largest capture are launched kernel by kernel in every mode.
"""

from __future__ import annotations

from collections.abc import Sequence

MODES = ("full", "piecewise", "eager")
LARGEST_CAPTURE = 512

# The device works while the host launches, so a step takes the longer of the two: launches show where kernels are
# short. Llama-3.1-8B took 8.4 ms a token eagerly on an H100 that needed 5.1 ms with a graph (a blog's figures): 320
# kernels at 26 us. From compiled code, assumed: half as long. Qwen2.5-1.5B, 28 layers, took 5.4 ms in pieces and 5.0
# as one graph (vllm#20059), an 8B on an H100 the same in both (vllm#21477): about four launches a layer.
EAGER_LAUNCH_TIME = 25e-6
LAUNCH_TIME = 12e-6
PIECE_TIME = 100e-6


def largest_capture(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """vLLM's default, in tokens."""
    return min(2 * max_num_seqs, max_num_batched_tokens, LARGEST_CAPTURE)


def capture_sizes(largest: int = LARGEST_CAPTURE) -> list[int]:
    """Tokens of each captured step: 1, 2, 4, then by 8 below 256, then by 16."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= largest]


def padded_sizes(sizes: Sequence[int]) -> list[int]:
    """By number of tokens, 0 to the largest size: the size that is run."""
    padded = [0]
    for size in sizes:
        padded += [size] * (size + 1 - len(padded))
    return padded

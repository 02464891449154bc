"""The GPU's path without a GPU: kernels interpreted, recordings played by hand, and the same tokens come out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from backend.cuda import LARGEST_GRAPH, graph_sizes
from backend.weights import random_model
from policies.prompt import TokenPrompt
from sim.cost.graphs import capture_sizes, padded_sizes
from tests.backend.lone import lone_logits
from tests.backend.stories import MODEL, asked
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, python -m backend.gpu_check compares")


def test_the_kernels_give_the_tokens_of_a_lone_uncached_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.backend.interpreted"],
        cwd=REPOSITORY, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["preempted"] > 0 and told["hit"] > 0, "the story must hold what it is to test"
    decoder = random_model(MODEL)
    for request in asked():
        assert isinstance(request.prompt, TokenPrompt)
        tokens, logits = lone_logits(decoder, request.prompt.token_ids, 5)
        expected = [*tokens[request.prompt.num_tokens :], int(logits[-1].argmax())]
        assert told["answers"][request.request_id] == expected


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 8, 100, 256, 512, 1000])
def test_graphs_pad_steps_as_the_simulator_pads_them(max_num_seqs: int) -> None:
    """Up to the largest; and every number that may run at once has one."""
    sizes, simulated = graph_sizes(max_num_seqs), padded_sizes(capture_sizes())
    for num in range(1, min(max_num_seqs, LARGEST_GRAPH) + 1):
        assert min(size for size in sizes if size >= num) == simulated[num]
    assert len(sizes) == 1 or sizes[-2] < max_num_seqs, "a graph that nothing can use"

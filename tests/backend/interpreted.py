"""A process of its own: the kernels' path under Triton's interpreter, which must be chosen before they are imported.

Prints what every request was answered, as JSON. Recordings are what they record: a graph is a GPU's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from backend.cuda import PagedForward
from backend.executor import TorchExecutor
from backend.model import Decoder
from backend.pool import KVPool
from backend.rope import RotaryTable
from backend.weights import random_model
from policies.config import EngineConfig
from tests.backend.serving import Server
from tests.backend.stories import MODEL, asked

CONFIG = EngineConfig(num_blocks=5, block_size=16, max_num_batched_tokens=32, max_num_seqs=5, max_model_len=96)


class InterpretedForward(PagedForward):
    """The kernels on tensors of a CPU."""

    def __init__(self, model: Decoder, pool: KVPool, engine: EngineConfig) -> None:
        rotary = RotaryTable(model.config.rope, model.config.head_dim, engine.max_model_len)
        super().__init__(model, pool, rotary, engine.max_num_seqs, engine.max_model_len, lambda work: work)

    @contextmanager
    def timed(self) -> Iterator[None]:
        yield

    def device_time(self) -> float:
        return 0.0

    def now(self) -> float:
        return time.thread_time()


def served(decoder: Decoder) -> dict[str, Any]:
    server = Server(decoder, CONFIG)
    server.executor = TorchExecutor(decoder, CONFIG, InterpretedForward)
    for request in asked():
        server.add(request)
        server.step()
    return {"answers": server.run(), "preempted": server.engine.num_preemptions,
            "hit": server.engine.prefix_stats.num_hit_tokens}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(served(random_model(MODEL))))

"""What is measured: parts of a step, at counts that a server meets. One grid for a CPU, one for a GPU.

Parts are of the whole model, as one step runs them: attention over all layers, so that nothing is read twice in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

PARTS = {
    "layers": ("tokens",),  # all that passes a token through the layers, attention left out
    "head": ("rows",),  # the last norm, the LM head, and choosing the likeliest
    "decode": ("batch", "context"),  # positions, KV write and attention of one new token a sequence
    "prefill": ("chunk", "start"),  # the same of one chunk
    "skewed": ("batch", "context", "longest"),  # decodes of unequal contexts, `context` their mean
    "prepare": ("decodes", "context", "chunk", "start"),  # a plan as tensors, and where its KV lies
    "write": ("tokens",),  # positions and KV write alone
    "gemm": ("m", "n", "k"),
    "step": ("decodes", "context", "chunk", "start"),  # whole: what the sum of its parts is held against
    "loop": ("running",),  # one turn of engine, threads and streams around a device that takes no time
    "hash": ("blocks",),  # keys of a prompt's blocks
}


@dataclass(frozen=True, slots=True)
class Point:
    """A part at these counts, in the order of PARTS."""

    part: str
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        names = PARTS.get(self.part)
        if names is None or len(self.counts) != len(names):
            raise ValueError(f"a point of {self.part!r} has counts {PARTS.get(self.part)}, not {self.counts}")


class Load(NamedTuple):
    """So many clients, each asking again when it is answered, for so long. 0 clients: one that sleeps between."""

    num_clients: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Counts to measure at. Contexts and chunks beyond `longest` tokens, or pools beyond `most_kv`, are left out."""

    batches: Sequence[int]
    contexts: Sequence[int]
    chunks: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[int]
    rows: Sequence[int]
    running: Sequence[int]
    num_mixed: int
    num_repeats: int
    most_kv: int  # tokens in one batch
    clients: Sequence[int]  # of each load in service
    seconds: float  # that each load lasts, each time
    num_rounds: int = 1  # of all loads: a machine drifts, and no load is to have its good hour
    longest_served: int = 1024  # tokens of prompt and answer together, of what is served

    def points(
        self, longest: int, weights: Sequence[tuple[int, int]], seed: int = 0, pool_tokens: int | None = None
    ) -> list[Point]:
        """Every point once, `weights` being the model's matrices as (n, k), that a pool of so many tokens holds."""
        if pool_tokens is not None:  # blocks are whole: a quarter is room enough for their ends
            return replace(self, most_kv=min(self.most_kv, pool_tokens * 3 // 4)).points(longest, weights, seed)
        contexts = [context for context in self.contexts if context <= longest]
        pairs = [(q, start) for q in self.chunks for start in self.starts if q + start <= longest]
        decodes = [(b, c) for b in self.batches for c in contexts if b * c <= self.most_kv]
        found = [Point("layers", (tokens,)) for tokens in self.tokens]
        found += [Point("head", (rows,)) for rows in self.rows]
        found += [Point("decode", each) for each in decodes]
        found += [Point("prefill", each) for each in pairs]
        found += [Point("skewed", (b, c, min(4 * c, longest))) for b, c in decodes if b >= 4 and c < longest]
        found += [Point("write", (tokens,)) for tokens in self.tokens]
        found += [Point("gemm", (m, n, k)) for m in self.tokens for n, k in weights]
        found += [Point("loop", (running,)) for running in self.running]
        found += [Point("hash", (blocks,)) for blocks in (8, 64)]
        mixed = self._mixed(longest, np.random.default_rng(seed))
        return found + [Point("step", each) for each in mixed] + [Point("prepare", each) for each in mixed]

    @property
    def loads(self) -> list[Load]:
        """An idle server's, then rounds of many clients and few."""
        rng = np.random.default_rng(0)
        rounds = [num for _ in range(self.num_rounds) for num in rng.permutation(self.clients).tolist()]
        return [Load(0, 0.0), *(Load(num, self.seconds) for num in rounds)]

    def _mixed(self, longest: int, rng: np.random.Generator) -> list[tuple[int, int, int, int]]:
        """Steps as a server takes them: many decodes alone, some with a chunk, few chunks alone."""
        steps = []
        for index in range(self.num_mixed):
            decodes = int(rng.choice(self.batches)) if index % 5 else 0
            most = min(longest, self.most_kv // max(1, decodes))
            context = int(np.exp(rng.uniform(np.log(8), np.log(most)))) if decodes else 0
            has_chunk = index % 5 == 0 or index % 2 == 1
            chunk = int(rng.choice(self.chunks)) if has_chunk else 0
            start = int(rng.uniform(0, longest - chunk)) if has_chunk and rng.random() < 0.5 else 0
            steps.append((decodes, context, chunk, start))
        return steps


CPU = Grid(
    batches=(1, 2, 4, 8, 16, 32),
    contexts=(16, 64, 256, 1024, 2048),
    chunks=(2, 16, 64, 128, 256, 512),
    starts=(0, 256, 1024),
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    rows=(1, 2, 4, 8, 16, 32),
    running=(1, 4, 16, 32),
    num_mixed=60,
    num_repeats=5,
    most_kv=32 * 1024,
    clients=(1, 2, 4, 8, 16, 32),
    seconds=1.0,
    num_rounds=3,
)
# Of a model that a CPU takes long for: fewer points, up to what its prompts will need.
LARGE_CPU = Grid(
    batches=(1, 2, 4, 8),
    contexts=(16, 128, 512),
    chunks=(2, 32, 128),
    starts=(0, 256),
    tokens=(1, 2, 4, 8, 32, 128),
    rows=(1, 4, 8),
    running=(1, 8),
    num_mixed=15,
    num_repeats=2,
    most_kv=8 * 1024,
    clients=(1, 2, 4, 8),
    seconds=1.5,
    num_rounds=2,
    longest_served=192,
)
SMALL_CPU = Grid((1, 4), (16, 128), (2, 32), (0, 64), (1, 4, 32), (1, 4), (1, 4), 6, 2, 1024, (1, 4), 0.2)
CUDA = Grid(
    batches=(1, 8, 32, 128, 256),
    contexts=(128, 1024, 4096, 8192),
    chunks=(16, 64, 256, 1024, 2048),
    starts=(0, 1024, 4096),
    tokens=(1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048),
    rows=(1, 8, 32, 128, 256),
    running=(1, 32, 128, 256),
    num_mixed=80,
    num_repeats=3,
    most_kv=1024 * 1024,
    clients=(1, 8, 32, 64, 128, 256),
    seconds=4.0,
    num_rounds=2,
)
GRIDS = {"cpu": CPU, "cpu-large": LARGE_CPU, "cpu-small": SMALL_CPU, "cuda": CUDA}

"""The parts of a live step as calls to be timed: the body's own code, on inputs nobody has touched before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from backend.attention import CpuAttention
from backend.batch import Batch, build_batch
from backend.executor import TorchExecutor
from backend.rope import RotaryTable
from backend.sampling import sample
from backend.start import Body
from calibration.idle import turn_time
from calibration.points import Point
from policies.prompt import TokenPrompt, seals
from policies.types import Chunk, Request, StepPlan

if TYPE_CHECKING:
    from backend.triton_attention import TritonAttention

Call = Callable[[], object]


class Passing:
    """Attention that costs nothing: what is left of a step without it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.flatten(1)


def weights_of(body: Body) -> list[tuple[int, int]]:
    """(n, k) of the model's matrices, each once."""
    weights = body.loaded.decoder.weights
    layer = weights.layers[0]
    matrices = (layer.qkv, layer.output, layer.gate_up, layer.down, weights.lm_head)
    return list(dict.fromkeys((each.shape[0], each.shape[1]) for each in matrices))


class Parts:
    """Makes the call of a point. Blocks are drawn anew each time, so that no cache has seen them lately."""

    def __init__(self, body: Body, executor: TorchExecutor, seed: int = 0, with_triton: bool | None = None) -> None:
        """`executor` is the body's, its blocks nobody's. `with_triton`: attention by the GPU's kernels; default: where
        the body is on a GPU."""
        self._body = body
        self._model = body.loaded.decoder
        self._shape = body.model
        self._executor = executor
        self._pool = self._executor.pool
        self._rotary = RotaryTable(self._shape.rope, self._shape.head_dim, body.config.max_model_len, body.device)
        self._triton: TritonAttention | None = None
        if body.device.type == "cuda" if with_triton is None else with_triton:
            from backend.triton_attention import TritonAttention

            most = max(512, body.config.max_num_seqs)
            self._triton = TritonAttention(self._shape, self._pool, self._rotary, most)
        self._rng = np.random.default_rng(seed)
        self._names = count()
        with torch.no_grad():  # zeros would be multiplied as quickly as anything, but denormals would not
            self._pool.k.normal_(std=0.5)
            self._pool.v.normal_(std=0.5)

    def call(self, point: Point) -> Call:
        """Ready to be run once; whatever is not part of the point has been done."""
        return getattr(self, f"_{point.part}")(*point.counts)  # type: ignore[no-any-return]

    # -- parts ----------------------------------------------------------------------------------------------------

    def _layers(self, tokens: int) -> Call:
        token_ids = self._tokens(tokens)
        return lambda: self._model.hidden(token_ids, Passing())

    def _head(self, rows: int) -> Call:
        hidden = self._normal(rows, self._shape.hidden_size)
        finite = torch.ones((), dtype=torch.bool, device=self._body.device)
        return lambda: sample(self._model.logits(hidden), finite, [None] * rows)

    def _decode(self, batch: int, context: int) -> Call:
        return self._attention([(context - 1, 1)] * batch)

    def _skewed(self, batch: int, context: int, longest: int) -> Call:
        """A few long contexts among short ones, with the same mean."""
        num_long = max(1, batch // 8)
        short = max(1, (batch * context - num_long * longest) // (batch - num_long))
        return self._attention([(longest - 1, 1)] * num_long + [(short - 1, 1)] * (batch - num_long))

    def _prefill(self, chunk: int, start: int) -> Call:
        return self._attention([(start, chunk)])

    def _prepare(self, decodes: int, context: int, chunk: int, start: int) -> Call:
        chunks, tokens = self._chunks(_spans(decodes, context, chunk, start))
        return lambda: self._prepared(build_batch(chunks, tokens, self._pool.block_size))

    def _write(self, tokens: int) -> Call:
        """One layer after another, as a step does; the pool's rows are drawn at random."""
        rows = self._shape.num_kv_heads * tokens
        keys = self._normal(rows, self._shape.head_dim)
        size = self._pool.k[0].view(-1, self._shape.head_dim).shape[0]
        places = torch.from_numpy(self._rng.choice(size, rows, replace=False)).to(self._body.device)
        heads = self._normal(tokens, self._shape.num_heads + self._shape.num_kv_heads, self._shape.head_dim)
        turns = self._rotary.turns(torch.arange(tokens, device=self._body.device))
        return lambda: self._written(heads, turns, keys, places)

    def _gemm(self, m: int, n: int, k: int) -> Call:
        inputs = self._normal(m, k)
        matrices = [each for each in self._matrices() if each.shape == (n, k)]
        weight = matrices[int(self._rng.integers(len(matrices)))]
        return lambda: functional.linear(inputs, weight)

    def _step(self, decodes: int, context: int, chunk: int, start: int) -> Call:
        spans = _spans(decodes, context, chunk, start)
        chunks, tokens = self._chunks(spans)
        for each, (begin, _), known in zip(chunks, spans, tokens, strict=True):
            prompt = TokenPrompt((0,) * begin + tuple(known) if begin else tuple(known))
            self._executor.add(Request(each.request_id, 0.0, prompt, max_tokens=2), length=2)
        plan = StepPlan(
            0,
            0.0,
            [each.request_id for each in chunks],
            [each.start for each in chunks],
            [each.num_tokens for each in chunks],
            [True] * len(chunks),
            [each.block_ids for each in chunks],
            num_running=len(chunks),
        )
        return lambda: self._executed(plan)

    def _loop(self, running: int) -> Call:
        return lambda: turn_time(self._body.config, running)

    def _hash(self, blocks: int) -> Call:
        size = self._pool.block_size
        tokens = tuple(self._rng.integers(0, self._shape.vocab_size, blocks * size).tolist())
        secret = b"measured"
        return lambda: TokenPrompt(tokens).chain(size, seals((), size, secret), secret, 0).extend(blocks)

    # -- inputs ---------------------------------------------------------------------------------------------------

    def _attention(self, spans: Sequence[tuple[int, int]]) -> Call:
        chunks, tokens = self._chunks(spans)
        attention = self._prepared(build_batch(chunks, tokens, self._pool.block_size))
        num = sum(map(len, tokens))
        q = self._normal(num, self._shape.num_heads, self._shape.head_dim)
        k = self._normal(num, self._shape.num_kv_heads, self._shape.head_dim)
        v = self._normal(num, self._shape.num_kv_heads, self._shape.head_dim)
        return lambda: [attention.attend(layer, q, k, v) for layer in range(self._shape.num_layers)]

    def _prepared(self, batch: Batch) -> CpuAttention | TritonAttention:
        if self._triton is None:
            return CpuAttention(self._shape, self._pool, self._rotary, batch)
        self._triton.begin(self._triton.step_of(batch, self._body.device))
        return self._triton

    def _chunks(self, spans: Sequence[tuple[int, int]]) -> tuple[list[Chunk], list[list[int]]]:
        """Of (start, tokens), each with blocks of its own, scattered over the pool."""
        size = self._pool.block_size
        nums = [-(-(start + num) // size) for start, num in spans]
        blocks = (1 + self._rng.choice(self._pool.num_blocks, sum(nums), replace=False)).tolist()
        ends = np.cumsum(nums).tolist()
        chunks = [
            Chunk(f"measured-{next(self._names)}", start, num, blocks[end - n : end], True)
            for (start, num), n, end in zip(spans, nums, ends, strict=True)
        ]
        tokens = [self._rng.integers(0, self._shape.vocab_size, num).tolist() for _, num in spans]
        return chunks, tokens

    def _executed(self, plan: StepPlan) -> object:
        output = self._executor.execute(plan)
        for name in plan.request_ids:
            self._executor.discard(name)
        return output

    def _written(self, heads: Tensor, turns: Tensor, keys: Tensor, places: Tensor) -> None:
        for k_pool, v_pool in self._pool.layers():
            self._rotary.rotate(heads, turns)
            k_pool.view(-1, self._shape.head_dim).index_copy_(0, places, keys)
            v_pool.view(-1, self._shape.head_dim).index_copy_(0, places, keys)

    def _matrices(self) -> list[Tensor]:
        layers = self._model.weights.layers
        return [each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)] + [
            self._model.weights.lm_head
        ]

    def _tokens(self, num: int) -> Tensor:
        return torch.from_numpy(self._rng.integers(0, self._shape.vocab_size, num)).to(self._body.device)

    def _normal(self, *shape: int) -> Tensor:
        values = torch.from_numpy(self._rng.standard_normal(shape, dtype=np.float32))
        return values.to(self._body.device, self._body.dtype)


def _spans(decodes: int, context: int, chunk: int, start: int) -> list[tuple[int, int]]:
    spans = [(context - 1, 1)] * decodes
    return [*spans, (start, chunk)] if chunk else spans

"""The device in earnest: runs a plan over real weights and a real KV pool, and says what came out and how long it took.

Owns the contents of the KV blocks and what each request has said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backend.batch import Batch, build_batch
from backend.forward import CpuForward, Forward
from backend.model import Decoder
from backend.pool import KVPool
from backend.rope import RotaryTable
from backend.sampling import sample
from backend.sequences import LiveSequence
from policies.config import EngineConfig
from policies.types import Chunk, FinishReason, Request, StepOutput, StepParts, StepPlan


class TorchExecutor:
    """Runs plans where the model is: on a CPU by one thread, or on a GPU.

    `add`, `execute` and `discard` come from one thread at a time, in the order of the engine's decisions.
    """

    def __init__(self, model: Decoder, engine: EngineConfig, forward: MakeForward | None = None) -> None:
        """Raises ValueError if the model cannot go as far as the engine's max_model_len."""
        if engine.max_model_len > model.config.max_model_len:
            raise ValueError(
                f"max_model_len ({engine.max_model_len}) is more than {model.config.name} goes to "
                f"({model.config.max_model_len}): lower it"
            )
        self._config = model.config
        self._pool = KVPool(model.config, engine.num_blocks, engine.block_size, model.dtype, model.device)
        self._forward = (forward or forward_of)(model, self._pool, engine)
        self._sequences: dict[str, LiveSequence] = {}

    @property
    def pool(self) -> KVPool:
        return self._pool

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    # -- who comes and goes -------------------------------------------------------------------------------------

    def check(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        """Raises ValueError for what `add` would not take; from any thread."""
        self._sequence(request, length, answer)

    def add(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        """A request may come up in plans from now on.

        For experiments: `length` ends its answer there, whatever the model says; `answer` says its first tokens.
        Raises ValueError, with nothing changed, for bad sampling and for tokens outside the vocabulary.
        """
        sequence = self._sequence(request, length, answer)
        assert request.request_id not in self._sequences, f"request {request.request_id} was not discarded"
        self._sequences[request.request_id] = sequence

    def _sequence(self, request: Request, length: int | None, answer: Sequence[int]) -> LiveSequence:
        return LiveSequence(request, self._config.vocab_size, self._config.eos_token_ids, length, answer)

    def discard(self, request_id: str) -> None:
        """It has left, and no plan that names it is still to be executed."""
        self._sequences.pop(request_id, None)

    # -- a step -------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's tokens and draw the next ones.

        Whatever is raised leaves the blocks it was to write zeroed and the requests known, for `EngineCore.fail`.
        """
        assert plan.repeat == 1 and not plan.transfers, "a live step is taken once, and swaps nothing"
        chunks = plan.chunks
        if not chunks:
            return StepOutput(0.0, parts=StepParts(0.0, 0.0))
        try:
            with torch.inference_mode():
                return self._run(chunks)
        except BaseException:
            self._scrub(chunks)
            raise

    def _run(self, chunks: Sequence[Chunk]) -> StepOutput:
        forward = self._forward
        began = forward.now()
        batch = self._batch(chunks)
        with forward.timed():
            drawn = self._draw(batch)
        token_ids, stopped = self._say(batch, drawn)
        duration, device = forward.now() - began, forward.device_time()
        return StepOutput(duration, stopped, token_ids, StepParts(max(0.0, duration - device), device))

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        tokens = [self._sequences[c.request_id].tokens[c.start : c.start + c.num_tokens] for c in chunks]
        return build_batch(chunks, tokens, self._pool.block_size)

    def _draw(self, batch: Batch) -> list[int]:
        logits, is_finite = self._forward.compute(batch)
        draws = [self._sequences[c.request_id].draw(c.start + c.num_tokens) for c in batch.sampled]
        return sample(logits, is_finite, draws)

    def _say(self, batch: Batch, drawn: Sequence[int]) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
        token_ids: dict[str, list[int]] = {}
        stopped: dict[str, FinishReason] = {}
        for chunk, token in zip(batch.sampled, drawn, strict=True):
            said, reason = self._sequences[chunk.request_id].says(chunk.start + chunk.num_tokens, token)
            token_ids[chunk.request_id] = [said]
            if reason is not None:
                stopped[chunk.request_id] = reason
        return token_ids, stopped

    def _scrub(self, chunks: Sequence[Chunk]) -> None:
        size = self._pool.block_size
        for chunk in chunks:
            last = (chunk.start + chunk.num_tokens - 1) // size
            self._pool.scrub(chunk.block_ids[chunk.start // size : last + 1])


MakeForward = Callable[[Decoder, KVPool, EngineConfig], Forward]


def forward_of(model: Decoder, pool: KVPool, engine: EngineConfig) -> Forward:
    """For the device that the model is on."""
    rotary = RotaryTable(model.config.rope, model.config.head_dim, engine.max_model_len, model.device)
    if model.device.type == "cuda":
        from backend.cuda import CudaForward

        return CudaForward(model, pool, rotary, engine.max_num_seqs, engine.max_model_len)
    return CpuForward(model, pool, rotary)

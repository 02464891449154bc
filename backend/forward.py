"""A batch through the model on a CPU: what comes out, and by which clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from backend.attention import CpuAttention
from backend.batch import Batch
from backend.model import Decoder
from backend.pool import KVPool
from backend.products import PackedProducts
from backend.rope import RotaryTable


class Computed(NamedTuple):
    """`logits` [sampled, vocab_size] of the batch's sample rows; `is_finite` [] bool, of everything computed."""

    logits: Tensor
    is_finite: Tensor


class Forward(Protocol):
    """The model on its device, over the pool."""

    def compute(self, batch: Batch) -> Computed: ...
    def timed(self) -> AbstractContextManager[None]:
        """Around what the device is to do; the host may go on before it is done."""

    def device_time(self) -> float:
        """Seconds of the last `timed`, once its results were read."""

    def now(self) -> float:
        """Seconds, by the clock that steps are timed with."""


class CpuForward:
    """One thread, timed by that thread's own CPU time: other load on the machine does not count."""

    def __init__(self, model: Decoder, pool: KVPool, rotary: RotaryTable) -> None:
        weights = model.weights
        products = PackedProducts((weights.lm_head, *(layer.gate_up for layer in weights.layers)))
        self._model = Decoder(model.config, weights, products)
        self._pool = pool
        self._rotary = rotary
        self._device_time = 0.0

    def compute(self, batch: Batch) -> Computed:
        attention = CpuAttention(self._model.config, self._pool, self._rotary, batch)
        hidden = self._model.hidden(batch.token_ids, attention)
        return Computed(self._model.logits(hidden[batch.sample_rows]), torch.isfinite(hidden).all())

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = self.now()
        with one_thread():
            yield
        self._device_time = self.now() - began

    def device_time(self) -> float:
        return self._device_time

    def now(self) -> float:
        return time.thread_time()


@contextmanager
def one_thread() -> Iterator[None]:
    """A thread's clock sees no helpers; the caller's setting comes back."""
    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)

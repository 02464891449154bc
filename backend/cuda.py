"""A batch through the model on a GPU: Triton kernels, and CUDA graphs for steps in which everybody decodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.batch import Batch
from backend.forward import Computed
from backend.model import Decoder
from backend.pool import KVPool
from backend.rope import RotaryTable
from backend.triton_attention import PagedStep, TritonAttention, padded, slots_of

LARGEST_GRAPH = 512  # sequences; more are launched kernel by kernel
Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]  # runs what it is given, and returns what runs it again


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that have a graph, vLLM's: a step of decodes is padded to the next one."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_GRAPH + 1, 16)]
    return [size for size, before in zip(sizes, (0, *sizes), strict=False) if before < max_num_seqs]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Inputs and outputs at addresses that stay: a graph of `size` sequences uses their first `size` rows."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64
    tables: Tensor  # [rows, max_blocks] int32
    lens: Tensor  # [rows] int32
    logits: Tensor  # [rows, vocab_size]
    is_finite: Tensor  # [] bool

    def step(self, size: int) -> PagedStep:
        return PagedStep(self.positions[:size], self.slots[:size], self.tables[:size], self.lens[:size], None)

    def fill(self, batch: Batch, size: int, block_size: int) -> None:
        """The batch's decodes first; rows past them compute token 0 for nobody."""
        num = batch.num_decodes
        self.token_ids[:size] = _extended(batch.token_ids, size, 0)
        self.positions[:size] = _extended(batch.positions, size, 0)
        self.slots[:size] = _extended(slots_of(batch, block_size), size, -1)
        self.lens[:size] = _extended(torch.tensor(batch.decode_lens, dtype=torch.int32), size, 0)
        tables = padded(batch.decode_tables)
        self.tables[:num, : tables.shape[1]] = tables.to(self.tables.device, non_blocking=True)


def _extended(values: Tensor, size: int, filler: int) -> Tensor:
    return torch.cat((values, values.new_full((size - len(values),), filler)))


def allocate_buffers(model: Decoder, num_rows: int, max_blocks: int) -> Buffers:
    def whole(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=model.device)

    return Buffers(
        token_ids=whole(num_rows),
        positions=whole(num_rows),
        slots=whole(num_rows).fill_(-1),
        tables=whole(num_rows, max_blocks, dtype=torch.int32),
        lens=whole(num_rows, dtype=torch.int32),
        logits=whole(num_rows, model.config.vocab_size, dtype=model.dtype),
        is_finite=whole(dtype=torch.bool),
    )


class PagedForward:
    """Steps of decodes replay a recording; all others are launched kernel by kernel."""

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        rotary: RotaryTable,
        max_num_seqs: int,
        max_model_len: int,
        record: Record,
    ) -> None:
        """Records every size, so that no step waits for a compiler."""
        self._model = model
        self._block_size = pool.block_size
        sizes = graph_sizes(max_num_seqs)
        self._largest = sizes[-1]
        self._attention = TritonAttention(model.config, pool, rotary, max(max_num_seqs, self._largest))
        self._buffers = allocate_buffers(model, self._largest, -(-max_model_len // pool.block_size))
        with torch.inference_mode():
            self._replays = {size: record(self._decode(size)) for size in reversed(sizes)}

    def _decode(self, size: int) -> Callable[[], None]:
        buffers, model = self._buffers, self._model

        def decode() -> None:
            self._attention.begin(buffers.step(size))
            hidden = model.hidden(buffers.token_ids[:size], self._attention)
            buffers.logits[:size] = model.logits(hidden)
            buffers.is_finite.copy_(torch.isfinite(hidden).all())

        return decode

    def compute(self, batch: Batch) -> Computed:
        if not batch.prefills and batch.num_decodes <= self._largest:
            return self._replay(batch)
        device = self._model.device
        self._attention.begin(self._attention.step_of(batch, device))
        hidden = self._model.hidden(batch.token_ids.to(device), self._attention)
        rows = torch.tensor(batch.sample_rows, dtype=torch.int64).to(device)
        return Computed(self._model.logits(hidden[rows]), torch.isfinite(hidden).all())

    def _replay(self, batch: Batch) -> Computed:
        size = min(size for size in self._replays if size >= batch.num_decodes)
        self._buffers.fill(batch, size, self._block_size)
        self._replays[size]()
        return Computed(self._sampled(batch.sample_rows), self._buffers.is_finite)

    def _sampled(self, rows: Sequence[int]) -> Tensor:
        """All rows but those of a prompt's token that comes alone and is not its last."""
        if list(rows) == list(range(len(rows))):
            return self._buffers.logits[: len(rows)]
        return self._buffers.logits[torch.tensor(rows, dtype=torch.int64).to(self._model.device)]


class CudaForward(PagedForward):
    """Timed by events on the device's stream; the host's clock tells the whole step."""

    def __init__(
        self, model: Decoder, pool: KVPool, rotary: RotaryTable, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        super().__init__(model, pool, rotary, max_num_seqs, max_model_len, Recorder())

    @contextmanager
    def timed(self) -> Iterator[None]:
        self._began.record()
        yield
        self._ended.record()

    def device_time(self) -> float:
        self._ended.synchronize()
        milliseconds: float = self._began.elapsed_time(self._ended)
        return milliseconds / 1e3

    def now(self) -> float:
        return time.perf_counter()


class Recorder:
    """Records CUDA graphs that share one pool of memory: they never run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Once on a side stream, to compile its kernels and settle their workspaces; then into the graph."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay

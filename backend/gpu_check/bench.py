"""What the stages share: the device, its clock, random KV that no cache holds, and the layers that are measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from backend.gpu_check.timing import Clock, GraphClock, HostClock, Launch
from backend.kernels.shape import FP8, AttentionShape

ARENA_ELEMENTS = 1_200_000_000  # of K, and of V: 128 sequences of 8k tokens of an 8B model's layer
TINY_ELEMENTS = 2**20
MIN_LAUNCHES, MAX_LAUNCHES = 10, 512
TIME_LIMIT = 170.0  # s


def layer(heads: int, kv_heads: int, head_dim: int = 128, kv_dtype: torch.dtype = torch.bfloat16) -> AttentionShape:
    return AttentionShape(heads, kv_heads, head_dim, 16, torch.bfloat16, kv_dtype)


LLAMA_8B = layer(32, 8)
QWEN_30B = layer(32, 4)
LLAMA_70B_TP8 = layer(8, 1)
SMOLLM2 = layer(9, 3, 64)
LLAMA_8B_FP8 = layer(32, 8, kv_dtype=FP8)


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. Times in s; bytes are the least a kernel must move, flops what the mask lets through."""

    kernel: str
    layer: str
    case: str
    num_bytes: int
    flops: int
    time: float
    spread: float
    num_replays: int
    gb_s: float
    tflop_s: float


class Arena:
    """Random K and V. Every layer's pools are views of the same memory, several times what the L2 cache holds."""

    def __init__(self, device: torch.device, num_elements: int) -> None:
        self._device = device
        self._num_elements = num_elements
        self._flat: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def pools(self, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        size = (self.num_blocks(shape), shape.num_kv_heads, shape.block_size, shape.head_dim)
        used = size[0] * shape.page_stride
        k, v = self._memory(shape.kv_dtype)
        return k[:used].view(size), v[:used].view(size)

    def num_blocks(self, shape: AttentionShape) -> int:
        return self._num_elements // shape.page_stride

    def _memory(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if dtype not in self._flat:
            self._flat[dtype] = self._random(dtype), self._random(dtype)
        return self._flat[dtype]

    def _random(self, dtype: torch.dtype) -> Tensor:
        drawn = torch.float16 if dtype == FP8 else dtype
        return torch.randn(self._num_elements, device=self._device, dtype=drawn).to(dtype)

    def tables(self, lengths: Sequence[int], shape: AttentionShape, wanted: int) -> list[Tensor]:
        """Block tables of up to `wanted` batches that share no block, all scattered."""
        counts = [-(-length // shape.block_size) for length in lengths]
        usable = self.num_blocks(shape) - 1
        if sum(counts) > usable:
            raise ValueError(f"{sum(counts)} blocks wanted, but the arena holds {usable}: a smaller batch fits")
        blocks = torch.randperm(usable, device=self._device).to(torch.int32) + 1
        batches = torch.split(blocks, sum(counts))[: min(wanted, usable // sum(counts))]
        return [pad_sequence(list(torch.split(batch, counts)), batch_first=True) for batch in batches]


@dataclass(frozen=True, slots=True)
class Bench:
    """`tiny`: every stage end to end in seconds, through the interpreter; its times mean nothing.

    After `time_limit` seconds no stage begins and no candidate is tried.
    """

    device: torch.device
    clock: Clock
    arena: Arena
    tiny: bool
    quick: bool
    time_limit: float
    began: float = field(default_factory=time.monotonic)

    @property
    def time_left(self) -> float:
        return self.time_limit - (time.monotonic() - self.began)

    @property
    def l2_bytes(self) -> int:
        return 0 if self.tiny else torch.cuda.get_device_properties(self.device).L2_cache_size

    def num_launches(self, num_bytes: int) -> int:
        """So many that together they read four times the L2 cache."""
        return 1 if self.tiny else min(max(-(-4 * self.l2_bytes // num_bytes), MIN_LAUNCHES), MAX_LAUNCHES)

    def scaled(self, shape: AttentionShape) -> AttentionShape:
        """The layer, or without a GPU one like it that the interpreter can do: no bf16, fewer and smaller heads."""
        if not self.tiny:
            return shape
        kv_heads = min(shape.num_kv_heads, 2)
        kv_dtype = FP8 if shape.kv_dtype == FP8 else torch.float16
        return replace(shape, num_heads=shape.group * kv_heads, num_kv_heads=kv_heads, head_dim=64,
                       dtype=torch.float16, kv_dtype=kv_dtype)  # fmt: skip

    def size(self, usual: int, tiny: int) -> int:
        return tiny if self.tiny else usual

    def measure(self, kernel: str, shape: AttentionShape, case: str, num_bytes: int, flops: int,
                launch: Launch, warm: bool = False) -> Point:  # fmt: skip
        """`launch` is asked for batches 0, 1, ... of those it has; `warm`: for the same one, as public tables are."""
        timing = self.clock.time(lambda index: launch(0 if warm else index), self.num_launches(num_bytes))
        return Point(
            kernel, name_of(shape), case, num_bytes, flops, timing.time, timing.spread, timing.num_replays,
            num_bytes / timing.time / 1e9, flops / timing.time / 1e12,
        )  # fmt: skip


def open_bench(device: str, quick: bool, time_limit: float = TIME_LIMIT) -> Bench:
    where, tiny = torch.device(device), device == "cpu"
    clock: Clock = HostClock() if tiny else GraphClock()
    return Bench(where, clock, Arena(where, TINY_ELEMENTS if tiny else ARENA_ELEMENTS), tiny, quick, time_limit)


def name_of(shape: AttentionShape) -> str:
    dtype = "fp8" if shape.kv_dtype == FP8 else str(shape.kv_dtype).removeprefix("torch.")
    return f"{shape.num_heads}/{shape.num_kv_heads}/{shape.head_dim} {dtype} page {shape.block_size}"

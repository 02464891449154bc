"""Which tiles a kernel runs with: a table in configs.json, so that a measurement improves it and no code does.

A row names what it is for (kernel, and any of arch, head_dim, group, dtype, block_size, max_size) and what to use. Of
the rows that match, the one that names most is taken; of several, the one with the smallest max_size. Rows that name
no arch fit a program into 99 KiB of shared memory, so that they run on every GPU from sm_80 on. `python -m
backend.gpu_check` measures candidates and writes rows that name everything. Nothing is tuned at run time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from backend.kernels.shape import FP8, AttentionShape

TABLE = Path(__file__).with_name("configs.json")
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "half", torch.bfloat16: "half"}
NAMED = ("kernel", "arch", "head_dim", "group", "dtype", "block_size")

Row = Mapping[str, int | str]
Constants = dict[str, int | float | str]  # of a kernel's compilation


@dataclass(frozen=True, slots=True)
class Config:
    """`rows` x `tile` of the score matrix a step of the loop; `programs_per_sm` where the grid is persistent."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1


@dataclass(frozen=True, slots=True)
class Key:
    """What a row may name. `size`: sequences x KV heads (decode), query rows of the longest chunk (prefill), tokens."""

    kernel: str
    arch: int  # 90: compute capability 9.0; 0: no GPU
    head_dim: int
    group: int
    dtype: str  # of the KV cache: fp32, half (fp16 or bf16), fp8
    block_size: int
    size: int


def key_of(kernel: str, shape: AttentionShape, size: int, device: torch.device | str) -> Key:
    dtype = "fp8" if shape.kv_dtype == FP8 else DTYPE_NAMES[shape.dtype]
    return Key(kernel, _arch(torch.device(device)), shape.head_dim, shape.group, dtype, shape.block_size, size)


@cache
def _arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + (0 if major == 10 else minor)  # sm_103 runs what sm_100 does


@cache
def config_for(key: Key) -> Config:
    return config_of(choose(key, read_table()))


def choose(key: Key, rows: Sequence[Row]) -> Row:
    matching = [row for row in rows if _matches(row, key)]
    assert matching, f"configs.json has no row for {key}: each kernel needs one that names nothing else"
    return max(matching, key=lambda row: (sum(name in row for name in NAMED), -int(row.get("max_size", 2**62))))


def config_of(row: Row) -> Config:
    return Config(**{name: int(row[name]) for name in Config.__slots__ if name in row})


def _matches(row: Row, key: Key) -> bool:
    named = (name for name in NAMED if name in row)
    return all(row[name] == getattr(key, name) for name in named) and key.size <= int(row.get("max_size", key.size))


@cache
def read_table() -> tuple[Row, ...]:
    return tuple(json.loads(TABLE.read_text()))

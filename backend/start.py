"""From names to a body that can run: the model, what of the engine's settings follows from it, and the executor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from backend.config import PRESETS, ModelConfig
from backend.executor import TorchExecutor
from backend.load import RANDOM, LoadedModel, load_model
from backend.weights import expected_shapes
from policies.catalogue import build
from policies.config import EngineConfig

GIB = 1024**3
ENOUGH = 4096  # blocks, to see whether policies go together: a part of the pool needs one
DEVICES = ("cpu", "cuda")
DTYPES = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
    "float32": torch.float32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Body:
    """A loaded model on a device, and settings it can keep."""

    loaded: LoadedModel
    config: EngineConfig
    device: torch.device

    @property
    def model(self) -> ModelConfig:
        return self.loaded.decoder.config

    @property
    def dtype(self) -> torch.dtype:
        return self.loaded.decoder.dtype

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model, self.dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_elements_per_token * self.dtype.itemsize

    def executor(self) -> TorchExecutor:
        return TorchExecutor(self.loaded.decoder, self.config)


def start(
    model: str,
    device: str = "cpu",
    settings: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    memory_share: float = 0.9,
    seed: int = 0,
) -> Body:
    """Load a model and settle what the engine's `settings` leave open: max_model_len and num_blocks.

    Blocks: room for as many requests as may run, each as long as may be; at most what `memory_share` of the free memory
    holds, and on a CPU, which others use too, a GiB. Raises ValueError, one line, and before anything is loaded where
    that can be known.
    """
    where, kind = _device(device), _dtype(dtype, device)
    if not 0.0 < memory_share <= 1.0:
        raise ValueError(f"gpu_memory_utilization ({memory_share}) must be above 0 and at most 1")
    draft = EngineConfig.from_dict({"max_model_len": 1, **(settings or {})})
    build(replace(draft, num_blocks=min(draft.num_blocks, ENOUGH)))  # all that were asked for may be too many to count
    if draft.num_host_blocks:
        raise ValueError(
            f"num_host_blocks ({draft.num_host_blocks}) must be 0: a live body keeps nothing of the preempted, it "
            "computes them again"
        )
    _check_room(model, where, kind)
    loaded = load_model(model, where, kind, seed)
    return Body(loaded, _settle(dict(settings or {}), loaded, where, memory_share), where)


def _settle(settings: dict[str, Any], loaded: LoadedModel, device: torch.device, memory_share: float) -> EngineConfig:
    shape = loaded.decoder.config
    settings.setdefault("max_model_len", shape.max_model_len)
    draft = EngineConfig.from_dict(settings)
    block_bytes = draft.block_size * shape.kv_elements_per_token * loaded.decoder.dtype.itemsize
    free = int(memory_share * free_bytes(device))
    fitting = free // block_bytes
    wanted = draft.max_num_seqs * -(-draft.max_model_len // draft.block_size)
    unasked = fitting if device.type == "cuda" else min(fitting, GIB // block_bytes)
    num_blocks = settings.setdefault("num_blocks", min(wanted, unasked))
    if not 1 <= num_blocks <= fitting:
        raise ValueError(
            f"num_blocks ({num_blocks:,}) of {draft.block_size} tokens take {num_blocks * block_bytes / GIB:.1f} GiB "
            f"of KV for {shape.name}, but {free / GIB:.1f} GiB are free on {device}: {fitting:,} blocks fit"
        )
    return EngineConfig.from_dict(settings)


def _check_room(model: str, device: torch.device, dtype: torch.dtype) -> None:
    """Of a shape that is known before it is filled."""
    shape = PRESETS.get(model.removeprefix(RANDOM))
    if shape is None or not model.startswith(RANDOM):
        return
    wanted = weight_bytes(shape, dtype)
    if wanted > (free := free_bytes(device)):
        raise ValueError(
            f"{model}'s weights take {wanted / GIB:.1f} GiB in {dtype}, but {free / GIB:.1f} GiB are free on {device}: "
            "take a smaller model"
        )


def weight_bytes(shape: ModelConfig, dtype: torch.dtype) -> int:
    return sum(prod(each) for each in expected_shapes(shape).values()) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """What can still be taken; where the system does not tell, what is there."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device(name: str) -> torch.device:
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no GPU here; take cpu, or simulate one")
    return torch.device(name)


def _dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} cannot be run; known: auto, {', '.join(DTYPES)}")
    return DTYPES[name]

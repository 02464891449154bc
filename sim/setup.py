"""What a user asks for, as plain values; and what is built from it: workload, engine configuration, cost."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from policies.catalogue import describe, preset, source_hash
from policies.config import EngineConfig
from sim.capacity import kv_blocks
from sim.cost import DatasheetCost
from sim.hardware import Device, device
from sim.models import Model, model
from sim.workload.load import load
from sim.workload.workload import Workload

DEFAULT_MODEL = "llama-3-8b"
DEFAULT_GPU = "h100"


@dataclass(frozen=True, slots=True)
class Setup:
    """One run in a user's words; None leaves a choice to the default or the preset.

    `engine` holds settings of EngineConfig by name, policies included.
    """

    trace: Path | None = None
    workload: str | None = None
    num_requests: int | None = None
    rate: float | None = None
    seed: int = 0
    ticks: str = "spread"
    max_tokens: int | None = None
    model: str = DEFAULT_MODEL
    gpu: str = DEFAULT_GPU
    gpu_memory_utilization: float = 0.9
    preset: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Workload:
        """Raises ValueError, one line, for whatever is wrong with the workload."""
        if self.seed < 0:
            raise ValueError(f"seed ({self.seed}) must be 0 or more")
        return load(
            self.trace,
            self.workload,
            num_requests=self.num_requests,
            rate=self.rate,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ticks=self.ticks,
        )

    def models(self) -> tuple[Model, Device]:
        return model(self.model), device(self.gpu)

    def cost(self) -> DatasheetCost:
        return DatasheetCost(*self.models())

    def config(self) -> EngineConfig:
        """The engine's settings: the preset's, then the user's; KV blocks from memory unless given."""
        the_model, the_device = self.models()
        values = {**(preset(self.preset) if self.preset else {}), **self.engine}
        values.setdefault("max_model_len", the_model.max_model_len)
        if "num_blocks" not in values:
            draft = EngineConfig.from_dict(values)
            values["num_blocks"] = kv_blocks(
                the_model,
                the_device,
                draft.block_size,
                self.gpu_memory_utilization,
                draft.max_num_batched_tokens,
                draft.max_num_seqs,
            )
        return EngineConfig.from_dict(values)


def scaled(cost: DatasheetCost, by: float) -> DatasheetCost:
    """The same cost with every time multiplied."""
    return replace(cost, scale=cost.scale * by)


def manifest(setup: Setup, config: EngineConfig, workload: Workload, cost: DatasheetCost) -> dict[str, Any]:
    """All that a result depends on, to be stored beside it."""
    return {
        "servetwin": version("servetwin"),
        "body": "simulator",
        "engine": config.to_dict(),
        "policies": describe(config),
        "policies_source": source_hash(),
        "profile": {
            "provenance": cost.provenance,
            "band": cost.band,
            "model": cost.model.name,
            "gpu": cost.device.name,
            "host_time_per_step": cost.host_time_per_step,
            "host_time_per_request": cost.host_time_per_request,
        },
        "workload": {
            "name": workload.name,
            "source": workload.source,
            "num_requests": workload.num_requests,
            "findings": list(workload.findings),
        },
        "seed": setup.seed,
        "cache_state": "cold",
        "isolation": config.isolation,
        "front_end": "not modelled: latencies begin and end at the engine",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("numpy", "simpy")}},
    }

"""What a user asks for, as plain values: options, a TOML file, a vLLM command; and what is built from it.

The command line, the file beside every result and the manifest say the same things by the same names.
"""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from policies.catalogue import describe, preset, source_hash
from policies.config import EngineConfig
from sim.capacity import Demand, demand, kv_blocks
from sim.conventions import check_convention
from sim.cost import DatasheetCost, MeasuredCost
from sim.cost.best import Cost, cost_of
from sim.cost.body import BodyCost, body_behind
from sim.cost.graphs import largest_capture
from sim.cost.server import ServedCost, server_behind
from sim.frontend import FrontEndTimes
from sim.hardware import Device, device
from sim.models import Model, model, stored_as
from sim.slo import Objective, parse_objectives
from sim.vllm_args import VllmArgs, serve_command, server_defaults
from sim.warmth import CacheState, parse_cache_state
from sim.workload.every import every_item
from sim.workload.generate import generate
from sim.workload.load import load
from sim.workload.transform import parse_transform
from sim.workload.workload import Workload

FRONT_ENDS = ("default", "off")
HOST_TIMES = ("per_step", "per_request", "per_hash", "per_lookup")


@dataclass(frozen=True, slots=True)
class Setup:
    """One run in a user's words; None leaves a choice to the default or the preset.

    `engine` holds settings of EngineConfig by name, policies included; `front_end_times` those of FrontEndTimes;
    `host_times` seconds of the host, by HOST_TIMES, where they are not to be those of the costs.
    """

    trace: str | None = None
    workload: str | None = None
    num_requests: int | None = None
    rate: float | None = None
    seed: int = 0
    arrivals: str | None = None
    transforms: tuple[str, ...] = ()
    ticks: str = "spread"
    timestamp_unit: str | None = None
    content_size: int | None = None
    max_tokens: int | None = None
    model: str = "llama-3-8b"
    gpu: str = "h100"
    tensor_parallel: int = 1
    dtype: str = "auto"
    kv_dtype: str = "auto"
    costs: str = "auto"
    cuda_graphs: str = "full"
    gpu_memory_utilization: float = 0.9
    num_replicas: int = 1
    routing: str = "round_robin"
    load_staleness: float = 0.0
    host_bandwidth_gb_s: float = 25.0  # of each GPU, to host memory and back (PCIe 4.0 x16, its protocol taken off)
    front_end: str = "default"
    slo: str | None = None
    convention: str = "vllm"
    preset: str | None = None
    cache_state: str = "cold"
    engine: Mapping[str, Any] = field(default_factory=dict)
    front_end_times: Mapping[str, Any] = field(default_factory=dict)
    host_times: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed ({self.seed}) must be 0 or more")
        if self.front_end not in FRONT_ENDS:
            raise ValueError(f"unknown front_end {self.front_end!r}; known: {', '.join(FRONT_ENDS)}")
        if not 0.0 < self.host_bandwidth_gb_s < float("inf"):
            raise ValueError(f"host_bandwidth_gb_s ({self.host_bandwidth_gb_s}) must be a finite number above 0")
        check_convention(self.convention)
        for name in self.host_times:
            if name not in HOST_TIMES:
                raise ValueError(f"unknown host time {name!r}; known: {', '.join(HOST_TIMES)}")
        if str(self.warmth) != "cold" and self.num_replicas > 1:
            raise ValueError(f"cache_state {self.cache_state!r} is for one replica, not for {self.num_replicas}")

    @property
    def warmth(self) -> CacheState:
        return parse_cache_state(self.cache_state)

    # -- building -----------------------------------------------------------------------------------------------

    def load(self) -> Workload:
        """Raises ValueError, one line, for whatever is wrong with the workload."""
        found = self._generated() if self.arrivals is not None else self._loaded()
        for text in self.transforms:
            found = parse_transform(text, self.seed)(found)
        return found

    def _loaded(self) -> Workload:
        return load(
            None if self.trace is None else Path(self.trace),
            self.workload if self.trace or self.workload else "chat",
            num_requests=self.num_requests,
            rate=self.rate,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ticks=self.ticks,
            timestamp_unit=self.timestamp_unit,
            content_size=self.content_size,
        )

    def _generated(self) -> Workload:
        if self.trace is not None:
            raise ValueError("arrivals are for built-in workloads: a trace has its own; scale it by rate")
        return generate(
            self.workload or "chat",
            num_requests=self.num_requests,
            rate=self.rate,
            seed=self.seed,
            max_tokens=self.max_tokens,
            arrivals=self.arrivals,
        )

    def block_transfer_time(self, config: EngineConfig) -> float:
        """Seconds in which each GPU moves its share of a KV block to host memory, or back."""
        the_model, _ = self.hardware()
        num_bytes = the_model.shard(self.tensor_parallel).kv_bytes_per_token * config.block_size
        return num_bytes / (self.host_bandwidth_gb_s * 1e9)

    def hardware(self) -> tuple[Model, Device]:
        return stored_as(model(self.model.removeprefix("random:")), self.dtype, self.kv_dtype), device(self.gpu)

    def config(self) -> EngineConfig:
        """The engine's settings: the preset's, then the user's; KV blocks from memory unless given."""
        the_model, the_device = self.hardware()
        server = server_behind(self.costs)
        base = dict(server.engine) if server else {}  # as the server ran that the costs are of
        values = {**base, **(preset(self.preset) if self.preset else {}), **self.engine}
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
                self.tensor_parallel,
            )
        return EngineConfig.from_dict(values)

    def cost(self, config: EngineConfig) -> Cost:
        """The best there is for this model and GPU, unless `costs` names others."""
        datasheet = DatasheetCost(
            *self.hardware(),
            tensor_parallel=self.tensor_parallel,
            cuda_graphs=self.cuda_graphs,
            largest_capture=largest_capture(config.max_num_seqs, config.max_num_batched_tokens),
            **{f"host_time_{name}": value for name, value in self.host_times.items()},
        )
        found = cost_of(self.costs, datasheet)
        if self.host_times and not isinstance(found, (DatasheetCost, MeasuredCost)):
            raise ValueError(f"host_times go with a datasheet or a profile; costs {self.costs!r} have their own")
        return found

    def front_end_model(self) -> FrontEndTimes | None:
        """None where latencies begin and end at the engine."""
        if self.front_end == "off":
            if self.front_end_times:
                raise ValueError("front_end is off, but front_end_times are given: leave one of them out")
            return None
        known = {each.name for each in fields(FrontEndTimes)}
        for name in self.front_end_times:
            if name not in known:
                raise ValueError(f"unknown front-end setting {name!r}; known: {', '.join(sorted(known))}")
        if (body := body_behind(self.costs)) is not None:
            return FrontEndTimes.off(**{**body.front_end, **self.front_end_times})
        server = server_behind(self.costs)
        if server is not None and server.front_end is None and not self.front_end_times:
            return None  # its latencies were taken at the engine
        return FrontEndTimes(**{**((server.front_end if server else None) or {}), **self.front_end_times})

    def objectives(self) -> tuple[Objective, ...]:
        return parse_objectives(self.slo) if self.slo else ()

    # -- other forms --------------------------------------------------------------------------------------------

    def with_vllm(self, args: VllmArgs) -> Setup:
        """What a vLLM command says, over what was there; steps as large as vLLM's server takes them by default."""
        engine = {**server_defaults(device(self.gpu)), **args.engine, **self.engine}
        if engine["max_num_batched_tokens"] < engine["max_num_seqs"]:
            engine["max_num_seqs"] = engine["max_num_batched_tokens"]
        options = {name: value for name, value in args.options.items() if name != "eager"}
        if args.options.get("eager"):
            options["cuda_graphs"] = "eager"
        return replace(self, model=args.model or self.model, engine=engine, **options)

    def to_dict(self) -> dict[str, Any]:
        """Only what differs from the defaults: what a person would have written."""
        default = Setup()
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        told = {name: value for name, value in values.items() if value != getattr(default, name)}
        return {
            name: list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v
            for name, v in told.items()
        }

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Setup:
        """Raises ValueError naming the first unknown name or bad value."""
        known = {each.name: each for each in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"unknown setting {name!r}; known: {', '.join(known)}")
            if not isinstance(value, _KINDS[str(known[name].type)]) or isinstance(value, bool):
                raise ValueError(f"{name} ({value!r}) must be {known[name].type}")
        typed: dict[str, Any] = {name: tuple(v) if name == "transforms" else v for name, v in values.items()}
        return cls(**typed)

    @classmethod
    def from_toml(cls, path: Path) -> Setup:
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: not a readable TOML file ({error})") from None
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str,),
    "int": (int,),
    "int | None": (int,),
    "float": (float, int),
    "float | None": (float, int),
    "tuple[str, ...]": (list, tuple),
    "Mapping[str, Any]": (dict,),
}


def scaled(cost: Cost, by: float) -> Cost:
    """The same cost with every time multiplied."""
    return replace(cost, scale=cost.scale * by)


def manifest(setup: Setup, config: EngineConfig, workload: Workload, cost: Cost) -> dict[str, Any]:
    """All that a result depends on, to be stored beside it."""
    front_end = setup.front_end_model()
    return {
        **basis(setup, config, workload, memory_wanted(config, workload, cost.model, cost.tensor_parallel)),
        "body": "simulator",
        "profile": {**_profile(cost), **_host(setup)},
        "front_end": "off" if front_end is None else asdict(front_end),
        "versions": versions("numpy", "simpy"),
    }


def basis(setup: Setup, config: EngineConfig, workload: Workload, memory: Demand) -> dict[str, Any]:
    """What a simulated result and a live one depend on alike."""
    return {
        "servetwin": version("servetwin"),
        "engine": config.to_dict(),
        "policies": describe(config),
        "policies_source": source_hash(),
        "cluster": {
            "num_replicas": setup.num_replicas,
            "routing": setup.routing,
            "load_staleness": setup.load_staleness,
            "host_bandwidth_gb_s": setup.host_bandwidth_gb_s,
        },
        "memory": asdict(memory),
        "workload": {
            "name": workload.name,
            "source": workload.source,
            "num_requests": workload.num_requests,
            "findings": list(workload.findings),
        },
        "seed": setup.seed,
        "cache_state": str(setup.warmth),
        "isolation": config.isolation,
        "convention": setup.convention,
        "slo": setup.slo,
        "vllm_flags": recommended_flags(config, setup),
    }


def versions(*libraries: str) -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in libraries}}


def memory_wanted(config: EngineConfig, workload: Workload, shape: Model, tensor_parallel: int = 1) -> Demand:
    """What as many requests as may run want of each GPU, their context limit included: it follows from the rest."""
    items = every_item(workload)
    prompts = [item.request.prompt.num_tokens for item in items]
    outputs = [item.num_output_tokens for item in items]
    return demand(shape, prompts, outputs, config.max_num_seqs, config.max_model_len, tensor_parallel)


def recommended_flags(config: EngineConfig, setup: Setup) -> str:
    """How to start vLLM as it was simulated, as far as it has the setting."""
    return serve_command(setup.model, config, setup.tensor_parallel, setup.gpu_memory_utilization)


def _profile(cost: Cost) -> dict[str, Any]:
    return {
        "provenance": cost.provenance,
        "band": cost.band,
        "model": cost.model.name,
        "gpu": cost.device.name,
        "tensor_parallel": cost.tensor_parallel,
        "dtype": cost.model.dtype,
        "kv_dtype": cost.model.kv_dtype,
        "cuda_graphs": cost.cuda_graphs,
        **_source(cost),
        "host_time_per_step": cost.host_time_per_step,
        "host_time_per_request": cost.host_time_per_request,
    }


def _host(setup: Setup) -> dict[str, Any]:
    return {"host_times": dict(setup.host_times)} if setup.host_times else {}


def _source(cost: Cost) -> dict[str, Any]:
    """Where the times come from: the parts of a profile, or the shares of a datasheet."""
    if isinstance(cost, ServedCost):
        return {"server": cost.server.name, "server_hash": cost.server.content_hash}
    if isinstance(cost, BodyCost):
        return {"body": cost.costs.name, "body_hash": cost.costs.content_hash, "kernels": cost.costs.about["kernels"]}
    if not isinstance(cost, MeasuredCost):
        return {"efficiency_source": cost.device.efficiency_source}
    profile = cost.profile
    return {
        "profile": profile.name,
        "profile_hash": profile.content_hash,
        "band_source": profile.band_source,
        "parts": dict(cost.parts),
    }

"""How each shipped profile is made: which public tables price which operation, and how far off whole steps were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.choose import calibrated, refitted
from calibration.fit import Form
from calibration.forms import DECODE_FORMS, GEMM_FORMS, PREFILL_FORMS
from calibration.samples import Ceilings, Rejected, Samples, screened
from calibration.tables import (
    Table,
    attention_samples,
    decode_kind,
    file_hash,
    gemm_samples,
    prefill_kind,
    tables_directory,
)
from sim.cost.kinds import Decode, Prefill
from sim.cost.profile import FittedOp, Profile
from sim.hardware import Device, device

SOURCE = "kernel tables of aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0)"
MOST_LISTED = 50  # rejected rows


@dataclass(frozen=True, slots=True)
class Attention:
    """Decode and prefill attention in bf16, from one engine's tables."""

    engine: str
    version: str
    kernel: str | None = None
    head_dim: int = 128
    kv_dtype: str = "bf16"
    grouped: bool = True


@dataclass(frozen=True, slots=True)
class Gemms:
    engine: str
    version: str
    dtype: str = "bf16"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A profile of public tables. `band`: 68 % of measured steps lay within it, see `band_source`."""

    device: str
    system: str
    parts: tuple[Attention | Gemms, ...]
    band: float
    band_source: str
    name: str = "public-tables"


COMPARED = "68 % of 706 published closed loops of dense models on H100 and H200 (three engines) are within 1.148"


def _hopper(device: str, system: str) -> Recipe:
    vllm = ("vllm", "0.24.0")
    parts: tuple[Attention | Gemms, ...] = (
        Attention(*vllm, kernel="vllm_flash_attn_fa3"),
        Attention(*vllm, kernel="vllm_flash_attn_fa3", grouped=False),
        Attention(*vllm, kernel="vllm_flash_attn_fa3", kv_dtype="fp8"),
        Attention(*vllm, kernel="vllm_flash_attn_fa3", head_dim=64),
        Gemms(*vllm),
        Gemms(*vllm, dtype="fp8"),
    )
    return Recipe(device, system, parts, 1.15, COMPARED)


NOT_COMPARED = "between that of H100 and H200 and a datasheet's: no whole steps of this GPU at hand"
RECIPES = (
    _hopper("h100", "h100_sxm"),
    _hopper("h200", "h200_sxm"),
    Recipe(
        "a100",
        "a100_sxm",
        (Attention("vllm", "0.14.0"), Attention("vllm", "0.14.0", grouped=False), Gemms("vllm", "0.14.0")),
        1.25,
        NOT_COMPARED,
    ),
    Recipe(
        "l40s",
        "l40s",
        (
            Attention("vllm", "0.24.0", "vllm_flash_attn_fa2"),
            Attention("vllm", "0.24.0", "vllm_flash_attn_fa2", grouped=False),
            Attention("sglang", "0.5.14", "triton", head_dim=64),
            Gemms("vllm", "0.24.0"),
            Gemms("vllm", "0.24.0", dtype="fp8"),
        ),
        1.25,
        NOT_COMPARED,
    ),
    Recipe(
        "rtx-pro-6000",
        "rtx_pro_6000_server",
        (
            Attention("sglang", "0.5.14", "triton"),
            Attention("sglang", "0.5.14", "triton", kv_dtype="fp8"),
            Attention("sglang", "0.5.14", "triton", head_dim=64),
            Gemms("vllm", "0.24.0"),
            Gemms("vllm", "0.24.0", dtype="fp8"),
        ),
        1.25,
        NOT_COMPARED,
    ),
)


def recipe_of(name: str) -> Recipe:
    """By the GPU's name. Raises ValueError for one that no profile is made for."""
    known = {recipe.device: recipe for recipe in RECIPES}
    if name not in known:
        raise ValueError(f"no kernel tables of {name!r} are fitted; known: {', '.join(known)}")
    return known[name]


@dataclass(frozen=True, slots=True)
class Job:
    """One operation to be fitted."""

    samples: Samples
    rejected: tuple[Rejected, ...]
    serves: Mapping[str, Any]
    source: str


def jobs(recipe: Recipe, directory: Path) -> list[Job]:
    """All operations of a recipe, their rows read and screened."""
    gpu = device(recipe.device)
    found = []
    for part in recipe.parts:
        found += (
            _gemms(recipe, part, gpu, directory)
            if isinstance(part, Gemms)
            else _attention(recipe, part, gpu, directory)
        )
    return found


def _attention(recipe: Recipe, part: Attention, gpu: Device, directory: Path) -> list[Job]:
    serves = {"head_dim": part.head_dim, "kv_dtype": part.kv_dtype, "grouped": part.grouped}
    kinds: dict[str, Decode | Prefill] = {
        "generation_attention_perf": decode_kind(gpu, part.head_dim, part.kv_dtype),
        "context_attention_perf": prefill_kind(gpu, part.head_dim, part.kv_dtype),
    }
    found = []
    for name, kind in kinds.items():
        table = Table(recipe.system, "attention", part.engine, part.version, name)
        samples = attention_samples(directory, table, kind, part.kv_dtype, part.grouped, part.kernel)
        found.append(_job(samples, gpu, serves, directory, table, part.kernel))
    return found


def _gemms(recipe: Recipe, part: Gemms, gpu: Device, directory: Path) -> list[Job]:
    table = Table(recipe.system, "gemm", part.engine, part.version, "gemm_perf")
    samples = gemm_samples(directory, table, part.dtype)
    return [_job(samples, gpu, {"dtype": part.dtype}, directory, table, None)]


def _job(
    samples: Samples, gpu: Device, serves: Mapping[str, Any], directory: Path, table: Table, kernel: str | None
) -> Job:
    is_fp8 = serves.get("dtype") == "fp8" and gpu.fp8_tflops is not None
    peak = gpu.fp8_tflops if is_fp8 and gpu.fp8_tflops else gpu.bf16_tflops
    kept, rejected = screened(samples, Ceilings(gpu.bandwidth_gb_s * 1e9, peak * 1e12, gpu.l2_mb * 1e6))
    rows = f"{table.path}{f' (kernel_source {kernel})' if kernel else ''}, sha256 {file_hash(directory / table.path)}"
    return Job(kept, tuple(rejected), serves, rows)


FORMS = {"decode attention": DECODE_FORMS, "prefill attention": PREFILL_FORMS, "gemm": GEMM_FORMS}
FRONTIERS = {"decode attention": "context", "prefill attention": "chunk", "gemm": "m"}


def make(recipe: Recipe, directory: Path | None = None) -> Profile:
    """Fit everything, forms chosen anew."""
    todo = jobs(recipe, tables_directory(directory))
    ops = [
        calibrated(job.samples, FORMS[job.samples.kind.name], FRONTIERS[job.samples.kind.name], job.serves)
        for job in todo
    ]
    return _profile(recipe, todo, ops)


def remake(recipe: Recipe, known: Profile, directory: Path | None = None) -> Profile:
    """Fit again in the forms that a profile chose: what a check compares."""
    todo = jobs(recipe, tables_directory(directory))
    if len(todo) != len(known.ops):
        raise ValueError(
            f"profile {known.name} of {known.device} has {len(known.ops)} operations, its recipe {len(todo)}"
        )
    ops = [refitted(job.samples, _form(op), op) for job, op in zip(todo, known.ops, strict=True)]
    return _profile(recipe, todo, ops)


def _form(op: FittedOp) -> Form:
    return next(form for form in FORMS[op.name] if form.name == op.evidence["form"])


def _profile(recipe: Recipe, todo: list[Job], ops: list[FittedOp]) -> Profile:
    rejected = [
        {"op": job.samples.kind.name, "point": list(row.point), "seconds": row.time, "reason": row.reason}
        for job in todo
        for row in job.rejected
    ]
    about = {
        "recipe": f"servetwin calibrate fit {recipe.device}",
        "source": SOURCE,
        "tables": [job.source for job in todo],
        "method": "graph-timed launches, as the tables' authors took them; a small KV is read from a warm cache",
        "num_rejected": len(rejected),
        "rejected": rejected[:MOST_LISTED],
    }
    return Profile(recipe.name, recipe.device, "public tables", tuple(ops), recipe.band, recipe.band_source, about)

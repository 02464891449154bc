"""Public kernel tables (NVIDIA's aiconfigurator-core, Apache-2.0) as samples: attention of one layer, and GEMMs.

The tables come with the installed package or lie in a directory of the same layout. Milliseconds there, seconds here.
Contexts are those of whole batches of equal sequences; prefills begin at token 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.samples import Floats, Samples
from sim.cost.kinds import Decode, Gemm, Kind, Prefill
from sim.hardware import Device

PACKAGE = "aiconfigurator_core"
TABLE_DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}
DTYPE_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Table:
    """A parquet file of the tables: system h200_sxm, group attention, engine vllm, version 0.24.0, name gemm_perf."""

    system: str
    group: str
    engine: str
    version: str
    name: str

    @property
    def path(self) -> Path:
        return Path(self.system, self.group, self.engine, self.version, f"{self.name}.parquet")


def tables_directory(given: Path | None = None) -> Path:
    """Raises ValueError where neither the directory nor the package is there."""
    if given is not None:
        if not given.is_dir():
            raise ValueError(
                f"no kernel tables at {str(given)!r}: give a directory with h200_sxm/, h100_sxm/, ... in it"
            )
        return given
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            "kernel tables wanted: pip install 'servetwin[kernel-tables]', or say where they lie (--tables)"
        )
    return Path(spec.origin).parent / "systems" / "data"


@cache
def read_columns(path: Path) -> Mapping[str, NDArray[Any]]:
    """Columns by name. Raises ValueError for a file that is missing or not a table."""
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError("kernel tables are parquet files: pip install 'servetwin[tables]' to read them") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(f"cannot read kernel table {str(path)!r}: {str(error).splitlines()[0]}") from None
    return {name: table.column(name).to_numpy() for name in table.column_names}


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wanted(columns: Mapping[str, NDArray[Any]], names: tuple[str, ...], source: str) -> list[NDArray[Any]]:
    """Raises ValueError naming the columns that are missing."""
    missing = [name for name in names if name not in columns]
    if missing:
        raise ValueError(f"{source}: no column {', '.join(missing)}; it has {', '.join(columns)}")
    return [columns[name] for name in names]


def attention_samples(
    directory: Path,
    table: Table,
    kind: Decode | Prefill,
    kv_dtype: str,
    grouped: bool,
    kernel: str | None = None,
) -> Samples:
    """Rows of full attention in bf16 with KV of this type, several query heads a KV head or one each."""
    columns, source = read_columns(directory / table.path), str(table.path)
    names = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "latency")
    batch, length, step, heads, kv_heads, head_dim, latency = wanted(columns, names, source)
    chosen = (head_dim == kind.head_dim) & ((heads > kv_heads) == grouped)
    chosen &= wanted(columns, ("attn_dtype",), source)[0] == "bfloat16"
    chosen &= wanted(columns, ("kv_cache_dtype",), source)[0] == TABLE_DTYPES[kv_dtype]
    if "window_size" in columns:
        chosen &= columns["window_size"] == 0
    if kernel is not None:
        chosen &= wanted(columns, ("kernel_source",), source)[0] == kernel
    group = heads / np.maximum(kv_heads, 1)
    points = (batch, length + step) if isinstance(kind, Decode) else (batch, length, step)
    return _samples(kind, np.column_stack((*points, kv_heads, group))[chosen], latency[chosen], source)


def gemm_samples(directory: Path, table: Table, dtype: str) -> Samples:
    columns, source = read_columns(directory / table.path), str(table.path)
    m, n, k, latency, stored = wanted(columns, ("m", "n", "k", "latency", "gemm_dtype"), source)
    chosen = stored == TABLE_DTYPES[dtype]
    kind = Gemm(DTYPE_BYTES[dtype])
    return _samples(kind, np.column_stack((m, n, k))[chosen], latency[chosen], source)


def _samples(kind: Kind, points: Floats, latency: Floats, source: str) -> Samples:
    """In an order of their own, whatever the file's."""
    order = np.lexsort(points.T[::-1])
    try:
        return Samples(kind, points[order].astype(np.float64), latency[order].astype(np.float64) * 1e-3)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def decode_kind(device: Device, head_dim: int, kv_dtype: str) -> Decode:
    return Decode(head_dim, DTYPE_BYTES[kv_dtype], device.l2_mb * 1e6, device.num_sms)


def prefill_kind(device: Device, head_dim: int, kv_dtype: str) -> Prefill:
    return Prefill(head_dim, DTYPE_BYTES[kv_dtype], device.num_sms)

"""LLMServingSim's kernel tables of one model on one GPU: a folder of CSV files, times in microseconds of one layer.

attention.csv (a chunk and decodes in one launch), dense.csv (layers by tokens), per_sequence.csv (head and sampler),
perhaps skew.csv (contexts that differ); meta.yaml lies above the folder.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibration.importers.files import read_columns, read_text
from calibration.samples import FEWEST, Floats, Samples
from sim.cost.mixed import Mixed
from sim.hardware import device
from sim.models import Model, model

ONCE = ("embedding", "final_layernorm")  # a step
PER_LAYER = {"layernorm": 2, "qkv_proj": 1, "qk_norm": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1,
             "down_proj": 1}  # fmt: skip
OPTIONAL = ("qk_norm",)
SLOWEST, FASTEST = 2e10, 2e13  # bytes a second that a GPU may read weights and KV at; a wrong unit lies far outside
CHIPS = {"NVIDIA GeForce RTX 4090": (72e6, 128)}  # L2 bytes and SMs of what sim/hardware.py has no datasheet of


@dataclass(frozen=True, slots=True)
class KernelTables:
    """What was measured, in seconds; of each layer by its count.

    `skew`, a row each: decodes, chunk, mean context, the longest in means, and how far the launch is on the way from
    one whose contexts are all the mean to one whose are all the longest.
    """

    gpu: str
    model: Model
    attention: Samples
    dense: Mapping[str, Mapping[float, float]]
    heads: Mapping[str, Mapping[float, float]]
    skew: Floats


def read_kernel_tables(folder: Path) -> KernelTables:
    """Raises ValueError, one line, for a table that is missing, incomplete, negative or in another unit."""
    meta = _meta(folder)
    shape = model(meta["model"])
    _check_priced(folder, shape)
    dense = _by_layer(folder / "dense.csv", "tokens")
    heads = _by_layer(folder / "per_sequence.csv", "sequences")
    _check_layers(folder / "dense.csv", dense, (*ONCE, *PER_LAYER))
    _check_layers(folder / "per_sequence.csv", heads, ("lm_head", "sampler"))
    matrices = sum(matrix.n * matrix.k for matrix in shape.attention_matrices + shape.mlp_matrices) * 2.0
    _check_unit(folder / "dense.csv", matrices, sum(min(times.values()) for times in dense.values()))
    _check_unit(folder / "per_sequence.csv", 2.0 * shape.vocab_size * shape.hidden_size, min(heads["lm_head"].values()))
    skew = folder / "skew.csv"
    samples = _attention(folder / "attention.csv", shape, meta["gpu"])
    return KernelTables(meta["gpu"], shape, samples, dense, heads, _skew(skew) if skew.is_file() else np.empty((0, 5)))


def _meta(folder: Path) -> dict[str, str]:
    path = folder.parent / "meta.yaml"
    found = dict(re.findall(r"^(gpu|model): *(.+?) *$", read_text(path), re.MULTILINE))
    if missing := {"gpu", "model"} - set(found):
        raise ValueError(f"{str(path)!r} has no {', '.join(sorted(missing))}: whose tables are these?")
    return found


def _check_priced(folder: Path, shape: Model) -> None:
    if folder.name != "tp1":
        raise ValueError(f"{str(folder)!r}: tables of several GPUs hold no all-reduce: give those of one, in tp1")
    if shape.experts or shape.latent or shape.num_sliding_layers:
        raise ValueError(f"{shape.name} has experts, latents or windows, which such tables do not price here")


def _attention(path: Path, shape: Model, gpu: str) -> Samples:
    """Medians of launches that were measured more than once."""
    counts = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    shots: dict[tuple[float, ...], list[float]] = {}
    for row in read_columns(path, (*counts, "time_us")):
        shots.setdefault(tuple(row[name] for name in counts), []).append(1e-6 * row["time_us"])
    l2_bytes, num_sms = chip_of(gpu)
    kind = Mixed(shape.num_heads, shape.num_kv_heads, shape.head_dim, 2, l2_bytes, num_sms)
    points = sorted(shots)
    samples = Samples(kind, np.array(points), np.array([np.median(shots[point]) for point in points]))
    alone = samples.where(samples.column("chunk") == 0.0)
    if len(alone.times) < FEWEST or (samples.column("decodes") == 0.0).sum() < FEWEST:
        raise ValueError(f"{str(path)!r} has under {FEWEST} launches of decodes alone or of chunks alone: measure them")
    longest = int(np.argmax(alone.column("decodes") * alone.column("context")))
    kv_bytes = 4.0 * shape.num_kv_heads * shape.head_dim * float(np.prod(alone.points[longest, 2:]))
    _check_unit(path, kv_bytes, float(alone.times[longest]))
    return samples


def chip_of(gpu: str) -> tuple[float, int]:
    """L2 bytes and SMs."""
    if gpu in CHIPS:
        return CHIPS[gpu]
    found = device(gpu)
    return 1e6 * found.l2_mb, found.num_sms


def _skew(path: Path) -> Floats:
    """Where a launch of the longest contexts takes longer than one of their mean, and no prefix hides the decodes."""
    columns = ("n", "pc", "kp", "kv_big", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us")
    rows = np.array([[row[name] for name in columns] for row in read_columns(path, columns)])
    num, chunk, _, longest, mean, at_mean, at_longest, time = rows[(rows[:, 6] > rows[:, 5]) & (rows[:, 2] == 0.0)].T
    return np.column_stack((num, chunk, mean, np.round(longest / mean, 1), (time - at_mean) / (at_longest - at_mean)))


def _by_layer(path: Path, count: str) -> dict[str, dict[float, float]]:
    rows = csv.DictReader(read_text(path).splitlines())
    if missing := {"layer", count, "time_us"} - set(rows.fieldnames or ()):
        raise ValueError(f"{str(path)!r} has no column {', '.join(sorted(missing))}")
    found: dict[str, dict[float, float]] = {}
    for number, row in enumerate(rows, start=2):
        try:
            x, time = float(row[count]), 1e-6 * float(row["time_us"])
        except (TypeError, ValueError):
            raise ValueError(f"{str(path)!r}: line {number} is not a layer, a count and a time") from None
        if not (0.0 < x < 1e9 and 0.0 < time < 1e3):
            raise ValueError(
                f"{str(path)!r}: line {number} says {row['time_us']} us at {row[count]}: both must be above 0"
            )
        found.setdefault(row["layer"], {})[x] = time
    return found


def _check_layers(path: Path, tables: Mapping[str, Mapping[float, float]], known: tuple[str, ...]) -> None:
    if missing := [name for name in known if name not in tables and name not in OPTIONAL]:
        raise ValueError(f"{str(path)!r} has no rows of {', '.join(missing)}: a step without them is no step")
    if unknown := [name for name in tables if name not in known]:
        raise ValueError(f"{str(path)!r}: how often a step runs {unknown[0]!r} is not known; known: {', '.join(known)}")
    if len({tuple(sorted(times)) for times in tables.values()}) > 1:
        raise ValueError(f"{str(path)!r}: its layers were measured at different counts: measure all at the same")


def _check_unit(path: Path, num_bytes: float, seconds: float) -> None:
    rate = num_bytes / seconds
    if not SLOWEST <= rate <= FASTEST:
        raise ValueError(f"{str(path)!r}: {1e-9 * rate:.3g} GB/s is no GPU's: times must be microseconds, are these?")

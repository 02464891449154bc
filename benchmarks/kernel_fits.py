"""How far the fits of kernel times are off where they were not fitted, beside a random forest on Vidur's features.

    python benchmarks/kernel_fits.py [GPU ...] [--op NAME] [--all] [--tables DIR] [--shared DIR]

Splits: 30 % of the rows at random; contexts or chunks above 4,096, and from 16,384, of fits to those up to 4,096; 30 %
of the (n, k) of GEMMs; mixed batches from a tenth of LLMServingSim's shots. The forest (250 trees, scikit-learn's
defaults) is grown on the same rows, in two ways of which the better stands here: for each shape of heads on (batch,
context) or (start, sum of chunks squared) and for each (n, k) on m, as Vidur does; and on all rows, with all counts and
sizes as features.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from calibration.choose import Errors, best_form
from calibration.fit import Form, fit, predicted
from calibration.forms import MIXED_FORMS
from calibration.recipes import FORMS, FRONTIERS, jobs, recipe_of
from calibration.samples import FEWEST, Floats, Mask, Samples
from calibration.tables import tables_directory
from sim.cost.kinds import Prefill
from sim.cost.mixed import Mixed

SEED = 0
HELD_OUT = 0.3
INSIDE, FAR = 4096.0, 16384.0
NUM_TREES = 250
MOST_FORESTS = 40  # of the shapes, picked by chance: a figure, not a product
MIXED_GPUS = {"RTXPRO6000": (128e6, 188), "RTX4090": (72e6, 128)}  # L2 bytes, SMs


def splits(samples: Samples) -> Iterator[tuple[str, Mask, Mask]]:
    """Name, rows to fit, rows to ask about."""
    rng = np.random.default_rng(SEED)
    held = rng.random(len(samples.times)) < HELD_OUT
    yield "30 % at random", ~held, held
    if samples.kind.name == "gemm":
        sites = np.unique(samples.points[:, 1:], axis=0, return_inverse=True)[1].ravel()
        unseen = np.isin(sites, rng.permutation(sites.max() + 1)[: int(HELD_OUT * (sites.max() + 1))])
        yield "30 % of (n, k)", ~unseen, unseen
        return
    length = samples.column(FRONTIERS[samples.kind.name])
    yield "all above the range", length <= INSIDE, length > INSIDE
    yield "4 times the range and more", length <= INSIDE, length >= FAR


def forest(samples: Samples, inside: Mask, asked: Mask, by_shape: bool) -> Floats:
    """Predictions of random forests, one for each shape of heads or weight, or one for all; nan for what has none."""
    grow = import_module("sklearn.ensemble").RandomForestRegressor
    features, keys = vidur_features(samples, by_shape)
    predictions = np.full(len(samples.times), np.nan)
    shapes = np.random.default_rng(SEED).permutation(np.unique(keys[asked]))[:MOST_FORESTS]
    for key in shapes:
        known, wanted = inside & (keys == key), asked & (keys == key)
        if known.any():
            trees = grow(NUM_TREES, random_state=SEED).fit(features[known], samples.times[known])
            predictions[wanted] = trees.predict(features[wanted])
    return predictions[asked]


def vidur_features(samples: Samples, by_shape: bool) -> tuple[Floats, Floats]:
    """Features, and the number of each row's shape."""
    num_counts = len(samples.kind.counts)
    counts, shape = samples.points[:, :num_counts], samples.points[:, num_counts:]
    if not by_shape:
        return samples.points, np.zeros(len(counts))
    keys = np.unique(shape, axis=0, return_inverse=True)[1].ravel().astype(np.float64)
    if samples.kind.name == "prefill attention":
        counts = np.column_stack((counts[:, 2], counts[:, 0] * counts[:, 1] ** 2))  # several chunks merge into one
    return counts, keys


def is_common(serves: Mapping[str, Any]) -> bool:
    """bf16 weights and KV, grouped heads of 128."""
    return "fp8" not in serves.values() and serves.get("head_dim", 128) == 128 and serves.get("grouped", True)


def rows_of(gpu: str, op: str, tables: Path | None, all_types: bool) -> Iterator[tuple[str, ...]]:
    for job in jobs(recipe_of(gpu), tables_directory(tables)):
        samples = job.samples
        if not (all_types or is_common(job.serves)) or op not in samples.kind.name:
            continue
        serves = " ".join(str(value) for name, value in job.serves.items() if name != "grouped")
        what = f"{samples.kind.name} {serves}{'' if job.serves.get('grouped', True) else ', a KV head each'}"
        for split, inside, asked in splits(samples):
            if asked.sum() < 12:
                continue
            form, _ = best_form(samples.where(inside), FORMS[samples.kind.name], FRONTIERS[samples.kind.name], SEED)
            ours = predicted(fit(samples.where(inside), form), samples.where(asked))
            yield (
                gpu,
                what,
                split,
                *compared(ours, best_forest(samples, inside, asked), samples.times[asked]),
                form.name,
            )


def best_forest(samples: Samples, inside: Mask, asked: Mask) -> Floats:
    """The way of growing it that is less off in the median; where shapes are unseen there is one only."""
    grown = [forest(samples, inside, asked, by_shape) for by_shape in (True, False)]
    able = [each for each in grown if not np.isnan(each).all()]
    return min(able, key=lambda each: float(np.nanmedian(np.abs(each / samples.times[asked] - 1.0))))


def compared(ours: Floats, theirs: Floats, times: Floats) -> tuple[str, str, str]:
    known = ~np.isnan(theirs)
    return f"{len(times):,}", figures(ours, times), figures(theirs[known], times[known])


def figures(predictions: Floats, times: Floats) -> str:
    errors = Errors.of(predictions, times)
    return f"{errors.median:.1f} / {errors.p95:.1f}"


def mixed_samples(shared: Path, gpu: str) -> Samples:
    """LLMServingSim's shots of Llama-3.1-8B, one GPU: a chunk and decodes in one launch, medians of repeats."""
    folder = shared / "data/kernel-tables/llmservingsim" / gpu / "meta-llama/Llama-3.1-8B/bf16/tp1"
    shots: dict[tuple[float, ...], list[float]] = {}
    with (folder / "attention.csv").open() as file:
        for row in csv.DictReader(file):
            point = tuple(float(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
            shots.setdefault(point, []).append(float(row["time_us"]) * 1e-6)
    points = sorted(shots)
    l2_bytes, num_sms = MIXED_GPUS[gpu]
    times = np.array([np.median(shots[point]) for point in points])
    return Samples(Mixed(32, 8, 128, 2, l2_bytes, num_sms), np.array(points), times)


def prefix_rows(shared: Path) -> Iterator[tuple[str, ...]]:
    """Chunks alone in their step: behind prefixes, from a fit to those without, and to a random half of all."""
    for gpu in MIXED_GPUS:
        shots = mixed_samples(shared, gpu)
        alone = shots.where((shots.column("chunk") > 0) & (shots.column("decodes") == 0))
        heads = np.column_stack((np.full(len(alone.times), 8.0), np.full(len(alone.times), 4.0)))
        points = np.column_stack((np.ones(len(alone.times)), alone.points[:, :2], heads))
        samples = Samples(Prefill(128, 2, MIXED_GPUS[gpu][1]), points, alone.times)
        half = np.random.default_rng(SEED).random(len(samples.times)) < 0.5
        for split, inside, asked in (
            ("behind prefixes, from those without", points[:, 2] == 0, points[:, 2] > 0),
            ("a random half", half, ~half),
        ):
            if inside.sum() >= FEWEST:
                ours = predicted(fit(samples.where(inside), Form("additive")), samples.where(asked))
                theirs = best_forest(samples, inside, asked)
                yield gpu, "prefill attention", split, *compared(ours, theirs, samples.times[asked]), "additive"


def mixed_rows(shared: Path) -> Iterator[tuple[str, ...]]:
    for gpu in MIXED_GPUS:
        samples = mixed_samples(shared, gpu)
        inside = np.random.default_rng(SEED).random(len(samples.times)) < 0.1
        form = MIXED_FORMS[-1]
        ours = predicted(fit(samples.where(inside), form), samples.where(~inside))
        theirs = best_forest(samples, inside, ~inside)
        yield (
            gpu,
            "mixed attention",
            "from 10 % of the shots",
            *compared(ours, theirs, samples.times[~inside]),
            form.name,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="*", default=["h200", "h100", "a100", "l40s", "rtx-pro-6000"])
    parser.add_argument("--op", default="", help="decode, prefill, gemm or mixed; default: all")
    parser.add_argument("--all", action="store_true", help="fp8, heads of 64 and one KV head each too")
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    options = parser.parse_args()
    print("GPU | operation | asked about | rows | ours, median / p95 % | forest | form")
    for gpu in options.gpus:
        for row in rows_of(gpu, options.op, options.tables, options.all):
            print(" | ".join(row), flush=True)
    if options.op in "mixed attention" and (options.shared / "data/kernel-tables/llmservingsim").is_dir():
        for row in (*mixed_rows(options.shared), *prefix_rows(options.shared)):
            print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()

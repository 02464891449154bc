"""Candidate tiles, measured: the best of each key becomes a row for backend/kernels/configs.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from backend.gpu_check.bench import LLAMA_8B, LLAMA_8B_FP8, LLAMA_70B_TP8, Bench, Point
from backend.gpu_check.speed import decode_point, kv_write_point, prefill_point
from backend.kernels.configs import Config, key_of
from backend.kernels.shape import AttentionShape

RESERVE = 5.0  # s, to end in time

DECODE = tuple(
    Config(16, tile, warps, stages, programs)
    for tile, warps, stages, programs in (
        (64, 4, 3, 2), (64, 4, 3, 3), (64, 4, 4, 2), (128, 8, 3, 1), (32, 4, 4, 4), (64, 4, 3, 1), (64, 8, 3, 2),
        (32, 4, 5, 3), (64, 8, 4, 2), (128, 4, 2, 2), (128, 8, 2, 2), (32, 2, 4, 4),
    )
)  # fmt: skip
PREFILL = tuple(
    Config(rows, tile, warps, stages)
    for rows, tile, warps, stages in (
        (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2),
        (64, 128, 4, 2), (128, 32, 8, 4), (128, 64, 4, 3), (64, 32, 4, 4),
    )
)  # fmt: skip
KV_WRITE = tuple(
    Config(tokens, heads, warps, 1)
    for tokens, heads, warps in ((16, 4, 8), (8, 4, 4), (4, 8, 4), (16, 8, 8), (2, 4, 4), (1, 8, 4), (32, 4, 8))
)


@dataclass(frozen=True, slots=True)
class Contest:
    """One key of the table and the point that decides it; `max_size` None: for all larger ones."""

    kernel: str
    shape: AttentionShape
    max_size: int | None
    candidates: Sequence[Config]
    measure: Callable[[Config], Point]


@dataclass(frozen=True, slots=True)
class Tried:
    config: Config
    point: Point | None  # None: it does not run here
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    row: dict[str, int | str] | None  # None: nothing ran in time
    tried: list[Tried]


def contests(bench: Bench) -> list[Contest]:
    """The most wanted first: time may run out."""
    llama, fp8, tp8 = (bench.scaled(shape) for shape in (LLAMA_8B, LLAMA_8B_FP8, LLAMA_70B_TP8))

    def decode(shape: AttentionShape, num_seqs: int, context: int, max_size: int | None) -> Contest:
        lengths = [bench.size(context, 40)] * bench.size(num_seqs, 2)
        return Contest("decode", shape, max_size, DECODE, lambda config: decode_point(bench, shape, lengths, config))

    def prefill(query: int, context: int, max_size: int | None) -> Contest:
        sizes = bench.size(query, 20), bench.size(context, 20)
        return Contest(
            "prefill", llama, max_size, PREFILL, lambda config: prefill_point(bench, llama, 1, *sizes, config)
        )

    def kv_write(num_tokens: int, max_size: int | None) -> Contest:
        tokens = bench.size(num_tokens, 20)
        return Contest(
            "kv_write", llama, max_size, KV_WRITE, lambda config: kv_write_point(bench, llama, tokens, config)
        )

    return [
        decode(llama, 128, 4096, None), prefill(8192, 0, None), decode(llama, 32, 1024, 512), kv_write(8192, None),
        decode(llama, 1, 4096, 64), prefill(16, 65536, 64), prefill(512, 8192, 4096), decode(fp8, 128, 4096, None),
        kv_write(64, 256), decode(tp8, 128, 4096, None),
    ]  # fmt: skip


def run(bench: Bench) -> Iterator[Result]:
    for contest in contests(bench)[: 2 if bench.tiny else None]:
        tried = [_try(contest, config) for config in _in_time(bench, contest.candidates)]
        timed = [(each.point.time, each.config) for each in tried if each.point]
        best = min(timed, key=lambda pair: pair[0], default=None)
        yield Result(_row(bench, contest, best[1]) if best else None, tried)


def _in_time(bench: Bench, candidates: Sequence[Config]) -> Iterator[Config]:
    for config in candidates[: 2 if bench.tiny else None]:
        if bench.time_left > RESERVE:
            yield config


def _try(contest: Contest, config: Config) -> Tried:
    """A candidate that does not fit the device is no fault."""
    try:
        return Tried(config, contest.measure(config))
    except Exception as why:  # Triton's own errors have no common class
        return Tried(config, None, f"{type(why).__name__}: {str(why).strip()[:200]}")


def _row(bench: Bench, contest: Contest, config: Config) -> dict[str, int | str]:
    key = key_of(contest.kernel, contest.shape, 1, bench.device)
    named: dict[str, int | str] = {
        "kernel": key.kernel, "arch": key.arch, "head_dim": key.head_dim, "group": key.group, "dtype": key.dtype,
        "block_size": key.block_size,
    }  # fmt: skip
    if contest.max_size is not None:
        named["max_size"] = contest.max_size
    return named | asdict(config)

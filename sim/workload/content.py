"""Content ids: whether those of a row cover its prompt, and what those of a whole trace say of each other."""

from __future__ import annotations

from collections.abc import Sequence

from sim.workload.fields import content_list
from sim.workload.rows import TraceRow

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens a content id in known traces, and between


def covering_ids(name: str, value: object, num_tokens: int, content_size: int, length_name: str) -> tuple[int, ...]:
    """One id for each `content_size` tokens begun."""
    ids = content_list(name, value)
    expected = -(-num_tokens // content_size)
    if len(ids) != expected:
        fitting = [str(size) for size in SIZES if -(-num_tokens // size) == len(ids)]
        hint = f"; content_size {' or '.join(fitting)} would fit this row" if fitting else ""
        raise ValueError(
            f"{len(ids)} {name} for an {length_name} of {num_tokens} must be {expected}, one for each "
            f"{content_size} tokens begun: check the block size of the trace{hint}"
        )
    return tuple(ids)


def coverage(rows: Sequence[TraceRow], content_size: int) -> str:
    num = sum(bool(row.content_ids) for row in rows)
    if num == len(rows):
        return f"content ids of {content_size} tokens cover all {num} prompts"
    return f"content ids of {content_size} tokens cover {num} of {len(rows)} prompts; the others share nothing"


def two_lengths(rows: Sequence[TraceRow], content_size: int) -> list[str]:
    """Says so where one id stands for two numbers of tokens, as in files made by hand."""
    partial: dict[int, int] = {}
    for row in rows:
        if row.content_ids and (length := row.num_prompt_tokens % content_size):
            partial.setdefault(row.content_ids[-1], length)
    num = sum(_differs(row, partial, content_size) for row in rows if row.content_ids) if partial else 0
    return [f"prompts with a content id that has another length elsewhere: {num}, read as alike from its start"] * (
        num > 0
    )


def _differs(row: TraceRow, partial: dict[int, int], content_size: int) -> bool:
    last, length = row.content_ids[-1], row.num_prompt_tokens % content_size
    return partial.get(last, length) != length or not partial.keys().isdisjoint(row.content_ids[:-1])

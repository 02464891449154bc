"""An engine as a mere cache: prompts are asked for one after another, and no time passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from policies.catalogue import build
from policies.config import EngineConfig
from policies.engine import EngineCore
from policies.prompt import Prompt
from policies.types import Request, StepOutput

# Paths in a tree that branches in three: the content of each block, as a trace would number it.
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=40)


def numbered(path: Sequence[int]) -> tuple[int, ...]:
    """One id for each prefix."""
    return tuple(int("1" + "".join(map(str, path[: depth + 1]))) for depth in range(len(path)))


def cached_tokens(engine: EngineCore, prompts: Iterable[Prompt]) -> list[int]:
    """Tokens that each prompt finds, asked one after another in no time for one token."""
    found = []
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), 0.0, prompt, max_tokens=1), 0.0)
        while (plan := engine.schedule(0.0)) is not None:
            engine.update(plan, StepOutput(0.0), 0.0)
        (record,) = engine.drain_records()
        found.append(record.num_cached_tokens)
    return found


def cache_of(num_blocks: int, block_size: int, **settings: Any) -> EngineCore:
    largest = 2**24
    return build(
        EngineConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=largest,
            max_model_len=largest,
            **settings,
        )
    )

"""The block released longest ago goes; tables are released tail first, so tails go before heads (vLLM V1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from policies.types import Block, RequestState


class LeastRecentlyUsed:
    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        self._blocks[block] = None

    def discard(self, block: Block) -> None:
        del self._blocks[block]

    def touch(self, block: Block) -> None:
        pass  # a found block is referenced, and takes its place when it is released

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

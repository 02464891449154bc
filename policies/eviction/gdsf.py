"""The block whose loss costs least goes: times used x seconds to recompute it at its depth (GDSF, Cherkasova 1998).

A floor rises to the worth of each block that goes, so that old worth is overtaken in time. Blocks are of one size. Deep
blocks cost more, as their tokens attend to all before them.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.eviction._leaves import LeafHeap
from policies.types import Block, RequestState


class GreedyDualSizeFrequency:
    """`ns_per_token`, `ns_per_context_token`: of prefill, nanoseconds for a token and for each token it attends to.

    The defaults are those of an 8B model at 400 TFLOP/s: 16 GFLOP a token, 0.5 MFLOP for each one before it.
    """

    def __init__(self, ns_per_token: int = 40_000, ns_per_context_token: int = 1) -> None:
        if ns_per_token < 0 or ns_per_context_token < 0 or not ns_per_token + ns_per_context_token:
            raise ValueError(
                f"ns_per_token ({ns_per_token}) and ns_per_context_token ({ns_per_context_token}) must be 0 or more, "
                f"and not both 0"
            )
        self._per_token = ns_per_token
        self._per_context_token = ns_per_context_token
        self._block_size = 1
        self._heap = LeafHeap()
        self._floor = 0

    def fit(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size

    def cost(self, block: Block) -> int:
        """Nanoseconds a token of it takes to recompute; all blocks have as many tokens."""
        return self._per_token + self._per_context_token * block.depth * self._block_size

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        num_uses = 1 + (block.note or 0)
        self._heap.add(block, self._floor + num_uses * self.cost(block))

    def discard(self, block: Block) -> None:
        self._heap.discard(block)

    def touch(self, block: Block) -> None:
        block.note = (block.note or 0) + 1

    def pop(self, beneficiary: RequestState | None, now: float) -> Block:
        block, self._floor = self._heap.take_ranked()
        return block

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._heap)

"""Host memory for the KV of preempted requests: what is kept there is counted here, and moved by the body."""

from __future__ import annotations

from policies.types import RequestState


class HostTier:
    """A request's KV is kept whole or not at all; how much is written in its `num_swapped_tokens`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_free = num_blocks
        self._block_size = block_size

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def keep(self, state: RequestState) -> None:
        """Keep what it has computed, if there is room."""
        num_blocks = self.num_blocks(state.num_computed_tokens)
        if num_blocks <= self.num_free:
            self.num_free -= num_blocks
            state.num_swapped_tokens = state.num_computed_tokens

    def forget(self, state: RequestState) -> None:
        """It is back on the device, or of no use any more."""
        self.num_free += self.num_blocks(state.num_swapped_tokens)
        state.num_swapped_tokens = 0

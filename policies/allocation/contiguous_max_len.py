"""One contiguous region of `max_model_len` tokens a request, as engines did before paging.

What it wastes is the point: the region is held whatever the answer's length. Sharing blocks would break the region, so
prefix caching must be off. Regions are all of one size and are reused whole, newest first, so they stay contiguous.
"""

from __future__ import annotations

from policies.allocation._blocks import blocks_for
from policies.interfaces import Promise, View
from policies.types import RequestState


class ContiguousMaxLen:
    shares_blocks = False

    def promise(self, state: RequestState, num_hit_tokens: int, num_new_tokens: int, view: View) -> Promise:
        size = blocks_for(view.max_model_len, view)
        return Promise(size, num_blocks_required=size, contiguous=True)

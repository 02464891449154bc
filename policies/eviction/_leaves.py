"""Free cached blocks in the order of a rank, children before parents.

A block whose key stands before another's in a chain is no use to evict first: what hangs on it could be found no more.
So only leaves may go, whatever the rank. A table holds every block before its last one; hence what hangs on a free
block is free as well, and some free block is always a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from policies.types import Block


class _Entry(NamedTuple):
    rank: Any  # integers or tuples of numbers, all of one form in a heap; the smallest goes first
    order: int  # of equal ranks the one that came first
    block: Block


class Tree:
    """Which free blocks hang on which, for heaps that share the blocks of one cache."""

    def __init__(self) -> None:
        self.num_children: dict[int, int] = {}  # free blocks by the key of the block before them
        self.parked: dict[int, dict[Block, LeafHeap]] = {}  # by their key, blocks that cannot go yet

    def has_children(self, block: Block) -> bool:
        return block.key is not None and block.key in self.num_children


class LeafHeap:
    """Each operation costs O(log n), spread over many."""

    def __init__(self, tree: Tree | None = None) -> None:
        self.tree = Tree() if tree is None else tree
        self._entries: dict[Block, _Entry] = {}
        self._heap: list[_Entry] = []  # with leftovers of blocks that went otherwise
        self._count = 0

    def add(self, block: Block, rank: Any) -> None:
        assert block not in self._entries, f"block {block.block_id} is there already"
        self._count += 1
        self._entries[block] = _Entry(rank, self._count, block)
        if block.key is not None and block.parent is not None:
            self.tree.num_children[block.parent] = self.tree.num_children.get(block.parent, 0) + 1
        self._place(block)

    def discard(self, block: Block) -> None:
        del self._entries[block]
        if block.key is not None:
            parked = self.tree.parked.get(block.key)
            if parked is not None:
                parked.pop(block, None)
            self._leave_parent(block)
        self._sweep()

    def rerank(self, block: Block, rank: Any) -> None:
        """Give a block that is here another rank."""
        self._count += 1
        self._entries[block] = _Entry(rank, self._count, block)
        self._place(block)
        self._sweep()

    def take(self) -> Block:
        """As `pop`, where this heap holds all the blocks there are."""
        return self.take_ranked()[0]

    def take_ranked(self) -> tuple[Block, Any]:
        """The same, with its rank."""
        entry = self._next()
        assert entry is not None, "no block is left to give up"
        return entry.block, entry.rank

    def pop(self) -> Block | None:
        """The leaf of the smallest rank, taken out; None if there is no leaf in this heap."""
        entry = self._next()
        return None if entry is None else entry.block

    def peek(self) -> Any:
        """The rank of the leaf that `pop` would take; None if there is no leaf."""
        return self._heap[0].rank if self._settle() else None

    def _next(self) -> _Entry | None:
        if not self._settle():
            return None
        entry = heappop(self._heap)
        del self._entries[entry.block]
        self._leave_parent(entry.block)
        return entry

    def _settle(self) -> bool:
        """Bring a leaf to the top, if there is one."""
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry.block) is entry:
                if not self.tree.has_children(entry.block):
                    return True
                self._park(entry.block)
            heappop(self._heap)
        return False

    def rank(self, block: Block) -> Any:
        return self._entries[block].rank

    def __contains__(self, block: Block) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Block]:
        """In the order in which they would go if none came and none was found."""
        twin = LeafHeap()
        for entry in sorted(self._entries.values()):
            twin.add(entry.block, (entry.rank, entry.order))
        while (block := twin.pop()) is not None:
            yield block

    def _place(self, block: Block) -> None:
        if self.tree.has_children(block):
            self._park(block)
        else:
            heappush(self._heap, self._entries[block])

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [each for each in self._heap if self._entries.get(each.block) is each]
            heapify(self._heap)

    def _park(self, block: Block) -> None:
        assert block.key is not None
        self.tree.parked.setdefault(block.key, {})[block] = self

    def _leave_parent(self, block: Block) -> None:
        """One block less hangs on its parent; a parent that has become a leaf may go."""
        tree, parent = self.tree, block.parent
        if block.key is None or parent is None:
            return
        tree.num_children[parent] -= 1
        if tree.num_children[parent]:
            return
        del tree.num_children[parent]
        for each, heap in tree.parked.pop(parent, {}).items():
            heappush(heap._heap, heap._entries[each])


class ByKey:
    """Blocks by their key; several may carry the same."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[Block, None]] = {}

    def add(self, block: Block) -> None:
        if block.key is not None:
            self._blocks.setdefault(block.key, {})[block] = None

    def discard(self, block: Block) -> None:
        if block.key is not None:
            carriers = self._blocks[block.key]
            del carriers[block]
            if not carriers:
                del self._blocks[block.key]

    def of(self, key: int) -> Iterable[Block]:
        return self._blocks.get(key, ())

"""A device on paper: slots hold the names of tokens, and whatever is read must be the tokens that belong there.

So a false hit, a block given away too early, and a key on a block that was never written are errors of their own,
however an engine counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from policies.prompt import ContentPrompt, TokenPrompt
from policies.types import Block, Request

Slot = tuple[int, int]  # block id, offset
Write = tuple[int, int]  # step id, index of the chunk


class Cell(NamedTuple):
    """What a slot holds: the name of a token and all before it (None: rubbish), and which chunk wrote it."""

    name: int | None
    write: Write


class Names:
    """A number for each prefix: equal numbers, equal tokens from the first on, and the same right to share."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, object], int] = {}
        self.parents: list[int] = [-1]

    def of(self, parent: int, token: object) -> int:
        number = self._numbers.setdefault((parent, token), len(self.parents))
        if number == len(self.parents):
            self.parents.append(parent)
        return number


def output_token(position: int) -> int:
    """What the model says after `position` tokens: the same to everybody, so that answers can be shared as well."""
    return position % 2


class Text:
    """The tokens of one request, by name. `serial` is what is its own; `scopes` says with whom it shares from where."""

    def __init__(self, names: Names, request: Request, serial: int, scopes: Mapping[int, object]) -> None:
        self._names = names
        self._request = request
        self._serial = serial
        self._scopes = scopes
        self._prefixes = [0]
        self.num_known_keys = 0

    def name(self, position: int) -> int:
        while len(self._prefixes) <= position + 1:
            at, parent = len(self._prefixes) - 1, self._prefixes[-1]
            if at in self._scopes:
                parent = self._names.of(parent, ("scope", self._scopes[at]))
            self._prefixes.append(self._names.of(parent, self._token(at)))
        return self._prefixes[position + 1]

    def _token(self, position: int) -> object:
        prompt = self._request.prompt
        if isinstance(prompt, TokenPrompt):
            known = position < prompt.num_tokens
            return ("token", prompt.token_ids[position] if known else output_token(position))
        if isinstance(prompt, ContentPrompt) and position < max(prompt.num_tokens, prompt.num_known_tokens):
            size, ids = prompt.content_size, prompt.content_ids
            if prompt.continuation:
                ids = ids[: prompt.num_tokens // size] + prompt.continuation
            return ("content", ids[position // size], position % size)
        return ("its own", self._serial, position)


class PaperDevice:
    """All of a step's tokens are written before any is read; steps run in the order in which they are scheduled."""

    def __init__(self, block_size: int) -> None:
        self.names = Names()
        self._block_size = block_size
        self._memory: dict[Slot, Cell] = {}
        self._meaning: dict[int, int] = {}  # key -> name
        self._key_of: dict[int, int] = {}  # name -> key

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> list[Slot]:
        size = self._block_size
        return [(block_ids[position // size], position % size) for position in range(start, end)]

    def write(self, text: Text, block_ids: Sequence[int], start: int, end: int, by: Write) -> list[Slot]:
        slots = self.slots(block_ids, start, end)
        for position, slot in enumerate(slots, start):
            self._memory[slot] = Cell(text.name(position), by)
        return slots

    def read(self, text: Text, block_ids: Sequence[int], end: int) -> set[Write]:
        """Who wrote what is read."""
        writers = set()
        for position, slot in enumerate(self.slots(block_ids, 0, end)):
            cell = self._memory.get(slot)
            assert cell is not None and cell.name == text.name(position), (
                f"token {position} is read in block {slot[0]}, where another one is"
            )
            writers.add(cell.write)
        return writers

    def spoil(self, failed: set[Write], later: Iterable[tuple[Write, set[Write]]]) -> set[Slot]:
        """Slots that hold rubbish once `failed` threw; `later` chunks, in order, with whose writes they read."""
        for write, reads in later:
            if reads & failed:
                failed.add(write)
        rubbish = {slot for slot, cell in self._memory.items() if cell.write in failed}
        for slot in rubbish:
            self._memory[slot] = Cell(None, self._memory[slot].write)
        return rubbish

    def learn_keys(self, text: Text, keys: Sequence[int]) -> None:
        """Equal keys, equal prefix, both ways."""
        size = self._block_size
        for depth in range(text.num_known_keys, len(keys)):
            key, name = keys[depth], text.name((depth + 1) * size - 1)
            assert self._meaning.setdefault(key, name) == name, "one key, two prefixes"
            assert self._key_of.setdefault(name, key) == key, "one prefix, two keys"
        text.num_known_keys = len(keys)

    def check_keys(self, blocks: Iterable[Block]) -> None:
        """Whoever has a key has been written, every slot of it."""
        for block in blocks:
            if block.key is None:
                continue
            name = self._meaning[block.key]
            for offset in reversed(range(self._block_size)):
                cell = self._memory.get((block.block_id, offset))
                assert cell is not None and cell.name == name, (
                    f"block {block.block_id} can be found by a key, but does not hold what the key stands for"
                )
                name = self.names.parents[name]

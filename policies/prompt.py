"""What a prompt is to the core: a length and a chain of block keys.

A key stands for a block's tokens and everything before them: equal keys, equal prefix. Only full blocks have keys.
Keys are computed once per request and extended as output fills blocks; they are keyed hashes, so a journal that holds
them tells nobody what was said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple, Protocol

ROOT = 0  # the parent of a first block


class Namespace(NamedTuple):
    """From `start_token` on, blocks can be found only by requests with the same fields."""

    start_token: int
    fields: tuple[str, ...]


def _integer(value: int) -> bytes:
    return value.to_bytes(20, "little", signed=True)


def digest(secret: bytes, *parts: bytes, size: int = 8) -> int:
    """A keyed hash of length-prefixed parts, so that ("ab", "c") and ("a", "bc") differ."""
    hasher = blake2b(digest_size=size, key=secret[:64])
    for part in parts:
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(part)
    return int.from_bytes(hasher.digest(), "little")


def seals(namespaces: Sequence[Namespace], block_size: int, secret: bytes) -> dict[int, bytes]:
    """Block index -> what is folded into its key; the block that holds the first private token is private."""
    sealed: dict[int, bytes] = {}
    for start_token, fields in namespaces:
        mark = digest(secret, *(field.encode() for field in fields), size=16).to_bytes(16, "little")
        index = start_token // block_size
        sealed[index] = sealed.get(index, b"") + mark
    return sealed


@dataclass(slots=True, eq=False)
class Content:
    """What a block holds and, block by block, all that stands before it."""

    mark: bytes = field(repr=False)
    before: Content | None = field(repr=False)

    def follows(self, before: Content | None) -> bool:
        """Whether the same stands before it; found at once where both were built on one block."""
        mine = self.before
        while mine is not before:
            if mine is None or before is None or mine.mark != before.mark:
                return False
            mine, before = mine.before, before.before
        return True


class KeyChain(Protocol):
    """Keys of a request's full blocks, in order."""

    keys: list[int]

    @property
    def marks(self) -> Sequence[bytes]:
        """For each key what it was made of, its parent's left out; empty where only keys are known."""

    @property
    def counts_from(self) -> int | None:
        """Base of counted output keys (key i is base + i), or None where output keys come from token ids."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Output tokens became known (live bodies)."""

    def extend(self, num_blocks: int) -> None:
        """Make at least `num_blocks` keys available."""


class CountedChain:
    """Output is known by position only: (request, position) stands for its tokens."""

    __slots__ = ("_base", "keys")
    marks = ()

    def __init__(self, keys: list[int], base: int) -> None:
        self.keys = keys
        self._base = base

    @property
    def counts_from(self) -> int | None:
        return self._base

    def append(self, token_ids: Sequence[int]) -> None:
        pass

    def extend(self, num_blocks: int) -> None:
        if num_blocks > len(self.keys):
            self.keys.extend(range(self._base + len(self.keys), self._base + num_blocks))


class TokenChain:
    """Keys over real token ids, prompt and output alike."""

    __slots__ = ("_block_size", "_sealed", "_secret", "_tokens", "keys", "marks")

    def __init__(self, token_ids: Sequence[int], block_size: int, sealed: dict[int, bytes], secret: bytes) -> None:
        self.keys: list[int] = []
        self.marks: list[bytes] = []
        self._tokens = list(token_ids)
        self._block_size = block_size
        self._sealed = sealed
        self._secret = secret
        self.extend(len(self._tokens) // block_size)

    @property
    def counts_from(self) -> int | None:
        return None

    def append(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)

    def extend(self, num_blocks: int) -> None:
        size = self._block_size
        for index in range(len(self.keys), num_blocks):
            tokens = self._tokens[index * size : (index + 1) * size]
            assert len(tokens) == size, f"block {index} of {num_blocks} has {len(tokens)} of {size} tokens"
            parent = self.keys[-1] if self.keys else ROOT
            content = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)
            seal = self._sealed.get(index, b"")
            self.keys.append(digest(self._secret, _integer(parent), content, seal, size=16))
            self.marks.append(seal + content)


class Prompt(Protocol):
    @property
    def num_tokens(self) -> int: ...

    def chain(self, block_size: int, sealed: dict[int, bytes], secret: bytes, owner: int) -> KeyChain:
        """`owner` tells requests apart whose content is theirs alone."""


# Bits below a hashed base that number the blocks counted from it: 2**24 blocks of one token outlast any context.
_COUNTER_BITS = 24


def _base(secret: bytes, *parts: bytes) -> int:
    return digest(secret, *parts) << _COUNTER_BITS


@dataclass(frozen=True, slots=True)
class LengthPrompt:
    """Only the length is known, as in Azure's traces: the content is like no other's."""

    num_tokens: int

    def chain(self, block_size: int, sealed: dict[int, bytes], secret: bytes, owner: int) -> KeyChain:
        base = _base(secret, b"own", _integer(owner))
        return CountedChain(list(range(base, base + self.num_tokens // block_size)), base)


@dataclass(frozen=True, slots=True)
class ContentPrompt:
    """Content ids of a trace, each standing for `content_size` tokens; the last one covers the remainder.

    `continuation`, made by `followed_by`, is what a later prompt tells about the answer: the ids from the first one on
    that this prompt does not fill, for `num_known_tokens` tokens in all.
    """

    num_tokens: int
    content_ids: tuple[int, ...]
    content_size: int
    continuation: tuple[int, ...] = ()
    num_known_tokens: int = 0

    def __post_init__(self) -> None:
        expected = -(-self.num_tokens // self.content_size)
        if len(self.content_ids) != expected:
            raise ValueError(
                f"a prompt of {self.num_tokens} tokens needs {expected} content ids of {self.content_size} tokens, "
                f"not {len(self.content_ids)}: check the trace's block size"
            )

    def followed_by(self, later: ContentPrompt) -> ContentPrompt:
        """This prompt, its answer known from a later turn; unchanged if the later one does not go on from it."""
        full = self.num_tokens // self.content_size
        goes_on = later.content_size == self.content_size and later.content_ids[:full] == self.content_ids[:full]
        if not goes_on or later.num_tokens <= self.num_tokens:
            return self
        return replace(self, continuation=later.content_ids[full:], num_known_tokens=later.num_tokens)

    def chain(self, block_size: int, sealed: dict[int, bytes], secret: bytes, owner: int) -> KeyChain:
        ids, num_known = self.content_ids, max(self.num_tokens, self.num_known_tokens)
        if self.continuation:
            ids = ids[: self.num_tokens // self.content_size] + self.continuation
        keys = list(self._keys(ids, num_known // block_size, block_size, sealed, secret))
        tail = keys[-1] if keys else ROOT
        return CountedChain(keys, _base(secret, b"output", _integer(tail), _integer(owner)))

    def _keys(
        self, ids: tuple[int, ...], num_blocks: int, block_size: int, sealed: dict[int, bytes], secret: bytes
    ) -> Iterable[int]:
        if self.content_size % block_size == 0:
            return self._split(ids, num_blocks, block_size, sealed, secret)
        if block_size % self.content_size == 0:
            return self._join(ids, num_blocks, block_size, sealed, secret)
        raise ValueError(
            f"block_size {block_size} neither divides nor is a multiple of the trace's {self.content_size} tokens "
            f"a content id: choose one that does"
        )

    def _split(
        self, ids: tuple[int, ...], num_blocks: int, block_size: int, sealed: dict[int, bytes], secret: bytes
    ) -> list[int]:
        """One hash a content id; its blocks are counted from it."""
        per_id, parent, keys = self.content_size // block_size, self.content_size, list[int]()
        for position, content in enumerate(ids):
            first = position * per_id
            seal = b"".join(sealed.get(first + i, b"") for i in range(per_id)) if sealed else b""
            parent = _base(secret, _integer(parent), _integer(content), seal)
            keys.extend(range(parent, parent + min(per_id, num_blocks - len(keys))))
        return keys

    def _join(
        self, ids: tuple[int, ...], num_blocks: int, block_size: int, sealed: dict[int, bytes], secret: bytes
    ) -> Iterable[int]:
        """Several content ids a block."""
        per_block, parent = block_size // self.content_size, self.content_size
        for index in range(num_blocks):
            content = b"".join(map(_integer, ids[index * per_block : (index + 1) * per_block]))
            parent = _base(secret, _integer(parent), content, sealed.get(index, b""))
            yield parent


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Real token ids: live runs and parity."""

    token_ids: tuple[int, ...]

    def __repr__(self) -> str:
        """Not the tokens: what is logged or dumped holds no prompt."""
        return f"TokenPrompt({self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def chain(self, block_size: int, sealed: dict[int, bytes], secret: bytes, owner: int) -> KeyChain:
        return TokenChain(self.token_ids, block_size, sealed, secret)


class RecordedChain:
    """Keys as a journal tells them: those of the prompt first, those of output tokens as updates bring them."""

    __slots__ = ("keys",)
    marks = ()

    def __init__(self, keys: list[int]) -> None:
        self.keys = keys

    @property
    def counts_from(self) -> int | None:
        return None

    def append(self, token_ids: Sequence[int]) -> None:
        self.keys.extend(token_ids)  # a journal's update carries keys where a live one carries tokens

    def extend(self, num_blocks: int) -> None:
        assert num_blocks <= len(self.keys), f"the journal holds {len(self.keys)} keys, {num_blocks} are asked for"


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt read back from a journal."""

    num_tokens: int
    keys: tuple[int, ...]
    counts_from: int | None

    def chain(self, block_size: int, sealed: dict[int, bytes], secret: bytes, owner: int) -> KeyChain:
        if self.counts_from is None:
            return RecordedChain(list(self.keys))
        return CountedChain(list(self.keys), self.counts_from)

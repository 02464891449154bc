"""A GGUF file: its settings, and its tensors by name (layout: ggml-org/ggml, docs/gguf.md, versions 2 and 3).

The header is read here, in a fraction of a second with its hundred thousand tokens; the `gguf` package knows how the
numbers are packed.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, and how its numbers are packed. `shape` is [rows, columns], as torch has it."""

    name: str
    shape: tuple[int, ...]
    packing: int
    offset: int  # from the start of the file
    num_bytes: int


class _Cursor:
    """Reads little-endian values one after another; never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, num_bytes: int) -> bytes:
        begin, end = self.at, self.at + num_bytes
        if end > len(self.data):
            raise ValueError(f"ends at byte {len(self.data)}, inside its header: the file is truncated")
        self.at = end
        return self.data[begin:end]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise ValueError(f"holds a value of unknown type {kind} at byte {self.at}")
        return self.number(_NUMBERS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in _NUMBERS:
            code = _NUMBERS[kind]
            return list(struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize("<" + code))))
        if length > len(self.data):
            raise ValueError(f"claims an array of {length} values, more than the file has bytes")
        return [self.value(kind) for _ in range(length)]


class GgufFile:
    """An open file, mapped into memory: tensors are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError, one line, for what is no GGUF file or not a whole one."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError:
            raise ValueError(f"{path}: is empty") from None
        try:
            self.settings, self.tensors = _read_header(_Cursor(self._data))
        except (ValueError, struct.error, RecursionError, MemoryError) as error:
            raise ValueError(f"{path}: {error}") from None

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in fp32, unpacked. Raises ValueError for a way of packing that is not known."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.tensors[name]
        packed = np.frombuffer(self._data, np.uint8, stored.num_bytes, stored.offset)
        rows = packed.reshape(*stored.shape[:-1], -1)
        kind = GGMLQuantizationType(stored.packing)
        try:
            unpacked = dequantize(rows, kind)
        except NotImplementedError:
            raise ValueError(
                f"{self.path}: tensor {name!r} is packed as {kind.name}, which is not unpacked here"
            ) from None
        return np.require(unpacked, np.float32, ("C", "W")).reshape(stored.shape)  # W: never the mapped file itself


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    if cursor.take(4) != b"GGUF":
        raise ValueError("is no GGUF file: it does not begin with 'GGUF'")
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"is of GGUF version {version}; versions 2 and 3 are read")
    num_tensors, num_settings = cursor.number("Q"), cursor.number("Q")
    settings = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_settings)}
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = settings.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment ({alignment!r}) must be a whole number above 0")
    begin = cursor.at + -cursor.at % alignment
    return settings, {entry[0]: _place(*entry, begin, len(cursor.data)) for entry in entries}


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dimensions = cursor.text(), cursor.number("I")
    if not 1 <= num_dimensions <= 4:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    sizes = [cursor.number("Q") for _ in range(num_dimensions)]
    return name, tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")


def _place(name: str, shape: tuple[int, ...], packing: int, offset: int, begin: int, file_size: int) -> StoredTensor:
    """Raises ValueError if its numbers do not lie in the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(packing)]
    except (ValueError, KeyError):
        raise ValueError(f"tensor {name!r} is packed in an unknown way ({packing})") from None
    if shape[-1] % per_block:
        raise ValueError(f"tensor {name!r} of {shape[-1]} columns is packed by {per_block}")
    num_bytes = math.prod(shape) // per_block * block_bytes
    if begin + offset + num_bytes > file_size:
        raise ValueError(
            f"tensor {name!r} ends at byte {begin + offset + num_bytes}, the file at {file_size}: truncated"
        )
    return StoredTensor(name, shape, packing, begin + offset, num_bytes)

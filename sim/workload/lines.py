"""Reading: what counts as a line of a file that nobody vouches for; memory holds one line at a time."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import Repr
from typing import IO, Any, NamedTuple, Protocol

MAX_LINE_BYTES = 16 * 2**20  # a prompt of 126,195 tokens takes 2 kB as content ids
MAX_DOCUMENT_BYTES = 64 * 2**20  # a whole JSON object: in memory at once, and up to 20 times that when parsed
MAX_UNPACKED_BYTES = 2**30  # the longest public trace has 0.5 GB; a few MB of gzip can claim any number

_GZIP, _LEAST_GZIP = b"\x1f\x8b\x08", 18  # bytes of a header and a trailer

_TEXT = "a trace must be UTF-8 text; decompress or convert the file"

_SHORT = Repr()
_SHORT.maxstring = 60


class Line(NamedTuple):
    number: int
    text: str


def shown(value: object) -> str:
    """A value from a file, fit for one line of a message, however long or deep it is."""
    return _SHORT.repr(value)


def place(path: Path, number: int | None = None) -> str:
    name = str(path) if str(path).isprintable() else repr(str(path))
    return name if number is None else f"{name}: line {number}"


def require_file(path: Path) -> None:
    """A pipe or a device is refused too: it may never end."""
    try:
        if path.is_file():
            return
        what = "is a directory" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise ValueError(f"{place(path)} {what}: a trace must be a file; check the path")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what goes wrong inside, with the file itself, into ValueError."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
        raise ValueError(f"{place(path)} cannot be unpacked ({error}): it may be cut off; fetch it again") from None
    except OSError as error:
        raise ValueError(f"{place(path)} cannot be read ({error.strerror}): check its permissions") from None


def is_gzip(file: IO[bytes]) -> bool:
    start = file.read(_LEAST_GZIP)
    file.seek(0)
    return len(start) == _LEAST_GZIP and start.startswith(_GZIP)


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, unpacked if they are gzip, to a limit. Raises ValueError only."""
    require_file(path)
    with readable(path), path.open("rb") as file:
        yield Limited(path, gzip.GzipFile(fileobj=file), MAX_UNPACKED_BYTES) if is_gzip(file) else file


class Packed(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Limited(io.BufferedReader):
    """Unpacks no more than `most` bytes."""

    def __init__(self, path: Path, packed: Packed, most: int) -> None:
        super().__init__(_Counted(path, packed, most))


class _Counted(io.RawIOBase):
    def __init__(self, path: Path, packed: Packed, most: int) -> None:
        self._path, self._packed, self._most, self._left = path, packed, most, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._packed.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(
                f"{place(self._path)} unpacks to more than {self._most} bytes: unpack it yourself, if you trust it"
            )
        buffer[: len(data)] = data
        return len(data)


def read_lines(path: Path) -> Iterator[Line]:
    """Lines that are not blank, stripped, numbered from 1; gzip is unpacked. Raises ValueError only.

    A first line that begins a JSON object may be as long as a whole document.
    """
    with opened(path) as file:
        number, raw = 1, file.readline(MAX_LINE_BYTES + 1)
        most = MAX_DOCUMENT_BYTES if raw.startswith(b"{") else MAX_LINE_BYTES
        if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raw += file.readline(most + 1 - len(raw))
        while raw:
            if text := line_text(path, number, raw, most):
                yield Line(number, text)
            number, raw, most = number + 1, file.readline(MAX_LINE_BYTES + 1), MAX_LINE_BYTES


def line_text(path: Path, number: int, raw: bytes, most: int) -> str:
    """Stripped."""
    if len(raw) > most:
        raise ValueError(
            f"{place(path, number)} is longer than {most} bytes: a trace has one request a line; "
            "write it as CSV or JSON lines"
        )
    try:
        return utf8(raw)
    except ValueError as error:
        raise ValueError(f"{place(path, number)} {error}") from None


def utf8(raw: bytes) -> str:
    """Stripped; raises ValueError for what is no text."""
    if (at := raw.find(b"\0")) >= 0:
        raise ValueError(f"has a NUL byte at position {at}: {_TEXT}")
    try:
        return raw.decode().lstrip("\ufeff").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"has byte 0x{raw[error.start]:02x} at position {error.start}: {_TEXT}") from None

"""Reading: what counts as a line of a file that nobody vouches for; memory holds one line at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from reprlib import Repr
from typing import NamedTuple

MAX_LINE_BYTES = 16 * 2**20  # a prompt of 126,195 tokens takes 2 kB as content ids

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


def read_lines(path: Path, seen: Callable[[bytes], None]) -> Iterator[Line]:
    """Lines that are not blank, stripped, numbered from 1; `seen` gets every byte. Raises ValueError only."""
    require_file(path)
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                seen(raw)
                if text := _text(path, number, raw):
                    yield Line(number, text)
    except OSError as error:
        raise ValueError(f"{place(path)} cannot be read ({error.strerror}): check its permissions") from None


def _text(path: Path, number: int, raw: bytes) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(
            f"{place(path, number)} is longer than {MAX_LINE_BYTES} bytes: a trace has one request a line; "
            "write it as CSV or JSON lines"
        )
    if (at := raw.find(b"\0")) >= 0:
        raise ValueError(
            f"{place(path, number)} has a NUL byte at position {at}: a trace must be UTF-8 text; "
            "decompress or convert the file"
        )
    try:
        return raw.decode().lstrip("\ufeff").strip()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place(path, number)} has byte 0x{raw[error.start]:02x} at position {error.start}: a trace must be "
            "UTF-8 text; decompress or convert the file"
        ) from None

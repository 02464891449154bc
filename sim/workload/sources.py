"""Where records come from: lines of a file, whole JSON documents, or the files of a folder or a tar archive."""

from __future__ import annotations

import hashlib
import lzma
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from sim.workload.fields import json_object
from sim.workload.lines import (
    MAX_DOCUMENT_BYTES,
    Limited,
    Line,
    opened,
    place,
    read_lines,
    readable,
    require_file,
    utf8,
)
from sim.workload.rows import File

MAX_FILES = 100_000  # of a folder
MAX_ARCHIVE_BYTES = 2**29  # unpacked; a pool of ServeGen's has 13 MB

_XZ, _TAR, _TAR_AT = b"\xfd7zXZ\0", b"ustar", 257
_PART = re.compile(r"(.*/)?chunk-\d+-(trace\.csv|dataset\.json)")  # of ServeGen's pools
_DOCUMENT = re.compile(r".*\.json")


class Record(NamedTuple):
    """`value`: a line of CSV, a JSON object as a dict, or a File; `at` which line, or in which file of a folder."""

    at: int | str
    value: Any

    def place(self, path: Path) -> str:
        if isinstance(self.at, int):
            return place(path, self.at)
        return f"{place(path)}: {self.at if self.at.isprintable() else repr(self.at)}"


def read_records(path: Path) -> Iterator[Record]:
    """Raises ValueError only, of one line."""
    with readable(path):
        is_folder = path.is_dir()
    if is_folder:
        return _of_files(path, _folder(path))
    require_file(path)
    if is_archive(path):
        return _of_files(path, _archive(path))
    return _of_lines(path)


def sha256(path: Path) -> str:
    """Of a file as it lies there, packed or not; of a folder: of the names and contents of what is read from it."""
    with readable(path):
        if not path.is_dir():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        for each in _chosen(path):
            digest.update(f"{each.relative_to(path)}\0{sha256(each)}\0".encode())
        return digest.hexdigest()


# Lines


def _of_lines(path: Path) -> Iterator[Record]:
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        return
    if first.text.startswith("{"):
        yield from _objects(path, first, lines)
    else:
        yield from map(Record._make, chain([first], lines))


def _objects(path: Path, first: Line, lines: Iterator[Line]) -> Iterator[Record]:
    """One object a line; or all lines one object, where the first is none."""
    try:
        value = json_object(first.text)
    except ValueError:
        yield _parsed(path, Record(first.number, _whole(path, first, lines)))
        return
    yield Record(first.number, value)
    for number, text in lines:
        yield _parsed(path, Record(number, text))


def _whole(path: Path, first: Line, lines: Iterator[Line]) -> str:
    texts, left = [first.text], MAX_DOCUMENT_BYTES
    for _, text in lines:
        texts.append(text)
        left -= len(text) + 64  # what a short line costs in memory
        if left < 0:
            raise ValueError(
                f"{place(path)} is one JSON document of more than {MAX_DOCUMENT_BYTES} bytes: leave out what a "
                "workload does not need, such as generated texts"
            )
    return "\n".join(texts)


def _parsed(path: Path, record: Record) -> Record:
    try:
        return Record(record.at, json_object(record.value))
    except ValueError as error:
        raise ValueError(f"{record.place(path)}: {error}") from None


# Files


def _of_files(path: Path, files: Iterator[tuple[str, IO[bytes]]]) -> Iterator[Record]:
    for name, file in files:
        with readable(path):  # here, and not only where the file is opened: a generator's own guard sleeps meanwhile
            raw = file.read(MAX_DOCUMENT_BYTES + 1)
        text = _file_text(Record(name, "").place(path), raw)
        yield Record(name, File(name, text)) if _PART.fullmatch(name) else _parsed(path, Record(name, text))


def _file_text(where: str, raw: bytes) -> str:
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{where} is longer than {MAX_DOCUMENT_BYTES} bytes: split it, or leave it out")
    try:
        return utf8(raw)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def _chosen(folder: Path) -> list[Path]:
    """Files that may be part of a trace, in order of name; those of other names are passed over."""
    with readable(folder):
        found = list(islice(folder.rglob("*"), MAX_FILES + 1))
        if len(found) > MAX_FILES:
            raise ValueError(f"{place(folder)} holds more than {MAX_FILES} files: choose the folder of one trace")
        names = [str(each.relative_to(folder)) for each in found]
        pattern = _PART if any(map(_PART.fullmatch, names)) else _DOCUMENT
        chosen = [each for each, name in zip(found, names, strict=True) if pattern.fullmatch(name) and each.is_file()]
    if not chosen:
        require_file(folder)  # says that it is a directory
    return sorted(chosen)


def _folder(folder: Path) -> Iterator[tuple[str, IO[bytes]]]:
    for each in _chosen(folder):
        with readable(each), each.open("rb") as file:
            yield str(each.relative_to(folder)), file


def is_archive(path: Path) -> bool:
    with _unpacked(path) as file:
        return bool(file.read(_TAR_AT + len(_TAR))[_TAR_AT:] == _TAR)


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    with opened(path) as file:
        is_xz = file.peek(len(_XZ)).startswith(_XZ)
        yield Limited(path, lzma.LZMAFile(file), MAX_ARCHIVE_BYTES) if is_xz else file  # noqa: SIM115


def _archive(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Members in the order they stand in; nothing is written to disk."""
    with readable(path), _unpacked(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            if member.isfile() and (_PART.fullmatch(member.name) or _DOCUMENT.fullmatch(member.name)):
                data = archive.extractfile(member)
                assert data is not None, "a regular member has data"
                yield member.name, data

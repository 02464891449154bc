"""Rows of a sweep in a file, one a run: written whole or not at all, so that what was killed goes on where it was.

A row is one line of JSON, appended by one write and brought to the disk before the next. Half a line at the end is what
a killed writer leaves: it is cut off, and its run is played again. Two sweeps cannot write to one file at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from policies.catalogue import source_hash
from sim.files import plain
from sim.setup import Setup


@dataclass(frozen=True, slots=True)
class Row:
    """One run: the knobs' values and the seed, and what came of it: manifest and metrics, or an error."""

    key: str
    values: Mapping[str, Any]
    seed: int
    manifest: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None
    error: str | None = None

    def to_line(self) -> str:
        """Not a number is null."""
        told = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return json.dumps(plain(told), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Row:
        told = json.loads(line)
        if not isinstance(told, dict) or not told.keys() <= set(cls.__slots__):
            raise ValueError("not a row")
        row = cls(**told)
        if (row.metrics is None) == (row.error is None):
            raise ValueError("a row holds metrics or an error")
        return row

    def as_written(self) -> Row:
        """As it comes back from a file: what is judged does not depend on whether it has been there."""
        return Row.from_line(self.to_line())


def key_of(setup: Setup) -> str:
    """Of all that a user can say about a run: equal setups, equal keys."""
    text = json.dumps(setup.to_dict(), sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def identity(base: Setup) -> dict[str, Any]:
    """What all rows of a file have in common: the setup around the knobs, its trace, and the code that decides."""
    return {
        "sweep": 1,
        "servetwin": version("servetwin"),
        "base": json.loads(json.dumps(base.to_dict(), default=list)),
        "trace": _content(base.trace),
        "policies_source": source_hash(),
    }


def _content(trace: str | None) -> str | None:
    """Of a file that is there: what is wrong with it, its runs will say."""
    if trace is None or not Path(trace).is_file():
        return None
    with Path(trace).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


class RowFile:
    """The rows there are, and a place for more. Raises ValueError where the file is another sweep's, or in use."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path, self._identity = path, dict(identity)
        self.rows: dict[str, Row] = {}  # by key; of a run that was repeated, the last
        self.num_torn_bytes = 0

    def __enter__(self) -> RowFile:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ValueError(f"cannot write {str(self._path)!r}: {error.strerror}; choose another place") from None
        try:
            self._take()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def append(self, row: Row) -> None:
        self._write(row.to_line())
        self.rows[row.key] = row

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back by the system, however we end
        except OSError:
            raise ValueError(f"{self._path} is being written by another sweep: wait, or choose another place") from None
        whole = self._whole_lines()
        if not whole:
            self._write(json.dumps(self._identity))
            return
        self._check(whole[0])
        for number, line in enumerate(whole[1:], 2):
            try:
                row = Row.from_line(line.decode())
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self._path}:{number}: not a row of a sweep ({error}): mend or move it") from None
            self.rows[row.key] = row

    def _whole_lines(self) -> list[bytes]:
        """The file's lines, after the half one at its end has been cut off."""
        text = self._path.read_bytes()
        end = text.rfind(b"\n") + 1
        if end < len(text):
            self.num_torn_bytes = len(text) - end
            os.ftruncate(self._file, end)
        return text[:end].splitlines()

    def _check(self, line: bytes) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or "sweep" not in found:
            raise ValueError(f"{self._path} is not a sweep's: choose another place for the rows")
        differ = [name for name in self._identity if found.get(name) != self._identity[name]]
        if differ:
            told = ", ".join("the policies' source" if each == "policies_source" else each for each in differ)
            raise ValueError(f"{self._path} holds another sweep's rows (not the same: {told}): choose another place")

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(0, "the disk is full")
            os.fsync(self._file)
        except OSError as error:
            raise ValueError(f"cannot write {str(self._path)!r}: {error.strerror}; rows so far are kept") from None

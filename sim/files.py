"""Files that are whole or not there: written beside their place, moved when done."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """A text file to write to; appears under its name only if nothing went wrong. `-` is standard output.

    What is not a regular file (/dev/stdout, a pipe) is written to directly. Raises ValueError when it cannot be made.
    """
    if str(path) == "-":
        yield sys.stdout
        sys.stdout.flush()
    elif path.exists() and not path.is_file():
        with _opened(path, path) as file:
            yield file
    else:
        partial = path.with_name(path.name + ".partial")
        try:
            with _opened(partial, path) as file:
                yield file
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """Indented. JSON has no NaN: what was not measured is null."""
    with whole_file(path) as file:
        json.dump(plain(value), file, indent=1)
        file.write("\n")


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _opened(path: Path, wanted: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if wanted.suffix == ".gz":
            return gzip.open(path, "wt")
        return path.open("w")
    except OSError as error:
        raise ValueError(f"cannot write {str(wanted)!r}: {error.strerror}; choose another place") from None

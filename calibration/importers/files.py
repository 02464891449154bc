"""Reading result files: text, plain or gzip, with errors of one line that name the file."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 512 * 2**20  # of a result, unpacked


def read_text(path: Path) -> str:
    """Raises ValueError when it cannot be read."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, EOFError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{str(path)!r} has more than {MAX_BYTES:,} bytes: leave out what is not measured")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not text: give a result file, plain or .gz") from None


def read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{str(path)!r} is not a JSON document") from None
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} holds no JSON object, but a {type(value).__name__}")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSON object a line."""
    try:
        values = [json.loads(line) for line in read_text(path).splitlines() if line.strip()]
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{str(path)!r} is not one JSON object a line") from None
    if not values or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{str(path)!r} is not one JSON object a line")
    return values


def read_columns(path: Path, columns: tuple[str, ...]) -> list[dict[str, float]]:
    """Numbers of a CSV's rows, by column. Raises ValueError naming a column that is missing."""
    rows = csv.DictReader(read_text(path).splitlines())
    if missing := [name for name in columns if name not in (rows.fieldnames or ())]:
        raise ValueError(
            f"{str(path)!r} has no column {', '.join(missing)}; it has: {', '.join(rows.fieldnames or ())}"
        )
    found = []
    for number, row in enumerate(rows, start=2):
        try:
            found.append({name: float(row[name]) for name in columns})
        except (TypeError, ValueError):
            raise ValueError(f"{str(path)!r}: line {number} is not {len(columns)} numbers") from None
    return found


def need(path: Path, fields: Mapping[str, Any], names: tuple[str, ...]) -> None:
    if missing := [name for name in names if name not in fields]:
        raise ValueError(f"{str(path)!r} has no {', '.join(missing)}")


def stem_of(path: Path) -> str:
    """The name without its endings: `run.json.gz` and `run.steps.csv.gz` are of one run."""
    return path.name.split(".", 1)[0]


def source_of(*paths: Path) -> str:
    return ", ".join(f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" for path in paths)

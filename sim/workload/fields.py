"""Fields: which text or JSON value counts as a time, a number of tokens, a name or a list of content ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sim.workload.clock import Unit
from sim.workload.lines import shown

MAX_TOKENS = 10**9  # a thousand times the longest context served today
MAX_TIME = 1e18  # beyond it, a double no longer tells seconds apart
MAX_NAME = 200  # characters

CUT_OFF = "the file may be cut off; remove the line or fetch the file again"

_MAX_ID = 2**64  # as wide as any hash these files hold


def header_fields(text: str) -> list[str]:
    return [field.strip() for field in text.split(",")]


def column_picker(header: str, columns: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads the named columns from a line of CSV, wherever the header puts them."""
    fields = header_fields(header)
    positions = [fields.index(column) for column in columns]

    def pick(text: str) -> list[str]:
        values = text.split(",")
        if len(values) != len(fields):
            raise ValueError(f"{shown(text)} has {len(values)} fields, the header {len(fields)}: {CUT_OFF}")
        return [values[position] for position in positions]

    return pick


def json_object(text: str) -> dict[str, Any]:
    """Raises ValueError for whatever json cannot or should not read: cut lines, depth, numbers of 5,000 digits."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{shown(text)} is nested too deeply: a row must be one flat JSON object") from None
    except ValueError:
        raise ValueError(f"{shown(text)} must be one whole JSON object: {CUT_OFF}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{shown(text)} must be a JSON object: write one request a line")
    return value


def require(fields: Mapping[str, object], columns: Sequence[str]) -> None:
    if missing := [column for column in columns if column not in fields]:
        raise ValueError(f"{shown(fields)} has no {', '.join(missing)}: every row needs {', '.join(columns)}")


def token_count(name: str, value: object) -> int:
    """A whole number; 0 is let through, as traces note failures by it."""
    if isinstance(value, str):
        value = _whole_number(value)
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    raise ValueError(
        f"{name} {shown(value)} must be a whole number of tokens, from 0 to {MAX_TOKENS}: correct or remove the row"
    )


def _whole_number(text: str) -> int | str:
    """The text itself where it is no number; int() would let 1_0 and other scripts' digits pass."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else text


def time_value(name: str, value: object) -> float:
    """In the unit of the trace."""
    number = _number(value) if isinstance(value, str) else value
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < MAX_TIME:
        return float(number)
    raise ValueError(f"{name} {shown(value)} must be a finite number, 0 or more: correct or remove the row")


def seconds(name: str, value: object, unit: Unit) -> float:
    return time_value(name, value) / unit.per_second


def _number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def name_text(name: str, value: object) -> str:
    """What names a session, a client or a class; numbers are names too."""
    text = str(value) if type(value) is int else value
    if isinstance(text, str) and len(text) <= MAX_NAME and text.isprintable():
        return text
    raise ValueError(f"{name} {shown(value)} must be text of at most {MAX_NAME} characters: correct or remove the row")


def list_of(name: str, value: object, kind: type) -> list[Any]:
    if isinstance(value, list) and all(isinstance(each, kind) for each in value):
        return value
    raise ValueError(f"{name} {shown(value)} must be a list of JSON values of one kind: correct or remove the row")


def content_list(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{name} {shown(value)} must be a list of whole numbers: correct or remove the row")
    if value and not -_MAX_ID < min(value) <= max(value) < _MAX_ID:
        raise ValueError(f"{name} {shown(value)} must have at most 64 bits each: number the contents from 0")
    return value

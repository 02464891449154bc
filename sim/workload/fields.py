"""Fields: which text or JSON value counts as a time or as a number of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from sim.workload.lines import shown

MAX_TOKENS = 10**9  # a thousand times the longest context served today
MAX_TIME = 1e18  # beyond it, a double no longer tells seconds apart

CUT_OFF = "the file may be cut off; remove the line or fetch the file again"


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


def _number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None

"""Values by name, as a knob spells them: `interactive:40/batch:20`."""

from __future__ import annotations

import math


def counts_by_name(knob: str, text: str) -> dict[str, int]:
    """Whole numbers, 0 or more. Raises ValueError for anything else; an empty text names nobody."""
    found: dict[str, int] = {}
    for entry in text.split("/") if text else ():
        name, colon, value = entry.rpartition(":")
        if not colon or not name or not (value.isascii() and value.isdigit()):
            raise ValueError(f"{knob} entry {entry!r} must read name:number, as in interactive:40/batch:20")
        if name in found:
            raise ValueError(f"{knob} names {name!r} twice: say it once")
        found[name] = int(value)
    return found


def rates_by_name(knob: str, text: str) -> dict[str, float]:
    """Numbers above 0. Raises ValueError for anything else; an empty text names nobody."""
    found: dict[str, float] = {}
    for entry in text.split("/") if text else ():
        name, colon, value = entry.rpartition(":")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not colon or not name or not 0 < number < math.inf:
            raise ValueError(f"{knob} entry {entry!r} must read name:number above 0, as in alice:1000/bob:500")
        if name in found:
            raise ValueError(f"{knob} names {name!r} twice: say it once")
        found[name] = number
    return found

"""Two traces side by side: how many steps are equal, or where they first part."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sim.steps.play import play
from sim.steps.script import Line, read_script


def read_trace(path: Path) -> Iterator[Line]:
    """Lines of a trace, plain or gzipped. Raises ValueError for a file that is not one, or is cut short."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as file:
            for number, text in enumerate(file, 1):
                try:
                    yield json.loads(text)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}: line {number} is not JSON ({error.msg}): is the file whole?") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a trace ({error})") from None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two traces part."""

    step: str
    field: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"first difference at {self.step}, {self.field}: expected {self.expected}, found {self.found}"


def check(script_path: Path, trace_path: Path, preset_name: str) -> int | Difference:
    """Play a script as its trace was recorded, and compare."""
    lines = read_trace(trace_path)
    header = next(lines, None)
    if not header or not header.get("header"):
        raise ValueError(f"{trace_path}: not a scheduler trace; expected a first line with 'header' and 'config'")
    played = play(read_script(script_path, header.get("config")), preset_name)
    next(played)
    return compare(lines, played)


def compare(expected: Iterator[Line], found: Iterator[Line]) -> int | Difference:
    """Number of equal steps, or the first difference; both without their headers.

    Hashes count by structure: as numbered by first appearance.
    """
    names, num_steps = (_Names(), _Names()), 0
    for number, (want, have) in enumerate(zip_longest(expected, found)):
        place = f"step {(want or have or {}).get('step', f'line {number + 1}')}"
        if want is None or have is None:
            ends = ("the end", "one more line")
            return Difference(place, "length", *(ends if want is None else ends[::-1]))
        difference = _difference(names[0].numbered(want), names[1].numbered(have), "")
        if difference:
            return Difference("the footer" if want.get("footer") else place, *difference)
        num_steps += "step" in want
    return num_steps


class _Names:
    """Replaces the hashes of one trace by numbers, in order of first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def numbered(self, line: Line) -> Line:
        return {**line, "kv_events": [self._event(event) for event in line.get("kv_events", ())]}

    def _event(self, event: Line) -> Line:
        named = dict(event)
        if event.get("parent") is not None:
            named["parent"] = self._number(event["parent"])
        if "hashes" in event:
            named["hashes"] = [self._number(value) for value in event["hashes"]]
        return named

    def _number(self, value: int) -> int:
        return self._numbers.setdefault(value, len(self._numbers))


def _difference(want: Any, have: Any, path: str) -> tuple[str, Any, Any] | None:
    """Where two values part, as deep as both have the same shape."""
    if want == have:
        return None
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(want, dict) and isinstance(have, dict):
        names = [*want, *(name for name in have if name not in want)]
        pairs = [(name, want.get(name, "nothing"), have.get(name, "nothing")) for name in names]
    elif isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
        pairs = list(zip(range(len(want)), want, have, strict=True))
    for name, a, b in pairs:
        if a != b:
            return _difference(a, b, f"{path}.{name}" if path else str(name))
    return path or "line", want, have

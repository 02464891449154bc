"""What a trace says of a request, and what a reader says of its format."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from policies.prompt import ContentPrompt, LengthPrompt, Prompt
from sim.workload.clock import UNITS, Unit

MAX_CONTENT_IDS = 2**27  # about 1 GB; 46,218 calls of Claude Code have 85 million


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `arrival_time` in seconds from the trace's own start.

    `follows` names rows above, by position, whose answers the prompt may repeat. With a `delay` the request arrives
    that many seconds after the last of them was answered; without, by the clock.
    """

    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int
    content_ids: tuple[int, ...] = ()
    class_name: str = "default"
    client: str = ""
    session: str = ""
    follows: tuple[int, ...] = ()
    delay: float | None = None


class Shape(Enum):
    """What a reader is given at a time."""

    CSV = "lines of CSV"  # a str; the first is the header
    JSON = "JSON objects"  # a dict, one a line or one a file
    FILES = "files of a folder or a tar archive"  # a File


class File(NamedTuple):
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the caller knows about a file; None leaves it to the format. `limit`: rows to keep, all are checked."""

    timestamp_unit: str | None = None
    content_size: int | None = None
    any_rate: bool = False  # accept an unlikely clock: the caller will set the rate himself
    limit: int | None = None
    seed: int = 0  # of formats that describe a distribution

    def __post_init__(self) -> None:
        if self.timestamp_unit is not None and self.timestamp_unit not in UNITS:
            raise ValueError(f"unknown timestamp_unit {self.timestamp_unit!r}; known: {', '.join(UNITS)}")
        if self.content_size is not None and not 1 <= self.content_size <= 2**20:
            raise ValueError(f"content_size ({self.content_size}) must be from 1 to {2**20} tokens a content id")


Parse = Callable[[Any], Iterable[TraceRow]]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How to know a format by its first record, and how to read it.

    `parser` takes the first record and gives the reader of each, which raises ValueError without saying where.
    """

    name: str
    columns: tuple[str, ...]  # of the header, keys of each JSON object, or names of files; the first is the time
    shape: Shape
    parser: Callable[[Any, Reading], Parse]
    assumptions: tuple[str, ...]
    unit: Unit | None  # in which times are read, unless told; None: must be told
    declares_unit: bool = False  # by how its times are written
    content_size: int | None = None  # tokens a content id
    takes_size: bool = False  # another content_size may be told
    may_tick: bool = False  # recorded on a coarse clock
    in_order: bool = True  # a row earlier than the one above is an error


class Reading:
    """What is learned while a file is read: how to take it, what was left out, what must be said about it."""

    def __init__(self, trace_format: TraceFormat, options: ReadOptions) -> None:
        self.format = trace_format
        self.options = options
        self.unit = self._unit()
        self.content_size = self._content_size()
        self.has_starts = True  # when sessions begin is recorded
        self.num_rows = 0
        self._num_ids = 0
        self.dropped: Counter[str] = Counter()
        self.noted: Counter[str] = Counter()
        self.findings: list[str] = []
        self.at_end: Callable[[], Iterable[TraceRow]] = list

    def _unit(self) -> Unit:
        told = self.options.timestamp_unit
        if told is None:
            return self.format.unit or UNITS["s"]
        if self.format.declares_unit:
            raise ValueError(
                f"timestamp_unit ({told}) cannot be given for {self.format.name}, which says its own: leave it out"
            )
        return UNITS[told]

    def _content_size(self) -> int | None:
        told = self.options.content_size
        if told is None or told == self.format.content_size:
            return self.format.content_size
        if not self.format.takes_size:
            says = "says its own" if self.format.content_size else "has no content ids"
            raise ValueError(
                f"content_size ({told}) cannot be given for {self.format.name}, which {says}: leave it out"
            )
        return told

    @property
    def unit_is_unknown(self) -> bool:
        return self.format.unit is None and self.options.timestamp_unit is None

    def keeps(self, index: int) -> bool:
        """Whether the row at this position will be kept; the others' contents need not be made."""
        return self.options.limit is None or index < self.options.limit

    def spend(self, num_ids: int) -> None:
        """Content ids that are made, not read: a short line can ask for any number of them."""
        self._num_ids += num_ids
        if self._num_ids > MAX_CONTENT_IDS:
            raise ValueError(
                f"the prompts have more than {MAX_CONTENT_IDS} content ids: give num_requests, or cut them"
            )

    @property
    def makes_ids(self) -> bool:
        return self._num_ids > 0

    def drop(self, reason: str) -> None:
        self.dropped[reason] += 1

    def note(self, what: str) -> None:
        self.noted[what] += 1

    def answered(self, row: TraceRow) -> list[TraceRow]:
        """The row, unless it notes a failure."""
        if row.num_prompt_tokens and row.num_output_tokens:
            return [row]
        side = "output" if row.num_prompt_tokens else "prompt"
        self.drop(f"0 {side} tokens, as failed requests have")
        return []

    def said(self) -> list[str]:
        return [
            *self.findings,
            *(f"{what}: {number}" for what, number in self.noted.items()),
            *(f"rows dropped for {reason}: {number}" for reason, number in self.dropped.items()),
        ]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole file, read and checked: at least one row; the first ones only where a limit was given.

    `times`: arrivals of all rows that come by the clock, those beyond the limit too.
    """

    name: str
    source: str
    format: TraceFormat
    rows: Sequence[TraceRow]
    times: array[float]
    num_rows: int
    content_size: int | None
    has_starts: bool
    findings: tuple[str, ...]

    @property
    def is_closed(self) -> bool:
        return any(row.delay is not None for row in self.rows)

    def prompt(self, row: TraceRow) -> Prompt:
        if self.content_size is None or not row.content_ids:
            return LengthPrompt(row.num_prompt_tokens)
        return ContentPrompt(row.num_prompt_tokens, row.content_ids, self.content_size)

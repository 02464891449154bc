"""What a trace says of a request, and what a reader says of its format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.prompt import ContentPrompt, LengthPrompt, Prompt


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `arrival_time` in seconds from the trace's own start."""

    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int
    content_ids: tuple[int, ...] = ()


Parse = Callable[[str], TraceRow]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How to know a format by its first line, and how to read the others.

    `parser` takes the first line and gives the reader of one line; that reader raises ValueError without saying where.
    """

    name: str
    columns: tuple[str, ...]  # of the header, or keys of each JSON object; the first is the time
    is_json: bool
    time_unit: str  # as read
    parser: Callable[[str], Parse]
    assumptions: tuple[str, ...]
    content_size: int | None = None  # tokens a content id
    may_tick: bool = False  # recorded on a coarse clock
    declares_unit: bool = False  # by how its times are written

    def prompt(self, row: TraceRow) -> Prompt:
        if self.content_size is None:
            return LengthPrompt(row.num_prompt_tokens)
        return ContentPrompt(row.num_prompt_tokens, row.content_ids, self.content_size)


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole file, read and checked: at least one row, in order of time."""

    name: str
    source: str
    format: TraceFormat
    rows: Sequence[TraceRow]
    findings: tuple[str, ...]

"""aiperf's sessions in Mooncake's words: a row is a turn and tells only what is new in it.

    {"session_id": "a", "timestamp": 0, "input_length": 300, "output_length": 40, "hash_ids": [123]}
    {"session_id": "a", "delay": 2000, "input_length": 150, "output_length": 20, "hash_ids": [124]}

The second prompt is 300 + 40 + 150 tokens long: what was asked, answered and is asked now. `delay` (ms) counts from the
answer before. hash_ids cover the new tokens only and are shared across the file. What follows a text of any length does
not start where a content id does, so prompts are told in chunks of 16 tokens, each named after all that is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

from sim.workload.clock import UNITS
from sim.workload.content import covering_ids
from sim.workload.fields import name_text, require, seconds, token_count
from sim.workload.lines import shown
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

COLUMNS = ("session_id", "input_length", "output_length")
CHUNK = 16  # tokens; vLLM's block size, so that nothing a cache could find is lost
MODES = (None, "deltas_without_responses")
SHARED, OWN = "shared", "own"  # what a piece is part of: a content id, or something no other session says


class Piece(NamedTuple):
    """Tokens `start` to `end` of one content, named by `source` and `number`."""

    source: str
    number: int
    start: int
    end: int


@dataclass(slots=True)
class Transcript:
    """All tokens of a session so far, in chunks; the last may be open."""

    chunks: list[int] = field(default_factory=list)
    open_pieces: tuple[Piece, ...] = ()
    num_tokens: int = 0
    start: float = 0.0
    num_turns: int = 0
    last_row: int | None = None
    pause: float = 0.0  # asked for since the last row that was kept


class Conversations:
    def __init__(self, reading: Reading, content_size: int) -> None:
        self._reading = reading
        self._contents = Contents(reading, content_size)
        self._sessions: dict[str, Transcript] = {}
        self._any_start: bool | None = None

    def __call__(self, fields: dict[str, Any]) -> list[TraceRow]:
        require(fields, COLUMNS)
        _check_mode(fields)
        session = name_text("session_id", fields["session_id"])
        turn = self._sessions.setdefault(session, Transcript())
        asked, answered = (token_count(each, fields[each]) for each in COLUMNS[1:])
        self._contents.ask(turn, asked, fields.get("hash_ids"))
        found = self._reading.answered(self._row(fields, session, turn, answered))
        if found:
            turn.last_row, turn.pause = self._reading.num_rows, 0.0
        turn.num_turns += 1
        self._contents.add_own(turn, answered)
        return found

    def _row(self, fields: dict[str, Any], session: str, turn: Transcript, answered: int) -> TraceRow:
        arrival_time, delay = self._when(fields, turn)
        return TraceRow(
            arrival_time,
            turn.num_tokens,
            answered,
            self._contents.ids(turn) if self._reading.keeps(self._reading.num_rows) else (),
            session=session,
            follows=() if turn.last_row is None else (turn.last_row,),
            delay=delay,
        )

    def _when(self, fields: dict[str, Any], turn: Transcript) -> tuple[float, float | None]:
        """Arrival by the clock, or seconds after the answer before."""
        pause = seconds("delay", fields.get("delay") or 0, UNITS["ms"])
        if turn.num_turns == 0 or (fields.get("delay") is None and fields.get("timestamp") is not None):
            turn.start = self._start(fields)
            return turn.start, None
        turn.pause += pause
        return (turn.start + turn.pause, None) if turn.last_row is None else (0.0, turn.pause)

    def _start(self, fields: dict[str, Any]) -> float:
        has_start = fields.get("timestamp") is not None
        if self._any_start not in (None, has_start):
            raise ValueError(
                f"session {shown(fields['session_id'])} begins {'at' if has_start else 'without'} a timestamp, others "
                f"{'without' if has_start else 'at'} one: give all sessions a start, or none"
            )
        self._any_start = self._reading.has_starts = has_start
        return seconds("timestamp", fields["timestamp"], self._reading.unit) if has_start else 0.0


def _check_mode(fields: dict[str, Any]) -> None:
    if fields.get("context_mode") not in MODES:
        raise ValueError(
            f"context_mode {shown(fields['context_mode'])} is not read, only rows of new tokens are: "
            "convert the rows, or leave context_mode out if they are"
        )


class Contents:
    """Names chunks: alike where all in them is alike, across sessions as far as content ids say so."""

    def __init__(self, reading: Reading, content_size: int) -> None:
        self._reading = reading
        self._size, self._chunk = content_size, gcd(CHUNK, content_size)
        self._first: dict[tuple[int, int], int] = {}  # of the chunks that lie within a content id
        self._mixed: dict[tuple[Piece, ...], int] = {}
        self._next = 0
        reading.content_size = self._chunk

    def ids(self, turn: Transcript) -> tuple[int, ...]:
        self._reading.spend(len(turn.chunks))
        return (*turn.chunks, *([self._number(turn.open_pieces)] if turn.open_pieces else []))

    def ask(self, turn: Transcript, num_tokens: int, hash_ids: object) -> None:
        if hash_ids is None:
            return self.add_own(turn, num_tokens)
        for index, content in enumerate(covering_ids("hash_ids", hash_ids, num_tokens, self._size, "input_length")):
            self._add(turn, SHARED, content, min(self._size, num_tokens - index * self._size))
        return None

    def add_own(self, turn: Transcript, num_tokens: int) -> None:
        """What nobody else says: an answer, or a question told by its length."""
        self._add(turn, OWN, self._take(1), num_tokens)

    def _add(self, turn: Transcript, source: str, number: int, num_tokens: int) -> None:
        head = min(num_tokens, -turn.num_tokens % self._chunk)
        num_whole, tail = divmod(num_tokens - head, self._chunk)
        turn.num_tokens += num_tokens
        if head:
            turn.open_pieces += (Piece(source, number, 0, head),)
            if turn.open_pieces and (turn.num_tokens - num_whole * self._chunk - tail) % self._chunk == 0:
                turn.chunks.append(self._number(turn.open_pieces))
                turn.open_pieces = ()
        if num_whole:
            self._reading.spend(num_whole)
            first = self._take(num_whole) if source == OWN else self._within(number, head)
            turn.chunks.extend(range(first, first + num_whole))
        if tail:
            turn.open_pieces = (Piece(source, number, num_tokens - tail, num_tokens),)

    def _within(self, content: int, head: int) -> int:
        """Number of the first whole chunk of a content id whose first `head` tokens lie in the chunk before."""
        key = (content, head)
        if key not in self._first:
            self._first[key] = self._take(self._size // self._chunk)
        return self._first[key]

    def _number(self, pieces: tuple[Piece, ...]) -> int:
        if pieces not in self._mixed:
            self._mixed[pieces] = self._take(1)
        return self._mixed[pieces]

    def _take(self, num: int) -> int:
        self._next += num
        return self._next - num


def parser(first: dict[str, Any], reading: Reading) -> Parse:
    assert reading.content_size is not None, "the format has a content size"
    return Conversations(reading, reading.content_size)


AIPERF_SESSIONS = TraceFormat(
    name="aiperf-sessions",
    columns=COLUMNS,
    shape=Shape.JSON,
    unit=UNITS["ms"],
    parser=parser,
    assumptions=(
        "input_length and hash_ids are of the new tokens; a prompt is all that was said in its session",
        "a turn comes its delay, in milliseconds, after the answer before",
    ),
    content_size=512,
    takes_size=True,
    in_order=False,
)

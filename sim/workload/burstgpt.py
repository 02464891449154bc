"""BurstGPT traces: arrivals in whole seconds and lengths of a campus service, no content (Wang et al., 2024).

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
    19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log

The third file has the two columns more, goes on with the clock of the first, and notes failures by zeros as they do.
"""

from __future__ import annotations

from sim.workload.clock import UNITS
from sim.workload.fields import column_picker, header_fields, name_text, seconds, token_count
from sim.workload.rows import Parse, Reading, Shape, TraceFormat, TraceRow

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
SESSION, CLASS = "Session ID", "Log Type"


def parser(header: str, reading: Reading) -> Parse:
    present = header_fields(header)
    pick = column_picker(header, [*COLUMNS, *(each for each in (SESSION, CLASS) if each in present)])
    has_session, has_class = SESSION in present, CLASS in present
    first: float | None = None

    def parse(text: str) -> list[TraceRow]:
        nonlocal first
        time, prompt, output, *names = pick(text)
        now = seconds("Timestamp", time, reading.unit)
        first = now if first is None else first
        return reading.answered(
            TraceRow(
                now - first,
                token_count("Request tokens", prompt),
                token_count("Response tokens", output),
                session=name_text(SESSION, names[0]) if has_session else "",
                class_name=name_text(CLASS, names[-1]) if has_class else "default",
            )
        )

    return parse


BURSTGPT = TraceFormat(
    name="burstgpt",
    columns=COLUMNS,
    shape=Shape.CSV,
    unit=UNITS["s"],
    parser=parser,
    assumptions=("Timestamp is counted from the first row", "prompts share nothing, those of one session included"),
    may_tick=True,
)

"""`servetwin explain`: one request of a run, or of a journal of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sim.commands import Prepared
from sim.experiment.explain.blame import ANSWERS, BUDGET, GROUP, PREFILLS
from sim.experiment.explain.life import FRONT_END
from sim.experiment.explain.story import Explained, explain
from sim.files import write_json
from sim.report import seconds
from sim.setup import Setup
from sim.simulate import Run

SLOWEST = "slowest"
MOST_CLASSES, MOST_REQUESTS = 3, 3  # named where many held something


def run_explain(request: str, journal: Path | None, setup: Setup, out: Path | None) -> None:
    """From a journal if one is given, else of a run of the setup."""
    found = explain_run(setup, request) if journal is None else explain_journal(journal, request)
    if out is not None:
        write_json(out, to_dict(found))
    if str(out) != "-":
        print_explained(Console(), found)


def explain_run(setup: Setup, request: str) -> Explained:
    """Play a setup; `request` may be `slowest`. Raises ValueError for one that no engine has heard of."""
    prepared = Prepared.of(setup)
    journals: list[list[str]] = [[] for _ in range(setup.num_replicas)]
    run = prepared.run(journal=[lines.append for lines in journals])
    request = _slowest_of(run) if request == SLOWEST else request
    client = next((each for each in run.clients if each.request_id == request), None)
    if client is not None and client.added_time is None:
        raise ValueError(f"request {request!r} never reached an engine: its client left after {seconds(client.e2e)}")
    return explain(_journal_with(request, journals), request, client)


def _slowest_of(run: Run) -> str:
    if run.clients:
        return max(run.clients, key=lambda each: each.e2e if each.added_time is not None else 0.0).request_id
    return max(run.records, key=lambda each: each.finish_time - each.arrival_time).request_id


def _journal_with(request: str, journals: Sequence[Sequence[str]]) -> Sequence[str]:
    start = f'{{"add":{json.dumps(request)},'
    return next((lines for lines in journals if any(line.startswith(start) for line in lines)), journals[0])


def explain_journal(path: Path, request: str) -> Explained:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
    try:
        return explain(lines, _slowest_in(lines) if request == SLOWEST else request)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def _slowest_in(lines: Iterable[str]) -> str:
    """Who took longest from arrival to leaving."""
    arrivals: dict[str, float] = {}
    times: dict[str, float] = {}
    for text in lines:
        line: dict[str, Any] = json.loads(text) if '"add"' in text or '"left"' in text else {}
        if "add" in line:
            arrivals[line["add"]] = line["arrival"]
        times |= {name: line["now"] - arrivals[name] for name, _ in line.get("left", ())}
    if not times:
        raise ValueError("nobody has left by the end of the journal")
    return max(times, key=lambda name: times[name])


def to_dict(found: Explained) -> dict[str, Any]:
    """Parts add up to e2e; beneath each what was waited for, and by request who held it."""
    return {
        "request": found.request_id,
        "class": found.class_name,
        "reason": found.reason,
        "as_seen_by": "client" if found.sees_client else "engine",
        "arrival_time": found.arrival_time,
        "e2e": found.e2e,
        "num_prompt_tokens": found.num_prompt_tokens,
        "num_cached_tokens": found.num_cached_tokens,
        "num_output_tokens": found.num_output_tokens,
        "num_preemptions": found.num_preemptions,
        "parts": found.parts(),
        "waits": [
            {"part": stage, "for": what, "seconds": time, "held_by": found.holders(stage, what)}
            for (stage, what), time in found.causes().items()
        ],
    }


def print_explained(console: Console, found: Explained) -> None:
    console.print(headline(found), style="bold", highlight=False, markup=False)
    told = (
        f"class {found.class_name}; {found.num_prompt_tokens:,} prompt tokens, {found.num_cached_tokens:,} of them "
        f"found; {found.num_output_tokens:,} out; {found.num_preemptions:,} times preempted; ended by {found.reason}"
    )
    console.print(told, highlight=False, markup=False)
    console.print()
    console.print(_table(found), highlight=False)
    end = "its client" if found.sees_client else "the engine, which knows nothing of the way back"
    console.print(
        f"as seen by {end}; what a step takes longer than one of decodes alone is put down to the prefills in it",
        style="dim",
        highlight=False,
    )


def headline(found: Explained) -> str:
    """The whole in a sentence: the longest waits, and whom for."""
    waits = [each for each in found.causes().items() if each[1] >= 0.005 * found.e2e and each[0][0] != FRONT_END]
    worst = sorted(waits, key=lambda each: -each[1])[:3]
    told = ", ".join(f"{seconds(time)} {_whom(found, stage, what)}" for (stage, what), time in worst)
    waited = sum(time for _, time in waits)
    tail = f"waited {seconds(waited)}: {told}" if worst else "waited for nobody worth naming"
    return f"request {found.request_id}: {seconds(found.e2e)}; {tail}"


def _whom(found: Explained, stage: str, what: str) -> str:
    holders = found.holders(stage, what)
    if not holders:
        return f"for {what}"
    if what == PREFILLS:
        return f"behind the prefills of {_named(holders, MOST_REQUESTS)}"
    if what == ANSWERS:
        return f"for the longer answers of {_named(holders, MOST_REQUESTS)}"
    if what == BUDGET:
        return f"for {what} that went to {_named(holders, MOST_REQUESTS)}"
    if what == GROUP:
        return f"for {what} ({_named(holders, MOST_REQUESTS)})"
    first, *others = _by_class(found, holders)
    more = f" and {len(others)} more" if others else ""
    return f"for {what} held by class {first} ({_named(_of_class(found, holders, first), MOST_REQUESTS)}){more}"


def _table(found: Explained) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("part", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("held by")
    for stage, time in found.parts().items():
        whole = {**found.holders(stage, PREFILLS), **found.holders(stage, ANSWERS)}  # the stage says what
        table.add_row(stage, seconds(time), f"{100 * time / found.e2e:.1f} %", _holders(found, whole))
        for (of, what), waited in found.causes().items():
            if of == stage and what not in (PREFILLS, ANSWERS):
                holders = _holders(found, found.holders(of, what))
                table.add_row(f"  {escape(what)}", f"[dim]{seconds(waited)}[/dim]", "", f"[dim]{holders}[/dim]")
    table.add_row("whole", seconds(found.e2e), "100.0 %", style="bold")
    return table


def _holders(found: Explained, holders: Mapping[str, float]) -> str:
    """Classes by the time they stand for, and the requests in them that do most."""
    by_class = _by_class(found, holders)
    told = [
        f"{name} {seconds(time)} ({_named(_of_class(found, holders, name), MOST_REQUESTS)})"
        for name, time in list(by_class.items())[:MOST_CLASSES]
    ]
    more = len(by_class) - MOST_CLASSES
    return escape(", ".join([*told, *([f"{more} classes more"] if more > 0 else [])]))


def _by_class(found: Explained, holders: Mapping[str, float]) -> dict[str, float]:
    times: dict[str, float] = {}
    for name, time in holders.items():
        times[found.classes[name]] = times.get(found.classes[name], 0.0) + time
    return dict(sorted(times.items(), key=lambda each: (-each[1], each[0])))


def _of_class(found: Explained, holders: Mapping[str, float], class_name: str) -> list[str]:
    return [name for name in holders if found.classes[name] == class_name]


def _named(names: Iterable[str], most: int) -> str:
    known = list(names)
    more = f" and {len(known) - most:,} more" if len(known) > most else ""
    return f"req {', '.join(known[:most])}{more}"

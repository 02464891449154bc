"""A result as one HTML file that needs no network: the answer first, then verdicts, what they rest on, tables, charts.

In the terminal's words where it has some. Runs side by side share one manifest, but for what each has of its own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from policies.types import FinishReason
from sim.charts import charts
from sim.diff import DERIVED, flat
from sim.files import whole_file
from sim.html_page import figure, from_rich, note, page, section, table
from sim.metrics import Summary
from sim.report import (
    Banded,
    answer,
    class_table,
    comparison,
    extrapolation,
    latency_table,
    print_basis,
    rate_table,
    verdicts,
)
from sim.series import MAX_POINTS
from sim.simulate import Run

MAX_REASONS = 3  # for rejection, that are told
GOOD, BAD, NEITHER = "good", "bad", "neither"


@dataclass(frozen=True, slots=True)
class Reported:
    """A run to report on. `manifest`: its own, where runs differ in it."""

    banded: Banded
    run: Run
    manifest: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.banded.name

    @property
    def summary(self) -> Summary:
        return self.banded.summary


def write_html(path: Path, runs: Sequence[Reported], manifest: Mapping[str, Any]) -> None:
    """`manifest` as sim.setup makes it. Raises ValueError if runs cannot be told apart, or the file not be made."""
    text = html(runs, manifest)
    with whole_file(path) as file:
        file.write(text)


def html(runs: Sequence[Reported], manifest: Mapping[str, Any]) -> str:
    names = [run.name for run in runs]
    if not runs or len(set(names)) < len(names):
        raise ValueError(f"runs to report on ({', '.join(names) or 'none'}) must have names, each its own")
    convention, *others = dict.fromkeys(run.summary.convention for run in runs)
    if others:
        raise ValueError(f"runs to report on follow {convention} and {others[0]}: give all the same convention")
    basis = _basis_lines(manifest, len(runs[0].banded.others))
    costs = basis[0].split(";")[0].capitalize()
    figures = charts({run.name: run.run for run in runs}, costs, max(100, MAX_POINTS // len(runs)), convention)
    parts = [*_answers(runs), *_verdicts(runs), *_basis(runs, manifest, basis), *_tables(runs)]
    parts += [section("Charts", *map(figure, figures)), _manifest(runs, manifest)]
    return page(", ".join(names), "\n".join(parts))


# -- the answer, and whether it is good ---------------------------------------------------------------------------


def _answers(runs: Sequence[Reported]) -> Iterator[str]:
    size = "answer" if len(runs) == 1 else "answer short"
    for run in runs:
        yield f"<p class='{size}'>{escape(answer(run.banded))}</p>"


def _verdicts(runs: Sequence[Reported]) -> Iterator[str]:
    rows = []
    for run in runs:
        name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        doubts = [(BAD, line) for line in extrapolation(run.banded)]
        told = "".join(_verdict(*each) for each in (*doubts, *_judged(run), *_rejections(run.run)))
        rows.append(f"<div>{name}<ul class='verdicts'>{told}</ul></div>")
    yield section("Verdicts", "<div class='runs'>", *rows, "</div>")


def _verdict(mood: str, text: str) -> str:
    sign = {GOOD: "✓", BAD: "✗", NEITHER: "•"}[mood]
    return f"<li class='{mood}'><span class='sign'>{sign}</span> {escape(text)}</li>"


def _judged(run: Reported) -> Iterator[tuple[str, str]]:
    """The terminal's lines, objectives first; and that the server kept up, if it did."""
    objectives, saturation = run.summary.objectives, run.summary.saturation
    lines = verdicts(run.banded)
    for kept, line in zip(objectives, lines, strict=False):
        yield GOOD if kept.is_met else BAD, line
    for line in lines[len(objectives) :]:
        yield BAD if line.startswith(("overloaded", "warning")) else NEITHER, line
    if not saturation.is_saturated:
        yield NEITHER if "too few" in saturation.reason else GOOD, f"not saturated, as far as seen: {saturation.reason}"


def _rejections(run: Run) -> Iterator[tuple[str, str]]:
    """The commonest reasons, each by an example: those that differ in numbers only are one."""
    details = [record.detail for record in run.records if record.reason is FinishReason.REJECTED]
    kinds = Counter(re.sub(r"\d+", "#", detail) for detail in details)
    examples = {re.sub(r"\d+", "#", detail): detail for detail in reversed(details)}
    for kind, num in kinds.most_common(MAX_REASONS):
        yield BAD, f"{num:,} of {len(run.records):,} requests rejected{', as' if num > 1 else ''}: {examples[kind]}"


# -- what it rests on ---------------------------------------------------------------------------------------------


def _basis_lines(manifest: Mapping[str, Any], num_others: int) -> list[str]:
    """The same words as in the terminal."""
    text = StringIO()
    print_basis(Console(file=text, width=10_000, color_system=None), dict(manifest), num_others)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _basis(runs: Sequence[Reported], manifest: Mapping[str, Any], lines: Sequence[str]) -> Iterator[str]:
    rows: dict[str, list[str]] = {}
    for line in lines:
        name, _, text = line.partition(": ")
        if line.startswith(" ") and rows:
            rows[next(reversed(rows))].append(line.strip())
        else:
            rows[name] = [text]
    for name, value in manifest.items():
        if isinstance(value, (str, int, float)) and value != "" and name != "vllm_flags":  # said above
            rows.setdefault(name.replace("_", " "), [str(value)])
    items = [f"<dt>{escape(name)}</dt><dd>{'<br>'.join(map(escape, texts))}</dd>" for name, texts in rows.items()]
    yield section("What this rests on", f"<dl>{''.join(items)}</dl>", *_differences(runs, manifest))


def _differences(runs: Sequence[Reported], manifest: Mapping[str, Any]) -> Iterator[str]:
    """What the runs were given differently, setting by setting; but not what follows from other settings."""
    of_runs = [flat(run.manifest or manifest) for run in runs]
    names = [name for name in dict.fromkeys(chain(*of_runs)) if not name.startswith(DERIVED)]
    rows = [[name, *[str(each.get(name, "-")) for each in of_runs]] for name in names]
    if differing := [row for row in rows if len(set(row[1:])) > 1]:
        yield note("The above holds for the first run; the others differ from it in this:")
        yield table(["setting", *[run.name for run in runs]], differing)


def _manifest(runs: Sequence[Reported], manifest: Mapping[str, Any]) -> str:
    whole = {"": manifest, **{run.name: run.manifest for run in runs if run.manifest not in (None, manifest)}}
    texts = [
        (f"<h3>{escape(name)}</h3>" if name else "")
        + f"<pre>{escape(json.dumps(each, indent=2, ensure_ascii=False, default=str))}</pre>"
        for name, each in whole.items()
    ]
    return f"<details><summary>The full manifest, as JSON</summary>{''.join(texts)}</details>"


# -- tables -------------------------------------------------------------------------------------------------------


def _tables(runs: Sequence[Reported]) -> Iterator[str]:
    banded = [run.banded for run in runs]
    notes = []
    if num := max(len(run.others) for run in banded):
        of = "with all costs at either end of their band" if num == 2 else f"of {num} draws of the costs"
        notes.append(f"Small print: the range {of}.")
    if saturated := [run.name for run in runs if run.summary.saturation.is_saturated]:
        notes.append(
            f"{', '.join(saturated)}: overloaded, without a steady state; latencies that grow with the length of the "
            "workload are left out, and the charts of them below describe these requests only."
        )
    tables = [latency_table(banded[0]), rate_table(banded)] if len(runs) == 1 else [comparison(banded)]
    yield section("Metrics", note(" ".join(notes)), "<div class='tables'>", *map(from_rich, tables), "</div>")
    if classes := [run for run in banded if run.summary.classes]:
        yield section("By class of request", *[_of_classes(run, len(runs) > 1) for run in classes])


def _of_classes(run: Banded, named: bool) -> str:
    return (f"<h3>{escape(run.name)}</h3>" if named else "") + from_rich(class_table(run))

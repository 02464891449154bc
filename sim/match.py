"""How far a simulation, given the workload alone, takes the decisions that a live run took.

Replaying a live journal shows that the core is deterministic; this shows how well step costs carry over, as other times
bring other batches. The two are told together: either alone says too much.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any

Decision = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Decisions of two runs, in order. `num_alike` were paired off without crossing, long stretches first."""

    num_live: int
    num_simulated: int
    num_alike: int
    num_until_first: int  # alike from the beginning

    @property
    def rate(self) -> float:
        """Of the live decisions, the share that the simulation took as well."""
        return self.num_alike / self.num_live if self.num_live else 1.0

    def __str__(self) -> str:
        return (
            f"{100 * self.rate:.1f} % of {self.num_live:,} live decisions, of {self.num_simulated:,} simulated ones; "
            f"the first {self.num_until_first:,} without exception"
        )


def match(live: Iterable[str], simulated: Iterable[str]) -> Match:
    """Compare two journals of one workload."""
    ours, theirs = decisions(live), decisions(simulated)
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return Match(len(ours), len(theirs), _num_alike(_runs(ours), _runs(theirs)), first)


def decisions(lines: Iterable[str]) -> list[Decision]:
    """Who was let in, and of each step who enters, yields, and is computed for how many tokens.

    Neither when, nor what follows from earlier decisions: in which blocks, and from which token on.
    """
    return [found for line in lines if (found := _decision(json.loads(line))) is not None]


def _runs(found: Sequence[Decision]) -> list[tuple[Decision, int]]:
    """Equal decisions one after another, as most decode steps are, and how many."""
    return [(decision, len(list(run))) for decision, run in groupby(found)]


def _num_alike(ours: Sequence[tuple[Decision, int]], theirs: Sequence[tuple[Decision, int]]) -> int:
    a, b = ([decision for decision, _ in runs] for runs in (ours, theirs))
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return sum(min(ours[at.a + i][1], theirs[at.b + i][1]) for at in blocks for i in range(at.size))


def _decision(line: dict[str, Any]) -> Decision | None:
    if "add" in line:
        return ("add", line["add"], line.get("refused", ""))
    if "plan" not in line:
        return None
    assert line["repeat"] == 1, "compare single steps: simulate with jumps off"
    chunks = tuple((request_id, num_tokens) for request_id, _, num_tokens, *_ in line["chunks"])
    return ("plan", chunks, tuple(map(tuple, line.get("admitted", ()))), tuple(line.get("preempted", ())))

"""An engine's own log of steps, joined to a forced replay: the log says what was computed, the tokens how long it took.

The log's own `elapsed` waits for the device only, and leaves out what the host does between two steps; a step's price
must have both. What the replay cannot know is how much of a prompt was found in the prefix cache: that the log tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calibration.forced import ObservedSteps
from calibration.records import MeasuredStep
from sim.cost import StepWork

SHIFTS = (0, 1, -1, 2, -2, 3)  # lines by which log and replay may have come apart


def joined(steps: Sequence[ObservedSteps], log: Sequence[MeasuredStep]) -> list[ObservedSteps]:
    """Steps with the prompt tokens that the log has for them; those that it does not have stay as they are."""
    if not log:
        return list(steps)
    works = [work for step in steps for work in step.works]
    told = _told(works, log)
    found, begin = [], 0
    for step in steps:
        end = begin + len(step.works)
        found.append(replace(step, works=tuple(told[begin:end])))
        begin = end
    return found


def _told(works: Sequence[StepWork], log: Sequence[MeasuredStep]) -> list[StepWork]:
    found, place = [], 0
    for index, work in enumerate(works):
        line = _line_of(works, index, log, place)
        found.append(work if line is None else _corrected(work, log[line]))
        place = (place if line is None else line) + 1
    return found


def _line_of(works: Sequence[StepWork], index: int, log: Sequence[MeasuredStep], place: int) -> int | None:
    """Away from its place a line counts only if the next one fits too."""
    for shift in SHIFTS:
        line = place + shift
        if _fits(works, index, log, line) and (shift == 0 or _fits(works, index + 1, log, line + 1)):
            return line
    return None


def _fits(works: Sequence[StepWork], index: int, log: Sequence[MeasuredStep], line: int) -> bool:
    if not (0 <= line < len(log) and index < len(works)):
        return False
    work, told = works[index], log[line]
    same = work.num_prefills == told.num_prefills and work.num_decodes == told.num_decodes
    return same and told.num_tokens <= work.num_tokens


def _corrected(work: StepWork, told: MeasuredStep) -> StepWork:
    """Pairs of the tokens that were not computed are left out as if they had been spread over the prompts."""
    prompt = work.num_tokens - work.num_decodes
    if not prompt or told.num_prefill_tokens == prompt:
        return work
    share = told.num_prefill_tokens / prompt
    return work._replace(num_tokens=told.num_tokens, prefill_pairs=round(work.prefill_pairs * share))

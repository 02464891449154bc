"""What an engine's own log of steps adds to the times of tokens: how much of each prompt was found in the prefix cache.

The log's `elapsed` waits for the device only, and leaves out what the host does between two steps; how long a step took
is told by its tokens. But the log counts the prompt tokens that were computed, which clients cannot see: a line with
fewer than the core would compute tells of a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calibration.forced import forced_steps, has_token_times
from calibration.records import MeasuredRequest, MeasuredRun, MeasuredStep
from policies.config import EngineConfig
from sim.cost import StepWork

SHIFTS = (0, 1, -1, 2, -2, 3)  # lines by which log and replay may have come apart


def with_hits(run: MeasuredRun, config: EngineConfig) -> MeasuredRun:
    """The run with `num_cached_tokens` where its log tells them, and prompts that share what was found."""
    told = any(request.num_cached_tokens is not None or request.content_ids for request in run.requests)
    if not told and run.steps and has_token_times(run):
        hits = _hits(run, config)
        requests = [replace(each, num_cached_tokens=hits.get(each.request_id, 0)) for each in run.requests]
        run = replace(run, requests=requests)
    return _sharing(run, config.block_size)


def _hits(run: MeasuredRun, config: EngineConfig) -> dict[str, int]:
    found = forced_steps(run, config).steps
    works = [work for step in found for work in step.works]
    entered = [names for step in found for names in step.entered]
    prompts = {request.request_id: request.num_prompt_tokens for request in run.requests}
    hits, place = dict[str, int](), 0
    for index, (work, names) in enumerate(zip(works, entered, strict=True)):
        line = _line_of(works, index, run.steps, place)
        place = (place if line is None else line) + 1
        lacking = work.num_tokens - run.steps[line].num_tokens if line is not None else 0
        whose = [name for name in names if prompts[name] > lacking]
        if lacking and lacking % config.block_size == 0 and whose:
            hits[whose[0]] = lacking
    return hits


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


# -- prompts that share -------------------------------------------------------------------------------------------


def _sharing(run: MeasuredRun, block_size: int) -> MeasuredRun:
    """Contents under which the core finds what was found: each hit is of the latest prompt that is long enough."""
    if run.content_size or not any(request.num_cached_tokens for request in run.requests):
        return run
    earlier: list[MeasuredRequest] = []
    next_id = 0
    for request in run.requests:
        num, shared = -(-request.num_prompt_tokens // block_size), (request.num_cached_tokens or 0) // block_size
        donor = next((each for each in reversed(earlier) if each.num_prompt_tokens // block_size >= shared), None)
        head = donor.content_ids[:shared] if donor else ()
        ids = (*head, *range(next_id, next_id + num - len(head)))
        next_id += num
        earlier.append(replace(request, content_ids=ids))
    return replace(run, requests=earlier, content_size=block_size)

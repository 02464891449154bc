"""The device on paper: prices a plan, and knows when each answer ends."""

from __future__ import annotations

import math

from policies.types import FinishReason, Request, StepOutput, StepPlan
from sim.cost import StepCost, StepWork


def work_of(plan: StepPlan) -> StepWork:
    """The counts of one step of a plan; a chunk of one token is attended as a decode, whatever it is."""
    num = len(plan.counts)
    if plan.only_decodes:
        return StepWork(num + plan.num_padding_tokens, plan.num_running, num, num, sum(plan.starts) + num)
    decodes = context = prefills = pairs = prefill_context = 0
    for start, count in zip(plan.starts, plan.counts, strict=True):
        if count == 1:
            decodes += 1
            context += start + 1
        else:
            prefills += 1
            pairs += count * (2 * start + count + 1)
            prefill_context += start + count
    num_tokens = plan.num_tokens + plan.num_padding_tokens
    return StepWork(num_tokens, plan.num_running, sum(plan.samples), decodes, context, prefills, pairs, prefill_context)


def delay_until(now: float, end: float) -> float:
    """The delay that, added to `now`, gives exactly `end`."""
    delay = end - now
    while now + delay < end:
        delay = math.nextafter(delay, math.inf)
    while now + delay > end:
        delay = math.nextafter(delay, 0.0)
    return delay


class SimulatedExecutor:
    """Holds where each answer ends, which no policy sees.

    `overlap`: host and device work at once, as they do when the next step is scheduled ahead. `block_size`: of the
    prefix cache, whose blocks are hashed and looked up on the host when a request enters; 0 where there is none.
    `block_transfer_time`: seconds to move a KV block to host memory or back, while nothing is computed.
    """

    def __init__(
        self, cost: StepCost, overlap: bool = False, block_size: int = 0, block_transfer_time: float = 0.0
    ) -> None:
        self._cost = cost
        self._block_transfer_time = block_transfer_time
        self._overlap = overlap
        self._block_size = block_size
        self._num_prompt_tokens: dict[str, int] = {}
        self._last_position: dict[str, int] = {}  # of the token whose successor is the answer's last
        self._prepared: tuple[int, list[float]] = (-1, [])
        self._nearest_stop = 0  # steps of the prepared plan until an answer ends

    def expect(self, request: Request, num_output_tokens: int) -> None:
        """A request will come whose answer has this length."""
        self._last_position[request.request_id] = request.prompt.num_tokens + num_output_tokens - 2
        self._num_prompt_tokens[request.request_id] = request.prompt.num_tokens

    def execute(self, plan: StepPlan) -> StepOutput:
        if not plan.request_ids:
            return StepOutput(self._duration(StepWork(num_requests=plan.num_running)) + self._transfer_time(plan))
        step_id, ends = self._prepared
        if step_id != plan.step_id:
            duration = self._duration(self._with_lookups(plan, work_of(plan))) + self._transfer_time(plan)
            return StepOutput(duration, self._stopped(plan))
        stopped = self._stopped(plan) if plan.repeat == self._nearest_stop else {}
        return StepOutput(delay_until(plan.time, ends[-1]), stopped)

    def ends(self, plan: StepPlan) -> list[float]:
        """End times of a repeated plan's steps."""
        assert self._prepared[0] == plan.step_id
        return self._prepared[1]

    def repeats(self, plan: StepPlan, limit: int, until: float) -> int:
        """How many equal decode steps to take: no answer ends before the last, and none begins at or after `until`."""
        last = self._last_position
        left = [last[name] - start for name, start in zip(plan.request_ids, plan.starts, strict=True)]
        self._nearest_stop = max(1, 1 + min(left))
        limit = min(limit, self._nearest_stop)
        work, end, ends = work_of(plan), plan.time, list[float]()
        duration, context, num = self._duration, work.decode_context, work.num_decodes
        while True:
            end += duration(work)
            ends.append(end)
            if len(ends) >= limit or end >= until:
                break
            context += num
            work = StepWork(work[0], work[1], work[2], num, context)
        self._prepared = (plan.step_id, ends)
        return len(ends)

    def _with_lookups(self, plan: StepPlan, work: StepWork) -> StepWork:
        """Blocks of prompts that enter: each is hashed once, and looked up until one is not found."""
        size = self._block_size
        if not size or not plan.admitted:
            return work
        hashed = sum(self._num_prompt_tokens[e.request_id] // size for e in plan.admitted if not e.resumed)
        lookups = sum(e.num_cached_tokens // size + 1 for e in plan.admitted)
        return work._replace(num_blocks_hashed=hashed, num_lookups=lookups)

    def _transfer_time(self, plan: StepPlan) -> float:
        return self._block_transfer_time * sum(each.num_blocks for each in plan.transfers) if plan.transfers else 0.0

    def _duration(self, work: StepWork) -> float:
        host, device = self._cost.host_time(work), self._cost.device_time(work)
        return max(host, device) if self._overlap else host + device

    def _stopped(self, plan: StepPlan) -> dict[str, FinishReason]:
        last, after = self._last_position, plan.repeat - 2
        return {
            name: FinishReason.STOP
            for name, start, count, samples in zip(
                plan.request_ids, plan.starts, plan.counts, plan.samples, strict=True
            )
            if samples and start + count + after >= last[name]
        }

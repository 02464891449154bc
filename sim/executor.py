"""The device on paper: prices a plan, and knows when each answer ends."""

from __future__ import annotations

import math
from collections.abc import Mapping

from policies.types import FinishReason, StepOutput, StepPlan
from sim.cost import StepCost, StepWork


def work_of(plan: StepPlan) -> StepWork:
    """The counts of one step of a plan; a chunk of one token is attended as a decode, whatever it is."""
    tokens = sampled = decodes = context = prefills = pairs = prefill_context = 0
    for _, start, num, _, samples in plan.chunks:
        tokens += num
        if samples:
            sampled += 1
        if num == 1:
            decodes += 1
            context += start + 1
        else:
            prefills += 1
            pairs += num * (2 * start + num + 1)
            prefill_context += start + num
    return StepWork(tokens + plan.num_padding_tokens, plan.num_running, sampled, decodes, context, prefills, pairs,
                    prefill_context)  # fmt: skip


def delay_until(now: float, end: float) -> float:
    """The delay that, added to `now`, gives exactly `end`."""
    delay = end - now
    while now + delay < end:
        delay = math.nextafter(delay, math.inf)
    while now + delay > end:
        delay = math.nextafter(delay, 0.0)
    return delay


class SimulatedExecutor:
    """Holds the true output lengths, which no policy sees.

    `overlap`: host and device work at once, as they do when the next step is scheduled ahead.
    """

    def __init__(self, cost: StepCost, output_lengths: Mapping[str, int], overlap: bool = False) -> None:
        self._cost = cost
        self._left = dict(output_lengths)  # output tokens still to come
        self._overlap = overlap
        self._prepared: tuple[int, list[float]] = (-1, [])

    def expect(self, request_id: str, num_output_tokens: int) -> None:
        """A request will come whose answer has this length."""
        self._left[request_id] = num_output_tokens

    def execute(self, plan: StepPlan) -> StepOutput:
        if not plan.chunks:
            return StepOutput(self._duration(StepWork(num_requests=plan.num_running)))
        step_id, ends = self._prepared
        if step_id == plan.step_id and len(ends) == plan.repeat:
            duration = delay_until(plan.time, ends[-1])
        else:
            duration = self._duration(work_of(plan))
        return StepOutput(duration, self._emit(plan))

    def ends(self, plan: StepPlan) -> list[float]:
        """End times of a repeated plan's steps."""
        return self._prepared[1]

    def repeats(self, plan: StepPlan, limit: int, until: float) -> int:
        """How many equal steps to take: no answer ends before the last, and none begins at or after `until`."""
        left = self._left
        limit = min(limit, min([left[chunk.request_id] for chunk in plan.chunks]))
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

    def _duration(self, work: StepWork) -> float:
        host, device = self._cost.host_time(work), self._cost.device_time(work)
        return max(host, device) if self._overlap else host + device

    def _emit(self, plan: StepPlan) -> dict[str, FinishReason]:
        left, repeat, stopped = self._left, plan.repeat, dict[str, FinishReason]()
        for request_id, _, _, _, samples in plan.chunks:
            if samples:
                left[request_id] -= repeat
                if left[request_id] <= 0:
                    stopped[request_id] = FinishReason.STOP
        return stopped

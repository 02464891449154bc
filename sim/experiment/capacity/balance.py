"""What a replica can do at most, in the mean: a step in balance, and the first limit that it meets.

In balance as many requests leave a step as enter. If `x` enter each step, x * (output - 1) decode and x * prompt tokens
are prefilled in it; its time t(x) follows from the costs, and x / t(x) requests a second are served. x is bounded by
the slots, the tokens of a step and the KV memory; the front end bounds the rate by itself. With costs linear in the
counts this is exact (the work of a request is the same in any batch); otherwise it is a first guess that runs correct.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from policies.config import EngineConfig
from sim.cost.best import Cost
from sim.cost.linear import LinearCost
from sim.cost.server import ServedCost
from sim.cost.work import StepWork
from sim.frontend import FrontEndTimes
from sim.models.shape import DTYPE_BYTES, Model
from sim.workload.every import every_item
from sim.workload.reuse import reuse
from sim.workload.workload import Workload

COMPUTE, BANDWIDTH, HOST = "compute", "memory bandwidth", "the host"
KV, SLOTS, BUDGET, FRONT_END = "KV memory", "slots", "tokens a step", "the front end"


@dataclass(frozen=True, slots=True)
class Mix:
    """Means over requests, in tokens. `computed`: of the prompt, what no cache has. `contexts`: summed over a
    request's decodes. `pairs`: as StepWork counts them. `held`: whole KV blocks summed over its steps."""

    prompt: float
    computed: float
    output: float
    contexts: float
    pairs: float
    held: float

    @classmethod
    def of(cls, workload: Workload, block_size: int) -> Mix:
        """With hits as a cache without limits would give them."""
        items = every_item(workload)
        prompts = np.array([item.request.prompt.num_tokens for item in items], dtype=np.float64)
        outputs = np.array([item.num_output_tokens for item in items], dtype=np.float64)
        computed = prompts * (1.0 - reuse(item.request.prompt for item in items))
        contexts = (outputs - 1.0) * (prompts + 0.5 * outputs)  # p + 1, ..., p + d - 1
        held = outputs * (prompts + 0.5 * (outputs - 1.0) + 0.5 * (block_size - 1))
        pairs = computed * (2.0 * (prompts - computed) + computed + 1.0)
        return cls(*(float(each.mean()) for each in (prompts, computed, outputs, contexts, pairs, held)))

    @property
    def tokens(self) -> float:
        """Computed for a request: the last one's KV never is."""
        return self.computed + self.output - 1.0


class Step(NamedTuple):
    """The mean step. `entering`: requests a step; times in seconds; `work`: its mean counts."""

    entering: float
    time: float
    host_time: float
    work: StepWork

    @property
    def rate(self) -> float:
        return self.entering / self.time


@dataclass(frozen=True, slots=True)
class Balance:
    """Of one replica."""

    mix: Mix
    config: EngineConfig
    cost: Cost
    front_end: FrontEndTimes | None

    @property
    def is_exact(self) -> bool:
        """Whether costs are a straight line in the counts."""
        return self._line is not None

    @property
    def _line(self) -> LinearCost | None:
        if not isinstance(self.cost, ServedCost) or self.config.async_depth > 1:
            return None
        line = self.cost.server.cost
        return None if line.free_tokens else replace(line, scale=line.scale * self.cost.scale)

    @property
    def entering_by_limit(self) -> dict[str, float]:
        """Requests that can enter each step before a limit of the engine is met."""
        mix, config = self.mix, self.config
        return {
            SLOTS: config.max_num_seqs / mix.output,
            BUDGET: config.max_num_batched_tokens / mix.tokens,
            KV: config.num_blocks * config.block_size / mix.held,
        }

    @property
    def front_end_rate(self) -> float:
        """Requests a second that the loop, the tokenisers and the streams of a replica can pass."""
        times, mix = self.front_end, self.mix
        if times is None:
            return math.inf
        slowest = max(
            times.api_time_per_request,
            (times.tokenise_time_per_request + times.tokenise_time_per_token * mix.prompt) / times.num_tokenisers,
            times.stream_time_per_request + times.stream_time_per_token * mix.output,
        )
        return times.num_api_servers / slowest if slowest else math.inf

    @property
    def most(self) -> tuple[float, str]:
        """The rate that is never exceeded, and what stops it; where costs are no straight line, a guess at it."""
        limits = self.entering_by_limit
        first = min(limits, key=lambda name: limits[name])
        rate = self.step(limits[first]).rate
        return (self.front_end_rate, FRONT_END) if self.front_end_rate < rate else (rate, first)

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, entering: float) -> Step:
        """A mean step: prompts in some, none in others, where fewer than one enters a step."""
        mix = self.mix
        if (line := self._line) is not None:
            return Step(entering, max(1e-9, _on_line(line, mix, entering)), 0.0, self._work(entering, 1.0))
        room = max(1.0, self.config.max_num_batched_tokens - entering * (mix.output - 1.0))
        share = min(1.0, entering * math.ceil(mix.computed / room)) if mix.computed else 0.0
        bare = self._work(entering, 0.0)
        works = ((1.0 - share, bare), (share, self._work(entering, 1.0 / share) if share else bare))
        host = sum(weight * self.cost.host_time(work) for weight, work in works)
        time = sum(weight * self._time(work) for weight, work in works)
        return Step(entering, max(time, 1e-9), host, self._work(entering, 1.0))

    def _work(self, entering: float, laden: float) -> StepWork:
        """Decodes, and `laden` times the prompts of a mean step."""
        mix = self.mix
        decodes = max(1, round(entering * (mix.output - 1.0))) if mix.output > 1.0 else 0
        prompts = max(1, round(entering * laden)) if laden and mix.computed else 0
        return StepWork(
            num_tokens=decodes + round(entering * laden * mix.computed),
            num_requests=decodes + prompts,
            num_sampled=decodes + prompts,
            num_decodes=decodes,
            decode_context=round(entering * mix.contexts),
            num_prefills=prompts,
            prefill_pairs=round(entering * laden * mix.pairs),
            prefill_context=round(entering * laden * mix.prompt),
        )

    def _time(self, work: StepWork) -> float:
        host, device = self.cost.host_time(work), self.cost.device_time(work)
        return max(host, device) if self.config.async_depth > 1 else host + device

    def at_rate(self, rate: float) -> Step:
        """The mean step at a rate; the largest where it cannot be served."""
        low, high = 0.0, min(self.entering_by_limit.values())
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.step(middle).rate < rate else (low, middle)
        return self.step(high)

    def residents(self, rate: float) -> float:
        """Requests in the engine at once, in the mean."""
        return self.at_rate(rate).entering * self.mix.output

    def rate_at_step_time(self, most: float) -> float:
        """The rate at which a mean step takes so long; 0 where the shortest does already."""
        low, high = 0.0, min(self.entering_by_limit.values())
        if self.step(high).time <= most:
            return self.step(high).rate
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.step(middle).time <= most else (low, middle)
        return self.step(low).rate if low else 0.0


def _on_line(line: LinearCost, mix: Mix, entering: float) -> float:
    """Seconds of the mean step, no count rounded."""
    each = line.per_token * mix.tokens + line.per_decode * (mix.output - 1.0) + line.per_prompt
    each += line.per_kv_token * mix.contexts + line.per_pair * mix.pairs
    return line.scale * (line.per_step + entering * each)


def device_shares(cost: Cost, step: Step) -> dict[str, float]:
    """Of a step's time, what its arithmetic and its bytes would take at the datasheet's peaks, and what the host does.

    Empty for a server's own prices, which name no hardware that they are of.
    """
    if isinstance(cost, ServedCost):
        return {}
    model, device, work = cost.model.shard(cost.tensor_parallel), cost.device, step.work
    peak = (device.fp8_tflops or device.bf16_tflops) if DTYPE_BYTES[model.dtype] == 1 else device.bf16_tflops
    bytes_read = model.weight_bytes + (work.decode_context + work.prefill_context) * model.kv_bytes_per_token
    return {
        COMPUTE: _flops(model, work) / (peak * 1e12) / step.time,
        BANDWIDTH: bytes_read / (device.bandwidth_gb_s * 1e9) / step.time,
        HOST: step.host_time / step.time,
    }


def _flops(part: Model, work: StepWork) -> float:
    each = sum(matrix.num_parameters for matrix in (*part.attention_matrices, *part.mlp_matrices))
    if part.experts:
        each += sum(m.num_parameters for m in part.expert_matrices) * part.experts.num_experts_per_token
    pairs = work.prefill_pairs + 2 * work.decode_context
    return 2.0 * each * work.num_tokens + 2.0 * pairs * part.num_heads * part.head_dim * part.num_layers

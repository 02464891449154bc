"""What a step costs where each layer of one model was measured on one GPU, its attention as one launch for all.

step = layers(tokens) + attention(chunk, start, decodes, context) * layers + head(sequences) + what no kernel explains
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sim.cost.measured import mixed_point
from sim.cost.op_model import ShapedOp
from sim.cost.surface import Line, Surface
from sim.cost.work import StepWork


@dataclass(frozen=True, slots=True)
class OneLaunch:
    """Seconds of one layer's attention: of decodes alone, a chunk alone, and both, which kernels split otherwise."""

    decodes: ShapedOp
    chunk: ShapedOp
    both: ShapedOp

    def op(self, is_decoding: bool, is_prefilling: bool) -> ShapedOp:
        if not is_prefilling:
            return self.decodes
        return self.both if is_decoding else self.chunk


@dataclass(frozen=True, slots=True)
class Skew:
    """Contexts differ, and a launch ends with its longest. All by the number of decodes.

    `alone`, `beside`: how far such a launch is on the way from one whose contexts are all the mean to one whose are all
    the longest; without a chunk and with one. `longest`: the longest context, in means.
    """

    alone: Surface
    beside: Surface
    longest: Surface

    def time(self, op: ShapedOp, point: tuple[float, float, float, float], is_beside: bool) -> float:
        """Seconds above those of a launch of equal contexts."""
        chunk, start, decodes, context = point
        share = (self.beside if is_beside else self.alone).at((decodes,))
        longest = max(1.0, self.longest.at((decodes,))) * context
        return share * (op.time(chunk, start, decodes, longest) - op.time(*point))


@dataclass(frozen=True, slots=True)
class TabledCost:
    """`layers`: all but attention, by tokens; `head`: LM head and sampler, by sequences. `padded`: by tokens, the size
    of the CUDA graph that runs them. `per_step`: seconds that no kernel explains, host and gaps: steps that are
    scheduled ahead hide most of the one behind the other, so they are one number.
    """

    provenance: ClassVar[str] = "kernel tables"
    band: ClassVar[float] = 1.05  # two runs of real servers were off by up to 4.3 %

    layers: Line
    head: Line
    attention: OneLaunch
    num_layers: int
    skew: Skew | None = None
    padded: tuple[int, ...] = ()
    per_step: float = 0.0

    def host_time(self, work: StepWork) -> float:
        return 0.0

    def device_time(self, work: StepWork) -> float:
        num_tokens, num_sampled = work.num_tokens, work.num_sampled
        if not num_tokens:
            return 0.0
        rows = self.padded[num_tokens] if num_tokens < len(self.padded) else num_tokens
        time = self.per_step + self.layers.at(rows) + self.num_layers * self._attention_time(work)
        return time + self.head.at(num_sampled) if num_sampled else time

    def _attention_time(self, work: StepWork) -> float:
        """One launch of the mean chunk and all decodes, and what each further chunk takes alone."""
        point = mixed_point(work)
        op = self.attention.op(work.num_decodes > 0, work.num_prefills > 0)
        time = op.time(*point)
        if self.skew and work.num_decodes > 1:
            time += self.skew.time(op, point, work.num_prefills > 0)
        if work.num_prefills > 1:
            time += (work.num_prefills - 1) * self.attention.chunk.time(point[0], point[1], 0.0, 0.0)
        return time

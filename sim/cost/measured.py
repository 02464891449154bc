"""How long a step takes on a GPU whose kernels were measured: fits where a profile has them, the datasheet elsewhere.

step = host(step, requests, blocks) and device = GEMMs + attention of decodes + attention of prefills + small kernels
+ all-reduces, as in sim/cost/datasheet.py. What a profile does not price (experts, all-reduces, small kernels, latent
attention, the host) costs what it costs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sim.cost.datasheet import DatasheetCost
from sim.cost.draws import Draw
from sim.cost.op_model import ShapedOp
from sim.cost.ops import DECODE, GEMM, MIXED, PREFILL, Ops
from sim.cost.profile import Profile
from sim.cost.rates import GEMM_FLOOR, speeds_of
from sim.cost.surface import Line
from sim.cost.work import StepWork
from sim.hardware import Device
from sim.models.shape import Model

FAR = 1.0  # octaves beyond the measured range from which a time counts as extrapolated


class Parts(NamedTuple):
    """Device seconds of one step."""

    rows: float = 0.0  # GEMMs of the layers, small kernels, all-reduces
    head: float = 0.0  # LM head and sampling
    decode: float = 0.0
    prefill: float = 0.0


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """A profile's kernels in the steps that `rest` describes: the same model on the same GPUs, by their datasheet.

    `scale` multiplies every time; that of `rest` what comes from the datasheet.
    """

    ops: Ops
    rest: DatasheetCost
    scale: float = 1.0
    _decodes: dict[int, Line] = field(init=False, repr=False, compare=False, default_factory=dict)  # by batch
    _by_rows: dict[int, float] = field(init=False, repr=False, compare=False, default_factory=dict)
    _plain: dict[int, tuple[float, Line, float]] = field(init=False, repr=False, compare=False, default_factory=dict)
    _has_plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.scale <= 0.0:
            raise ValueError(f"scale ({self.scale}) must be above 0: it multiplies every time")
        if self.profile.device != self.device.name:
            raise ValueError(f"profile {self.profile.name} is of {self.profile.device}, not of {self.device.name}")
        plain = self.ops.decode is not None and self.ops.mixed is None and not self.model.num_sliding_layers
        object.__setattr__(self, "_has_plain", plain)

    @classmethod
    def of(cls, profile: Profile, rest: DatasheetCost) -> MeasuredCost:
        return cls(Ops.of(profile, rest.model.shard(rest.tensor_parallel)), rest)

    def drawn(self, draw: Draw) -> MeasuredCost:
        """What else it might be: every operation off by its own error, the datasheet's part by the datasheet's."""
        ops = Ops.of(self.profile, self.model.shard(self.tensor_parallel), draw)
        return MeasuredCost(ops, self.rest.drawn(draw), self.scale)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def profile(self) -> Profile:
        return self.ops.profile

    @property
    def provenance(self) -> str:
        return self.profile.provenance

    @property
    def parts(self) -> Mapping[str, str]:
        return self.ops.provenance

    @property
    def band(self) -> float:
        return self.profile.band

    @property
    def model(self) -> Model:
        return self.rest.model

    @property
    def device(self) -> Device:
        return self.rest.device

    @property
    def tensor_parallel(self) -> int:
        return self.rest.tensor_parallel

    @property
    def cuda_graphs(self) -> str:
        return self.rest.cuda_graphs

    @property
    def host_time_per_step(self) -> float:
        return self.rest.host_time_per_step

    @property
    def host_time_per_request(self) -> float:
        return self.rest.host_time_per_request

    # -- a step -------------------------------------------------------------------------------------------------------

    def host_time(self, work: StepWork) -> float:
        return self.scale * self.rest.host_time(work)

    def device_time(self, work: StepWork) -> float:
        """Of a step of plain decodes, the case of nearly all, only the attention's time is not known by its batch."""
        if not self.is_plain(work):
            return self.total(work, self.part_times(work))
        batch = work[3]
        fixed, line, launches = self._plain.get(batch) or self._plain_step(work)
        time = fixed + self.model.num_layers * line.at(work[4] / batch)
        return self.scale * (time if time > launches else launches)

    def is_plain(self, work: StepWork) -> bool:
        """Whether all its tokens are decodes that sample, and their attention was measured as such."""
        return self._has_plain and work[0] == work[2] == work[3] > 0

    def _plain_step(self, work: StepWork) -> tuple[float, Line, float]:
        """Seconds beside attention, attention of one layer by context, and launches."""
        batch, parts = work.num_decodes, self.part_times(work)
        launches = self.rest.scale * self.rest.launch_time(batch, 0)
        found = self._plain[batch] = (parts.rows + parts.head, self._decodes[batch], launches)
        return found

    def total(self, work: StepWork, parts: Parts) -> float:
        """The host launches while the device works: a step takes the longer."""
        rows, head, decode, prefill = parts
        time = rows + head + decode + prefill
        launches = self.rest.scale * self.rest.launch_time(work.num_tokens, work.num_prefills) if time else 0.0
        return self.scale * (time if time > launches else launches)

    def part_times(self, work: StepWork) -> Parts:
        """`scale` not applied."""
        num_tokens, _, num_sampled, num_decodes, context, num_prefills, _, _, _, _ = work
        if num_tokens == 0:
            return Parts()
        rows = self.rest.num_rows(num_tokens)
        time = self._by_rows.get(rows)
        if time is None:
            time = self._by_rows[rows] = self._rows_time(rows)
        time += self.rest.scale * self.rest.rates.token * num_tokens
        head = self._head_time(num_sampled) if num_sampled else 0.0
        if self.ops.mixed is not None:
            return Parts(time, head, prefill=self._mixed_time(self.ops.mixed, work))
        return Parts(
            time,
            head,
            self._decode_time(num_decodes, context) if num_decodes else 0.0,
            self._prefill_time(work) if num_prefills else 0.0,
        )

    def _rows_time(self, rows: int) -> float:
        """GEMMs, floors of the small kernels, all-reduces."""
        rest, rates, gemms = self.rest, self.rest.rates, self.rest.gemms
        time = rates.step + rates.row * rows
        if self.ops.gemms is None:
            return rest.scale * (time + gemms.time(rows))
        floors = speeds_of(self.device, self.model.dtype).gemm_floor * self.ops.gemms.num_launches
        return rest.scale * (time - floors + gemms._replace(dense=()).time(rows)) + self.ops.gemms.layers.at(rows)

    def _head_time(self, num_rows: int) -> float:
        scale, rates = self.rest.scale, self.rest.rates
        if self.ops.gemms is not None:
            return scale * rates.sample * num_rows + self.ops.gemms.head.at(num_rows)
        compute, stream, move = rates.head
        return scale * (rates.sample * num_rows + GEMM_FLOOR + max(compute * num_rows, stream + move * num_rows))

    def _decode_time(self, batch: int, context: int) -> float:
        """As if all contexts were as long as their mean."""
        rates, model, op = self.rest.rates, self.model, self.ops.decode
        if op is None:
            time = rates.attention + rates.decode * batch + rates.kv_token * context
            return self.rest.scale * (time + rates.window_kv_token * min(context, batch * rates.window))
        line = self._decodes.get(batch)
        if line is None:
            line = self._decodes[batch] = op.line(batch)
        mean, windowed = context / batch, model.num_sliding_layers
        time = (model.num_layers - windowed) * line.at(mean)
        return time + windowed * line.at(min(mean, rates.window)) if windowed else time

    def _prefill_time(self, work: StepWork) -> float:
        """As if all chunks were as long as their mean, and began where that gives as many query-key pairs."""
        rates, model, op = self.rest.rates, self.model, self.ops.prefill
        num, chunk, start = equal_chunks(work)
        if op is None:
            pairs, context, window = work.prefill_pairs, work.prefill_context, rates.window
            time = rates.attention + rates.pair * pairs + rates.kv_token * context
            time += rates.window_pair * min(pairs, 2 * window * num * chunk)
            return self.rest.scale * (time + rates.window_kv_token * min(context, num * (window + chunk)))
        windowed = model.num_sliding_layers
        time = (model.num_layers - windowed) * op.time(num, chunk, start)
        return time + windowed * op.time(num, chunk, min(start, rates.window)) if windowed else time

    def _mixed_time(self, op: ShapedOp, work: StepWork) -> float:
        """One launch: a chunk and all decodes, and what each further chunk adds by itself."""
        chunk, start, batch, context = mixed_point(work)
        time = op.time(chunk, start, batch, context)
        if work.num_prefills > 1:
            alone = op.time(chunk, start, 0.0, 0.0) - op.time(0.0, 0.0, 0.0, 0.0)
            time += (work.num_prefills - 1) * alone
        return self.model.num_layers * time

    # -- what was measured --------------------------------------------------------------------------------------------

    def extrapolated(self, work: StepWork, parts: Parts) -> dict[str, float]:
        """Device seconds of a step in operations that lie an octave or more beyond what was measured, by operation."""
        ops, found = self.ops, {}
        if ops.gemms and self.rest.num_rows(work.num_tokens) > 2.0 * ops.gemms.last_rows:
            found[GEMM] = parts.rows
        if ops.decode and parts.decode and ops.decode.outside(*mean_decode(work)) >= FAR:
            found[DECODE] = parts.decode
        if ops.prefill and parts.prefill and not ops.mixed and ops.prefill.outside(*equal_chunks(work)) >= FAR:
            found[PREFILL] = parts.prefill
        if ops.mixed and parts.prefill and ops.mixed.outside(*mixed_point(work)) >= FAR:
            found[MIXED] = parts.prefill
        return found


def mean_decode(work: StepWork) -> tuple[float, float]:
    return work.num_decodes, work.decode_context / work.num_decodes


def equal_chunks(work: StepWork) -> tuple[float, float, float]:
    """Number, tokens and start of equal chunks with as many tokens and pairs (StepWork counts each pair twice)."""
    num = work.num_prefills
    chunk = max(1.0, (work.num_tokens - work.num_decodes) / num)
    return num, chunk, max(0.0, 0.5 * (work.prefill_pairs / (num * chunk) - chunk - 1.0))


def mixed_point(work: StepWork) -> tuple[float, float, float, float]:
    """Chunk, its start, decodes and their context; 0 for what a step has none of."""
    chunk, start = equal_chunks(work)[1:] if work.num_prefills else (0.0, 0.0)
    batch, context = mean_decode(work) if work.num_decodes else (0.0, 0.0)
    return chunk, start, batch, context

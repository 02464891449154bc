"""How long a step takes where nothing is measured: a roofline over its operations, with the floors of its kernels.

step = host(step, requests, blocks) and device = GEMMs + attention of decodes + attention of prefills + small kernels
+ all-reduces. The two attentions add and have no max between them: they are separate launches, and additive fits
extrapolated best. Cascade attention, expert and pipeline parallelism and multi-step scheduling are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from sim.cost.draws import DATASHEET, Draw
from sim.cost.graphs import EAGER_LAUNCH_TIME, LARGEST_CAPTURE, LAUNCH_TIME, MODES, capture_sizes, padded_sizes
from sim.cost.rates import GEMM_FLOOR, Gemms, Rates, gemms_of, rates_of
from sim.cost.work import StepWork
from sim.hardware import MEASURED_BAND, Device
from sim.models.shape import Model

DATASHEET_BAND = MEASURED_BAND
LARGEST_TABLED = 16384

# Public measurements of vLLM V1's loop on a CPU build: 541 us a step and 12.7 us a running request. Its documentation
# gives 6 ms for the SHA-256 keys of 50,000 tokens, 16 a block; a lookup, its key built, took 0.5 us in a loop like its.
HOST_TIME_PER_STEP = 540e-6
HOST_TIME_PER_REQUEST = 12.7e-6
HOST_TIME_PER_HASH = 2e-6
HOST_TIME_PER_LOOKUP = 0.5e-6


@dataclass(frozen=True, slots=True)
class DatasheetCost:
    """A model on `tensor_parallel` GPUs of a kind, from datasheets and measured shares of them.

    `scale` multiplies every time: `band` and 1 / `band` are the ends of the band. `cuda_graphs` and `largest_capture`:
    see sim/cost/graphs.py. Host times are in seconds.
    """

    provenance: ClassVar[str] = "datasheet"

    model: Model
    device: Device
    host_time_per_step: float = HOST_TIME_PER_STEP
    host_time_per_request: float = HOST_TIME_PER_REQUEST
    scale: float = 1.0
    tensor_parallel: int = 1
    cuda_graphs: str = "full"
    largest_capture: int = LARGEST_CAPTURE
    host_time_per_hash: float = HOST_TIME_PER_HASH
    host_time_per_lookup: float = HOST_TIME_PER_LOOKUP
    rates: Rates = field(init=False, repr=False, compare=False)
    gemms: Gemms = field(init=False, repr=False, compare=False)
    _padded: Sequence[int] = field(init=False, repr=False, compare=False)  # by tokens, rows that are run
    _tabled: tuple[float, ...] = field(init=False, repr=False, compare=False)  # by tokens: floors, GEMMs, all-reduces
    _num_captured: int = field(init=False, repr=False, compare=False)  # tokens of the largest step with a graph
    _launches: tuple[float, float] = field(init=False, repr=False, compare=False)  # with one: decodes alone, others

    def __post_init__(self) -> None:
        if self.scale <= 0.0:
            raise ValueError(f"scale ({self.scale}) must be above 0: it multiplies every time")
        for name in ("host_time_per_step", "host_time_per_request", "host_time_per_hash", "host_time_per_lookup"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 0 or more seconds")
        if self.cuda_graphs not in MODES:
            raise ValueError(f"unknown cuda_graphs {self.cuda_graphs!r}; known: {', '.join(MODES)}")
        if not 1 <= self.largest_capture <= LARGEST_TABLED:
            raise ValueError(f"largest_capture ({self.largest_capture}) must be 1 to {LARGEST_TABLED} tokens")
        self._prepare()

    def _prepare(self) -> None:
        eager = self.cuda_graphs == "eager"
        padded = padded_sizes(capture_sizes(self.largest_capture))
        rows = range(LARGEST_CAPTURE + 1) if eager else padded
        launch_time = EAGER_LAUNCH_TIME if eager else LAUNCH_TIME
        rates = rates_of(self.model, self.device, self.tensor_parallel, launch_time)
        gemms = gemms_of(self.model.shard(self.tensor_parallel), self.device)
        prepared = {
            "rates": rates,
            "gemms": gemms,
            "_padded": rows,
            "_tabled": tuple(rates.step + gemms.time(m) + rates.row * m for m in rows),
            "_num_captured": 0 if eager else len(padded) - 1,
            "_launches": (0.0 if self.cuda_graphs == "full" else rates.pieces, rates.pieces),
        }
        for name, value in prepared.items():
            object.__setattr__(self, name, value)

    @property
    def band(self) -> float:
        return self.device.band

    def drawn(self, draw: Draw) -> DatasheetCost:
        """What else it might be: all times off by as much as the band says, or more, or less."""
        return replace(self, scale=self.scale * math.exp(draw.score(DATASHEET) * math.log(self.band)))

    def host_time(self, work: StepWork) -> float:
        time = self.host_time_per_step + self.host_time_per_request * work.num_requests
        if work.num_blocks_hashed or work.num_lookups:
            time += self.host_time_per_hash * work.num_blocks_hashed + self.host_time_per_lookup * work.num_lookups
        return self.scale * time

    def device_time(self, work: StepWork) -> float:
        """Plain float arithmetic: the same bits on every machine, and a run asks about 100,000 times."""
        num_tokens, _, num_sampled, num_decodes, context, num_prefills, pairs, prefill_context, _, _ = work
        if num_tokens == 0:
            return 0.0
        rates = self.rates
        if num_tokens < len(self._tabled):
            time = self._tabled[num_tokens] + rates.token * num_tokens
        else:
            time = rates.step + self.gemms.time(num_tokens) + rates.row * num_tokens + rates.token * num_tokens
        if num_sampled:
            compute, stream, move = rates.head
            arithmetic, memory = compute * num_sampled, stream + move * num_sampled
            time += GEMM_FLOOR + (arithmetic if arithmetic > memory else memory) + rates.sample * num_sampled
        if num_decodes:
            time += rates.attention + rates.decode * num_decodes + rates.kv_token * context
        if num_prefills:
            time += rates.attention + rates.pair * pairs + rates.kv_token * prefill_context
        if rates.window:
            time += self._windowed(work)
        launches = self.launch_time(num_tokens, num_prefills)
        return self.scale * (time if time > launches else launches)

    def launch_time(self, num_tokens: int, num_prefills: int) -> float:
        """Seconds in which the host launches a step's kernels while the device works; `scale` not applied."""
        return self._launches[num_prefills > 0] if num_tokens <= self._num_captured else self.rates.launches

    def num_rows(self, num_tokens: int) -> int:
        """Rows that the GEMMs of a step are run with."""
        return self._padded[num_tokens] if num_tokens < len(self._padded) else num_tokens

    def _windowed(self, work: StepWork) -> float:
        """Attention in layers with a sliding window, at most: as if all contexts were as long as their mean."""
        rates, window, num_tokens = self.rates, self.rates.window, work.num_tokens
        context = min(work.decode_context, work.num_decodes * window)
        context += min(work.prefill_context, work.num_prefills * window + num_tokens)
        return rates.window_kv_token * context + rates.window_pair * min(work.prefill_pairs, 2 * window * num_tokens)

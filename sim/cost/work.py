"""What a cost is asked and answers: counts of one step in, seconds out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol


class StepWork(NamedTuple):
    """What one step computes, as counts; all that a cost may depend on."""

    num_tokens: int = 0  # through the GEMMs, padding of static batching included, that of CUDA graphs not
    num_requests: int = 0  # running, each handled by the host
    num_sampled: int = 0  # rows of the LM head
    num_decodes: int = 0
    decode_context: int = 0  # sum of context lengths, the new token included
    num_prefills: int = 0
    prefill_pairs: int = 0  # twice the query-key pairs: sum of q * (2 * start + q + 1)
    prefill_context: int = 0  # sum of start + q: KV read
    num_blocks_hashed: int = 0  # blocks that got their key since the last step
    num_lookups: int = 0  # keys sought in the prefix cache, the one that missed included


class StepCost(Protocol):
    """Prices a step in seconds. The executor adds host and device, or takes the larger when they overlap."""

    @property
    def provenance(self) -> str:
        """measured | fitted from server records | public tables | datasheet, or a name of its own."""

    @property
    def band(self) -> float:
        """Times multiplied and divided by it cover 68 %."""

    def host_time(self, work: StepWork) -> float: ...
    def device_time(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class AffineCost:
    """A straight line, for tests and theory: no host time, no band."""

    provenance: ClassVar[str] = "affine"
    band: ClassVar[float] = 1.0

    per_step: float
    per_token: float = 0.0
    per_request: float = 0.0

    def host_time(self, work: StepWork) -> float:
        return 0.0

    def device_time(self, work: StepWork) -> float:
        num_chunks = work.num_decodes + work.num_prefills
        return self.per_step + self.per_token * work.num_tokens + self.per_request * num_chunks

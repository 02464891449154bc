"""The questions, one Protocol each. A policy answers one of them and owns only its own bookkeeping.

Any policy may also have `next_wakeup(now) -> float | None`: the next time at which its answer changes by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from policies.prompt import Namespace
from policies.types import Block, Context, Request, RequestState, StepOutput, StepPlan, Verdict

if TYPE_CHECKING:
    from policies.step import Step


class View(Protocol):
    """What policies may see: no true output length, nothing to write."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def num_free_blocks(self) -> int:
        """Blocks no request holds, cached ones included, less those held back for growth."""

    @property
    def num_cached_blocks(self) -> int:
        """Of the free ones, those that still carry a key."""

    @property
    def running(self) -> Sequence[RequestState]: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_waiting_tokens(self) -> int:
        """Prompt and output tokens of the waiting, cached ones included."""

    def matched_tokens(self, state: RequestState) -> int:
        """Tokens of its prompt the cache holds now."""


class AdmissionPolicy(Protocol):
    """May it come in?"""

    def decide(self, request: Request, view: View, now: float) -> Verdict: ...


class SchedulingPolicy(Protocol):
    """Who is next? Owns the order of the waiting."""

    charges: bool  # whether `charge` must be told of every step (repeated steps then come one by one)

    def add(self, state: RequestState, now: float) -> None: ...
    def requeue(self, state: RequestState, now: float) -> None:
        """It was preempted and waits again."""

    def discard(self, state: RequestState) -> None:
        """It was admitted or has left."""

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        """Best first. A candidate may be discarded while it is being looked at."""

    def charge(self, state: RequestState, input_tokens: int, output_tokens: int) -> None: ...
    def __len__(self) -> int: ...


class BatchingPolicy(Protocol):
    """How many tokens each?"""

    repeats: bool  # the same decode step may be taken again while nothing arrives, ends or runs short
    returns_together: bool  # answers are handed over when the whole group is done

    def compose(self, step: Step) -> None:
        """Fill the step by `step.grant` and `step.admit`."""


class Promise(NamedTuple):
    """Sizes of a request's block table: taken now, needing room now, and held back for its growth."""

    num_blocks_now: int
    num_blocks_required: int
    num_blocks_held: int = 0
    num_blocks_slack: int = 0  # must stay free besides
    contiguous: bool = False


class AllocationPolicy(Protocol):
    """Which memory is promised to a request that enters? The mechanism refuses what does not fit."""

    shares_blocks: bool  # prefix caching is possible

    def promise(self, state: RequestState, num_hit_tokens: int, num_new_tokens: int, view: View) -> Promise: ...


class PreemptionPolicy(Protocol):
    """Memory is full: who yields?"""

    def choose_victim(
        self, candidates: Sequence[RequestState], beneficiary: RequestState, now: float
    ) -> RequestState | None:
        """One of the running, the beneficiary itself included; None lets it wait."""


class EvictionPolicy(Protocol):
    """Which cached block goes? A set of unreferenced blocks with keys that chooses what `pop` returns."""

    def add(self, block: Block) -> None: ...
    def discard(self, block: Block) -> None:
        """It is referenced again, or lost its key."""

    def touch(self, block: Block) -> None:
        """A request found it in the cache."""

    def pop(self, beneficiary: RequestState | None, now: float) -> Block: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Block]:
        """In the order in which they would go, as far as that is known."""


class IsolationPolicy(Protocol):
    """Who may share a prefix?"""

    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        """None: nobody else. An empty sequence: everybody."""


class ReplicaLoad(NamedTuple):
    """What a replica had to do when its router last heard of it."""

    num_running: int
    num_waiting: int  # sent to it, and neither running nor gone
    num_prompt_tokens: int  # of both


class RoutingPolicy(Protocol):
    """Which replica?"""

    def choose_replica(self, request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
        """An index into `replicas`."""


class Executor(Protocol):
    """Runs a plan: on a device, or on paper."""

    def execute(self, plan: StepPlan) -> StepOutput: ...

"""The questions, one Protocol each. A policy answers one of them and owns only its own bookkeeping.

Any policy may also have `next_wakeup(now) -> float | None`: the next time at which its answer changes by itself; equal
steps are repeated up to it at most. One whose answer may change with every step says `time_dependent = True`, and one
whose answer to the waiting changes as the running go on, `depends_on_progress = True`.

Abilities that not every policy has are Protocols of their own, after the question they belong to: a policy that has
the method is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from policies.prompt import Namespace
from policies.totals import Totals
from policies.types import Block, Context, Reject, Request, RequestState, StepOutput, StepPlan, Verdict

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
    def step_id(self) -> int:
        """Of the step that is being composed; a repeated step counts as often as it repeats."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_waiting_tokens(self) -> int:
        """Prompt and output tokens of the waiting, cached ones included."""

    @property
    def num_waiting_blocks(self) -> int:
        """What those tokens fill, a begun block counting whole."""

    def matched_tokens(self, state: RequestState) -> int:
        """Tokens of its prompt the cache holds now."""

    def num_held(self, line: str) -> int:
        """Requests that admission holds in this line."""

    def of_class(self, class_name: str) -> Totals: ...
    def of_client(self, client_id: str) -> Totals: ...


@runtime_checkable
class HearsOfEnds(Protocol):
    """Any policy that keeps accounts."""

    def finished(self, state: RequestState, now: float) -> None:
        """A request that was admitted or held has left, whichever way."""


class AdmissionPolicy(Protocol):
    """May it come in?"""

    def decide(self, request: Request, view: View, now: float) -> Verdict: ...


@runtime_checkable
class Releases(Protocol):
    """An admission policy that asks something else of those it holds than of those who come.

    With `steady`, its answers to them change only when somebody comes, enters or leaves, or at `next_wakeup`.
    """

    steady: bool

    def release(self, request: Request, view: View, now: float) -> Verdict: ...


@runtime_checkable
class Sheds(Protocol):
    """An admission policy that sends away who waits."""

    def shed(self, view: View, now: float) -> Sequence[tuple[str, Reject]]:
        """Request ids and what they are told, asked before each step; who was ever let in is left alone."""


@runtime_checkable
class Reclaims(Protocol):
    """An admission policy with reserves: what is lent out is taken back when its owner wants it."""

    lends: bool  # whether there are any

    def may_claim(self, class_name: str, num_blocks: int, view: View) -> bool:
        """Whether borrowers must make way for one that waits and would take so many blocks."""

    def borrowers(self, running: Sequence[RequestState], view: View) -> Sequence[RequestState]:
        """Of these, in their order, those who use what is reserved for others: they yield first."""


class SchedulingPolicy(Protocol):
    """Who is next? Owns the order of the waiting.

    One in whose order nobody waits for ever behind others of his band, the clients being always the same, says
    `promises_a_turn = True`.
    """

    reorders: bool  # the order of the waiting may change while all the running just decode

    def add(self, state: RequestState, now: float) -> None: ...
    def requeue(self, state: RequestState, now: float) -> None:
        """It was preempted and waits again."""

    def discard(self, state: RequestState) -> None:
        """It is admitted, or has left: its status is FINISHED then."""

    def candidates(self, view: View, now: float) -> Iterator[RequestState]:
        """Best first. A candidate may be discarded while it is being looked at; a look alone changes nothing.

        Who orders by what was served reads it off the states it saw admitted (`policies.scheduling._served`).
        """

    def __len__(self) -> int: ...


@runtime_checkable
class Outranks(Protocol):
    """A scheduling policy whose order may hold against the running too; asked with `preempt_for_waiting` only.

    A strict order that does not change while both stay where they are, or the two would take turns and get nowhere.
    """

    def outranks(self, waiting: RequestState, running: RequestState) -> bool: ...


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


@runtime_checkable
class HearsOfPreemptions(Protocol):
    """An allocation policy that learns from having promised too much."""

    def preempted(self, state: RequestState, view: View) -> None:
        """It yielded, and is no more among the running."""


class PreemptionPolicy(Protocol):
    """Memory is full: who yields?"""

    def choose_victim(
        self, candidates: Sequence[RequestState], beneficiary: RequestState, now: float
    ) -> RequestState | None:
        """One of the running, the beneficiary itself included; None lets it wait."""


class EvictionPolicy(Protocol):
    """Which cached block goes? A set of unreferenced blocks with keys that chooses what `pop` returns.

    `block.note` is the policy's own, from the first time it hears of a block until the block loses its key.
    """

    def add(self, block: Block, holder: RequestState, now: float) -> None:
        """Nobody references it any more, `holder` having been the last. Tables come tail first."""

    def discard(self, block: Block) -> None:
        """It is referenced again, or lost its key."""

    def touch(self, block: Block) -> None:
        """A request found it in the cache; `discard` follows if nobody held it."""

    def pop(self, beneficiary: RequestState | None, now: float) -> Block: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Block]:
        """In the order in which they would go, as far as that is known."""


@runtime_checkable
class Sized(Protocol):
    """An eviction policy whose parts are shares of the pool."""

    def fit(self, num_blocks: int, block_size: int) -> None:
        """Told once, before anything else."""


@runtime_checkable
class Expires(Protocol):
    """An eviction policy that lets blocks go though there is room."""

    def expired(self, now: float) -> Sequence[Block]:
        """Blocks that may be found no more, taken out as if by `pop`; asked before each step and after each release."""


@runtime_checkable
class HearsOfWaiting(Protocol):
    """An eviction policy that looks at who will come next."""

    def waiting_changed(self, state: RequestState, waits: bool) -> None:
        """It began to wait, or waits no more; `state.chain.keys` are the keys it will look for."""


class IsolationPolicy(Protocol):
    """Who may share a prefix?"""

    def namespaces(self, context: Context) -> Sequence[Namespace] | None:
        """None: nobody else. An empty sequence: everybody."""


@runtime_checkable
class CrossesTenants(Protocol):
    """An isolation policy under which tenants may share: where there are several, somebody has to say why."""

    crosses_tenants: bool


@runtime_checkable
class Partitions(Protocol):
    """An isolation policy that cuts the pool into parts of equal size, each for one tenant."""

    parts: int

    def part(self, context: Context) -> int | None:
        """Numbered from 0 in the order in which tenants first come; None: all belong to others."""


class ReplicaLoad(NamedTuple):
    """What a replica had to do when its router last heard of it."""

    num_running: int
    num_waiting: int  # sent to it, and neither running nor gone
    num_prompt_tokens: int  # of both
    num_matched_tokens: int = 0  # of the request's prompt, as far as is known; told to those who ask


class RoutingPolicy(Protocol):
    """Which replica?"""

    def choose_replica(self, request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
        """An index into `replicas`."""


@runtime_checkable
class ReadsCaches(Protocol):
    """A routing policy that wants to know what each replica has cached."""

    index_staleness: float  # seconds by which the answer may be old


class Executor(Protocol):
    """Runs a plan: on a device, or on paper."""

    def execute(self, plan: StepPlan) -> StepOutput: ...

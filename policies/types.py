"""What flows through the core: requests and their state, blocks, plans, outputs, records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from policies.prompt import Content, KeyChain, Prompt


@dataclass(frozen=True, slots=True)
class Context:
    """Who asks, as verified by the server; never what the request body claims."""

    tenant: str = ""
    user: str = ""
    application: str = ""
    session: str = ""
    request: str = ""  # the server's name for the call; the same when it is asked again


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the live body draws tokens; the core only passes it on."""

    temperature: float = 0.0  # 0 takes the likeliest
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One call for tokens. Lower `priority` is more urgent, as in vLLM; times are seconds."""

    request_id: str
    arrival_time: float
    prompt: Prompt
    max_tokens: int
    client_id: str = ""
    class_name: str = "default"
    priority: int = 0
    deadline: float | None = None
    predicted_output_tokens: int | None = None
    context: Context = field(default=Context(), repr=False)  # dumps name nobody
    sampling: Sampling | None = None


class Status(Enum):
    HELD = "HELD"  # admission asked to be asked again
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"  # waiting again, its blocks given up
    FINISHED = "FINISHED"


class FinishReason(Enum):
    STOP = "stop"  # the model ended its answer
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # cancelled by its caller
    ERROR = "error"  # its step threw
    REJECTED = "rejected"  # never entered the queue, or was shed from it


@dataclass(eq=False, slots=True)
class Block:
    """One page of the KV pool. `key` is set once the block is full and may be found by others."""

    block_id: int
    ref_count: int = 0
    key: int | None = None
    depth: int = 0  # position in the chain of the request that filled it, in blocks
    parent: int | None = None  # key of the block before it, where it has a key itself
    content: Content | None = None  # what it holds and what stands before it, where that is known
    note: Any = None  # the eviction policy's own; empty when the block gets its key


@dataclass(eq=False, slots=True)
class RequestState:
    """Where a request stands. Owned by the engine; policies read it and never write."""

    request: Request
    request_id: str
    sequence: int  # order of adding: the last tie-breaker everywhere
    num_prompt_tokens: int
    token_limit: int  # output tokens at which it ends for length
    chain: KeyChain
    arrival_time: float
    priority: int
    status: Status = Status.WAITING
    num_tokens: int = 0  # prompt and output known so far
    num_output_tokens: int = 0
    num_computed_tokens: int = 0  # KV computed or being computed by a step in flight
    num_placeholders: int = 0  # output tokens of steps in flight (asynchronous scheduling)
    num_cached_tokens: int = 0  # prompt tokens found in the cache at first admission
    num_preemptions: int = 0
    part: int = 0  # of a pool that is cut into parts, the one whose blocks it may use
    num_keyed_blocks: int = 0  # leading blocks of the table that carry a key
    num_held_blocks: int = 0  # promised for growth, not yet taken
    num_recomputed_tokens: int = 0
    num_lost_tokens: int = 0  # computed before the last preemption, to be computed again
    num_spared_tokens: int = 0  # found in the cache on its return, though it had never computed them
    num_swapped_tokens: int = 0  # whose KV waits in host memory
    granted_step: int = -1
    admitted_step: int = -1  # the one that let it in, last time
    discard_before_step: int = -1  # outputs of older steps are dropped (prefix cache reset)
    block_ids: list[int] = field(default_factory=list)
    stop_reason: FinishReason | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    waiting_since: float = 0.0
    last_step_time: float = 0.0
    queue_time: float = 0.0
    prefill_time: float = 0.0
    stall_time: float = 0.0
    requeue_time: float = 0.0
    token_spans: list[tuple[int, int]] = field(default_factory=list)  # (step, tokens before it) where a run begins
    span_end: int = -1  # the step after its last token

    @property
    def is_decoding(self) -> bool:
        """True when only its newest token lacks KV and it has answered before."""
        return self.num_output_tokens + self.num_placeholders > 0 and (
            self.num_tokens + self.num_placeholders - self.num_computed_tokens <= 1
        )


class Chunk(NamedTuple):
    """Tokens of one request in one step; a decode is a chunk of one token.

    `block_ids` is the request's table, which only grows while the plan is in flight.
    """

    request_id: str
    start: int
    num_tokens: int
    block_ids: Sequence[int]
    samples: bool  # the last of its tokens yields an output token


class Admission(NamedTuple):
    """A request that entered the running set in this step."""

    request_id: str
    num_cached_tokens: int
    resumed: bool


class Transfer(NamedTuple):
    """KV blocks of a preempted request that go to host memory before the step, or come back from there."""

    request_id: str
    num_blocks: int
    to_host: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What one step computes; with `repeat` k, k equal steps in which every chunk moves on by one token a step.

    Kept by columns, an entry a chunk in the order of the grants: a simulator adds them up and needs no object per
    request and step. `chunks` gives them as rows.
    """

    step_id: int
    time: float
    request_ids: Sequence[str] = ()
    starts: Sequence[int] = ()
    counts: Sequence[int] = ()
    samples: Sequence[bool] = ()
    tables: Sequence[Sequence[int]] = ()
    repeat: int = 1
    only_decodes: bool = False  # each chunk goes on by one token after another
    num_running: int = 0
    num_padding_tokens: int = 0  # computed and thrown away by static batching
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()  # in this order, before anything is computed; live bodies refuse them

    @property
    def chunks(self) -> list[Chunk]:
        return list(map(Chunk, self.request_ids, self.starts, self.counts, self.tables, self.samples))

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class StepParts(NamedTuple):
    """Where a live step's duration went, in seconds."""

    host: float  # building the batch, reading the tokens
    device: float


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the device gave back. Every sampling chunk yielded `plan.repeat` tokens.

    `stopped` names the requests whose answer ended with their last token; `token_ids` and `parts` are filled by live
    bodies only. `duration` is in seconds, for all repeats together.
    """

    duration: float
    stopped: Mapping[str, FinishReason] = field(default_factory=dict)
    token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict, repr=False)
    parts: StepParts | None = None


class Flight(NamedTuple):
    """A step whose output is not known yet; `lives` tells which of its requests were preempted since."""

    plan: StepPlan
    states: list[RequestState]
    lives: list[int]
    block_size: int


class Sample(NamedTuple):
    """How things stood while a step ran, or equal ones. Blocks held + cached + free = all."""

    time: float
    num_steps: int
    num_running: int
    num_waiting: int
    num_tokens: int
    num_padding_tokens: int
    num_held_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_evicted_blocks: int  # since the start


class Admit(NamedTuple):
    """May wait for a place."""


class Hold(NamedTuple):
    """Kept in order and asked again at each schedule.

    Of those held in one `line` the first is asked, and the next only if it was let go; without one, each is asked.
    """

    line: str | None = None


class Reject(NamedTuple):
    """Refused: a result, not an error. `retry_after` in seconds."""

    reason: str
    retry_after: float | None = None


Verdict = Admit | Hold | Reject


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `EngineCore.add` answered."""

    accepted: bool
    reason: str = ""
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has left, whichever way. Times are seconds on the shell's clock; None where never reached.

    Exactly: finish - arrival = queue + prefill + decode + stall + requeue. `stall_time` counts running without being
    granted tokens, `requeue_time` waiting after a preemption. `token_spans` lists (first step, number of steps) in
    which it gave one token a step; step end times are kept by the shell. It is empty where the answer came as a whole.
    """

    request_id: str
    class_name: str
    client_id: str
    reason: FinishReason
    detail: str
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finish_time: float
    queue_time: float
    prefill_time: float
    decode_time: float
    stall_time: float
    requeue_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    token_spans: tuple[tuple[int, int], ...] = ()
    retry_after: float | None = None  # seconds; a hint to who was refused

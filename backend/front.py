"""The asyncio side: requests go to the engine's thread, tokens come back step by step, as one stream a request.

Closing a stream, or cancelling the task that reads it, hangs up: its blocks are free before the next step is decided.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from threading import Thread
from types import TracebackType
from typing import Self

from backend.device import LiveExecutor
from backend.live import Listener, LiveReplica
from policies.catalogue import make
from policies.engine import EngineCore
from policies.fitting import check
from policies.types import FinishReason, Outcome, Request, RequestRecord, StepPlan

OnStep = Callable[[StepPlan, Mapping[str, Sequence[int]]], object]


class Answer:
    """What comes back for one request. Iterate for its tokens, as often as you like; `record` is there at the end.

    Times are the front's: when the engine had it, its client hung up, its end was known.
    """

    def __init__(self, request: Request, hang_up: Callable[[Answer], object]) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.outcome: Outcome | None = None
        self.record: RequestRecord | None = None
        self.error: BaseException | None = None
        self.added_time: float | None = None
        self.hung_up_time: float | None = None
        self.finish_time: float | None = None
        self._hang_up = hang_up
        self._news: asyncio.Event | None = None  # there while somebody waits for the next token
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    async def __aiter__(self) -> AsyncIterator[int]:
        """Raises ValueError if the request was refused, RuntimeError if its step threw."""
        num_read = 0
        try:
            while num_read < len(self.tokens) or not self.is_over:
                if num_read == len(self.tokens):
                    self._news = self._news or asyncio.Event()
                    await self._news.wait()
                else:
                    num_read += 1
                    yield self.tokens[num_read - 1]
        finally:
            self.hang_up()
        self.check()

    async def whole(self) -> list[int]:
        """All its tokens. Raises as iterating does."""
        return [token async for token in self]

    async def end(self) -> None:
        """Wait until it is over, however it ends."""
        await self._over.wait()

    def hang_up(self) -> None:
        """Nobody wants the rest. Nothing happens if there is none."""
        if not self.is_over and self.hung_up_time is None:
            self._hang_up(self)

    def check(self) -> None:
        name = f"request {self.request.request_id}"
        if self.error is not None:
            raise RuntimeError(f"{name} failed: {type(self.error).__name__}: {self.error}") from self.error
        if self.record is not None and self.record.reason is FinishReason.REJECTED:
            raise ValueError(self.record.detail)

    def tell(self, new: Sequence[int] = ()) -> None:
        """Tokens have come: wake whoever waits for them."""
        self.tokens.extend(new)
        if self._news is not None:
            self._news.set()
            self._news = None

    def close(self, now: float) -> None:
        self.finish_time = now
        self._over.set()
        self.tell()


class Front:
    """`async with Front(engine, executor) as front`: an engine at work. Leaving hangs up on all who still wait.

    Everything here happens on the event loop's thread. `on_step` hears of each step and of the tokens that count,
    `on_stuck` when those who wait will do so for ever, unless somebody else comes or leaves.
    """

    def __init__(
        self,
        engine: EngineCore,
        executor: LiveExecutor,
        clock: Callable[[], float] = time.monotonic,
        on_step: OnStep | None = None,
        on_stuck: Callable[[], object] | None = None,
    ) -> None:
        self.clock = clock
        self.delivered = array("d")  # when the tokens of each step came here, by step id
        self._engine = engine
        self._executor = executor
        self._on_step = on_step
        self._on_stuck = on_stuck
        self._answers: dict[str, Answer] = {}
        self._answers_whole = make("batching", engine.config.batching).returns_together
        self._withheld: dict[str, list[int]] = {}  # tokens of answers that are handed over as a whole
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._over = asyncio.Event()
        listener = Posted(asyncio.get_running_loop(), self)
        self.replica = LiveReplica(self._engine, self._executor, listener, self.clock)
        Thread(target=self.replica.run, name="engine", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for answer in list(self._answers.values()):
            answer.hang_up()
        self.replica.stop()
        await self._over.wait()
        if self._error is not None:
            raise self._error

    # -- from the caller to the engine --------------------------------------------------------------------------

    def ask(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> Answer:
        """Send a request on its way. For experiments, `length` and `answer` force what is said.

        Raises ValueError for what no server would accept, and for an id whose bearer has not left.
        """
        check(request)
        self._executor.check(request, length, answer)
        if request.request_id in self._answers:
            raise ValueError(
                f"request id {request.request_id!r} is live: wait until it has finished, or choose another"
            )
        if self._over.is_set():
            raise RuntimeError("the engine has stopped: nobody answers") from self._error
        asked = self._answers[request.request_id] = Answer(request, self._hang_up)
        self.replica.submit(request, length, answer)
        return asked

    def _hang_up(self, answer: Answer) -> None:
        answer.hung_up_time = self.clock()
        self.replica.cancel(answer.request.request_id)

    # -- from the engine to the caller --------------------------------------------------------------------------

    def added(self, request: Request, outcome: Outcome) -> None:
        answer = self._answers[request.request_id]
        answer.outcome, answer.added_time = outcome, self.clock()

    def stepped(self, plan: StepPlan, tokens: Mapping[str, Sequence[int]]) -> None:
        self.delivered.append(self.clock())
        for request_id, new in tokens.items():
            if self._answers_whole:
                self._withheld.setdefault(request_id, []).extend(new)
            else:
                self._answers[request_id].tell(new)
        if self._on_step is not None:
            self._on_step(plan, tokens)

    def left(self, record: RequestRecord, error: BaseException | None) -> None:
        answer = self._answers.pop(record.request_id)
        withheld = self._withheld.pop(record.request_id, [])
        if record.reason in (FinishReason.STOP, FinishReason.LENGTH):
            answer.tokens.extend(withheld[: record.num_output_tokens])
        answer.record, answer.error = record, error
        answer.close(self.clock())

    def stuck(self, num_taken: int) -> None:
        if self._on_stuck is not None and num_taken == self.replica.num_sent:
            self._on_stuck()

    def ended(self, error: BaseException | None) -> None:
        """Whoever is still there was not answered."""
        self._error = error
        self._over.set()
        for answer in self._answers.values():
            answer.error = error or RuntimeError("the engine stopped before it could run")
            answer.close(self.clock())
        self._answers.clear()


class Posted:
    """A listener on the engine's thread that hands on what it hears to one on the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self._post = loop.call_soon_threadsafe
        self._listener = listener

    def added(self, request: Request, outcome: Outcome) -> None:
        self._post(self._listener.added, request, outcome)

    def stepped(self, plan: StepPlan, tokens: Mapping[str, Sequence[int]]) -> None:
        self._post(self._listener.stepped, plan, tokens)

    def left(self, record: RequestRecord, error: BaseException | None) -> None:
        self._post(self._listener.left, record, error)

    def stuck(self, num_taken: int) -> None:
        self._post(self._listener.stuck, num_taken)

    def ended(self, error: BaseException | None) -> None:
        self._post(self._listener.ended, error)

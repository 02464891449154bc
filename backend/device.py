"""The thread that owns an executor: what it is told, it does in order, while the engine's thread decides what is next.

So a request that returns under an old id, or leaves while a step still computes it, meets the executor in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from policies.types import Request, StepOutput, StepPlan


class LiveExecutor(Protocol):
    """Holds the tokens and the KV of requests. For experiments, `length` and `answer` force what is said."""

    def check(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        """Raises ValueError for what `add` would not take; from any thread."""

    def add(self, request: Request, length: int | None = None, answer: Sequence[int] = ()) -> None:
        """It may come up in plans from now on."""

    def execute(self, plan: StepPlan) -> StepOutput: ...
    def discard(self, request_id: str) -> None:
        """It will not come up in plans any more."""


class Device:
    """A thread that owns the executor and does in order what it is told. After a step that threw it waits.

    What was ordered behind such a step, up to `resume`, may build on tokens that never were: it is not executed.
    """

    def __init__(self, executor: LiveExecutor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, "device")
        self._is_halted = False
        self._fault: BaseException | None = None

    def add(self, request: Request, length: int | None, answer: Sequence[int]) -> None:
        self._thread.submit(self._do, self._executor.add, request, length, answer)

    def discard(self, request_id: str) -> None:
        self._thread.submit(self._do, self._executor.discard, request_id)

    def execute(self, plan: StepPlan) -> Future[StepOutput]:
        return self._thread.submit(self._execute, plan)

    def resume(self) -> None:
        """In its turn, after what it was told before."""
        self._thread.submit(setattr, self, "_is_halted", False)

    def close(self) -> None:
        self._thread.shutdown()

    def _do(self, order: Callable[..., object], *arguments: object) -> None:
        """Nobody waits for it: what it throws, every later step does."""
        try:
            order(*arguments)
        except BaseException as fault:
            self._fault = fault

    def _execute(self, plan: StepPlan) -> StepOutput:
        if self._fault is not None:
            raise RuntimeError(f"the executor is out of step: {self._fault!r}") from self._fault
        if self._is_halted:
            raise HaltedError
        assert not plan.transfers, "a live body cannot swap: it has no second memory"
        try:
            return self._executor.execute(plan)
        except BaseException:
            self._is_halted = True
            raise


class HaltedError(RuntimeError):
    """Not executed: the step before it threw."""

"""The loop under the wall clock: whoever comes, goes or fails, at whatever moment, all others are served right."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from backend.front import Answer, Front
from backend.live import Flight, LiveReplica
from policies.catalogue import build
from policies.engine import EngineCore
from policies.journal import replay
from policies.types import FinishReason, RequestRecord, Sampling, StepPlan
from tests.backend.echo import Echo
from tests.worlds import request, tiny_engine

DEPTHS = pytest.mark.parametrize("async_depth", [1, 2])


class Stage:
    """An engine at work on an echo, with its journal; `steps` opens the gate for so many of them."""

    def __init__(self, fails: tuple[int, ...] = (), **settings: Any) -> None:
        self.lines: list[str] = []
        self.engine = tiny_engine(self.lines.append, **settings)
        self.echo = Echo(fails)

    def play(self, scene: Callable[[Stage, Front], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with asyncio.timeout(20), Front(self.engine, self.echo) as front:
                await scene(self, front)

        asyncio.run(whole())
        replayed = replay(self.lines, build)
        assert replayed.divergence is None, str(replayed.divergence)

    async def begun(self) -> None:
        """The device has begun a step."""
        await asyncio.to_thread(self.echo.begun.acquire)

    async def flying(self, num_steps: int) -> None:
        """So many steps are in flight."""
        while self.engine.num_in_flight < num_steps:
            await asyncio.sleep(0.001)

    def left(self) -> dict[str, str]:
        """How each request left, by the journal."""
        return dict(pair for line in map(json.loads, self.lines) for pair in line.get("left", ()))


def blocks_held(engine: EngineCore) -> int:
    return engine.kv.num_blocks - engine.kv.num_free


# -- answers ----------------------------------------------------------------------------------------------------------


@DEPTHS
def test_tokens_come_in_order_and_all_of_them(async_depth: int) -> None:
    async def scene(stage: Stage, front: Front) -> None:
        answers = [front.ask(request(name, prompt=size, max_tokens=5)) for name, size in (("a", 3), ("b", 9), ("c", 1))]
        assert await asyncio.gather(*[answer.whole() for answer in answers]) == [
            [3, 4, 5, 6, 7], [9, 10, 11, 12, 13], [1, 2, 3, 4, 5],
        ]  # fmt: skip
        assert [answer.record.reason for answer in answers if answer.record] == [FinishReason.LENGTH] * 3

    Stage(async_depth=async_depth).play(scene)


@DEPTHS
def test_an_answer_may_be_forced_to_a_length(async_depth: int) -> None:
    """At depth 2 the token after the last is computed for nobody."""

    async def scene(stage: Stage, front: Front) -> None:
        answer = front.ask(request("a", prompt=3, max_tokens=9), length=2)
        assert await answer.whole() == [3, 4]
        assert answer.record is not None and answer.record.reason is FinishReason.STOP
        assert answer.record.num_output_tokens == 2

    stage = Stage(async_depth=async_depth)
    stage.play(scene)
    assert sum(len(plan.chunks) for plan in stage.echo.plans) == 1 + async_depth


def test_one_step_ahead_is_decided_while_the_device_is_busy() -> None:
    async def scene(stage: Stage, front: Front) -> None:
        stage.echo.gate.clear()
        answer = front.ask(request("a"))
        await stage.begun()
        await stage.flying(2)
        assert not stage.echo.plans, "not even the first step is done"
        stage.echo.gate.set()
        await answer.whole()

    Stage(async_depth=2).play(scene)


def test_a_group_that_returns_together_does() -> None:
    async def scene(stage: Stage, front: Front) -> None:
        short, long = front.ask(request("short", max_tokens=9), length=2), front.ask(request("long", max_tokens=6))
        assert await short.whole() == [4, 5], "the token behind its last is nobody's"
        assert await long.whole() == [4, 5, 6, 7, 8, 9]
        assert short.record is not None and long.record is not None
        assert short.record.finish_time == long.record.finish_time

    Stage(batching="static,group_size=2", async_depth=2).play(scene)


def test_who_cannot_be_served_is_told_why() -> None:
    async def scene(stage: Stage, front: Front) -> None:
        with pytest.raises(ValueError, match="max_model_len is 32"):
            await front.ask(request("long", prompt=40)).whole()
        for bad, words in (
            (request("empty", prompt=0), "an empty prompt"),
            (request("mute", max_tokens=0), "max_tokens 0"),
            (request("hot", sampling=Sampling(temperature=-1.0)), "temperature"),
        ):
            with pytest.raises(ValueError, match=words):
                front.ask(bad)
        stage.echo.gate.clear()
        answer = front.ask(request("twin"))
        with pytest.raises(ValueError, match="'twin' is live"):
            front.ask(request("twin"))
        stage.echo.gate.set()
        await answer.whole()
        assert await front.ask(request("twin")).whole() == [4, 5, 6, 7], "it has left: its id is free"

    Stage().play(scene)


# -- leaving ----------------------------------------------------------------------------------------------------------


async def until_over(answer: Answer) -> None:
    await answer.end()
    assert answer.record is not None and answer.record.reason is FinishReason.ABORT


@DEPTHS
def test_s39_a_cancelled_request_gives_its_blocks_back_before_the_next_step(async_depth: int) -> None:
    """While its step runs; the step's token for it counts no more."""

    async def scene(stage: Stage, front: Front) -> None:
        stage.echo.gate.clear()
        answer = front.ask(request("gone", prompt=10, max_tokens=20))
        await stage.flying(async_depth)
        assert blocks_held(stage.engine) == 3
        answer.hang_up()
        stage.echo.gate.set()
        await until_over(answer)
        assert answer.tokens == [] and blocks_held(stage.engine) == 0

    stage = Stage(async_depth=async_depth)
    stage.play(scene)
    assert len(stage.echo.plans) == async_depth, "no step was begun for it that was not in flight"
    assert stage.echo.known == {}, "nor does the device remember it"


@DEPTHS
def test_s37_closing_a_stream_or_cancelling_its_reader_aborts_the_request(async_depth: int) -> None:
    async def scene(stage: Stage, front: Front) -> None:
        echo = stage.echo
        echo.open_for(1)
        closed = front.ask(request("closed", max_tokens=25))
        stream = closed.__aiter__()
        assert await anext(stream) == 4
        await stream.aclose()  # type: ignore[attr-defined]
        echo.gate.set()
        await until_over(closed)
        echo.gate.clear()
        cancelled = front.ask(request("cancelled", max_tokens=25))
        reader = asyncio.create_task(cancelled.whole())
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        echo.gate.set()
        await until_over(cancelled)
        echo.open_for(3)
        broken = front.ask(request("off", max_tokens=25))
        async for token in broken:
            if token == 6:
                break
        while broken.hung_up_time is None:  # a stream that nobody holds is closed by the event loop
            await asyncio.sleep(0)
        echo.gate.set()
        await until_over(broken)

    stage = Stage(async_depth=async_depth)
    stage.play(scene)
    assert stage.left() == dict.fromkeys(("closed", "cancelled", "off"), "abort")
    assert blocks_held(stage.engine) == 0


@DEPTHS
def test_a_request_may_be_cancelled_in_any_state(async_depth: int) -> None:
    """Running, waiting behind it, still in the inbox, finished, never seen; the last one is served."""

    async def scene(stage: Stage, front: Front) -> None:
        stage.echo.gate.clear()
        running, waiting = front.ask(request("running", max_tokens=20)), front.ask(request("waiting", max_tokens=20))
        await stage.begun()
        inbox, served = front.ask(request("inbox")), front.ask(request("served"))
        for answer in (running, waiting, inbox):
            answer.hang_up()
            answer.hang_up()  # once is enough
        front.replica.cancel("nobody")
        stage.echo.gate.set()
        for answer in (running, waiting, inbox):
            await until_over(answer)
        assert await served.whole() == [4, 5, 6, 7]
        served.hang_up()
        front.replica.cancel("served")

    stage = Stage(async_depth=async_depth, max_num_seqs=1)
    stage.play(scene)
    assert stage.left()["served"] == "length" and len(stage.left()) == 4


class Notes:
    """Writes down what it hears, in order: tokens of "a", and why it left."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def added(self, *_: object) -> None: ...
    def stuck(self, *_: object) -> None: ...
    def stepped(self, plan: StepPlan, tokens: Mapping[str, Sequence[int]]) -> None:
        self.heard += tokens.get("a", ())

    def left(self, record: RequestRecord, error: BaseException | None) -> None:
        self.heard.append(record.reason.value)

    def ended(self, error: BaseException | None) -> None:
        self.heard.append(error)


@DEPTHS
def test_an_id_that_returns_inherits_nothing(async_depth: int) -> None:
    """Cancelled while its step is in flight, and asked anew at once: what the step says is for its first bearer."""
    echo, notes = Echo(), Notes()
    replica = LiveReplica(tiny_engine(async_depth=async_depth), echo, notes)
    thread = threading.Thread(target=replica.run)
    echo.gate.clear()
    replica.submit(request("a", prompt=10, max_tokens=20))
    thread.start()
    echo.begun.acquire()
    replica.cancel("a")
    replica.submit(request("a", prompt=5, max_tokens=3))
    replica.stop()
    echo.gate.set()
    thread.join(10)
    assert notes.heard == ["abort", 5, 6, 7, "length", None]


def test_whoever_returns_at_the_instant_of_leaving_is_known_to_the_device() -> None:
    """Without threads: what came of one id is in the inbox all at once."""
    replica = LiveReplica(tiny_engine(), (echo := Echo()), Notes())
    replica.submit(request("a", prompt=9))
    replica._drain_inbox()
    for prompt in (3, 5):
        replica.cancel("a")
        replica.submit(request("a", prompt=prompt))
    replica._drain_inbox()
    plan = replica.engine.schedule(time.monotonic())
    assert plan is not None and plan.counts == [5]
    assert replica._device.execute(plan).result().token_ids == {"a": [5]} and echo.known == {"a": 6}
    replica._device.close()


def test_an_executor_that_cannot_do_what_it_is_told_fails_every_step_from_then_on() -> None:
    async def scene(stage: Stage, front: Front) -> None:
        stage.echo.add = broken  # type: ignore[method-assign]
        for name in "ab":
            with pytest.raises(RuntimeError, match="the executor is out of step: LookupError"):
                await front.ask(request(name)).whole()

    def broken(*_: object) -> None:
        raise LookupError("no such drawer")

    Stage().play(scene)


def test_leaving_hangs_up_on_everybody() -> None:
    async def scene(stage: Stage, front: Front) -> None:
        front.ask(request("a", max_tokens=20))
        front.ask(request("b", max_tokens=20))

    stage = Stage()
    stage.play(scene)
    assert stage.left() == {"a": "abort", "b": "abort"} and blocks_held(stage.engine) == 0


# -- failing ----------------------------------------------------------------------------------------------------------


@DEPTHS
def test_a_step_that_throws_fails_its_requests_and_the_next_ones_are_right(async_depth: int) -> None:
    async def scene(stage: Stage, front: Front) -> None:
        lost = [front.ask(request(name, prompt=9)) for name in ("a", "b")]
        for answer in lost:
            with pytest.raises(RuntimeError, match="failed: ArithmeticError: step 1 went wrong"):
                await answer.whole()
            assert answer.tokens == [9], "the first token had come"
        assert blocks_held(stage.engine) == 0
        assert await front.ask(request("c", prompt=9)).whole() == [9, 10, 11, 12]

    Stage(fails=(1,), async_depth=async_depth).play(scene)


def test_a_step_behind_one_that_threw_goes_on_without_its_requests() -> None:
    """Depth 2: step 1 holds `new` beside `old`; step 0, which was `old`'s alone, throws."""

    async def scene(stage: Stage, front: Front) -> None:
        stage.echo.gate.clear()
        old, new = front.ask(request("old", prompt=16)), front.ask(request("new", prompt=6))
        await stage.flying(2)
        stage.echo.gate.set()
        with pytest.raises(RuntimeError, match="step 0 went wrong"):
            await old.whole()
        assert await new.whole() == [6, 7, 8, 9]

    stage = Stage(fails=(0,), async_depth=2, max_num_batched_tokens=16)
    stage.play(scene)
    assert [plan.step_id for plan in stage.echo.plans] == list(range(5)), "and is computed once"
    assert stage.echo.plans[1].request_ids == ["new"], "which needs no token of step 0"


def test_a_request_that_returned_behind_the_step_that_threw_goes_on() -> None:
    """Without threads: step 0 is the first bearer's, step 1 the second's; step 0 throws."""
    replica = LiveReplica(tiny_engine(async_depth=2), Echo(fails=(0,)), notes := Notes())

    def decide() -> None:
        replica._drain_inbox()
        plan = replica.engine.schedule(time.monotonic())
        assert plan is not None
        replica._in_flight.append(Flight(plan, replica._device.execute(plan)))

    replica.submit(request("a", prompt=9))
    decide()
    replica.cancel("a")
    replica.submit(request("a", prompt=5))
    decide()
    for _ in range(2):
        replica._finish(*replica._in_flight.popleft())
    assert notes.heard == ["abort", 5]
    replica._device.close()


def test_whoever_found_the_blocks_of_a_step_that_threw_fails_with_it() -> None:
    """They were to be written by it. Asked again, the prompt is not found in the cache."""

    async def scene(stage: Stage, front: Front) -> None:
        stage.echo.gate.clear()
        first, second = (front.ask(request(name, prompt=range(12))) for name in ("first", "second"))
        await stage.begun()
        stage.echo.gate.set()
        for answer in (first, second):
            with pytest.raises(RuntimeError, match="step 0 went wrong"):
                await answer.whole()
        again = front.ask(request("again", prompt=range(12)))
        assert await again.whole() == [12, 13, 14, 15]
        assert again.record is not None and again.record.num_cached_tokens == 0
        hit = front.ask(request("hit", prompt=range(12)))
        assert await hit.whole() == [12, 13, 14, 15]
        assert hit.record is not None and hit.record.num_cached_tokens == 8

    Stage(fails=(0,)).play(scene)


# -- the end of a run -------------------------------------------------------------------------------------------------


def test_a_stranded_block_fails_the_run_loudly() -> None:
    """A leak is planted: whoever leaves forgets his last block."""

    async def scene(stage: Stage, front: Front) -> None:
        answer = front.ask(request("a"))
        await answer.whole()

    stage = Stage()
    release = stage.engine.kv.release

    def leaky(state: Any, *now: float) -> int:
        state.block_ids.pop()
        return release(state, *now)

    stage.engine.kv.release = leaky  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="1 of 8 KV blocks are held and 0 promised, but nobody runs"):
        stage.play(scene)


def test_a_fault_of_the_engine_ends_the_run_and_all_are_told() -> None:
    async def scene(stage: Stage, front: Front) -> None:
        def broken(*_: object) -> None:
            raise LookupError("the books do not balance")

        answer = front.ask(request("a"))
        stage.engine.schedule = broken  # type: ignore[assignment]
        front.ask(request("b"))
        with pytest.raises(RuntimeError, match="LookupError: the books do not balance"):
            await answer.whole()
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            front.ask(request("c"))

    with pytest.raises(LookupError):
        Stage().play(scene)


def test_who_waits_for_what_never_comes_is_not_answered() -> None:
    """A group of two with one member: the run ends when it is stopped, and does not hang."""

    engine = tiny_engine(batching="static,group_size=2,max_wait=0")

    async def scene() -> bool:
        async with Front(engine, Echo()) as front:
            return await front.ask(request("alone")).whole() == [4, 5, 6, 7]

    assert asyncio.run(asyncio.wait_for(scene(), 10))


def test_threads_end_with_the_run() -> None:
    before = threading.active_count()
    Stage().play(lambda stage, front: front.ask(request("a")).end())
    assert threading.active_count() <= before + 1, "asyncio keeps a worker of its own at most"

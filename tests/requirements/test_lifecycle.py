"""The article's requirements on what a request holds and costs while it lives, and that nothing of it stays behind.

Under each test stands what it was seen to fall for: a change to the project that breaks the requirement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from backend.front import Answer, Front
from backend.load import load_model
from policies.engine import EngineCore
from policies.kv import KVCache
from policies.prompt import TokenPrompt
from policies.types import FinishReason, RequestState
from sim.cost import AffineCost, StepWork
from sim.report import Banded, comparison
from sim.simulate import simulate
from sim.workload.workload import WorkItem, Workload
from tests.backend.echo import Echo
from tests.backend.serving import Server
from tests.laws import check_blocks
from tests.requirements.test_article import printed, report, row
from tests.worlds import finish, request, step, tiny_config, tiny_engine

SECOND = AffineCost(per_step=1.0)


def item(
    name: object, prompt: int | Sequence[int], at: float, output: int = 1, leaves: float | None = None
) -> WorkItem:
    return WorkItem(request(f"{name}", prompt, max_tokens=output, arrival_time=at), output, leaves)


# -- what a request holds ---------------------------------------------------------------------------------------------


def test_s01_a_decode_writes_the_kv_of_one_token_and_touches_no_other() -> None:
    """Live, by the pool's contents: of all blocks a step changes the slots of its own tokens, one of each who decodes.
    Three requests come apart, and two of them share a block."""
    torch.set_num_threads(1)
    server = Server(load_model("tiny").decoder, tiny_config(num_blocks=24, max_num_batched_tokens=8))
    prompts = ((0, range(1, 12)), (3, (*range(1, 9), 90, 91)), (5, range(50, 55)))
    num_decodes, pool = 0, server.executor.pool
    for now in range(20):
        for name, tokens in (each for each in prompts if each[0] == now):
            server.add(request(name, TokenPrompt(tuple(tokens)), max_tokens=8))
        before = pool.k.clone(), pool.v.clone()
        plan = server.step()
        for was, now_is in zip(before, (pool.k, pool.v), strict=True):
            changed = {tuple(each) for each in (was != now_is).any(0).any(1).any(-1).nonzero().tolist()}
            assert changed == {
                (chunk.block_ids[position // 4], position % 4)
                for chunk in (plan.chunks if plan else ())
                for position in range(chunk.start, chunk.start + chunk.num_tokens)
            }
        num_decodes += sum(chunk.num_tokens == 1 for chunk in plan.chunks) if plan else 0
    assert num_decodes == 3 * 7 and not server.engine.has_work


# Falls if the batch writes a token's KV one slot on.


@pytest.mark.parametrize("batching", ["chunked", "decode_first", "prefill_first", "stall_free,chunk_size=8"])
def test_s01_whoever_decodes_keeps_his_blocks_and_grows_by_a_token(batching: str) -> None:
    engine = tiny_engine(batching=batching, num_blocks=12, max_num_batched_tokens=16)
    for number in range(6):
        engine.add(request(number, 5 + number, max_tokens=6 + number), now=0.0)
    held: dict[str, tuple[int, list[int]]] = {}
    num_decodes = 0
    for now in range(60):
        plan = engine.schedule(float(now))
        if plan is None:
            break
        for name in plan.preempted:
            held.pop(name, None)
        for chunk in plan.chunks:
            computed, table = held.get(chunk.request_id, (chunk.start, []))
            assert chunk.start == computed and list(chunk.block_ids[: len(table)]) == table
            assert len(chunk.block_ids) == -(-(chunk.start + chunk.num_tokens) // 4)
            held[chunk.request_id] = chunk.start + chunk.num_tokens, list(chunk.block_ids)
            num_decodes += chunk.num_tokens == 1
        finish(engine, plan, float(now))
    assert num_decodes > 40 and not engine.has_work


# Falls if `allocate` puts fresh blocks at the head of a table, or a step grants one block too many.

Release = Callable[[KVCache, RequestState, float], int]


def leaky(release: Release) -> Release:
    def release_all_but_one(kv: KVCache, state: RequestState, now: float) -> int:
        state.block_ids = state.block_ids[1:]
        return release(kv, state, now)

    return release_all_but_one


def _ends(engine: EngineCore) -> None:
    step(engine, 0.0, stop=["a"])


def _is_cancelled(engine: EngineCore) -> None:
    step(engine, 0.0)
    engine.abort("a", 1.0)


def _yields(engine: EngineCore) -> None:
    engine.add(request("b", 12, max_tokens=20), now=0.0)
    assert any(step(engine, float(now)).preempted for now in range(12))


@pytest.mark.parametrize("leaves", [_ends, _is_cancelled, _yields])
def test_s06_a_block_that_does_not_come_back_is_noticed_whichever_way_its_holder_goes(
    leaves: Callable[[EngineCore], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "release", leaky(KVCache.release))
    engine = tiny_engine()
    engine.add(request("a", 12, max_tokens=20), now=0.0)
    with pytest.raises(AssertionError, match="references are miscounted"):
        leaves(engine)
        check_blocks(engine)


def test_s06_a_leak_is_told_as_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer strands one of eight blocks. After six the seventh finds no three: whoever comes now is never
    answered, and the report says so."""
    made = Workload("it", [item(number, 12, at=float(number)) for number in range(9)])
    whole = simulate(tiny_config(), made, SECOND)
    assert not whole.unfinished and "never answered" not in report(whole.summary)
    monkeypatch.setattr(KVCache, "release", leaky(KVCache.release))
    leaks = simulate(tiny_config(), made, SECOND)
    assert leaks.unfinished == ("6", "7", "8") and leaks.summary.num_unfinished == 3
    assert "3 never answered" in report(leaks.summary)


# Each is a mutation itself, and falls without one (`leaky` that loses no block).

# -- what is found, and what that is worth ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WithLookups(AffineCost):
    """A second a token, and so much for each key that is looked for."""

    per_lookup: float = 0.0

    def host_time(self, work: StepWork) -> float:
        return self.per_lookup * work.num_lookups


def gain(
    length: int = 16, every: int = 1, num_blocks: int = 64, per_lookup: float = 0.0, output: int = 1
) -> tuple[float, float]:
    """Seconds that caching saves, and the share of all answers' time. Eight prompts of 33 tokens, one at a time; each
    `every`th begins with the same `length` tokens."""
    prompts = [
        [*range(length), *range(100 * n, 100 * n + 33 - length)] if n % every == 0 else range(100 * n, 100 * n + 33)
        for n in range(1, 9)
    ]
    made = Workload("it", [item(n, prompt, at=1e3 * n, output=output) for n, prompt in enumerate(prompts)])
    cost = WithLookups(per_step=0.0, per_token=1.0, per_lookup=per_lookup)
    sizes = {"num_blocks": num_blocks, "max_num_batched_tokens": 64, "max_model_len": 64}
    off, on = (
        sum(record.finish_time - record.arrival_time for record in done.records)
        for done in (simulate(tiny_config(**sizes, enable_prefix_caching=is_on), made, cost) for is_on in (False, True))
    )
    return off - on, (off - on) / off


def test_s12_the_gain_depends_on_length_frequency_residency_lookup_and_what_else_binds() -> None:
    """One at a time, to the second: a second is a token of prefill."""
    assert [gain(length)[0] for length in (0, 3, 8, 16, 32)] == [0, 0, 7 * 8, 7 * 16, 7 * 32]
    assert [gain(every=every)[0] for every in (1, 2, 4, 8)] == [7 * 16, 3 * 16, 16, 0]
    assert [gain(every=2, num_blocks=num)[0] for num in (9, 18)] == [0, 3 * 16], "gone before it is asked for again"
    assert [gain(per_lookup=each)[0] for each in (0.0, 1.0, 4.0)] == [112, 112 - (1 + 7 * 5), 112 - 4 * (1 + 7 * 5)]
    seconds, shares = zip(*(gain(output=output) for output in (1, 11, 30)), strict=True)
    assert seconds == (112, 112, 112) and shares[0] > 1.2 * shares[1] > 1.2**2 * shares[2]


# Falls if hits are not taken off the bill, if an evicted prefix is found, if a step has no `num_lookups`.


def test_s59_with_hits_the_first_token_comes_sooner_and_no_other_does() -> None:
    """The comparison that people read says the same to the digit."""
    prompts = [[*range(16), 100 + n] for n in range(6)]
    made = Workload("it", [item(n, prompt, at=200.0 * n, output=5) for n, prompt in enumerate(prompts)])
    cost = AffineCost(per_step=1.0, per_token=1.0)
    off, on = (simulate(tiny_config(enable_prefix_caching=is_on), made, cost) for is_on in (False, True))
    assert [r.decode_time for r in off.records] == [r.decode_time for r in on.records] == [8.0] * 6
    text = printed(comparison([Banded("off", off.summary), Banded("on", on.summary)]))
    assert row(text, "TPOT p50")[:2] == row(text, "TPOT p50")[2:4] and row(text, "TTFT p50")[0] == "18"
    assert row(text, "TTFT p50")[2] == "2"


# Falls if decode_time, or the metric TPOT, is the less for `num_cached_tokens`.

# -- who leaves -------------------------------------------------------------------------------------------------------


async def _closes(answer: Answer) -> None:
    """Disconnects: whoever reads the stream is gone."""
    reader = asyncio.create_task(answer.whole())
    await asyncio.sleep(0)
    reader.cancel()


async def _needs_it_no_more(answer: Answer) -> None:
    """Says so, and stays to hear that it is over."""
    answer.hang_up()


@pytest.mark.parametrize("trigger", [_closes, _needs_it_no_more])
def test_s37_a_disconnect_and_a_word_both_reach_the_device(trigger: Callable[[Answer], Any]) -> None:
    """Door, engine, device, and back: three times, in order; the device forgets the request and works for others."""
    echo = Echo()

    async def scene() -> tuple[Answer, list[int]]:
        async with asyncio.timeout(20), Front(tiny_engine(), echo) as front:
            echo.open_for(2)
            gone = front.ask(request("gone", max_tokens=25))
            while len(gone.tokens) < 2:
                await asyncio.sleep(0.001)
            await trigger(gone)
            while gone.hung_up_time is None:
                await asyncio.sleep(0)
            echo.gate.set()
            await gone.end()
            return gone, await front.ask(request("stays", prompt=3)).whole()

    gone, said = asyncio.run(scene())
    assert gone.record is not None and gone.record.reason is FinishReason.ABORT and gone.hung_up_time is not None
    assert gone.hung_up_time <= gone.record.finish_time <= (gone.finish_time or 0.0)
    assert echo.known == {} and said == [3, 4, 5, 6]
    assert sum("gone" in plan.request_ids for plan in echo.plans) <= 3, "one step may have been on its way"


# Falls if `Answer.hang_up` only closes the answer, if `_collect` does not tell the device.

"""The executor under the real core: whatever is decided, everybody gets the tokens of a lone uncached run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.attention import NUM_SHORT_BLOCKS, like_lengths
from backend.config import PRESETS, Rope
from backend.executor import TorchExecutor
from backend.model import Decoder
from backend.products import MAX_ROWS, MIN_OUTPUTS, PackedProducts
from backend.weights import random_model
from policies.config import EngineConfig
from policies.prompt import ContentPrompt, LengthPrompt, TokenPrompt
from policies.types import Context, FinishReason, Request, Sampling
from tests.backend.lone import lone_logits
from tests.backend.serving import Server
from tests.conftest import REPOSITORY

TINY: dict[str, Any] = {
    "num_blocks": 64,
    "block_size": 4,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 96,
}


@cache
def decoder(interleaved: bool = False) -> Decoder:
    return random_model(replace(PRESETS["tiny"], rope=Rope(interleaved=interleaved)))


@cache
def alone(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Greedy tokens of the prompt, with no scheduler and no cache."""
    tokens, logits = lone_logits(decoder(), prompt, num_tokens - 1)
    return [*tokens[len(prompt) :], int(logits[-1].argmax())]


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{**TINY, **settings})


def asks(request_id: str, prompt: tuple[int, ...], max_tokens: int = 12, **fields: Any) -> Request:
    return Request(request_id, 0.0, TokenPrompt(prompt), max_tokens, **fields)


def served(*requests: Request, **settings: Any) -> dict[str, list[int]]:
    server = Server(decoder(), config(**settings))
    for each in requests:
        assert server.add(each)
    return server.run()


# Three that share a head, one that is another's head, one of a single token, and a long one.
_SIZES = ((1, 5), (1, 9), (1, 30), (2, 17), (3, 1), (4, 41))
PROMPTS = tuple(tuple((7 * first + 3 * at + at * at) % 512 for at in range(length)) for first, length in _SIZES)


def draw_settings(random: Random) -> dict[str, Any]:
    max_num_seqs = random.randint(1, 8)
    return {
        "num_blocks": random.randint(20, 48),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": random.randint(max_num_seqs, 40),
        "max_model_len": 64,
        "scheduling": random.choice(("fcfs", "priority")),
        "batching": random.choice(("chunked", "prefill_first", "stall_free,chunk_size=3", "static,group_size=3")),
        "allocation": random.choice(("paged", "paged_full_prompt", "paged_reserve_output")),
        "preemption": random.choice(("latest", "lowest_priority")),
        "isolation": random.choice(("global", "tenant", "no_reuse")),
        "enable_prefix_caching": random.random() < 0.8,
        "async_depth": random.choice((1, 2)),
        "cache_at": random.choice(("schedule", "step_end")),
        "long_prefill_token_threshold": random.choice((0, 5)),
    }


@pytest.mark.parametrize("seed", range(40))
def test_any_schedule_gives_the_tokens_of_a_lone_uncached_run(seed: int) -> None:
    random = Random(seed)
    server = Server(decoder(), config(**draw_settings(random)))
    asked: dict[str, tuple[int, ...]] = {}
    for index in range(14):
        prompt = random.choice(PROMPTS)
        tenant, priority = random.choice("xy"), random.randint(0, 2)
        request = asks(str(index), prompt, random.randint(1, 20), context=Context(tenant=tenant), priority=priority)
        if server.add(request):
            asked[request.request_id] = prompt
        if random.random() < 0.1:
            server.abort(random.choice(sorted(asked)))
        for _ in range(random.randint(0, 6)):
            server.step()
    for request_id, answer in server.run().items():
        assert answer == alone(asked[request_id], 20)[: len(answer)]
        record = server.records[request_id]
        assert record.reason is FinishReason.ABORT or len(answer) > 0
    assert server.executor.num_sequences == 0, "requests left, but what the executor knew of them did not"


def test_the_random_schedules_hold_what_they_are_to_test() -> None:
    """Hits, chunks, preemptions: a schedule without them would prove little."""
    server = Server(decoder(), config(num_blocks=20, max_num_batched_tokens=12))
    for index in range(8):
        server.add(asks(str(index), PROMPTS[2], 20))
    server.run()
    assert server.engine.num_preemptions > 3
    assert server.engine.prefix_stats.num_hit_tokens > 50
    assert all(server.answer(str(index)) == alone(PROMPTS[2], 20) for index in range(8))


def test_a_hit_on_blocks_of_the_same_step_reads_what_that_step_writes() -> None:
    """Both enter at once: the second computes its last tokens only, on blocks the first one is filling."""
    server = Server(decoder(), config(cache_at="schedule"))
    server.add(asks("a", PROMPTS[5]))
    server.add(asks("b", PROMPTS[5]))
    plan = server.step()
    assert plan is not None and plan.counts == [41, 1] and plan.starts == [0, 40]
    assert server.run() == {"a": alone(PROMPTS[5], 12), "b": alone(PROMPTS[5], 12)}


def test_an_answer_thrown_back_by_a_reset_is_said_again() -> None:
    """Two steps in flight, and the outputs of both are dropped: the tokens known by then are not tokens twice."""
    server = Server(decoder(), config(async_depth=2))
    server.add(asks("a", PROMPTS[1]))
    for _ in range(4):
        server.step()
    assert server.engine.reset_prefix_cache(server.now, reset_running=True)
    assert server.run() == {"a": alone(PROMPTS[1], 12)}
    assert server.engine.num_preemptions == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_an_id_that_returns_is_a_new_request_and_nothing_is_kept_of_the_old(depth: int) -> None:
    server = Server(decoder(), config(async_depth=depth))
    for prompt in PROMPTS * 3:
        server.add(asks("a", prompt, 5))
        assert server.run()["a"] == alone(prompt, 20)[:5]
        assert server.executor.num_sequences == 0


@pytest.mark.parametrize("interleaved", [False, True])
def test_both_conventions_of_positions_give_one_answer_for_permuted_weights(interleaved: bool) -> None:
    """llama.cpp permutes the rows of Q and K where Hugging Face splits a head in halves."""
    halves, pairs = decoder(), decoder(interleaved=True)
    size, heads = halves.config.head_dim, halves.config.num_heads + halves.config.num_kv_heads
    order = torch.arange(size).view(2, size // 2).t().flatten()
    rows = torch.cat([head * size + order for head in range(heads)])
    for ours, theirs in zip(halves.weights.layers, pairs.weights.layers, strict=True):
        theirs.qkv[: len(rows)] = ours.qkv[rows]
    answer = lone_logits(pairs, PROMPTS[2], 4)[1] if interleaved else lone_logits(halves, PROMPTS[2], 4)[1]
    torch.testing.assert_close(answer, lone_logits(halves, PROMPTS[2], 4)[1], atol=1e-5, rtol=0.0)


# -- how answers end ------------------------------------------------------------------------------------------------


def test_an_answer_stops_at_a_stop_token_or_at_its_last() -> None:
    expected = alone(PROMPTS[1], 12)
    stop = Sampling(stop_token_ids=(expected[4],))
    server = Server(decoder(), config())
    server.add(asks("stops", PROMPTS[1], sampling=stop))
    server.add(asks("runs out", PROMPTS[1]))
    assert server.run() == {"stops": expected[: expected.index(expected[4]) + 1], "runs out": expected}
    assert server.records["stops"].reason is FinishReason.STOP
    assert server.records["runs out"].reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forced_length_ends_an_answer_and_nothing_else_does(depth: int) -> None:
    first = alone(PROMPTS[1], 12)[0]
    server = Server(decoder(), config(async_depth=depth))
    server.add(asks("a", PROMPTS[1], 30, sampling=Sampling(stop_token_ids=(first,))), length=9)
    assert server.run() == {"a": alone(PROMPTS[1], 9)}
    assert server.records["a"].reason is FinishReason.STOP


def test_forced_tokens_are_said_and_go_on_from_there() -> None:
    server = Server(decoder(), config())
    server.add(asks("a", PROMPTS[1], 6), answer=(11, 12))
    continued = alone((*PROMPTS[1], 11, 12), 4)
    assert server.run() == {"a": [11, 12, *continued]}


# -- prompts of traces ----------------------------------------------------------------------------------------------


def test_equal_content_is_equal_tokens_and_a_hit_on_it_is_true() -> None:
    """Two prompts of a trace share their first ids; the second one's hit must not change its answer."""
    shared, own = ContentPrompt(12, (5, 6, 7), 4), ContentPrompt(12, (5, 6, 8), 4)
    cached, fresh = (Server(decoder(), config(enable_prefix_caching=caching)) for caching in (True, False))
    for server in (cached, fresh):
        for name, prompt in (("a", shared), ("b", own), ("c", shared), ("d", LengthPrompt(12))):
            server.add(Request(name, 0.0, prompt, 10), length=8)
            server.run()
    assert cached.records["b"].num_cached_tokens == 8
    answers = cached.run()
    assert answers == fresh.run()
    assert answers["a"] == answers["c"] != answers["d"]


def test_an_answer_that_a_later_turn_repeats_is_said_as_it_is_repeated() -> None:
    """The core keys such an answer by the later turn's content: then the hit must hold those tokens."""
    first = ContentPrompt(6, (5, 6), 4)
    later = ContentPrompt(16, (5, 9, 7, 8), 4)
    server = Server(decoder(), config())
    server.add(Request("first", 0.0, first.followed_by(later), 10), length=10)
    server.run()
    server.add(Request("later", 0.0, later, 6), length=6)
    answer = server.run()["later"]
    assert server.records["later"].num_cached_tokens == 12
    fresh = Server(decoder(), config(enable_prefix_caching=False))
    fresh.add(Request("later", 0.0, later, 6), length=6)
    assert fresh.run()["later"] == answer


# -- steps that fail ------------------------------------------------------------------------------------------------


def fail_next_step(server: Server) -> None:
    plan = server.engine.schedule(server.now)
    assert plan is not None
    weights = decoder().weights.layers[0].qkv
    kept = weights.clone()
    weights.fill_(float("nan"))
    try:
        with pytest.raises(FloatingPointError, match="not finite"):
            server.executor.execute(plan)
    finally:
        weights.copy_(kept)
    server.fail(plan)


@pytest.mark.parametrize("cache_at", ["schedule", "step_end"])
def test_a_step_that_fails_spoils_its_requests_only(cache_at: str) -> None:
    """Its blocks hold rubbish: nobody may find them, and who gets them next must not read past what it writes."""
    server = Server(decoder(), config(num_blocks=14, cache_at=cache_at))
    server.add(asks("a", PROMPTS[5]))
    fail_next_step(server)
    assert server.records["a"].reason is FinishReason.ERROR
    assert server.executor.num_sequences == 0
    for name, prompt in (("b", PROMPTS[2]), ("c", PROMPTS[5])):
        server.add(asks(name, prompt, 6))
        assert server.run()[name] == alone(prompt, 6)
    assert server.records["c"].num_cached_tokens == 0


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [
        (Sampling(temperature=-1.0), "temperature -1.0: give 0"),
        (Sampling(temperature=float("nan")), "temperature nan"),
        (Sampling(top_p=0.0), "top_p 0.0: give more than 0"),
        (Sampling(top_p=1.5), "top_p 1.5"),
        (Sampling(top_k=-1), "top_k -1"),
        (Sampling(top_k=513), "top_k 513"),
        (Sampling(seed=2**64), "seed"),
        (Sampling(stop_token_ids=(512,)), "stops at token 512"),
    ],
)
def test_bad_sampling_is_refused(sampling: Sampling, rule: str) -> None:
    executor = TorchExecutor(decoder(), config())
    for refuse in (executor.check, executor.add):
        with pytest.raises(ValueError, match=rule):
            refuse(asks("a", (1, 2), sampling=sampling))
    assert executor.num_sequences == 0


@pytest.mark.parametrize("token", [-1, 512])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    executor = TorchExecutor(decoder(), config())
    with pytest.raises(ValueError, match=f"request a has token {token}, outside the vocabulary of 512"):
        executor.add(asks("a", (1, token)))
    with pytest.raises(ValueError, match=f"request a has token {token}"):
        executor.add(asks("a", (1,)), answer=(token,))


def test_an_empty_prompt_and_one_longer_than_the_pool_are_refused() -> None:
    server = Server(decoder(), config(num_blocks=4, max_model_len=64))
    with pytest.raises(ValueError, match="empty prompt"):
        server.add(asks("a", ()))
    assert not server.add(asks("b", PROMPTS[5]))
    assert "needs 52 tokens of KV cache, but the cache holds 16" in server.engine.drain_records()[0].detail


def test_a_model_is_not_stretched_past_its_positions() -> None:
    with pytest.raises(ValueError, match=r"max_model_len \(4097\) is more than tiny goes to \(4096\)"):
        TorchExecutor(decoder(), config(max_model_len=4097))


# -- the batch --------------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 600), max_size=40))
def test_decodes_are_grouped_by_like_lengths(lengths: list[int]) -> None:
    """Each once, in order; padded to twice its own blocks at most, or to twice what counts as short."""
    tables = [[0] * length for length in sorted(lengths, reverse=True)]
    groups = list(like_lengths(tables))
    assert [row for rows in groups for row in range(rows.start, rows.stop)] == list(range(len(tables)))
    for rows in groups:
        assert all(len(tables[rows.start]) <= 2 * max(len(table), NUM_SHORT_BLOCKS) for table in tables[rows])


def test_a_long_context_beside_short_ones_costs_them_nothing_and_changes_nothing() -> None:
    long, short = tuple(at * at % 512 for at in range(90)), PROMPTS[0]
    together = served(asks("long", long, 6), *(asks(str(index), short, 6) for index in range(3)))
    assert together == {"long": alone(long, 6), **{str(index): alone(short, 6) for index in range(3)}}


def test_products_by_packed_weights_are_products() -> None:
    weight, bias = torch.randn(MIN_OUTPUTS, 48), torch.randn(MIN_OUTPUTS)
    product = PackedProducts([weight])
    for num_rows in (1, 2, 3, 16, MAX_ROWS, MAX_ROWS + 1):
        rows = torch.randn(num_rows, 48)
        for each in (bias, None):
            expected = rows.double() @ weight.double().T + (0.0 if each is None else each.double())
            torch.testing.assert_close(product(rows, weight, each).double(), expected, atol=1e-4, rtol=0.0)


def test_the_executor_needs_torch_numpy_and_the_standard_library_alone() -> None:
    """What a bare GPU machine has: neither file formats nor the simulator's libraries can be imported."""
    code = (
        "import sys\n"
        "missing = ('gguf', 'tokenizers', 'safetensors', 'transformers', 'simpy', 'typer', 'rich', 'scipy')\n"
        "sys.modules.update(dict.fromkeys(missing))\n"  # None: an import of it fails
        "from backend.executor import TorchExecutor\n"
        "from backend.load import load_model\n"
        "from policies.catalogue import build\n"
        "from policies.config import EngineConfig\n"
        "from policies.prompt import LengthPrompt\n"
        "from policies.types import Request\n"
        "config = EngineConfig(num_blocks=8, max_model_len=64)\n"
        "engine, executor = build(config), TorchExecutor(load_model('tiny').decoder, config)\n"
        "request = Request('a', 0.0, LengthPrompt(5), 3)\n"
        "executor.add(request, length=3); engine.add(request, 0.0)\n"
        "while (plan := engine.schedule(0.0)):\n"
        "    engine.update(plan, executor.execute(plan), 0.0)\n"
        "print(engine.drain_records()[0].num_output_tokens)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"

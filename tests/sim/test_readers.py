"""Traces of many kinds: what each says, the traps in each, what is refused, and what becomes of hostile files."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import math
import tarfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.config import EngineConfig
from policies.prompt import ContentPrompt, LengthPrompt, TokenPrompt
from policies.types import Context, Request, RequestRecord
from sim.cost import AffineCost
from sim.simulate import simulate
from sim.workload import lines, rows, sources
from sim.workload.convert import write_mooncake, write_vidur
from sim.workload.describe import describe, every_item
from sim.workload.load import load
from sim.workload.read import FORMATS, read_trace
from sim.workload.servegen import lengths as distribution
from sim.workload.sessions import Sessions
from sim.workload.workload import WorkItem, Workload
from tests.conftest import SHARED

CONFIG = EngineConfig(num_blocks=256, block_size=4, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512)
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURSTGPT_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"


def real(name: str) -> Path:
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"needs the shared data beside the repository: ../shared/data has no {name}")
    return path


def write(folder: Path, *records: str | dict[str, Any], name: str = "trace") -> Path:
    """Lines of CSV, or objects, one a line."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records))
    return path


def read(path: Path, **options: Any) -> Workload:
    return load(path, None, **options)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and str(path) in message and len(message) < 700
    return message.removeprefix(f"{path}").removeprefix(": ")


def requests(workload: Workload) -> list[Request]:
    """By name, which is by row."""
    return sorted((item.request for item in every_item(workload)), key=lambda request: int(request.request_id))


def arrivals(workload: Workload) -> list[float]:
    return [item.request.arrival_time for item in workload.items]


def sizes(workload: Workload) -> list[tuple[int, int]]:
    return [(item.request.prompt.num_tokens, item.num_output_tokens) for item in workload.items]


def contents(workload: Workload) -> list[tuple[int, ...]]:
    found = []
    for request in requests(workload):
        assert isinstance(request.prompt, ContentPrompt)
        found.append(request.prompt.content_ids)
    return found


def said(workload: Workload, words: str) -> bool:
    return any(words in finding for finding in workload.findings)


def waits(workload: Workload) -> dict[str, tuple[tuple[str, ...], float]]:
    assert isinstance(workload, Sessions)
    return {each.item.request.request_id: (each.after, each.delay) for each in workload.follow_ups}


def play(workload: Workload) -> dict[str, RequestRecord]:
    """A step takes a second; by name."""
    run = simulate(CONFIG, workload, AffineCost(per_step=1.0))
    return {record.request_id: record for record in run.records}


# Azure


def test_azure_of_2024_has_a_time_zone(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE,
        "2024-05-10 00:00:00.009930+00:00,2162,5",
        "2024-05-10T02:00:00.5+0200,2399,6",
        "2024-05-10 00:00:01Z,76,15",
    )
    assert arrivals(read(path)) == pytest.approx([0.0, 0.49007, 0.99007], abs=1e-12)


def test_azure_of_2025_counts_images_that_are_said_to_be_left_out(tmp_path: Path) -> None:
    workload = read(write(tmp_path, f"{AZURE},NumImages", "2025-01-01 00:00:00,10,5,0", "2025-01-01 00:00:01,10,5,3"))
    assert sizes(workload) == [(10, 5), (10, 5)]
    assert "requests with images, of which only ContextTokens are known: 1" in workload.findings


# BurstGPT: trap 6


def test_burstgpt_has_columns_with_and_without_sessions_and_with_only_what_is_needed(tmp_path: Path) -> None:
    plain = read(write(tmp_path, BURSTGPT, "5,ChatGPT,472,18,490,Conversation log", "45,GPT-4,1087,230,1317,API log"))
    third = "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log", "19440161.0,,2,GPT-4,1,2,3,API log"
    with_sessions = read(write(tmp_path, BURSTGPT_3, *third))
    bare = read(write(tmp_path, "Timestamp,Request tokens,Response tokens", "0,472,18", "40,1087,230"))
    assert sizes(plain) == sizes(bare) == [(472, 18), (1087, 230)]
    assert arrivals(plain) == arrivals(bare) == [0.0, 40.0]
    assert [request.class_name for request in requests(plain)] == ["Conversation log", "API log"]
    assert arrivals(with_sessions) == [0.0, 51.0]  # not 225 days
    assert [request.context.session for request in requests(with_sessions)] == ["1722ac82", ""]


def test_burstgpt_failures_are_rows_of_zeros_and_are_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path, BURSTGPT, "5,ChatGPT,472,18,490,API log", "6,ChatGPT,9,0,9,API log", "7,ChatGPT,0,0,0,API log"
    )
    workload = read(path)
    assert sizes(workload) == [(472, 18)]
    assert "rows dropped for 0 output tokens, as failed requests have: 1" in workload.findings
    assert "rows dropped for 0 prompt tokens, as failed requests have: 1" in workload.findings


def test_burstgpt_whole_seconds_are_ticks(tmp_path: Path) -> None:
    rows_of_three = [f"{second},ChatGPT,9,9,18,API log" for second in range(20) for _ in range(3)]
    workload = read(write(tmp_path, BURSTGPT, *rows_of_three))
    assert said(workload, "ticks of 1 s, 3.0 at once; spread uniformly") and len(set(arrivals(workload))) == 60
    assert "rows equal to the row above, kept: 40" in workload.findings


# Bailian


def bailian(chat: int, parent: int, time: float, prompt: int, ids: Sequence[int], **fields: Any) -> dict[str, Any]:
    row = {"chat_id": chat, "parent_chat_id": parent, "timestamp": time, "input_length": prompt, "output_length": 20}
    return {**row, "type": "text", "turn": 1, "hash_ids": list(ids), **fields}


def test_bailian_is_in_seconds_with_ids_of_16_tokens_that_all_share(tmp_path: Path) -> None:
    workload = read(
        write(tmp_path, bailian(7, -1, 61.114, 33, [5, 6, 9]), bailian(8, -1, 62.0, 20, [5, 6], type="image"))
    )
    assert arrivals(workload) == [61.114, 62.0]
    assert requests(workload)[0].prompt == ContentPrompt(33, (5, 6, 9), 16)
    assert [request.class_name for request in requests(workload)] == ["text", "image"]
    assert describe(workload).reuse is not None


def test_a_bailian_chat_is_one_session_and_a_turn_tells_the_answer_before(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        bailian(7, -1, 0.0, 16, [5]),
        bailian(8, 7, 50.0, 48, [5, 6, 7], output_length=0),
        bailian(9, 7, 60.0, 64, [5, 6, 7, 8]),
        bailian(3, 8, 70.0, 64, [5, 6, 7, 8]),
        bailian(4, 99, 80.0, 16, [5]),
    )
    workload = read(path)
    assert type(workload) is Workload and arrivals(workload) == [0.0, 60.0, 70.0, 80.0]
    assert [request.context.session for request in requests(workload)] == ["7", "7", "7", "4"]
    first = requests(workload)[0].prompt
    assert isinstance(first, ContentPrompt) and first.continuation == (6, 7, 8) and first.num_known_tokens == 64
    assert said(workload, "chats whose parent is not above them, read as the first of their session: 1")


# Mooncake's kin: traps 2 and 5


def mooncake(timestamp: float, prompt: int, ids: Sequence[int], **fields: Any) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": prompt, "output_length": 9, "hash_ids": list(ids), **fields}


def test_a_timed_trace_of_another_unit_and_chunk_size_is_read_as_told(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(0.5, 33, [1, 2, 3]), mooncake(2.0, 16, [1]))
    workload = read(path, timestamp_unit="s", content_size=16)
    assert arrivals(workload) == [0.5, 2.0]
    assert requests(workload)[0].prompt == ContentPrompt(33, (1, 2, 3), 16)
    assert said(workload, "times are in seconds, as given")
    assert arrivals(read(path, timestamp_unit="ms", content_size=16)) == [0.5e-3, 2e-3]


def test_a_wrong_content_size_names_those_that_fit(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(0, 33, [1, 2, 3]))
    assert refusal(path) == (
        "line 1: 3 hash_ids for an input_length of 33 must be 1, one for each 512 tokens begun: check the block size "
        "of the trace; content_size 16 would fit this row"
    )
    assert "must be 2, one for each 32 tokens begun" in refusal(path, content_size=32)


def test_a_wrong_unit_names_those_that_would_do(tmp_path: Path) -> None:
    path = write(tmp_path, *(mooncake(0.25 * index, 1, [0]) for index in range(100)))
    assert refusal(path) == (
        "line 100: the trace runs at 4,000 requests a second when its times are read as milliseconds, more than 1,000 "
        "to be true: convert the times to milliseconds, or give the rate you mean, or timestamp_unit: s (4 requests a "
        "second)"
    )
    assert read(path, timestamp_unit="s").rate == pytest.approx(4.0, rel=0.02)


def test_milliseconds_told_to_be_seconds_are_refused_too(tmp_path: Path) -> None:
    """An hour would last 41 days: what vLLM's timed_trace does with Mooncake's files and no flags."""
    rows_of_an_hour = [mooncake(295 * index, 1, [0]) for index in range(12_000)]
    message = refusal(write(tmp_path, *rows_of_an_hour), timestamp_unit="s")
    assert "one request every 295 s for 41.0 days when its times are read as seconds, too little load" in message
    assert "timestamp_unit: ms (3.39 requests a second)" in message


def test_lengths_alone_must_be_told_their_unit(tmp_path: Path) -> None:
    path = write(tmp_path, *({"timestamp": 10 * i, "input_length": 5, "output_length": 6} for i in range(200)))
    assert refusal(path) == (
        "line 200: timestamp spans 1990 of an unknown unit: give timestamp_unit; likely s (0.1 requests a second) or "
        "ms (100 requests a second)"
    )
    workload = read(path, timestamp_unit="ms")
    assert arrivals(workload)[:2] == [0.0, 0.01] and requests(workload)[0].prompt == LengthPrompt(5)


def test_an_option_that_a_format_answers_itself_is_refused(tmp_path: Path) -> None:
    azure = write(tmp_path, AZURE, "2023-11-16 18:15:46,32,44")
    assert "timestamp_unit (s) cannot be given for azure, which says its own" in refusal(azure, timestamp_unit="s")
    assert "content_size (16) cannot be given for azure, which has no content ids" in refusal(azure, content_size=16)
    with pytest.raises(ValueError, match="unknown timestamp_unit 'm'; known: s, ms, us, ns"):
        read(azure, timestamp_unit="m")
    with pytest.raises(ValueError, match=r"content_size \(0\) must be from 1 to"):
        read(azure, content_size=0)
    with pytest.raises(ValueError, match="say how to read a trace"):
        load(None, "chat", timestamp_unit="s")


def test_an_id_of_two_lengths_is_said(tmp_path: Path) -> None:
    path = write(
        tmp_path, mooncake(0, 600, [1, 2]), mooncake(1, 700, [1, 2]), mooncake(2, 1024, [1, 2]), mooncake(3, 512, [1])
    )
    assert said(
        read(path), "prompts with a content id that has another length elsewhere: 2, read as alike from its start"
    )


def test_rows_of_sessions_and_rows_without_do_not_mix(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(0, 1, [0]), mooncake(1, 1, [0], session_id="a"))
    assert refusal(path) == "line 2: session_id 'a' must stand in the first row too, or in none"
    lengths_first = {"timestamp": 0, "input_length": 5, "output_length": 6}
    assert "hash_ids [0] must stand in the first row too" in refusal(
        write(tmp_path, lengths_first, mooncake(1, 1, [0])), timestamp_unit="s"
    )


# aiperf's sessions: trap 3


def turn(session: str, new: int, answer: int, ids: Sequence[int] | None = None, **fields: Any) -> dict[str, Any]:
    row = {"session_id": session, "input_length": new, "output_length": answer, **fields}
    return row if ids is None else {**row, "hash_ids": list(ids)}


def test_a_turn_tells_new_tokens_only_and_comes_its_delay_after_the_answer(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        turn("a", 10, 4, timestamp=1000),
        turn("b", 7, 1, timestamp=500),
        turn("a", 6, 2, delay=5000),
        turn("a", 1, 2, delay=0),
    )
    workload = read(path)
    assert isinstance(workload, Sessions) and arrivals(workload) == [0.5, 1.0]
    assert [request.prompt.num_tokens for request in requests(workload)] == [10, 7, 10 + 4 + 6, 20 + 2 + 1]
    assert waits(workload) == {"2": (("0",), 5.0), "3": (("2",), 0.0)}
    records = play(workload)
    assert records["2"].arrival_time == records["0"].finish_time + 5.0


def test_a_rate_of_sessions_is_that_of_their_starts(tmp_path: Path) -> None:
    rows_ = (turn(name, 10, 4, timestamp=1000 * at) for name, at in (("a", 2), ("b", 4), ("c", 6)))
    workload = read(write(tmp_path, *rows_, turn("a", 6, 2, delay=5000)), rate=1.5)
    assert arrivals(workload) == [1.0, 2.0, 3.0] and waits(workload) == {"3": (("0",), 5.0)}
    assert said(workload, "times multiplied by 0.5: from 0.75 to 1.5 requests by the clock a second")


def test_a_turn_finds_what_was_said_before_it_and_the_answer(tmp_path: Path) -> None:
    """Blocks of 4 in chunks of 16: 32 asked, 16 answered (the last token's KV is never computed), 8 asked."""
    workload = read(write(tmp_path, turn("a", 32, 16, timestamp=0), turn("a", 8, 2, delay=10)))
    records = play(workload)
    assert (records["0"].num_cached_tokens, records["1"].num_cached_tokens) == (0, 44)


def test_sessions_share_what_their_content_ids_say_wherever_it_begins(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        turn("a", 40, 5, [7, 8, 9], timestamp=0),
        turn("b", 40, 9, [7, 8, 9], timestamp=1),
        turn("a", 20, 1, [4, 5], delay=0),
        turn("b", 20, 1, [4, 5], delay=0),
        turn("c", 48, 1, [7, 8, 9], timestamp=2),
    )
    a, b, a_next, b_next, c = contents(read(path, content_size=16))
    assert a == b and len(a) == 3
    assert a_next[:2] == a[:2] == b_next[:2] and not set(a_next[2:]) & set(b_next[2:])  # their answers differ
    assert c[:2] == a[:2] and c[2] != a[2]  # 16 tokens of content 9 are not 8 of them


TURNS = st.tuples(st.sampled_from("ab"), st.integers(1, 70), st.integers(1, 40), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.lists(TURNS, min_size=1, max_size=6))
def test_chunks_are_alike_exactly_where_their_tokens_are(
    tmp_path_factory: pytest.TempPathFactory, turns_: list[tuple[str, int, int, bool]]
) -> None:
    """Told token by token: of a shared content its id and place, of anything else whose it is and which."""
    told: dict[str, list[tuple[object, ...]]] = {"a": [], "b": []}
    prompts, rows_ = [], []
    for at, (session, asked, answered, is_shared) in enumerate(turns_):
        ids = [asked % 3, 9, 8, 7, 6][: -(-asked // 16)] if is_shared else None
        told[session] += [(ids[n // 16], n % 16) if ids else ("asked", at, n) for n in range(asked)]
        prompts.append([tuple(told[session][n : n + 16]) for n in range(0, len(told[session]), 16)])
        told[session] += [("answered", at, n) for n in range(answered)]
        rows_.append(turn(session, asked, answered, ids, timestamp=at))
    path = write(tmp_path_factory.getbasetemp(), *rows_, name="chunks")
    names = contents(read(path, content_size=16))
    pairs = {
        (name, tokens)
        for each, prompt in zip(names, prompts, strict=True)
        for name, tokens in zip(each, prompt, strict=True)
    }
    assert len({name for name, _ in pairs}) == len({tokens for _, tokens in pairs}) == len(pairs)


def test_turns_by_the_clock_and_sessions_without_a_start(tmp_path: Path) -> None:
    by_clock = read(write(tmp_path, turn("a", 10, 4, timestamp=0), turn("a", 6, 2, timestamp=9000)))
    assert type(by_clock) is Workload and arrivals(by_clock) == [0.0, 9.0]
    assert requests(by_clock)[1].prompt.num_tokens == 20
    unknown = read(write(tmp_path, turn("a", 10, 4), turn("b", 10, 4), turn("a", 6, 2, delay=1)), rate=2.0)
    assert said(unknown, "session starts are not recorded: Poisson at 2 a second, seed 0")
    assert 0 < arrivals(unknown)[0] < arrivals(unknown)[1]
    mixed = refusal(write(tmp_path, turn("a", 10, 4), turn("b", 10, 4, timestamp=5)))
    assert mixed == "line 2: session 'b' begins at a timestamp, others without one: give all sessions a start, or none"
    assert "context_mode 'message_array_with_responses' is not read" in refusal(
        write(tmp_path, turn("a", 10, 4, context_mode="message_array_with_responses"))
    )


def test_a_turn_that_failed_is_left_out_and_the_next_waits_for_the_one_before(tmp_path: Path) -> None:
    path = write(tmp_path, turn("a", 10, 4, timestamp=0), turn("a", 6, 0, delay=2000), turn("a", 3, 5, delay=3000))
    workload = read(path)
    assert waits(workload) == {"1": (("0",), 5.0)} and requests(workload)[1].prompt.num_tokens == 10 + 4 + 6 + 3


# LLMServingSim


def test_llmservingsim_lines_are_requests_and_sessions(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 2_000_000_000, "input_tok_ids": [5, 6, 5]},
        {"session_id": "s0", "arrival_time_ns": 1_500_000_000, "sub_requests": [
            {"input_toks": 8, "output_toks": 1, "tool_duration_ns": 250_000_000, "input_tok_ids": list(range(8))},
            {"input_toks": 12, "output_toks": 0, "tool_duration_ns": 250_000_000, "input_tok_ids": list(range(12))},
            {"input_toks": 16, "output_toks": 3, "input_tok_ids": list(range(16))},
        ]},
    )  # fmt: skip
    workload = read(path)
    assert arrivals(workload) == [1.5, 2.0] and waits(workload) == {"2": (("1",), 0.5)}
    assert requests(workload)[0].prompt == ContentPrompt(3, (5, 6, 5), 1)
    assert [request.context.session for request in requests(workload)] == ["", "s0", "s0"]
    assert play(workload)["2"].num_cached_tokens == 8
    assert "2 input_tok_ids for 3 input_toks must be as many" in refusal(
        write(tmp_path, {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 0, "input_tok_ids": [1, 2]})
    )


# Weka's sessions: trap 4


def call(t: float, prompt: int, output: int = 4, ids: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
    """Blocks of 4 tokens; one id for each whole one."""
    return {
        "t": t,
        "type": "n",
        "in": prompt,
        "out": output,
        "hash_ids": list(ids) or list(range(prompt // 4)),
        **fields,
    }


def agent(t: float, calls: Sequence[dict[str, Any]], duration_ms: int | None) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "duration_ms": duration_ms, "requests": list(calls)}


def weka(name: str, *calls: dict[str, Any], scope: str = "local") -> dict[str, Any]:
    return {"id": name, "block_size": 4, "hash_id_scope": scope, "requests": list(calls)}


def test_a_session_waits_its_think_time_after_each_answer(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        weka(
            "a", call(0, 8, api_time=3.0), call(10.0, 24, api_time=2.0, think_time=7.0), call(20.0, 32, think_time=8.0)
        ),
    )
    workload = read(path)
    assert waits(workload) == {"1": (("0",), 7.0), "2": (("1",), 8.0)}
    records = play(workload)
    assert records["1"].arrival_time == records["0"].finish_time + 7.0
    assert [(each.context.session, each.class_name) for each in requests(workload)] == [("a", "main")] * 3
    assert said(workload, "a session ends where one is not answered")


def test_the_next_turn_finds_the_answer_in_the_cache(tmp_path: Path) -> None:
    """9 tokens asked and 8 answered, the last of which is never computed: 16 have KV, four whole blocks."""
    records = play(read(write(tmp_path, weka("a", call(0, 9, 8), call(9, 20, think_time=1.0)))))
    assert records["1"].num_cached_tokens == 16


def test_ids_of_a_session_mean_nothing_outside_it_unless_they_are_global(tmp_path: Path) -> None:
    local = read(write(tmp_path, weka("a", call(0, 9)), weka("b", call(0, 9), call(5, 12))))
    first, second, third = contents(local)
    assert not set(first) & set(second) and second[:2] == third[:2] and second[2] != third[2]
    assert (
        describe(local).reuse
        == describe(read(write(tmp_path, weka("b", call(0, 9), call(5, 12)), weka("a", call(0, 9))))).reuse
    )
    shared = read(
        write(tmp_path, weka("a", call(0, 9), scope="global"), weka("b", call(0, 9), call(5, 12), scope="global"))
    )
    first, second, _ = contents(shared)
    assert first[:2] == second[:2] == (0, 1) and first[2] != second[2]  # nobody knows the last token
    assert refusal(write(tmp_path, {**weka("a", call(0, 9)), "hash_id_scope": None})) == (
        "line 1: hash_id_scope None must be local (ids mean something within their session only) or global: add it to "
        "the session"
    )


def test_ids_cover_whole_blocks_or_all_tokens(tmp_path: Path) -> None:
    assert len(contents(read(write(tmp_path, weka("a", call(0, 9, ids=[1, 2])))))[0]) == 3
    assert len(contents(read(write(tmp_path, weka("a", call(0, 9, ids=[1, 2, 3])))))[0]) == 3
    message = refusal(write(tmp_path, weka("a", call(0, 9, ids=[1, 2, 3, 4]))))
    assert message == "line 1: 4 hash_ids for 9 tokens must be 2, one for each 4: check block_size"


def test_a_wait_whose_answer_was_not_timed_is_what_the_clock_says(tmp_path: Path) -> None:
    """think_time counts from the last timed answer, here for both later calls: taken as it is, it would count twice."""
    path = write(
        tmp_path,
        weka("a", call(0, 8, api_time=5.0), call(25, 12, think_time=20.0), call(35, 16, think_time=30.0, api_time=1.0)),
    )
    workload = read(path)
    assert waits(workload) == {"1": (("0",), 20.0), "2": (("1",), 10.0)}
    assert "waits that hold the service time before them, which was not measured: 1" in workload.findings


def test_a_sub_agent_begins_after_its_caller_and_the_next_turn_waits_for_it(tmp_path: Path) -> None:
    """Done at 30 after 20 s: called at 10, two seconds after the answer at 8; the main agent goes on 4 s later."""
    inner = [
        call(0, 16, ids=[50, 51, 52, 53], api_time=3.0),
        call(9, 20, ids=[50, 51, 52, 53, 54], api_time=2.0, think_time=6.0),
    ]
    first, last = call(0, 8, api_time=8.0), call(34, 12, think_time=26.0, api_time=1.0)
    path = write(tmp_path, weka("a", first, agent(30, inner, 20_000), last))
    workload = read(path)
    assert [each.class_name for each in requests(workload)] == ["main", "subagent", "subagent", "main"]
    assert waits(workload) == {"1": (("0",), 2.0), "2": (("1",), 6.0), "3": (("0", "2"), 4.0)}
    assert {each.context.session for each in requests(workload)} == {"a"}


def test_a_sub_agent_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    path = write(
        tmp_path, weka("a", call(0, 8, api_time=8.0), agent(10, [call(0, 16)], None), call(12, 12, think_time=4.0))
    )
    assert waits(read(path)) == {"1": (("0",), 2.0), "2": (("0",), 4.0)}


def test_a_sub_agents_clock_may_be_the_sessions(tmp_path: Path) -> None:
    inner = [call(40, 16, api_time=3.0), call(50, 20, api_time=2.0)]
    path = write(tmp_path, weka("a", call(0, 8, api_time=8.0), agent(40, inner, 15_000), call(60, 12)))
    assert waits(read(path)) == {"1": (("0",), 32.0), "2": (("1",), 7.0), "3": (("0", "2"), 8.0)}


def test_an_unanswered_call_is_left_out_of_its_session(tmp_path: Path) -> None:
    path = write(tmp_path, weka("a", call(0, 8, api_time=5.0), call(10, 12, output=0), call(20, 16, think_time=3.0)))
    workload = read(path)
    assert waits(workload) == {"1": (("0",), 15.0)}
    assert "rows dropped for 0 output tokens, as failed requests have: 1" in workload.findings


def test_copies_of_a_session_are_dropped_and_counted(tmp_path: Path) -> None:
    same = [call(0, 8), call(9, 12)]
    packed = {
        **weka("c"),
        "requests": [{**each, "hash_ids": None, "hash_runs": [[0, each["in"] // 4]]} for each in same],
    }
    workload = read(write(tmp_path, weka("a", *same), weka("b", *same), packed))
    assert workload.num_requests == 2
    assert "sessions dropped as copies of another but for the id: 2" in workload.findings
    assert "session 'a' stands twice, with different requests" in refusal(
        write(tmp_path, weka("a", *same), weka("a", call(0, 8)))
    )


def test_sessions_start_by_chance_where_nobody_recorded_it(tmp_path: Path) -> None:
    path = write(tmp_path, *(weka(f"s{index}", call(3, 8), call(9, 12 + 4 * index)) for index in range(50)))
    workload = read(path)
    assert said(workload, "session starts are not recorded: Poisson at 0.01 a second, seed 0")
    assert arrivals(read(path, num_requests=20)) == arrivals(workload)[:10]
    assert arrivals(read(path, seed=1)) != arrivals(workload)
    assert arrivals(read(path, rate=0.1)) == pytest.approx([time / 10 for time in arrivals(workload)])
    assert read(path, num_requests=21).num_requests == 21
    assert arrivals(read(path, num_requests=1)) == arrivals(workload)[:1] != [0.0]


def test_a_folder_and_an_archive_of_sessions_are_read_as_one(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path, json.dumps(weka(name, call(0, 8 if name == "a" else 12)), indent=1), name=f"set/{name}.json")
    (tmp_path / "set" / "README.md").write_text("not a trace")
    with tarfile.open(tmp_path / "set.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "set", "set")
    from_folder, from_archive = read(tmp_path / "set"), read(tmp_path / "set.tar.gz")
    assert [each.context.session for each in requests(from_folder)] == ["a", "b"]
    assert {each.context.session for each in requests(from_archive)} == {"a", "b"}
    write(tmp_path, "not json", name="set/c.json")
    assert refusal(tmp_path / "set").startswith("c.json: 'not json' must be one whole JSON object")


@pytest.mark.parametrize(
    ("session", "words"),
    [
        (weka("a", call(9, 8), call(5, 8)), "t 5 is earlier than 9 above it"),
        (weka("a", call(0, 8, ids=[-1, 2])), "hash_ids -1 must be from 0 to"),
        (weka("a", {**call(0, 8), "hash_runs": [[0, 2, 3]]}), "hash_runs [0, 2, 3] must be [first id, number of ids]"),
        (weka("a", {**call(0, 8), "hash_runs": [[0, 10**30]]}), "must be [first id, number of ids]"),
        (weka("a", {**call(0, 8), "hash_runs": [[0, True]]}), "must be [first id, number of ids]"),
        (weka("a", {"t": 0, "in": 5}), "has no out: every row needs t, in, out"),
        (weka("a", call(math.nan, 8)), "t nan must be a finite number"),
        ({**weka("a", call(0, 8)), "block_size": 0}, "block_size (0) must be from 1"),
        ({**weka("a"), "requests": 5}, "requests 5 must be a list"),
        ({**weka("a\nb", call(0, 8))}, "id 'a\\nb' must be text of at most 200 characters"),
        (weka("a", agent(5, [{"in": 1}], 5)), "has no t, out"),
    ],
)
def test_a_session_that_makes_no_sense_is_refused(tmp_path: Path, session: dict[str, Any], words: str) -> None:
    assert words in refusal(write(tmp_path, session))


def test_ids_told_by_their_number_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_CONTENT_IDS", 10_000)
    big = {"t": 0, "in": 10**9, "out": 1, "hash_runs": [[0, 250_000_000]]}
    assert "the prompts have more than 10000 content ids: give num_requests" in refusal(write(tmp_path, weka("a", big)))
    assert "more than 10000 content ids" in refusal(write(tmp_path, turn("a", 10**9, 1)))


# ServeGen: trap 7


def pool(folder: Path, rate: float = 4.0, *, clients: int = 2, family: str = "Gamma,0.25,99") -> Path:
    """Three windows of 600 s, the second without requests."""
    for client in range(clients):
        write(
            folder, f"0,{rate},2,{family}", "600,0,0,,0,0", f"1200,{rate},2,{family}", name=f"chunk-{client}-trace.csv"
        )
        early, late = (
            {
                "input_tokens": str({n: 0.01 for n in range(k, k + 100)}),
                "output_tokens": str({n: 0.01 for n in range(1, 101)}),
            }
            for k in (100, 500)
        )
        write(folder, {"0": early, "1200": late}, name=f"chunk-{client}-dataset.json")  # fmt: skip
    return folder


def test_a_pool_gets_as_many_requests_as_its_windows_say(tmp_path: Path) -> None:
    workload = read(pool(tmp_path))
    times = np.array(arrivals(workload))
    assert [len(times[(times >= start) & (times < start + 600)]) for start in (0, 600, 1200)] == [4800, 0, 4800]
    assert {request.client_id for request in requests(workload)} == {"client-0", "client-1"}
    assert said(workload, "requests are drawn for 2 clients, seed 0: 9600 in all")
    prompts = [request.prompt.num_tokens for request in requests(workload)]
    assert max(prompts[:4800]) < 200 and min(prompts[4800:]) >= 500


def test_gaps_have_the_shape_that_the_window_says(tmp_path: Path) -> None:
    for family, cv in (
        ("Gamma,0.25,99", 2.0),
        ("Gamma,1,99", 1.0),
        ("Weibull,0.5,99", math.sqrt(5)),
        ("Weibull,1,9", 1.0),
    ):
        facts = describe(read(pool(tmp_path, 8.0, clients=1, family=family), num_requests=4800))
        assert facts.arrivals.cv == pytest.approx(cv, rel=0.08)


def test_prompts_and_answers_are_drawn_independently(tmp_path: Path) -> None:
    prompts, outputs = np.array(sizes(read(pool(tmp_path, clients=1), num_requests=2400))).T
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.05  # ServeGen's own sampler: 1
    assert prompts.mean() == pytest.approx(149.5, rel=0.02) and outputs.mean() == pytest.approx(50.5, rel=0.03)


def test_more_requests_only_extend_a_pool_and_a_seed_changes_it(tmp_path: Path) -> None:
    few, many = (read(pool(tmp_path), num_requests=num, max_tokens=99) for num in (500, 5000))
    assert list(few.items) == list(many.items)[:500]
    assert arrivals(read(tmp_path, seed=1, num_requests=9)) != arrivals(few)[:9]


def test_a_pool_may_be_a_tar_archive(tmp_path: Path) -> None:
    folder = pool(tmp_path / "reason" / "x")
    with tarfile.open(tmp_path / "pool.tar.xz", "w:xz") as archive:
        archive.add(folder, "reason/x")
    assert read(tmp_path / "pool.tar.xz", num_requests=99).items == read(folder, num_requests=99).items
    (tmp_path / "cut.tar.xz").write_bytes((tmp_path / "pool.tar.xz").read_bytes()[:-400])
    assert refusal(tmp_path / "cut.tar.xz").startswith(" cannot be unpacked (Compressed file ended before")


def test_clients_without_a_dataset_are_left_out_with_their_share(tmp_path: Path) -> None:
    (pool(tmp_path, clients=4) / "chunk-2-dataset.json").unlink()
    assert said(
        read(tmp_path, num_requests=9), "clients left out because their dataset is absent: 1, 25.0% of all requests"
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("chunk-0-trace.csv", "0,1,1,Pareto,1,1", "line 1: '0,1,1,Pareto,1,1' must name a family, Gamma or Weibull"),
        ("chunk-0-trace.csv", "0,1,1,Gamma,0,1", "and a shape above 0"),
        ("chunk-0-trace.csv", "0,1,1,Gamma,1", "must have 6 fields"),
        ("chunk-0-trace.csv", "0,nan,1,Gamma,1,1", "rate 'nan' must be a finite number"),
        ("chunk-0-trace.csv", "0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n900,1,1,Gamma,1,1", "not [300.0, 600.0] s"),
        ("chunk-0-trace.csv", "0,1e9,1,Gamma,1,1\n600,0,0,,0,0\n1200,0,0,,0,0", "no client is that busy"),
        ("chunk-0-dataset.json", '{"0": {"input_tokens": "{1: 1.0}"}}', "must have input_tokens and"),
        ("chunk-0-dataset.json", '{"x": {}}', "window 'x' must be a finite number"),
        ("x/chunk-0-trace.csv", "0,1,1,Gamma,1,1", "client 0 has two trace files"),
    ],
)  # fmt: skip
def test_a_pool_that_makes_no_sense_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    write(pool(tmp_path), text, name=name)
    assert words in refusal(tmp_path)


@pytest.mark.parametrize(
    "text", ["{1: 0.5}", "{1: nan}", "{}", "", "{'a': 1}", "{-5: 1.0}", "{1.5: 1.0}", "{1: 2.0, 2: -1}", 7, "[" * 9999]
)
def test_a_distribution_must_be_one(text: object) -> None:
    with pytest.raises(ValueError, match="must give each number of tokens a probability, 1 in all"):
        distribution(text)


# Results as workloads


def bench(**fields: Any) -> dict[str, Any]:
    run = {"num_prompts": 3, "total_input_tokens": 60, "request_throughput": 1.0, "max_concurrency": None}
    arrays = {
        "start_times": [72.5, 70.0, 71.0],
        "input_lens": [30, 10, 20],
        "output_lens": [3, 1, 2],
        "errors": ["", "", ""],
    }
    return {**run, **arrays, **fields}


def test_a_detailed_vllm_result_is_what_its_client_sent(tmp_path: Path) -> None:
    workload = read(write(tmp_path, bench()))
    assert arrivals(workload) == [0.0, 1.0, 2.5] and sizes(workload) == [(10, 1), (20, 2), (30, 3)]
    assert said(
        read(write(tmp_path, bench(max_concurrency=8))), "at most 8 in flight: the server measured set their pace"
    )


def test_failures_in_a_vllm_result_are_masked(tmp_path: Path) -> None:
    workload = read(write(tmp_path, bench(errors=["", "timeout", ""], output_lens=[3, 1, 0])))
    assert sizes(workload) == [(30, 3)]
    assert "rows dropped for an error noted: 1" in workload.findings
    assert "rows dropped for 0 output tokens, as failed requests have: 1" in workload.findings


def test_a_vllm_result_without_times_is_refused(tmp_path: Path) -> None:
    run = {name: value for name, value in bench().items() if name != "start_times"}
    assert "the result has no start_times: run vllm bench serve with --save-detailed" in refusal(write(tmp_path, run))
    assert "must have one entry a request, not [3, 2, 3]" in refusal(write(tmp_path, bench(input_lens=[1, 2])))
    assert "a second run must be read by itself" in refusal(write(tmp_path, bench(), bench()))


def aiperf(start: int, phase: str = "profiling", error: object = None, **metadata: Any) -> dict[str, Any]:
    metrics = {
        "input_sequence_length": {"value": 70},
        "output_sequence_length": {"value": 7},
        "usage_prompt_tokens": {"value": 46},
    }
    return {
        "metadata": {"request_start_ns": start, "benchmark_phase": phase, "conversation_id": "c", **metadata},
        "metrics": metrics,
        "error": error,
    }


def test_aiperf_results_keep_nanoseconds_and_leave_out_what_was_not_measured(tmp_path: Path) -> None:
    now = 1_795_980_876_596_002_383
    left_out = aiperf(now + 9, "warmup"), aiperf(now, error={"code": 500}), aiperf(now, was_cancelled=True)
    path = write(tmp_path, aiperf(now + 100), aiperf(now), *left_out)
    workload = read(path)
    assert arrivals(workload) == pytest.approx([0.0, 1e-7], rel=1e-9) and sizes(workload) == [(70, 7)] * 2
    for reason in ("being warm-up", "an error noted", "being cancelled"):
        assert f"rows dropped for {reason}: 1" in workload.findings
    assert said(workload, "the server's own count, differs by more than a tenth: 2")
    older = {"metadata": {"timestamp_ns": 5, "credit_phase": "profiling"}, "metrics": aiperf(0)["metrics"]}
    assert sizes(read(write(tmp_path, older))) == [(70, 7)]


def guidellm(*runs: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [{"request_start_time": 5.0}]
    return {
        "metadata": {"version": 2},
        "benchmarks": [{"requests": {"successful": run, "errored": failed, "incomplete": None}} for run in runs],
    }


def test_a_guidellm_report_is_one_benchmark_with_its_requests(tmp_path: Path) -> None:
    done = [
        {"request_start_time": time, "prompt_tokens": 35, "output_tokens": 16, "info": {"conversation_id": "c"}}
        for time in (1795980962.5, 1795980961.0)
    ]
    workload = read(write(tmp_path, guidellm([], done)))
    assert arrivals(workload) == [0.0, 1.5] and requests(workload)[0].context == Context(session="c")
    assert "rows dropped for being errored: 1" in workload.findings
    assert "the report holds 2 benchmarks with requests: leave one" in refusal(write(tmp_path, guidellm(done, done)))
    assert "list no successful request, as sampled reports do" in refusal(write(tmp_path, guidellm([], [])))


# Hostile files


def test_gzip_is_unpacked_whatever_it_is_called(tmp_path: Path) -> None:
    plain = write(tmp_path, VIDUR, "0,10,2", "1,20,3")
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(packed).items == read(plain).items
    packed.write_bytes(gzip.compress(plain.read_bytes())[:-9])
    assert refusal(packed).startswith(" cannot be unpacked (")
    packed.write_bytes(gzip.compress(plain.read_bytes())[:15] + b"\xff" * 30)
    assert refusal(packed).startswith(" cannot be unpacked (")


def test_what_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_UNPACKED_BYTES", 100_000)
    monkeypatch.setattr(sources, "MAX_ARCHIVE_BYTES", 100_000)
    bomb = tmp_path / "bomb"
    bomb.write_bytes(gzip.compress(f"{VIDUR}\n".encode()) + gzip.compress(b"0,10,2\n" * 1000) * 1000)
    assert " unpacks to more than 100000 bytes: unpack it yourself, if you trust it" in refusal(bomb)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in ("padding", "chunk-0-trace.csv"):
            member = tarfile.TarInfo(name)
            member.size = 10**7
            archive.addfile(member, io.BytesIO(bytes(10**7)))
    bomb.write_bytes(lzma.compress(data.getvalue()))
    assert " unpacks to more than 100000 bytes" in refusal(bomb)


@pytest.mark.parametrize("start", [f"{VIDUR}\n0,10,", '{"timestamp": ', "", "\0"])
def test_a_line_of_a_gigabyte_is_refused_in_bounded_memory(tmp_path: Path, start: str) -> None:
    path = tmp_path / "trace"
    path.write_text(start)
    with path.open("r+b") as file:
        file.truncate(2**30)  # zeros that take no disk
    tracemalloc.start()
    message = refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "is longer than" in message and peak < 200 * 2**20


def test_a_document_of_many_lines_ends_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 10_000)
    path = write(tmp_path, "{", *('"a": 1,' for _ in range(1000)))
    assert " is one JSON document of more than 10000 bytes" in refusal(path)
    big = write(tmp_path, "[" * 20_000, name="set/a.json")
    assert refusal(big.parent) == "a.json is longer than 10000 bytes: split it, or leave it out"


def test_no_file_makes_more_rows_than_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.workload.read.MAX_ROWS", 5)
    path = write(tmp_path, VIDUR, *("0,10,2" for _ in range(6)))
    assert refusal(path) == "line 7: a trace of more than 5 requests must be cut: give num_requests"
    assert read(path, num_requests=5).num_requests == 5


@pytest.mark.parametrize(
    "text",
    [
        '{"requests": ' + "[" * 100_000,
        '{"requests": [' + "{}," * 100,
        '{"requests": [], "block_size": ' + "9" * 5000 + "}",
        '{"requests": [null], "block_size": 64, "hash_id_scope": "local"}',
        '{"arrival_time_ns": NaN, "input_toks": 1, "output_toks": 1}',
        '{"arrival_time_ns": 1, "sub_requests": {"a": 1}}',
        '{"arrival_time_ns": 1, "sub_requests": [[]]}',
        '{"session_id": {}, "input_length": 1, "output_length": 1}',
        '{"session_id": "a", "input_length": 1, "output_length": 1, "delay": "soon"}',
        '{"session_id": "a", "input_length": 1, "output_length": 1, "timestamp": Infinity}',
        '{"metadata": [], "benchmarks": []}',
        '{"metadata": 1, "benchmarks": [{"requests": {"successful": [3]}}]}',
        '{"metadata": 1, "metrics": {}}',
        '{"metadata": {}, "metrics": {}}',
        '{"metadata": {"request_start_ns": 1e18}, "metrics": {}}',
        '{"num_prompts": 1, "total_input_tokens": 1, "request_throughput": 1, "start_times": 1, "input_lens": []}',
        '{"num_prompts": 1, "total_input_tokens": 1, "request_throughput": 1, "start_times": 1, "input_lens": 1, '
        '"output_lens": []}',
        '{"chat_id": [], "parent_chat_id": 1, "timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
        "[" * 100_000,
        f"{BURSTGPT}\n1,a,b",
        "\ud7ff\n\x01",
    ],
)
def test_what_cannot_be_read_ends_in_one_line(tmp_path: Path, text: str) -> None:
    refusal(write(tmp_path, text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**19) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OTHERS = {"hash_ids", "delay", "sub_requests", "hash_id_scope", "start_times", "input_lens", "output_lens", "errors"}
FIELDS = sorted({column for each in FORMATS for column in each.columns} | OTHERS)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([each for each in FORMATS if each.shape is rows.Shape.JSON]),
    st.dictionaries(st.sampled_from(FIELDS), JSON),
    JSON,
)
def test_any_json_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, trace_format: rows.TraceFormat, fields: dict[str, Any], value: Any
) -> None:
    path = write(tmp_path_factory.getbasetemp(), {**dict.fromkeys(trace_format.columns, value), **fields}, name="any")
    try:
        assert every_item(read(path, timestamp_unit=None))
    except ValueError as error:
        assert len(str(error).splitlines()) == 1 and str(path) in str(error)


def test_a_folder_of_nothing_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert refusal(tmp_path) == " is a directory: a trace must be a file; check the path"


# Describing and converting


def test_facts_of_a_small_workload(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        turn("a", 512, 1, [1], timestamp=0),
        turn("b", 512, 3, [1], timestamp=1000),
        turn("a", 511, 2, delay=9),
    )
    facts = describe(read(path))
    assert (facts.num_requests, facts.num_sessions, facts.turns) == (3, 2, 1.5)
    assert (facts.prompts.mean, facts.prompts.most, facts.outputs.p50) == ((512 + 512 + 1024) / 3, 1024, 2)
    assert (facts.arrivals.num, facts.arrivals.duration, facts.arrivals.rate) == (2, 1.0, 2.0)
    assert facts.reuse is not None
    assert (facts.reuse.tokens, facts.reuse.requests) == (1024 / 2048, 2 / 3)
    assert facts.num_clients == 0 and dict(facts.num_by_class) == {"default": 3}


def test_facts_of_clients_and_of_one_request(tmp_path: Path) -> None:
    facts = describe(read(pool(tmp_path, 0.1, clients=12)))
    assert facts.num_clients == 12 and facts.top_clients == pytest.approx(10 / 12)
    assert facts.reuse is None and math.isnan(describe(read(write(tmp_path, VIDUR, "0,1,1"))).arrivals.cv)
    with pytest.raises(ValueError, match="has no request to describe"):
        describe(Workload("none", []))


def test_equal_ids_behind_different_ones_are_no_reuse(tmp_path: Path) -> None:
    facts = describe(
        read(write(tmp_path, mooncake(0, 1024, [1, 2]), mooncake(1, 1024, [3, 2]), mooncake(2, 1000, [1, 2])))
    )
    assert facts.reuse is not None and (facts.reuse.blocks, facts.reuse.requests) == (2 / 6, 1 / 3)
    assert facts.reuse.tokens == 1000 / 3048


def test_a_workload_comes_back_from_mooncakes_format(tmp_path: Path) -> None:
    original = read(write(tmp_path, mooncake(0, 758, [0, 7]), mooncake(1500.25, 512, [0]), mooncake(1501, 2, [9])))
    assert write_mooncake(original, tmp_path / "again") == 512
    assert read(tmp_path / "again").items == original.items
    assert json.loads((tmp_path / "again").read_text().splitlines()[0])["timestamp"] == 0


def test_prompts_known_by_length_get_ids_of_their_own(tmp_path: Path) -> None:
    original = read(write(tmp_path, VIDUR, "0,1000,5", "0.097829,513,6"))
    write_mooncake(original, tmp_path / "again")
    again = read(tmp_path / "again")
    assert arrivals(again) == arrivals(original) and contents(again) == [(0, 1), (2, 3)]
    write_vidur(original, tmp_path / "csv")
    assert read(tmp_path / "csv").items == original.items


def test_nothing_is_lost_in_silence(tmp_path: Path) -> None:
    closed = read(write(tmp_path, weka("a", call(0, 8), call(9, 12))))
    with pytest.raises(ValueError, match="is a closed loop: its 1 follow-ups come when others are answered"):
        write_mooncake(closed, tmp_path / "out", drop=("sessions", "classes"))
    chats = read(write(tmp_path, bailian(7, -1, 0.0, 16, [5]), bailian(8, 7, 50.0, 40, [5, 6, 7])))
    with pytest.raises(
        ValueError, match=r"has sessions, classes, which the file cannot hold: say so with drop=\['sessions"
    ):
        write_mooncake(chats, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert write_mooncake(chats, tmp_path / "out", drop=("sessions", "classes")) == 16
    assert contents(read(tmp_path / "out", content_size=16)) == contents(chats)
    with pytest.raises(ValueError, match="has contents"):
        write_vidur(chats, tmp_path / "csv", drop=("sessions", "classes"))
    with pytest.raises(ValueError, match="unknown drop 'tenants'; known: sessions, clients"):
        write_mooncake(chats, tmp_path / "out", drop=("tenants",))
    tokens = Workload("tokens", [WorkItem(Request("0", 0.0, TokenPrompt((1, 2)), max_tokens=1), 1)])
    with pytest.raises(ValueError, match="has a prompt of token ids or keys"):
        write_mooncake(tokens, tmp_path / "tokens")


# The real files

OPENS = {
    "vllm-bench-serve/timed_trace_input_60.jsonl": ("mooncake", 60),
    "vllm-bench-serve/vllm_bench_serve_random_detailed.json": ("vllm-bench", 24),
    "vllm-bench-serve/vllm_bench_serve_timed_trace_detailed.json": ("vllm-bench", 60),
    "aiperf/run_mooncake_fixed_schedule/input_mc40.jsonl": ("mooncake", 40),
    "aiperf/run_mooncake_fixed_schedule/profile_export.jsonl": ("aiperf-result", 40),
    "aiperf/run_chat_closedloop/profile_export.jsonl": ("aiperf-result", 20),
    "guidellm/guidellm_0.8.1_poisson_slo_20req.json": ("guidellm", 20),
}


def test_every_sample_that_tells_requests_opens_and_every_other_is_refused_in_one_line() -> None:
    folder = real("formats")
    opened = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            try:
                trace = read_trace(path)
                opened[str(path.relative_to(folder))] = (trace.format.name, trace.num_rows)
            except ValueError as error:
                assert len(str(error).splitlines()) == 1 and str(path) in str(error)
    assert opened == OPENS


def test_the_real_sampled_report_says_that_it_lists_no_requests() -> None:
    assert "list no successful request" in refusal(real("formats/guidellm/guidellm_report_v2.json"))


def test_a_real_replay_sent_what_its_input_says() -> None:
    """aiperf and vLLM replayed these files: their results are the same arrivals, give or take the client."""
    for given_, sent in (
        (
            "aiperf/run_mooncake_fixed_schedule/input_mc40.jsonl",
            "aiperf/run_mooncake_fixed_schedule/profile_export.jsonl",
        ),
        ("vllm-bench-serve/timed_trace_input_60.jsonl", "vllm-bench-serve/vllm_bench_serve_timed_trace_detailed.json"),
    ):
        planned, measured = arrivals(read(real(f"formats/{given_}"))), arrivals(read(real(f"formats/{sent}")))
        assert measured == pytest.approx(planned, abs=0.02)


def test_the_real_server_runs_open() -> None:
    runs = [
        read(real("vllm-runs/RTX4090-Llama-3.1-8B/requests.jsonl")),
        read(real("vllm-runs/cpu-vllm-0.32/base_r6_s1_p0_2.json.gz")),
    ]
    assert [len(run.items) for run in runs] == [300, 240]
    assert runs[0].rate == pytest.approx(10.3, rel=0.01) and runs[1].rate == pytest.approx(6.0, rel=0.1)


PACKED = "traces/claude-code/claude_code_traces_packed.jsonl.gz"


@pytest.fixture(scope="module")
def claude_code() -> Workload:
    return read(real(PACKED), num_requests=900)


def test_the_real_sessions_are_692_with_18_copies(claude_code: Workload) -> None:
    stats = json.loads(real("traces/stats.json").read_text())["claude_code"]
    assert stats["sessions"] == 692
    for finding in (
        f"the first 900 of {stats['requests'] - 27} requests",
        "rows dropped for 0 output tokens, as failed requests have: 27",
        "sessions dropped as copies of another but for the id: 18",
        "requests recorded before the answer that they wait for here: 4",
    ):
        assert finding in claude_code.findings


def test_the_real_sub_agents_begin_within_a_second_of_their_call(tmp_path: Path) -> None:
    """Where t - duration is taken as their start; t itself, read as the start, would make it minutes."""
    with gzip.open(real(PACKED), "rt") as file:
        rows_ = read_trace(write(tmp_path, *(line.strip() for line in file if '"subagent"' in line))).rows
    begun = [row.delay for row in rows_ if row.class_name == "subagent" and rows_[row.follows[0]].class_name == "main"]
    assert len(begun) == 63
    assert (
        sum(delay is not None and delay < 1.1 for delay in begun) == 61
    )  # the other two come 40 hours after the last turn
    joined = [row for row in rows_ if row.class_name == "main" and len(row.follows) > 1]
    assert sum(len(row.follows) - 1 for row in joined) == 57  # 59 were awaited, and two sessions ended with theirs


def test_the_real_sessions_reuse_almost_all_of_their_tokens(claude_code: Workload) -> None:
    """By a set of ids, as they are chained: what the published figure counts, 96 % of all sessions."""
    hit = total = 0
    seen: set[int] = set()
    for request in requests(claude_code):
        assert isinstance(request.prompt, ContentPrompt)
        hit += min(64 * sum(each in seen for each in request.prompt.content_ids), request.prompt.num_tokens)
        total += request.prompt.num_tokens
        seen.update(request.prompt.content_ids)
    facts = describe(claude_code)
    assert facts.reuse is not None and facts.reuse.tokens == hit / total == pytest.approx(0.962, abs=0.02)


def test_the_raw_sessions_are_the_packed_ones(tmp_path: Path) -> None:
    raw = read_trace(real("traces/claude-code/raw_samples"))
    names = {row.session for row in raw.rows}
    with gzip.open(real(PACKED), "rt") as file:
        chosen = [line for line in file if json.loads(line[: line.index(",")] + "}")["id"] in names]
    packed = read_trace(write(tmp_path, *map(str.strip, chosen)))
    assert packed.rows == raw.rows and len(names) == 3


def test_real_sessions_play_in_a_closed_loop() -> None:
    workload = read(real("traces/claude-code/raw_samples/trace_0630.json"))
    config = EngineConfig(
        num_blocks=8192, block_size=16, max_num_seqs=8, max_num_batched_tokens=8192, max_model_len=131_072
    )
    run = simulate(config, workload, AffineCost(per_step=0.01))
    cached, total = (
        sum(getattr(each, name) for each in run.records) for name in ("num_cached_tokens", "num_prompt_tokens")
    )
    assert len(run.records) == 17 and cached / total == pytest.approx(0.93, abs=0.05)
    ends = {record.request_id: record.finish_time for record in run.records}
    delays = waits(workload)
    for record in run.records[1:]:
        after, delay = delays[record.request_id]
        assert record.arrival_time == pytest.approx(max(ends[each] for each in after) + delay)


def test_the_real_pool_has_its_published_rates_and_clients() -> None:
    workload = read(real("traces/servegen-deepseek-r1/reason_deepseek-r1.tar.xz"), num_requests=20_000)
    assert said(workload, "requests are drawn for 73 clients, seed 0: 1383669 in all")
    times = np.array(arrivals(workload))
    lines_of_rates = real("traces/servegen-deepseek-r1/reason_deepseek-r1_rates.csv").read_text().splitlines()[1:3]
    for line in lines_of_rates:
        start, rate = map(float, line.split(",")[:2])
        assert ((times >= start) & (times < start + 600)).sum() / 600 == pytest.approx(rate, abs=0.001)
    assert 0.6 < describe(workload).top_clients < 0.95


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", "azure2023_conv"),
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", "azure2023_code"),
        ("mooncake-fast25/conversation_trace.jsonl", "mooncake_conversation_trace"),
        ("mooncake-fast25/synthetic_trace.jsonl", "mooncake_synthetic_trace"),
    ],
)
def test_the_facts_of_a_real_trace_are_the_published_ones(name: str, key: str) -> None:
    facts = describe(read(real(f"traces/{name}"), ticks="as-is"))
    stats = json.loads(real("traces/stats.json").read_text())[key]
    assert facts.arrivals.cv == pytest.approx(stats["arrival"]["cv_iat"], rel=1e-9)
    for window in (1, 10, 60):
        found = getattr(facts.arrivals, f"dispersion_{window}s")
        assert found == pytest.approx(stats["arrival"][f"idx_disp_{window}s"], rel=1e-9)
    for lengths_, side in ((facts.prompts, "prompt"), (facts.outputs, "output")):
        for point in ("mean", "p50", "p90", "p99"):
            assert getattr(lengths_, point) == pytest.approx(stats[side][point], rel=1e-9)
    if "prefix" in stats:
        assert facts.reuse is not None
        assert facts.reuse.tokens == pytest.approx(stats["prefix"]["hit_token_frac"], rel=1e-9)
        assert facts.reuse.blocks == pytest.approx(stats["prefix"]["hit_block_frac"], rel=1e-9)
        assert facts.reuse.requests == pytest.approx(stats["prefix"]["req_with_any_hit_frac"], rel=1e-9)

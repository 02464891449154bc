"""Workloads: what is read, what is refused and how, what is drawn, and what is done to either."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prompt import ContentPrompt, LengthPrompt
from policies.types import Context, Request
from sim.workload.clock import find_tick
from sim.workload.generate import Chat, Fixed, from_lengths, generate, poisson
from sim.workload.lines import MAX_LINE_BYTES
from sim.workload.load import load
from sim.workload.shared_prefix import SharedPrefix
from sim.workload.streams import poisson_arrivals
from sim.workload.workload import WorkItem, Workload

SHARED = Path(__file__).resolve().parents[2].parent / "shared"

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"


def real(name: str) -> Path:
    path = SHARED / "data" / "traces" / name
    if not path.exists():
        pytest.skip(f"the real trace {name} is not at ../shared")
    return path


def write(folder: Path, *lines: str, end: str = "\n") -> Path:
    path = folder / "trace"
    path.write_bytes(end.join(lines).encode())
    return path


def mooncake(timestamp: object, prompt: int = 1, output: object = 1, ids: Sequence[object] | None = None) -> str:
    ids = [0] * -(-prompt // 512) if ids is None else ids
    row = {"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": ids}
    return json.dumps(row)


def read(path: Path, **options: Any) -> Workload:
    return load(path, None, **options)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and str(path) in message and len(message) < 600
    return message.removeprefix(f"{path}")


def arrivals(workload: Workload) -> list[float]:
    return [item.request.arrival_time for item in workload.items]


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(item.request.prompt.num_tokens, item.num_output_tokens) for item in workload.items]


# Reading


def test_azure_wall_clock_is_exact_to_100_ns(tmp_path: Path) -> None:
    path = write(
        tmp_path, AZURE, "2023-11-16 23:59:59.9999999,374,44", "2023-11-17 00:00:00.0000001,396,109", end="\r\n"
    )
    workload = read(path)
    assert arrivals(workload) == [0.0, 0.0000002]
    assert lengths(workload) == [(374, 44), (396, 109)]


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    workload = read(write(tmp_path, AZURE, "2023-11-16 18:15:46,32,44"))
    assert workload.items[0].request.prompt == LengthPrompt(32)
    assert "prompts share nothing" in workload.findings


def test_mooncake_times_are_milliseconds_and_ids_cover_512_tokens(tmp_path: Path) -> None:
    workload = read(write(tmp_path, mooncake(0, 758, 500, [0, 7]), mooncake(1500, 512, 3, [0])))
    assert arrivals(workload) == [0.0, 1.5]
    assert workload.items[0].request.prompt == ContentPrompt(758, (0, 7), 512)
    assert workload.items[0].num_output_tokens == 500


def test_vidur_columns_may_stand_in_any_order_among_others(tmp_path: Path) -> None:
    path = write(tmp_path, "id,num_decode_tokens,arrived_at,num_prefill_tokens", "a,205,0.097829,169", "b,1,2,3")
    assert arrivals(read(path)) == [0.097829, 2.0]
    assert lengths(read(path)) == [(169, 205), (3, 1)]


def test_blank_lines_a_byte_order_mark_and_a_missing_last_newline_do_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeff", "", VIDUR, "", "0.5,1,2", "   ", "1.5,3,4")
    assert lengths(read(path)) == [(1, 2), (3, 4)]


def test_requests_are_named_by_position_and_nobody_in_particular_asks(tmp_path: Path) -> None:
    items = read(write(tmp_path, VIDUR, "0,10,2", "1,20,3")).items
    assert items[1] == WorkItem(Request("1", 1.0, LengthPrompt(20), max_tokens=3), num_output_tokens=3)


def test_the_source_is_the_files_name_and_sha256(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR, "0,10,2")
    assert read(path).source == f"trace sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_rows_of_zero_tokens_are_dropped_and_counted(tmp_path: Path) -> None:
    workload = read(write(tmp_path, VIDUR, "0,10,0", "1,0,0", "2,10,5", "3,10,0"))
    assert lengths(workload) == [(10, 5)]
    assert "rows dropped for 0 output tokens, as failed requests have: 2" in workload.findings
    assert "rows dropped for 0 prompt tokens, as failed requests have: 1" in workload.findings


def test_an_open_loop_gives_all_at_first_and_nothing_after(tmp_path: Path) -> None:
    workload = read(write(tmp_path, VIDUR, "0,10,2"))
    assert workload.initial() == workload.items
    assert workload.on_outcome(record=None, now=1.0) == ()  # type: ignore[arg-type]


# Cutting, scaling, hiding


def test_every_request_may_answer_as_long_as_the_longest_answer(tmp_path: Path) -> None:
    workload = read(write(tmp_path, VIDUR, "0,10,2", "1,10,7"))
    assert [item.request.max_tokens for item in workload.items] == [7, 7]
    assert "max_tokens is 7 for every request, the largest output length" in workload.findings


def test_a_given_max_tokens_is_said_to_cut_answers(tmp_path: Path) -> None:
    workload = read(write(tmp_path, VIDUR, "0,10,2", "1,10,7"), max_tokens=4)
    assert [(item.request.max_tokens, item.num_output_tokens) for item in workload.items] == [(4, 2), (4, 7)]
    assert "max_tokens is 4 for every request, as given; answers cut short: 1" in workload.findings


def test_the_first_requests_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR, "0,10,2", "1,10,0", "2,10,7", "3,10,9")
    workload = read(path, num_requests=2)
    assert lengths(workload) == [(10, 2), (10, 7)]
    assert "the first 2 of 3 requests" in workload.findings


def test_a_trace_shorter_than_asked_says_so(tmp_path: Path) -> None:
    workload = read(write(tmp_path, VIDUR, "0,10,2"), num_requests=5)
    assert len(workload.items) == 1
    assert "5 requests were asked for, the trace has 1" in workload.findings


def test_a_rate_multiplies_all_times(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR, "1,10,2", "2,10,2", "5,10,2", "9,10,2")
    workload = read(path, rate=1.0)  # recorded: 4 requests in 8 s
    assert arrivals(workload) == [0.5, 1.0, 2.5, 4.5]
    assert workload.rate == 1.0 and workload.duration == 4.0
    assert "times multiplied by 0.5: from 0.5 to 1 requests a second" in workload.findings


def test_requests_that_all_arrive_at_once_have_no_rate_to_change(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR, "1,10,2", "1,10,2")
    assert read(path).rate == math.inf
    with pytest.raises(ValueError, match=r"rate \(2\) cannot be reached: all 2 requests arrive at once"):
        read(path, rate=2.0)


# Ticks


def ticking(folder: Path, num_ticks: int = 10, each: int = 3) -> Path:
    """Three requests every 3,000 ms, give or take one, as in Mooncake's conversation trace."""
    return write(folder, *(mooncake(3000 * tick + (tick % 4 == 1)) for tick in range(num_ticks) for _ in range(each)))


def test_arrivals_recorded_in_ticks_are_spread_within_them(tmp_path: Path) -> None:
    workload = read(ticking(tmp_path))
    times = arrivals(workload)
    assert times == sorted(times) and len(set(times)) == 30
    assert [sum(3 * tick <= time < 3 * tick + 3.01 for time in times) for tick in range(10)] == [3] * 10
    assert any(f.startswith("arrivals were recorded in ticks of 3 s, 3.0 at once; spread") for f in workload.findings)


def test_spreading_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = ticking(tmp_path)
    assert arrivals(read(path, seed=1)) == arrivals(read(path, seed=1)) != arrivals(read(path, seed=2))
    assert arrivals(read(path, seed=1, num_requests=7)) == arrivals(read(path, seed=1))[:7]


def test_ticks_may_be_kept_as_they_are(tmp_path: Path) -> None:
    workload = read(ticking(tmp_path), ticks="as-is")
    assert arrivals(workload)[:5] == [0.0, 0.0, 0.0, 3.001, 3.001]
    assert "arrivals were recorded in ticks of 3 s, 3.0 at once; left as they are" in workload.findings


def test_a_fine_clock_is_left_alone(tmp_path: Path) -> None:
    workload = read(write(tmp_path, mooncake(0), mooncake(0), mooncake(40), mooncake(277)))
    assert arrivals(workload) == [0.0, 0.0, 0.04, 0.277]
    assert "arrivals are as recorded: no coarse clock found" in workload.findings


def test_batches_at_irregular_times_are_no_ticks() -> None:
    batches = np.cumsum(np.random.default_rng(0).exponential(10.0, 50))
    assert find_tick(np.repeat(batches, 4)) is None
    assert find_tick(np.repeat(np.arange(50) * 2.0, 4)) == 2.0


# Refusing


def test_a_missing_file_a_directory_and_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "none") == " does not exist: a trace must be a file; check the path"
    assert refusal(tmp_path) == " is a directory: a trace must be a file; check the path"
    assert refusal(tmp_path / "pipe") == " is not a regular file: a trace must be a file; check the path"
    assert "cannot be read" in refusal(tmp_path / ("long" * 100))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    assert refusal(write(tmp_path, content)) == " is empty: a trace needs at least one row; fetch the file again"


@pytest.mark.parametrize("header", [AZURE, VIDUR])
def test_a_header_alone_is_refused(tmp_path: Path, header: str) -> None:
    assert refusal(write(tmp_path, header)).startswith(": line 1: no request to run (only a header): a trace needs")


def test_a_trace_of_failures_only_is_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, VIDUR, "0,5,0", "1,5,0"))
    assert message.startswith(
        ": line 3: no request to run (rows dropped for 0 output tokens, as failed requests have: 2)"
    )


def test_an_unknown_header_is_answered_with_the_known_formats(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "when,in,out", "0,1,2"))
    assert message == (
        ": line 1: 'when, in, out' is no known trace format; known: azure, burstgpt, vidur, bailian, aiperf-sessions, "
        "mooncake, timed, weka, llmservingsim, llmservingsim-run, servegen, vllm-bench, aiperf-result, guidellm. "
        "Convert or rename columns"
    )
    message = refusal(write(tmp_path, "TIMESTAMP,ContextTokens,Generated", "0,1,2"))
    assert "; azure would need GeneratedTokens. Convert or rename columns" in message
    assert "is no known trace format" in refusal(write(tmp_path, '{"timestamp": 0, "input_length": 5}'))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            (AZURE, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:5"),
            "line 3: '2023-11-16 18:15:5' has 1 fields",
        ),
        ((VIDUR, "0,10,2", "1.5,1"), "line 3: '1.5,1' has 2 fields, the header 3: the file may be cut off; remove"),
        ((VIDUR, "0,10,2", "1.5,10,"), "line 3: num_decode_tokens '' must be a whole number"),
        ((mooncake(0), '{"timestamp": 1, "inp'), 'line 2: \'{"timestamp": 1, "inp\' must be one whole JSON object'),
    ],
)
def test_a_cut_last_row_is_refused(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    assert refusal(write(tmp_path, *lines)).startswith(f": {said}")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e999", "1_0", "", "soon", "1" * 400])
def test_a_time_must_be_finite_and_not_negative(tmp_path: Path, value: str) -> None:
    message = refusal(write(tmp_path, VIDUR, f"{value},10,2"))
    assert message.startswith(": line 2: arrived_at '") and "must be a finite number, 0 or more" in message


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1.5", "1_0", "", "many", "\u0663", "1000000001", "9" * 5000])
def test_a_number_of_tokens_must_be_whole_and_of_this_world(tmp_path: Path, value: str) -> None:
    message = refusal(write(tmp_path, VIDUR, f"0,10,{value}"))
    assert message.startswith(": line 2: num_decode_tokens ")
    assert "must be a whole number of tokens, from 0 to 1000000000" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 10**400, True, None, "0", [0], {"ms": 0}])
def test_a_json_time_must_be_a_number(tmp_path: Path, value: object) -> None:
    if value == "0":
        assert arrivals(read(write(tmp_path, mooncake(value)))) == [0.0]  # a number in quotes is still one
    else:
        assert "must be a finite number, 0 or more" in refusal(write(tmp_path, mooncake(value)))


@pytest.mark.parametrize("value", [math.nan, -1, 1.5, 10**10, True, None, [1]])
def test_a_json_number_of_tokens_must_be_whole(tmp_path: Path, value: object) -> None:
    assert "must be a whole number of tokens" in refusal(write(tmp_path, mooncake(0, output=value)))


@pytest.mark.parametrize(
    "text", ["2023-13-16 18:15:46", "2023-11-16", "18:15:46", "2023-11-16 18:15:46.0000000001", "1"]
)
def test_a_wall_clock_time_must_be_one(tmp_path: Path, text: str) -> None:
    message = refusal(write(tmp_path, AZURE, f"{text},10,2"))
    assert message.startswith(f": line 2: TIMESTAMP '{text}' must be a wall-clock time such as 2023-11-16 18:15:46.680")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            (AZURE, "2023-11-16 18:15:46,1,1", "2023-11-16 18:15:45,1,1"),
            "line 3: TIMESTAMP is 1 s earlier than the row",
        ),
        ((VIDUR, "5,1,1", "7,1,1", "6.5,1,1"), "line 4: arrived_at is 0.5 s earlier than the row above"),
        ((mooncake(7000), mooncake(4000)), "line 2: timestamp is 3 s earlier than the row above"),
    ],
)
def test_rows_out_of_order_are_refused(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    message = refusal(write(tmp_path, *lines))
    assert message.startswith(f": {said}") and "rows must be in order of arrival; sort the file by " in message


def test_content_ids_must_cover_the_prompt(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, mooncake(0), mooncake(0, 1025, 1, [1, 2]))) == (
        ": line 2: 2 hash_ids for an input_length of 1025 must be 3, one for each 512 tokens begun: "
        "check the block size of the trace; content_size 1024 would fit this row"
    )


@pytest.mark.parametrize("ids", [[1.5], ["a"], [True], [[0]], [2**64], [-(2**70)]])
def test_content_ids_must_be_whole_numbers_of_64_bits(tmp_path: Path, ids: list[object]) -> None:
    assert ": line 1: hash_ids [" in refusal(write(tmp_path, mooncake(0, 1, 1, ids)))


def test_a_row_without_a_needed_field_is_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, mooncake(0), '{"delay": 5, "input_length": 9}'))
    assert "has no timestamp, output_length, hash_ids: every row needs timestamp, input_length" in message
    assert "must be a JSON object" in refusal(write(tmp_path, mooncake(0), "[1, 2]"))


def test_seconds_in_a_mooncake_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, *(mooncake(0.25 * index) for index in range(100)))
    assert refusal(path) == (
        ": line 100: the trace runs at 4,000 requests a second when its times are read as milliseconds, more than "
        "1,000 to be true: convert the times to milliseconds, or give the rate you mean, or timestamp_unit: s (4 "
        "requests a second)"
    )
    assert read(path, rate=4.0).rate == pytest.approx(4.0)
    assert "6,667 requests a second" in refusal(write(tmp_path, mooncake(0), mooncake(0.15)))


def test_milliseconds_in_a_vidur_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR, *(f"{2500 * index},10,2" for index in range(100)))
    assert refusal(path).startswith(
        ": line 101: the trace runs at one request every 2,500 s for 2.9 days when its times are read as seconds, "
        "too little load to be true: convert"
    )
    assert read(path, rate=4.0).rate == pytest.approx(4.0)


def test_times_since_1970_are_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, VIDUR, "1700000000,10,2", "1700000001,10,2"), rate=1.0)
    assert "the last request arrives after 19,676 days, read as seconds" in message
    assert message.endswith("check the unit, and count the times from the start of the trace")


@pytest.mark.parametrize("name", ["mooncake-fast25/conversation_trace.jsonl", "mooncake-fast25/synthetic_trace.jsonl"])
def test_the_real_mooncake_traces_in_seconds_are_refused(tmp_path: Path, name: str) -> None:
    rows = [json.loads(line) for line in real(name).read_text().splitlines()]
    path = write(tmp_path, *(json.dumps(row | {"timestamp": row["timestamp"] / 1000}) for row in rows))
    assert "requests a second when its times are read as milliseconds" in refusal(path)


def test_the_real_vidur_trace_in_milliseconds_is_refused(tmp_path: Path) -> None:
    header, *rows = real("bench-10k/poisson4_conv_10000.csv").read_text().splitlines()
    cells = [row.split(",") for row in rows]
    path = write(tmp_path, header, *(f"{float(time) * 1000},{prompt},{output}" for time, prompt, output in cells))
    assert "one request every 249 s for 28.8 days when its times are read as seconds" in refusal(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x1f\x8b\x08\x00", ": line 1 has a NUL byte at position 3: a trace must be UTF-8 text; decompress"),
        (
            VIDUR.encode() + b"\n0,1,\xff",
            ": line 2 has byte 0xff at position 4: a trace must be UTF-8 text; decompress",
        ),
        (VIDUR.encode("utf-16"), " has a NUL byte at position"),
        (b'{"a": ' + b"[" * 100_000, " is nested too deeply: a row must be one flat JSON object"),
        (b'{"a": ' + b"1" * 5000 + b"}", " must be one whole JSON object"),
        (b"[" * 100_000, " is no known trace format"),
        (b'{"\\ud800": 0}', " is no known trace format"),
    ],
)
def test_hostile_bytes_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "trace").write_bytes(content)
    assert said in refusal(tmp_path / "trace")


def test_a_line_that_never_ends_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with path.open("wb") as file:
        file.write(f"{VIDUR}\n0,10,".encode())
        file.write(b"2" * MAX_LINE_BYTES)
    assert refusal(path).startswith(": line 2 is longer than 16777216 bytes: a trace has one request a line")


def test_a_path_with_a_line_break_still_makes_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\\nne' does not exist"):
        read(tmp_path / "no\nne")


@settings(max_examples=200)
@given(lines=st.lists(st.binary(max_size=40), max_size=4), header=st.sampled_from([AZURE, VIDUR, mooncake(0), ""]))
def test_any_bytes_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], header: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(b"\n".join([header.encode(), *lines]))
    try:
        assert read(path).items
    except ValueError as error:
        assert len(str(error).splitlines()) == 1 and str(path) in str(error)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 0.0}, r"rate \(0.0\) must be a finite number of requests a second above 0"),
        ({"rate": math.nan}, r"rate \(nan\) must be"),
        ({"rate": math.inf}, r"rate \(inf\) must be"),
        ({"rate": -1.0}, r"rate \(-1.0\) must be"),
        ({"num_requests": 0}, r"num_requests \(0\) must be at least 1"),
        ({"max_tokens": 0}, r"max_tokens \(0\) must be at least 1"),
        ({"ticks": "smooth"}, "unknown ticks 'smooth'; known: spread, as-is"),
        ({"seed": -1}, r"seed \(-1\) must be 0 or more"),
        ({"num_requests": 10**12}, r"num_requests \(1000000000000\) must be from 1 to 10000000"),
    ],
)
def test_a_wrong_option_names_value_and_rule(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(None, "chat", **options)


def test_a_run_needs_exactly_one_workload(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give either a trace file or the name of a built-in workload"):
        load(None, None)
    with pytest.raises(ValueError, match="give either a trace file or the name of a built-in workload"):
        load(tmp_path, "chat")


def test_an_unknown_workload_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError) as caught:
        load(None, "caht")
    assert str(caught.value) == (
        "unknown workload 'caht'; known: azure-code, azure-conv, chat, claude-code, conversation, cycle, "
        "document-template, fixed, mooncake-conversation, multi-tenant, repeated-prefix, shared-prefix, "
        "system-instruction, tool-schema. "
        "Did you mean 'chat'?"
    )


# Drawing


@pytest.mark.parametrize("name", ["chat", "fixed", "shared-prefix"])
def test_more_requests_only_extend_a_workload(name: str) -> None:
    few, many = generate(name, num_requests=20, max_tokens=9), generate(name, num_requests=50, max_tokens=9)
    assert list(few.items) == list(many.items)[:20]


def test_a_change_of_lengths_leaves_arrivals_and_tenants_alone() -> None:
    plain = generate("shared-prefix", num_requests=50)
    longer = generate("mine", recipe=SharedPrefix(own_median=1000, output_most=9), num_requests=50)
    assert arrivals(plain) == arrivals(longer)
    assert [item.request.context for item in plain.items] == [item.request.context for item in longer.items]
    assert lengths(plain) != lengths(longer)


def test_another_seed_is_another_workload() -> None:
    assert arrivals(generate("chat", seed=1)) != arrivals(generate("chat", seed=2))
    assert lengths(generate("chat", seed=1)) != lengths(generate("chat", seed=2))
    assert generate("chat", seed=1).items == generate("chat", seed=1).items


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(poisson_arrivals(rate=5.0, num=100_001, seed=3))
    assert gaps.mean() == pytest.approx(0.2, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.01)
    assert (gaps > 0.4).mean() == pytest.approx(math.exp(-2), rel=0.02)


def test_a_rate_scales_the_same_poisson_arrivals() -> None:
    assert arrivals(generate("fixed", rate=8.0)) == pytest.approx(
        [t / 2 for t in arrivals(generate("fixed", rate=4.0))]
    )


def test_chat_lengths_are_lognormal_and_clipped() -> None:
    prompts, outputs = zip(*lengths(generate("chat", num_requests=20_000)), strict=True)
    assert np.median(prompts) == pytest.approx(512, rel=0.03) and max(prompts) == 4096 and min(prompts) >= 1
    assert np.median(outputs) == pytest.approx(192, rel=0.03) and max(outputs) == 1024 and min(outputs) >= 1
    assert abs(np.corrcoef(np.log(prompts), np.log(outputs))[0, 1]) < 0.02


def test_fixed_requests_are_all_the_same() -> None:
    assert set(lengths(generate("fixed", num_requests=10))) == {(512, 128)}
    assert set(lengths(generate("mine", recipe=Fixed(num_prompt_tokens=3), num_requests=10))) == {(3, 128)}


def test_equal_ids_are_one_application_and_own_ids_are_nobody_elses() -> None:
    heads: dict[str, set[tuple[int, ...]]] = {}
    tails: list[int] = []
    for item in generate("shared-prefix", num_requests=200).items:
        prompt = item.request.prompt
        assert isinstance(prompt, ContentPrompt) and prompt.content_size == 16 and prompt.num_tokens > 1024
        heads.setdefault(item.request.context.application, set()).add(prompt.content_ids[:64])
        tails.extend(prompt.content_ids[64:])
    assert len(heads) == 4 and all(len(ids) == 1 for ids in heads.values())
    assert len(set.union(*heads.values())) == 4
    assert len(set(tails)) == len(tails) and not set(tails) & {i for ids in heads.values() for i in min(ids)}


def test_tenants_share_applications_so_that_isolation_costs_hits() -> None:
    requests = [item.request for item in generate("shared-prefix", num_requests=500).items]
    pairs = {(each.context.tenant, each.context.application) for each in requests}
    assert len(pairs) == 32  # 8 tenants x 4 applications: 32 cold prefixes instead of 4
    assert all(each.client_id == each.context.tenant for each in requests)
    share = sum(each.client_id == "tenant-0" for each in requests) / 500
    assert share == pytest.approx(1 / sum(1 / rank for rank in range(1, 9)), abs=0.06)


def test_a_prefix_must_end_where_a_content_id_ends() -> None:
    with pytest.raises(ValueError, match=r"prefix_tokens \(1000\) must be a multiple of 16"):
        SharedPrefix(prefix_tokens=1000)


def test_a_generated_workload_says_how_to_draw_it_again() -> None:
    assert generate("fixed", num_requests=3, rate=2.0, seed=7).source == (
        "Fixed(default_rate=4.0, num_prompt_tokens=512, num_output_tokens=128), num_requests=3, rate=2.0, seed=7"
    )
    assert generate("chat").rate == pytest.approx(Chat().default_rate, rel=0.1)


def test_lengths_given_become_a_workload() -> None:
    workload = from_lengths([0.0, 1.5], [10, 20], [3, 4])
    assert arrivals(workload) == [0.0, 1.5] and lengths(workload) == [(10, 3), (20, 4)]
    assert workload.items[0].request.context == Context()
    assert lengths(poisson([10, 20], [3, 4], rate=2.0)) == [(10, 3), (20, 4)]


def test_lengths_given_must_be_equally_many_positive_and_in_order() -> None:
    with pytest.raises(ValueError, match=r"arrivals \(1\), prompts \(2\) and outputs \(1\) must be equally many"):
        from_lengths([0.0], [1, 2], [1])
    with pytest.raises(ValueError, match="lengths must be at least 1 token, not 0"):
        from_lengths([0.0], [0], [1])
    with pytest.raises(ValueError, match="must list items in order of arrival"):
        from_lengths([1.0, 0.0], [1, 1], [1, 1])
    with pytest.raises(ValueError, match="arrival times that are not finite"):
        from_lengths([math.nan], [1], [1])


# The real traces


@pytest.mark.parametrize(
    ("name", "key", "num_rows"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", "azure2023_conv", 19366),
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", "azure2023_code", 8819),
        ("mooncake-fast25/conversation_trace.jsonl", "mooncake_conversation_trace", 12031),
        ("mooncake-fast25/synthetic_trace.jsonl", "mooncake_synthetic_trace", 3993),
    ],
)
def test_a_real_trace_has_its_published_statistics(name: str, key: str, num_rows: int) -> None:
    workload = read(real(name), ticks="as-is")
    stats = json.loads(real("stats.json").read_text())[key]
    assert len(workload.items) == num_rows == stats["arrival"]["n"]
    assert workload.duration == pytest.approx(stats["arrival"]["span_s"], abs=1e-9)
    assert workload.rate == pytest.approx(stats["arrival"]["rate_rps"], rel=1e-9)
    for side, values in zip(("prompt", "output"), np.array(lengths(workload)).T, strict=True):
        for percent in (1, 10, 25, 50, 75, 90, 95, 99, 99.9):
            assert np.percentile(values, percent) == pytest.approx(stats[side][f"p{percent:g}"], abs=1e-6)
        assert values.mean() == pytest.approx(stats[side]["mean"]) and values.max() == stats[side]["max"]


def test_the_real_conversation_trace_is_spread_and_the_synthetic_one_is_not() -> None:
    conversation = read(real("mooncake-fast25/conversation_trace.jsonl"))
    gaps = np.diff(arrivals(conversation))
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)  # as recorded: 3.03
    assert any("ticks of 3 s, 10.2 at once; spread uniformly" in finding for finding in conversation.findings)
    synthetic = read(real("mooncake-fast25/synthetic_trace.jsonl"))
    assert "arrivals are as recorded: no coarse clock found" in synthetic.findings


def test_the_real_conversation_trace_shares_its_published_share_of_tokens() -> None:
    """Ids are chained, so that one seen before is a block found by a cache that forgets nothing."""
    seen: set[int] = set()
    hit = total = 0
    for item in read(real("mooncake-fast25/conversation_trace.jsonl")).items:
        prompt = item.request.prompt
        assert isinstance(prompt, ContentPrompt)
        num_seen = sum(each in seen for each in prompt.content_ids)
        hit += min(num_seen * 512, prompt.num_tokens)
        total += prompt.num_tokens
        seen.update(prompt.content_ids)
    assert total == 144_793_823
    assert hit / total == pytest.approx(0.37362, abs=1e-5)


def test_the_real_vidur_trace_is_poisson_at_four_a_second() -> None:
    workload = read(real("bench-10k/poisson4_conv_10000.csv"))
    assert len(workload.items) == 10_000
    assert workload.rate == pytest.approx(4.0, rel=0.01)
    assert max(prompt + output for prompt, output in lengths(workload)) <= 4096

"""The page without a browser: it runs, answers, complains in one line, and speaks the command line's TOML."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from sim.setup import Setup
from tests.conftest import REPOSITORY

pytest.importorskip("streamlit", reason="the page needs the extra 'app'")
from streamlit.testing.v1 import AppTest

TRACE = b"arrived_at,num_prefill_tokens,num_decode_tokens\n" + b"".join(b"%d,%d,7\n" % (i, 50 + i) for i in range(9))
SETUP = Setup(
    workload="shared-prefix",
    num_requests=12,
    rate=5.0,
    seed=3,
    gpu="a100",
    tensor_parallel=2,
    num_replicas=2,
    routing="least_loaded",
    slo="ttft_p99<1s",
    transforms=("scale_rate=2",),
    engine={"batching": "stall_free,chunk_size=256", "max_num_seqs": 16, "enable_prefix_caching": False},
)


@pytest.fixture
def page() -> AppTest:
    return AppTest.from_file(str(REPOSITORY / "app.py"), default_timeout=60).run()


def press_run(page: AppTest) -> AppTest:
    page.button[0].click()
    return page.run()


def upload(page: AppTest, label: str, name: str, content: bytes) -> AppTest:
    (uploader,) = [each for each in page.file_uploader if each.label == label]
    uploader.set_value((name, content, "text/plain"))
    return page.run()


def settings(page: AppTest) -> Setup:
    """As the page offers them for download."""
    (code,) = page.code
    return Setup.from_dict(tomllib.loads(code.value))


def set_number(page: AppTest, label: str, value: Any) -> None:
    (field,) = [each for each in page.number_input if each.label == label]
    field.set_value(value)


def texts(page: AppTest) -> str:
    return "\n".join(each.proto.body for each in page.get("html"))


def said(page: AppTest) -> list[str]:
    assert not page.exception
    return [error.value.replace("\\", "") for error in page.error]


def test_a_run_is_answered_with_what_it_rests_on(page: AppTest) -> None:
    set_number(page, "Requests", 20)
    press_run(page)
    assert said(page) == []
    assert "chat: 20 of 20 requests completed in" in texts(page)
    assert "costs: public tables of llama-3-8b on h100, ×/÷1.15 (68 %)" in texts(page)
    assert len(page.get("plotly_chart")) == 4
    set_number(page, "Requests", 21)
    page.run()
    assert "changed since this run" in page.warning[0].value


def test_nothing_chosen_is_the_default_setup(page: AppTest) -> None:
    assert settings(page) == Setup()


def test_toml_goes_in_and_comes_out_the_same(page: AppTest) -> None:
    upload(page, "Take them from a file", "mine.toml", SETUP.to_toml().encode())
    assert said(page) == []
    assert settings(page) == SETUP
    (gpu,) = [each for each in page.selectbox if each.label == "GPU"]
    assert gpu.value == "a100"
    press_run(page)
    assert "shared-prefix: 12 of 12 requests completed" in texts(page)


def test_an_uploaded_trace_is_played_and_named_by_its_own_name(page: AppTest) -> None:
    upload(page, "Or a trace", "mine.csv", TRACE)
    press_run(page)
    assert said(page) == []
    assert "mine: 9 of 9 requests completed" in texts(page)
    assert settings(page) == Setup(trace="mine.csv")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"rate = 'fast'", "mine.toml: rate ('fast') must be float | None"),
        (b"rate = ", "mine.toml: Invalid value"),
        (b"rate = inf", "mine.toml: rate (inf) is too large"),
        (b"\xff", "mine.toml: 'utf-8' codec"),
        (b"gpu = 'h1000'", "mine.toml: unknown GPU 'h1000'"),
        (b"[engine]\nmax_num_seqs = 'many'", "mine.toml: max_num_seqs ('many') must be int"),
    ],
)
def test_a_bad_file_is_told_in_one_line_and_changes_nothing(page: AppTest, content: bytes, complaint: str) -> None:
    upload(page, "Take them from a file", "mine.toml", content)
    (line,) = said(page)
    assert line.startswith(complaint) and "\n" not in line
    assert settings(page) == Setup()


def test_bad_choices_are_told_in_one_line(page: AppTest) -> None:
    page.text_input(key="slo").set_value("ttfb<1s")
    press_run(page)
    assert said(page) == ["objective 'ttfb<1s': unknown metric 'ttfb'; known: ttft, tpot, itl, e2e, queue_delay"]
    page.text_input(key="slo").set_value("")
    set_number(page, "Requests/s", -1.0)
    press_run(page)
    assert len(said(page)) == 1 and "rate (-1.0)" in said(page)[0]


def test_a_bad_trace_is_told_without_where_it_was_put(page: AppTest) -> None:
    upload(page, "Or a trace", "mine.csv", TRACE + b"9,x,7\n")
    press_run(page)
    (line,) = said(page)
    assert line.startswith("mine.csv") and "11" in line

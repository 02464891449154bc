"""The command line: answers, files, and one-line errors with exit code 2."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cli
from tests.conftest import REPOSITORY, SHARED

Result = tuple[int, str, str]
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["servetwin", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return call


SMALL = ("simulate", "--num-requests", 40, "--rate", 20, "--no-band")


def test_simulate_opens_with_the_answer_and_says_what_it_rests_on(run: Run) -> None:
    code, out, err = run("simulate", "--num-requests", 40)
    assert code == 0 and err == ""
    assert out.startswith("chat: 40 of 40 requests completed")
    for words in ("TTFT", "TPOT", "E2E", "queue delay", "prefix hits by token", "prefix hits by request", "preemptions",
                  "rejections", "public tables of llama-3-8b on h100, ×/÷1.15 (68 %)", "by datasheet: small kernels",
                  "cache cold", "max_tokens is"):  # fmt: skip
        assert words in out


def test_json_to_standard_output_is_all_that_is_there(run: Run) -> None:
    for place in ("-", "/dev/stdout"):
        code, out, _ = run(*SMALL, "--json", place) if place == "-" else as_process(*SMALL, "--json", place)
        assert code == 0
        result = json.loads(out)
        assert result["metrics"]["num_completed"] == 40
        assert result["manifest"]["engine"]["scheduling"] == "fcfs"
        assert result["manifest"]["cache_state"] == "cold"
        assert result["manifest"]["policies"]["eviction"] == "policies.eviction.lru.LeastRecentlyUsed"


def test_the_band_is_the_same_run_with_dearer_and_cheaper_steps(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    run("simulate", "--num-requests", 40, "--rate", 20, "--json", path)
    result = json.loads(path.read_text())
    runs = (result["band"]["low_cost"], result["metrics"], result["band"]["high_cost"])
    cheap, middle, dear = (run["tpot"]["p50"] for run in runs)
    assert cheap < middle < dear


def test_a_journal_replays_equal_and_a_tampered_one_does_not(
    run: Run, tmp_path: Path, count: Callable[[str, int], None]
) -> None:
    journal = tmp_path / "run.jsonl"
    run(*SMALL, "--journal", journal)
    code, out, _ = run("replay", journal)
    assert code == 0 and out.startswith("equal: ")
    count("decisions_replayed", int(out.split()[3].replace(",", "")))
    lines = journal.read_text().splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith('{"plan":5'))
    lines[at] = lines[at].replace('"repeat":1', '"repeat":2').replace(",1]", ",2]", 1)
    journal.write_text("\n".join(lines) + "\n")
    code, out, _ = run("replay", journal)
    assert code == 1 and f"line {at + 1} differs" in out


def test_every_policy_of_every_menu_is_listed_with_its_knobs(run: Run) -> None:
    code, out, _ = run("policies")
    assert code == 0
    for name in ("fcfs", "priority", "chunked", "prefill_first", "static", "stall_free", "paged", "paged_full_prompt",
                 "paged_reserve_output", "contiguous_max_len", "latest", "lowest_priority", "lru", "no_reuse", "tenant",
                 "global", "accept_all", "group_size=0", "chunk_size=512"):  # fmt: skip
        assert name in out


def test_a_policy_from_ones_own_file(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "class LeastComputed:\n"
        "    def choose_victim(self, candidates, beneficiary, now):\n"
        "        return min(candidates, key=lambda s: (s.num_computed_tokens, s.sequence))\n"
    )
    journal = tmp_path / "run.jsonl"
    code, out, _ = run(*SMALL, "--preemption", f"{mine}:LeastComputed", "--num-blocks", 200, "--json", "-",
                       "--max-model-len", 2048, "--journal", journal)  # fmt: skip
    assert code == 0
    assert json.loads(out)["manifest"]["policies"]["preemption"].endswith("LeastComputed")
    assert run("replay", journal)[0] == 0


def test_the_same_run_from_options_a_file_and_a_vllm_command(run: Run, tmp_path: Path) -> None:
    """The TOML beside a result gives the result again; a serve command says the same as options."""
    options = ("simulate", "--num-requests", 40, "--max-num-seqs", 16, "--max-num-batched-tokens", 512, "--no-band")
    assert run(*options, "--json", tmp_path / "a.json")[0] == 0
    assert run("simulate", "--config", tmp_path / "a.toml", "--no-band", "--json", tmp_path / "b.json")[0] == 0
    command = "vllm serve llama-3-8b --max-num-seqs 16 --max-num-batched-tokens 512 --port 80"
    assert run("simulate", "--from", command, "--num-requests", 40, "--no-band", "--json", tmp_path / "c.json")[0] == 0
    texts = [(tmp_path / f"{name}.json").read_text() for name in "abc"]
    assert texts[0] == texts[1] == texts[2]


def test_results_compare_only_if_nothing_but_the_factor_differs(run: Run, tmp_path: Path) -> None:
    for name, extra in (("a", ()), ("b", ("--batching", "stall_free")), ("c", ("--batching", "static", "--seed", 5))):
        run(*SMALL, *extra, "--json", tmp_path / f"{name}.json")
    code, out, _ = run("diff", tmp_path / "a.json", tmp_path / "b.json", "--factor", "engine.batching")
    assert code == 0 and "engine.batching: chunked -> stall_free" in out and "TPOT p50" in out
    code, _, err = run("diff", tmp_path / "a.json", tmp_path / "c.json", "--factor", "engine.batching")
    assert code == 2 and "not comparable: besides 'engine.batching' they differ in seed" in err
    code, _, err = run("diff", tmp_path / "a.json", tmp_path / "a.json", "--factor", "seed")
    assert code == 2 and "nothing differs" in err


def test_cold_and_warm_results_are_refused(run: Run, tmp_path: Path) -> None:
    run(*SMALL, "--json", tmp_path / "cold.json")
    warm = json.loads((tmp_path / "cold.json").read_text())
    warm["manifest"]["cache_state"] = "warm"
    warm["manifest"]["engine"]["batching"] = "static"
    (tmp_path / "warm.json").write_text(json.dumps(warm))
    code, _, err = run("diff", tmp_path / "cold.json", tmp_path / "warm.json", "--factor", "engine.batching")
    assert code == 2 and "cache_state: 'cold' and 'warm'" in err


def test_an_overloaded_run_says_so_and_gives_no_percentile_of_what_waits(run: Run) -> None:
    code, out, _ = run("simulate", "--num-requests", 400, "--rate", 500, "--no-band", "--max-num-seqs", 8)
    assert code == 0 and "overloaded, no steady state" in out and "slots (max_num_seqs 8)" in out
    ttft = next(line for line in out.splitlines() if line.startswith("TTFT"))
    assert ttft.split() == ["TTFT", "-", "-", "-", "-"]


def test_objectives_are_judged_first(run: Run) -> None:
    code, out, _ = run("simulate", "--num-requests", 40, "--no-band", "--slo", "ttft_p99<1us,tpot<10s")
    assert code == 0 and "missed by" in out and "kept: tpot < 10 s by 100.0 % of arrivals" in out


def test_a_page_and_rows_are_written(run: Run, tmp_path: Path) -> None:
    code, _, _ = run(
        *SMALL, "--html", tmp_path / "r.html", "--records", tmp_path / "r.csv", "--toml", tmp_path / "r.toml"
    )
    assert code == 0
    assert "chat: 40 of 40 requests completed" in (tmp_path / "r.html").read_text()
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 41
    code, out, _ = run("report", tmp_path / "r.toml", "--html", tmp_path / "again.html", "--no-band")
    assert code == 0 and out.startswith("r: 40 of 40") and (tmp_path / "again.html").is_file()


def test_several_replicas_have_a_journal_each(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(*SMALL, "--num-replicas", 2, "--routing", "least_loaded", "--journal", tmp_path / "j.jsonl")
    assert code == 0 and "2 replicas, least_loaded" in out
    for index in (0, 1):
        assert run("replay", tmp_path / f"j.{index}.jsonl")[0] == 0


def test_a_workload_is_described_and_converted(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("workload", "describe", "--workload", "shared-prefix", "--num-requests", 200)
    assert code == 0 and "shared-prefix" in out and "arrivals are Poisson" in out
    (tmp_path / "t.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,3\n1.5,20,4\n")
    code, out, _ = run("workload", "convert", tmp_path / "t.csv", tmp_path / "t.jsonl")
    assert code == 0 and out.endswith("2 requests\n")
    code, out, _ = run("simulate", "--trace", tmp_path / "t.jsonl", "--json", "-", "--no-band")
    assert code == 0 and json.loads(out)["metrics"]["num_completed"] == 2


def test_gpus_and_models_are_listed_with_their_provenance(run: Run) -> None:
    code, out, _ = run("profiles")
    assert code == 0 and "H100" in out.upper() and "datasheet" in out and "llama-3-8b" in out


SKIP = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared scheduler traces")


@SKIP
def test_steps_writes_the_trace_format_and_checks_it(run: Run, tmp_path: Path) -> None:
    workload = SHARED / "oracle" / "vllm" / "06_priority.workload.json"
    trace = SHARED / "oracle" / "vllm" / "06_priority.trace.jsonl.gz"
    ours = tmp_path / "ours.jsonl.gz"
    assert run("steps", workload, "--preset", "vllm-v1", "--out", ours) == (0, "", "")
    assert run("steps", workload, "--preset", "vllm-v1", "--check", ours) == (0, "equal: 61 steps\n", "")
    assert run("steps", workload, "--preset", "vllm-v1", "--check", trace) == (0, "equal: 61 steps\n", "")
    with gzip.open(trace, "rt") as theirs, gzip.open(ours, "rt") as file:
        recorded, written = json.loads(list(theirs)[1]), json.loads(list(file)[1])
    assert list(recorded) == list(written), "the same fields in the same order"


@SKIP
def test_steps_names_the_first_difference(run: Run, tmp_path: Path) -> None:
    workload = SHARED / "oracle" / "vllm" / "01_plain.workload.json"
    other = SHARED / "oracle" / "vllm" / "02_chunked_long.trace.jsonl.gz"
    code, out, _ = run("steps", workload, "--check", other)
    assert code == 1 and out.startswith("first difference at step 0, arrived")
    assert len(out.splitlines()) == 1


BAD = {
    "unknown policy": (("simulate", "--eviction", "lur"), "Did you mean 'lru'?"),
    "unknown knob": (("simulate", "--batching", "static,size=3"), "unknown knob 'size' of batching policy 'static'"),
    "bad knob": (("simulate", "--batching", "static,group_size=x"), "group_size=x of batching static must be int"),
    "bad knob value": (("simulate", "--batching", "static,max_wait=nan"), "max_wait (nan) must be a finite number"),
    "bad watermark": (("simulate", "--allocation", "paged,watermark=1.5"), "watermark (1.5) must be"),
    "unknown GPU": (("simulate", "--gpu", "h1000"), "unknown GPU 'h1000'"),
    "unknown model": (("simulate", "--model", "llama-3-9b"), "unknown model 'llama-3-9b'"),
    "unknown preset": (("simulate", "--preset", "vllm"), "unknown preset 'vllm'; known: vllm-v1"),
    "unknown workload": (("simulate", "--workload", "chatt"), "Did you mean 'chat'?"),
    "both sources": (("simulate", "--workload", "chat", "--trace", "x.csv"), "either a trace file or the name"),
    "no file": (("simulate", "--trace", "nowhere.csv"), "nowhere.csv"),
    "NaN rate": (("simulate", "--rate", "nan"), "rate (nan)"),
    "negative rate": (("simulate", "--rate", "-1"), "rate (-1"),
    "text for a number": (("simulate", "--rate", "fast"), "('fast')"),
    "no requests": (("simulate", "--num-requests", 0), "num_requests (0) must be at least 1"),
    "negative seed": (("simulate", "--seed", -1), "seed (-1) must be 0 or more"),
    "no blocks": (("simulate", "--num-blocks", 0), "num_blocks (0) must be at least 1"),
    "budget under slots": (("simulate", "--max-num-batched-tokens", 8), "must be at least max_num_seqs"),
    "no memory": (("simulate", "--gpu-memory-utilization", 0.1), "no room for KV"),
    "too much memory": (("simulate", "--gpu-memory-utilization", 1.5), "must be above 0 and at most 1"),
    "contiguous with sharing": (("simulate", "--allocation", "contiguous_max_len"), "switch prefix caching off"),
    "chunking off": (("simulate", "--no-chunked-prefill"), "when chunked prefill is off"),
    "no such command": (("simulat",), "No such command 'simulat'"),
    "no such option": (("simulate", "--speed", 3), "No such option"),
    "unknown menu": (("policies", "evict"), "unknown menu 'evict'"),
    "unwritable": (("simulate", "--num-requests", 5, "--json", "/proc/nope/x"), "cannot write '/proc/nope/x'"),
    "no journal": (("replay", "nowhere.jsonl"), "cannot read 'nowhere.jsonl'"),
    "no configuration": (("simulate", "--config", "nowhere.toml"), "not a readable TOML file"),
    "unknown vLLM flag": (("simulate", "--from", "vllm serve m --lora x"), "--lora is not simulated"),
    "unknown front end": (("simulate", "--front-end", "of"), "unknown front_end 'of'; known: default, off"),
    "unknown convention": (("simulate", "--convention", "vlm"), "unknown convention 'vlm'"),
    "bad objective": (("simulate", "--slo", "ttft"), "must read like ttft_p99<1s"),
    "bad arrivals": (("simulate", "--arrivals", "gama,cv=3"), "gama"),
    "bad transform": (("simulate", "--transform", "cancle=1"), "cancle"),
    "arrivals of a trace": (("simulate", "--trace", "x.csv", "--arrivals", "poisson"), "a trace has its own"),
    "no replicas": (("simulate", "--num-replicas", 0), "num_replicas (0) must be at least 1"),
    "unknown routing": (("simulate", "--routing", "randon"), "unknown routing policy 'randon'"),
    "no result": (("diff", "a.json", "b.json", "--factor", "engine"), "not a readable result"),
    "unknown format": (("workload", "convert", "x.csv", "y.txt"), "cannot tell the format of 'y.txt'"),
    "no script": (("steps", "nowhere.json"), "not a readable workload"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_code_2(run: Run, arguments: tuple[object, ...], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("servetwin: error: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the journal is empty"),
        (b"\x00\xff\xfe", "not text"),
        (b"[1, 2]\n", "not an object"),
        (b'{"journal": 99}\n', "not a journal of version 1"),
        (b'{"journal": 1, "config": {"num_blocks": "many"}}\n', "num_blocks ('many') must be int"),
        (b'{"journal": 1, "config": {"bloks": 3}}\n', "unknown engine setting 'bloks'"),
        (b'{"journal": 1, "con', "is the file whole?"),
    ],
)
def test_what_is_not_a_journal_is_refused(run: Run, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    code, out, err = run("replay", path)
    assert (code, out) == (2, "") and words in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "document",
    ["", "{}", "[]", '{"requests": [3]}', '{"requests": [{"id": "a"}]}', '{"requests": [], "config": {"blocks": 3}}',
     '{"requests": [{"id": "a", "arrival_step": 0, "prompt_token_ids": [], "max_tokens": 3}]}',
     '{"requests": [{"id": "a", "arrival_step": 0, "prompt_token_ids": [1], "max_tokens": -1}]}',
     '{"requests": [{"id": "a", "arrival_step": 0, "prompt_token_ids": ["x"], "max_tokens": 1}]}',
     '{"requests": [], "config": {"num_blocks": "x"}}', '{"requests": [], "actions": [{"step": 0, "op": "explode"}]}',
     "[" * 100_000],
)  # fmt: skip
def test_what_is_not_a_script_is_refused(run: Run, tmp_path: Path, document: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(document)
    code, out, err = run("steps", path, "--out", tmp_path / "out.jsonl")
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and err.startswith("servetwin: error: ")
    assert [each.name for each in tmp_path.iterdir()] == ["script.json"], "no half-written trace is left"


def test_a_run_that_fails_leaves_no_file_that_looks_whole(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "class Breaks:\n    repeats = returns_together = False\n    def compose(self, step):\n"
        "        for state in step.candidates():\n            step.admit(state, 10**9)\n"
    )
    code, _, err = run(*SMALL, "--batching", f"{mine}:Breaks", "--journal", tmp_path / "j", "--json", tmp_path / "r")
    assert code == 2 and "a batching policy admitted request 0 with 1000000000 tokens" in err
    assert [each.name for each in tmp_path.iterdir() if each.suffix != ".py" and each.is_file()] == []


def as_process(*arguments: object, **environment: str) -> Result:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "cli.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


def test_one_seed_gives_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    outputs = []
    for hash_seed in ("0", "4711"):
        journal = tmp_path / f"{hash_seed}.jsonl"
        what = ("--workload", "shared-prefix", "--num-requests", 60, "--rate", 30, "--seed", 7, "--isolation", "tenant")
        tight = ("--num-blocks", 600, "--max-model-len", 4096)
        files = ("--json", "-", "--journal", journal)
        code, out, err = as_process("simulate", *what, *tight, *files, PYTHONHASHSEED=hash_seed)
        assert (code, err) == (0, "")
        outputs.append((out, journal.read_bytes()))
    assert outputs[0] == outputs[1]


def test_another_seed_gives_another_run() -> None:
    results = {as_process(*SMALL, "--json", "-", "--seed", seed)[1] for seed in (1, 2)}
    assert len(results) == 2


def test_the_demo_compares_and_replays(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("demo", "--no-live", "--shared", tmp_path / "nothing", "--out", tmp_path / "results")
    assert code == 0
    assert "chunked (vLLM V1)" in out and "prefill first (V0)" in out and "equal: " in out
    assert [each.name for each in (tmp_path / "results").iterdir()] == ["built-in-chat.journal.jsonl"]

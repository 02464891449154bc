"""`servetwin generate` and `servetwin bench`: a live body behind the same options, files and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cli
from tests.conftest import REPOSITORY

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


TINY = ("generate", "--model", "tiny", "--max-tokens", 5)
SHORT = ("--num-requests", 12, "--rate", 60, "--max-tokens", 6, "--max-model-len", 4096)


# -- generate ---------------------------------------------------------------------------------------------------------


def test_prompts_are_answered_in_order_and_the_same_whoever_shares_their_batch(run: Run) -> None:
    """A model without a tokenizer reads the bytes and says numbers."""
    code, out, err = run(*TINY, "one", "two and more", "one")
    assert code == 0 and "15 out" in err
    first, second, third = out.splitlines()
    assert first.startswith("one ") and second.startswith("two and more ") and first == third
    assert len(first.split()) == 1 + 5
    code, alone, _ = run(*TINY, "one")
    assert alone == first + "\n"


def test_chance_is_the_seeds(run: Run) -> None:
    hot = (*TINY, "one", "--temperature", 1.5)
    answers = {seed: run(*hot, "--seed", seed)[1] for seed in (1, 2, 3)}
    assert len(set(answers.values())) == 3
    assert run(*hot, "--seed", 1, "--async-depth", 1)[1] == answers[1]


def test_what_was_generated_can_be_replayed(run: Run, tmp_path: Path) -> None:
    assert run(*TINY, "one", "two", "--journal", tmp_path / "j.jsonl")[0] == 0
    code, out, _ = run("replay", tmp_path / "j.jsonl")
    assert code == 0 and out.startswith("equal: ")


def test_the_embedded_model_says_real_text(run: Run) -> None:
    code, out, _ = run("generate", "The capital of France is", "--max-tokens", 3)
    assert code == 0 and out.startswith("The capital of France is Paris")


BAD = {
    "unknown model": (("generate", "hi", "--model", "gpt-5"), "unknown model 'gpt-5': neither a folder"),
    "empty prompt": ((*TINY, ""), "an empty prompt"),
    "no tokens": (("generate", "hi", "--model", "tiny", "--max-tokens", 0), "max_tokens 0: ask for at least 1"),
    "cold": ((*TINY, "hi", "--temperature=-1"), "temperature -1.0: give 0 (greedy) or more"),
    "no mass": ((*TINY, "hi", "--top-p", 0), "top_p 0.0: give more than 0 and at most 1"),
    "too long": ((*TINY, "x" * 5000), "a prompt of 5000 tokens, but max_model_len is 4096"),
    "unknown device": ((*TINY, "hi", "--device", "tpu"), "unknown device 'tpu'; known: cpu, cuda"),
    "unknown dtype": ((*TINY, "hi", "--dtype", "int3"), "dtype 'int3' cannot be run"),
    "too large": (("generate", "hi", "--model", "random:llama-3-8b", "--dtype", "float32"), "random:llama-3-8b"),
    "no room": (("bench", *SHORT, "--num-blocks", 10**9), "blocks fit"),
    "replicas": (("bench", *SHORT, "--num-replicas", 2), "num_replicas (2) must be 1: bench runs one engine"),
    "two GPUs": (("bench", *SHORT, "--tensor-parallel", 2), "tensor_parallel (2) must be 1"),
    "KV type": (("bench", *SHORT, "--kv-dtype", "fp8"), "kv_dtype ('fp8') must be auto"),
    "unknown policy": (("bench", *SHORT, "--eviction", "lur"), "unknown eviction policy 'lur'"),
    "no such shape": (("bench", *SHORT, "--model", "llama-3-8b"), "unknown model 'llama-3-8b'"),
    "no such trace": (("bench", "--trace", "nowhere.csv"), "nowhere.csv"),
    "too much context": (("bench", *SHORT, "--max-model-len", 9000), "max_model_len (9000)"),
}


@pytest.mark.parametrize("arguments, complaint", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_code_2(
    run: Run, arguments: tuple[object, ...], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.start.free_bytes", lambda device: 4 * 1024**3)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("servetwin: error: ") and err.count("\n") == 1 and complaint in err


# -- bench ------------------------------------------------------------------------------------------------------------


def test_bench_reports_as_simulate_does(run: Run, tmp_path: Path, count: Callable[[str, int], None]) -> None:
    """The journal is replayed, and beside it stands how well a simulation guesses."""
    paths = {name: tmp_path / f"run.{name}" for name in ("json", "html", "toml", "journal", "records")}
    paths["records"] = tmp_path / "records.csv"
    files = [word for name, path in paths.items() for word in (f"--{name}", path)]
    code, out, err = run("bench", *SHORT, *files, "--slo", "ttft_p99<60s")
    assert (code, err) == (0, "")
    assert out.startswith("chat: 12 of 12 requests completed")
    for words in (
        "TTFT", "queue delay", "KV held, mean", "kept: ttft p99 < 60 s", "costs: live, tiny in float32 on cpu",
        "front end: live", "arrivals were sent up to", "replayed: equal, ", "free-running match: ",
    ):  # fmt: skip
        assert words in out, words
    result = json.loads(paths["json"].read_text())
    assert result["metrics"]["num_completed"] == 12 and result["metrics"]["num_steps"] > 0
    assert result["metrics"]["ttft"]["p50"] > 0.0
    assert "chat: 12 of 12" in paths["html"].read_text()
    assert len(paths["records"].read_text().splitlines()) == 13
    code, out, _ = run("replay", paths["journal"])
    assert code == 0
    count("decisions_replayed", int(out.split()[3].replace(",", "")))


def test_both_bodies_have_the_same_policies_and_settings(run: Run, tmp_path: Path) -> None:
    """The file beside a live result runs the simulator as well, and the other way round."""
    assert run("bench", *SHORT, "--async-depth", 2, "--json", tmp_path / "live.json")[0] == 0
    again = ("simulate", "--config", tmp_path / "live.toml", "--no-band", "--json", tmp_path / "simulated.json")
    assert run(*again)[0] == 0
    texts = [(tmp_path / f"{name}.json").read_text() for name in ("live", "simulated")]
    live, simulated = (json.loads(text)["manifest"] for text in texts)
    assert (live["body"], simulated["body"]) == ("live", "simulator")
    assert live["policies"] == simulated["policies"] and len(live["policies"]) == 7
    assert live["policies_source"] == simulated["policies_source"]
    assert live["engine"] == simulated["engine"]
    assert live["workload"] == simulated["workload"]
    assert live.keys() == simulated.keys()
    code, out, _ = run("diff", tmp_path / "simulated.json", tmp_path / "live.json", "--factor", "body")
    assert code == 0 and "body: simulator -> live" in out and "TPOT p50" in out
    assert run("bench", "--config", tmp_path / "simulated.toml", "--no-band", "--json", "-")[0] == 0


def test_bench_takes_every_option_of_simulate(run: Run) -> None:
    options = {
        name: {word for line in run(name, "--help")[1].splitlines() for word in line.split() if word.startswith("--")}
        for name in ("simulate", "bench")
    }
    assert options["bench"] - options["simulate"] == {"--device"}
    assert options["simulate"] <= options["bench"]


def test_what_only_a_simulation_uses_is_said_not_to_be(run: Run) -> None:
    code, out, _ = run("bench", *SHORT, "--gpu", "h200", "--cuda-graphs", "eager", "--front-end", "off")
    assert code == 0 and "not used by a live run: gpu, cuda_graphs" in out
    assert "front end: off, latencies begin and end at the engine" in out


def test_s38_who_gives_up_is_cancelled_and_how_long_that_took_is_told(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("bench", "--num-requests", 12, "--rate", 100, "--transform", "cancel=0.5,patience=0.001",
                       "--json", tmp_path / "run.json")  # fmt: skip
    metrics = json.loads((tmp_path / "run.json").read_text())["metrics"]
    assert code == 0 and metrics["num_aborted"] >= 3
    assert metrics["num_aborted"] + metrics["num_completed"] == 12
    told = metrics["cancel_latency"]
    assert 1 <= told["num"] <= metrics["num_aborted"] and told["max"] >= told["p50"] >= 0.0
    assert f"{told['num']} cancelled in the engine: their blocks were free p50" in out


def test_sessions_go_on_after_their_answers(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("bench", "--num-requests", 8, "--arrivals", "closed,users=4,think=0.01", "--max-tokens", 4,
                       "--json", "-")  # fmt: skip
    assert code == 0 and json.loads(out)["metrics"]["num_completed"] == 8


def test_help_and_simulate_need_no_torch() -> None:
    for arguments in (["--help"], ["bench", "--help"], ["generate", "--help"], ["simulate", "--num-requests", "5"]):
        code = (
            f"import sys; sys.argv = ['servetwin', *{arguments}]\n"
            "import cli\n"
            "try: cli.main()\n"
            "except SystemExit: pass\n"
            "print([m for m in ('torch', 'triton', 'tokenizers', 'backend') if m in sys.modules], file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "[]", arguments

"""Engine limits from what vLLM users have, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.config import EngineConfig
from sim.hardware import device
from sim.vllm_args import parse_command, parse_yaml, serve_command, server_defaults

COMMAND = (
    "vllm serve meta-llama/Meta-Llama-3-8B --max-num-seqs 128 --max-num-batched-tokens=8192 --max_model_len 16k "
    "--no-enable-prefix-caching --gpu-memory-utilization 0.95 -tp 2 --port 8000 --disable-log-requests"
)


def test_a_serve_command_sets_model_limits_caching_memory_and_parallelism() -> None:
    args = parse_command(COMMAND)
    assert args.model == "meta-llama/Meta-Llama-3-8B"
    assert args.engine == {
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "max_model_len": 16000,
        "enable_prefix_caching": False,
    }
    assert args.options == {"gpu_memory_utilization": 0.95, "tensor_parallel": 2}
    assert args.findings == ("no difference to the simulation: --port, --disable-log-requests",)


def test_the_module_form_and_bare_flags_say_the_same() -> None:
    module = COMMAND.replace("vllm serve", "python -m vllm.entrypoints.openai.api_server --model")
    assert parse_command(module) == parse_command(COMMAND)
    assert parse_command("--max-num-seqs 64").engine == {"max_num_seqs": 64}


def test_a_yaml_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\nmax-num-seqs: 32\nenable_prefix_caching: false\ngpu-memory-utilization: 0.8\n")
    args = parse_yaml(path)
    assert (args.model, args.engine) == ("m", {"max_num_seqs": 32, "enable_prefix_caching": False})


def test_16k_is_decimal_and_16K_binary_as_in_vllm() -> None:  # noqa: N802
    assert parse_command("--max-model-len 16k").engine["max_model_len"] == 16_000
    assert parse_command("--max-model-len 16K").engine["max_model_len"] == 16_384


def test_priority_scheduling_brings_its_victim() -> None:
    engine = parse_command("--scheduling-policy priority").engine
    assert engine == {"scheduling": "priority", "preemption": "lowest_priority"}


def test_asynchronous_scheduling_is_depth_two() -> None:
    assert parse_command("--async-scheduling").engine == {"async_depth": 2}
    assert parse_command("--no-async-scheduling").engine == {"async_depth": 1}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vllm serve m --speculative-config x", "--speculative-config is not simulated"),
        ("vllm serve m --max-num-seqs many", "--max-num-seqs many cannot be read"),
        ("vllm serve m --max-num-seqs", "(nothing) cannot be read"),
        ('vllm serve "m', "check the quotes"),
        ("vllm serve m --enable-prefix-caching=perhaps", "perhaps cannot be read"),
    ],
)
def test_what_is_not_known_is_named(command: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_command(command)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00"])
def test_what_is_not_settings_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        parse_yaml(path)
    assert "\n" not in str(error.value)


def test_the_flags_that_are_recommended_read_back_as_the_configuration() -> None:
    config = EngineConfig(
        max_num_seqs=48, max_num_batched_tokens=4096, enable_prefix_caching=False, scheduling="priority"
    )
    args = parse_command(serve_command("some/model", config))
    assert args.model == "some/model"
    for name, value in args.engine.items():
        if name != "preemption":
            assert getattr(config, name) == value


def test_the_server_takes_larger_steps_on_larger_gpus() -> None:
    assert server_defaults(device("h100")) == {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
    assert server_defaults(device("a100")) == {"max_num_batched_tokens": 2048, "max_num_seqs": 256}

"""Engine limits as vLLM users write them: a `vllm serve` command or its YAML, and back.

What changes a simulation is taken over; what does not (ports, logging, ...) is passed over by name; anything else is
refused by name, so that nothing is silently ignored. Defaults are vLLM V1's for its server.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policies.config import EngineConfig
from sim.hardware import Device


@dataclass(frozen=True, slots=True)
class VllmArgs:
    """Our settings, by our names; `findings` say what was assumed or passed over."""

    model: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the run: tensor_parallel, kv_dtype, ...
    findings: tuple[str, ...] = ()


def _human_int(text: str) -> int:
    """vLLM's notation: 16k is 16,000, 16K is 16,384."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    if not match:
        raise ValueError
    base = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]
    return int(float(match[1]) * base)


def _usable_blocks(text: str) -> int:
    """One of vLLM's blocks stands for no block, and holds nothing."""
    return _human_int(text) - 1


def _share(text: str) -> float:
    return float(text)


def _switch(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


# Flag -> (our setting, how it is read). Settings of the engine first.
_ENGINE = {
    "max-num-seqs": ("max_num_seqs", _human_int),
    "max-num-batched-tokens": ("max_num_batched_tokens", _human_int),
    "max-model-len": ("max_model_len", _human_int),
    "block-size": ("block_size", _human_int),
    "num-gpu-blocks-override": ("num_blocks", _usable_blocks),
    "enable-prefix-caching": ("enable_prefix_caching", _switch),
    "enable-chunked-prefill": ("enable_chunked_prefill", _switch),
    "long-prefill-token-threshold": ("long_prefill_token_threshold", _human_int),
    "scheduling-policy": ("scheduling", str),
    "async-scheduling": ("async_depth", lambda text: 2 if _switch(text) else 1),
}
_OPTIONS = {
    "gpu-memory-utilization": ("gpu_memory_utilization", _share),
    "tensor-parallel-size": ("tensor_parallel", _human_int),
    "dtype": ("dtype", str),
    "kv-cache-dtype": ("kv_dtype", str),
    "enforce-eager": ("eager", _switch),
}
_KNOWN = {**_ENGINE, **_OPTIONS}
_SWITCHES = {"enable-prefix-caching", "enable-chunked-prefill", "async-scheduling", "enforce-eager"}
_SHORT = {"tp": "tensor-parallel-size"}

# Said to make no difference to what is simulated; the number is how many values follow.
_PASSED_OVER = {
    "host": 1, "port": 1, "served-model-name": 1, "api-key": 1, "download-dir": 1, "load-format": 1, "revision": 1,
    "tokenizer": 1, "chat-template": 1, "seed": 1, "uvicorn-log-level": 1, "root-path": 1, "ssl-keyfile": 1,
    "ssl-certfile": 1, "max-log-len": 1, "trust-remote-code": 0, "disable-log-requests": 0, "disable-log-stats": 0,
    "no-enable-log-requests": 0, "enable-log-requests": 0, "disable-uvicorn-access-log": 0,
    "enable-auto-tool-choice": 0, "tool-call-parser": 1, "reasoning-parser": 1, "generation-config": 1,
    "enable-logging-iteration-details": 0,
}  # fmt: skip


def parse_command(text: str) -> VllmArgs:
    """`vllm serve MODEL --flag value ...`, or the flags alone. Raises ValueError naming the first that is not known."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a command line: {error}; check the quotes") from None
    return _read(_pairs(_without_command(words)))


def parse_yaml(path: Path) -> VllmArgs:
    """The file that `vllm serve --config` takes."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable YAML file ({str(error).splitlines()[0]})") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected vLLM's settings as 'name: value' lines")
    return _read((str(name).replace("_", "-"), str(value)) for name, value in document.items())


def _without_command(words: list[str]) -> list[str]:
    if words[:2] == ["vllm", "serve"]:
        return words[2:]
    if "vllm.entrypoints.openai.api_server" in words:
        return words[words.index("vllm.entrypoints.openai.api_server") + 1 :]
    return words


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """(flag, value); a switch's value is "true"; a leading word without dashes is the model."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            yield "model", word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = _SHORT.get(name, name).replace("_", "-")
        if equals:
            yield name, value
        elif name in _SWITCHES or name.removeprefix("no-") in _SWITCHES or _PASSED_OVER.get(name) == 0:
            yield name, "true"
        else:
            yield name, next(rest, "")


def _read(pairs: Iterator[tuple[str, str]]) -> VllmArgs:
    model: str | None = None
    engine: dict[str, Any] = {}
    options: dict[str, Any] = {}
    passed_over: list[str] = []
    for given, text in pairs:
        name, value = given, text
        if given.startswith("no-") and given[3:] in _SWITCHES:
            name, value = given[3:], "false"
        if name == "model":
            model = value
        elif name in _PASSED_OVER:
            passed_over.append(f"--{name}")
        else:
            setting, read = _setting(name)
            (engine if name in _ENGINE else options)[setting] = _value(name, value, read)
    if engine.get("scheduling") == "priority":
        engine["preemption"] = "lowest_priority"
    findings = (f"no difference to the simulation: {', '.join(passed_over)}",) if passed_over else ()
    return VllmArgs(model, engine, options, findings)


def _setting(name: str) -> tuple[str, Any]:
    if name not in _KNOWN:
        raise ValueError(
            f"vLLM flag --{name} is not simulated; taken over: {', '.join(f'--{flag}' for flag in sorted(_KNOWN))}. "
            f"Leave it out if it does not matter"
        )
    return _KNOWN[name]


def _value(name: str, text: str, read: Any) -> Any:
    try:
        return read(text)
    except (KeyError, ValueError):
        raise ValueError(f"--{name} {text or '(nothing)'} cannot be read: check the value after it") from None


def server_defaults(device: Device) -> dict[str, Any]:
    """What vLLM V1's server takes where nothing is said: larger steps on 70 GiB and more, the A100 excepted."""
    is_large = device.memory_gb >= 70 and "a100" not in device.name.lower()
    return {"max_num_batched_tokens": 8192 if is_large else 2048, "max_num_seqs": 1024 if is_large else 256}


def serve_command(
    model: str, config: EngineConfig, tensor_parallel: int = 1, gpu_memory_utilization: float = 0.9
) -> str:
    """The `vllm serve` command that sets the engine as simulated, as far as vLLM has the setting."""
    flags = [
        f"--max-num-seqs {config.max_num_seqs}",
        f"--max-num-batched-tokens {config.max_num_batched_tokens}",
        f"--max-model-len {config.max_model_len}",
        f"--block-size {config.block_size}",
        f"--gpu-memory-utilization {gpu_memory_utilization:g}",
    ]
    if tensor_parallel > 1:
        flags.append(f"--tensor-parallel-size {tensor_parallel}")
    if not config.enable_prefix_caching:
        flags.append("--no-enable-prefix-caching")
    if config.scheduling == "priority":
        flags.append("--scheduling-policy priority")
    if config.long_prefill_token_threshold:
        flags.append(f"--long-prefill-token-threshold {config.long_prefill_token_threshold}")
    return " ".join(["vllm serve", shlex.quote(model), *flags])

"""A scripted workload: settings as in vLLM, requests by step, forced outputs, resets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.catalogue import preset
from policies.config import EngineConfig
from policies.prompt import TokenPrompt
from policies.types import Context, Request, Sampling

Line = dict[str, Any]

# What vLLM's recorder assumes for settings that a workload leaves out.
DEFAULTS: Line = {
    "block_size": 16,
    "num_blocks": 65,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 128,
    "max_num_active_seqs": None,
    "max_model_len": 1024,
    "policy": "fcfs",
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "hash_algo": "sha256_cbor",
    "max_steps": 2000,
    "async": False,
}
PHASES = ("before_schedule", "during_execute")
OPERATIONS = ("reset_prefix_cache", "reset_running_requests")


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request of the script. Steps count from 0."""

    request: Request
    arrival_step: int
    cancel_step: int | None
    cancel_phase: str
    salt: str


@dataclass(frozen=True, slots=True)
class ForcedOutput:
    """What a request answers, whatever the model: the ids given, else numbers that no other request answers."""

    index: int  # of the last entry with this id
    given: tuple[int, ...] = ()

    def token(self, number: int) -> int:
        if number < len(self.given):
            return self.given[number]
        return 10 + (10003 * (self.index + 1) + 7919 * number) % 30000


@dataclass(frozen=True, slots=True)
class Script:
    """A workload file: settings (as in vLLM), requests, and resets by step."""

    name: str
    settings: Line
    requests: tuple[ScriptedRequest, ...]
    outputs: Mapping[str, ForcedOutput]
    actions: tuple[Line, ...]

    @property
    def last_step(self) -> int:
        """The last step at which something is to happen."""
        steps = [each.arrival_step for each in self.requests]
        return max(steps + [each.cancel_step or 0 for each in self.requests], default=0)


def engine_config(settings: Mapping[str, Any], preset_name: str) -> EngineConfig:
    """vLLM's settings as ours; vLLM counts its null block in `num_blocks`."""
    values = preset("vllm-v1-priority" if settings["policy"] == "priority" else preset_name)
    # A script speaks to the scheduler behind the front end's back: what can never run waits forever, as it does there.
    values |= {"refuse_unfittable": False, "isolation": "tenant"}
    allocation = "paged_full_prompt" if settings["scheduler_reserve_full_isl"] else "paged"
    same = (
        "block_size", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching", "enable_chunked_prefill",
        "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
    )  # fmt: skip
    return EngineConfig(
        **values
        | {name: settings[name] for name in same}
        | {
            "num_blocks": settings["num_blocks"] - 1,
            "max_num_seqs": settings["max_num_active_seqs"] or settings["max_num_seqs"],
            "allocation": f"{allocation},watermark={settings['watermark']}",
            "async_depth": 2 if settings["async"] else 1,
        }
    )


def read_script(path: Path, header: Mapping[str, Any] | None = None) -> Script:
    """Settings that the file leaves out are those of a trace's header, if given, or the recorder's.

    Raises ValueError, one line, for what is missing or does not make sense.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a readable workload ({error}); expected JSON with 'config' and 'requests'"
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
        raise ValueError(f"{path}: not a scheduler workload; expected an object with 'config' and 'requests'")
    known = {name: value for name, value in (header or {}).items() if name in DEFAULTS}
    settings = {**DEFAULTS, **known, **document.get("config", {})}
    for name, value in settings.items():
        if name not in DEFAULTS:
            raise ValueError(f"{path}: unknown setting {name!r}; known: {', '.join(DEFAULTS)}")
        kinds = (int, type(None)) if name == "max_num_active_seqs" else (type(DEFAULTS[name]),)
        if type(value) not in kinds and not (kinds == (float,) and type(value) is int):
            raise ValueError(f"{path}: setting {name} ({value!r}) must be {kinds[0].__name__}")
    try:
        requests = tuple(_scripted(row) for row in document["requests"])
        outputs = {str(row["id"]): _output(index, row) for index, row in enumerate(document["requests"])}
        actions = tuple(_action(row) for row in document.get("actions", ()))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: a request or action lacks or misuses the field {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return Script(path.name.removesuffix(".json").removesuffix(".workload"), settings, requests, outputs, actions)


def _scripted(row: Line) -> ScriptedRequest:
    salt = row.get("cache_salt") or ""
    phase = row.get("cancel_phase") or PHASES[0]
    if phase not in PHASES:
        raise ValueError(f"request {row['id']!r} has cancel_phase {phase!r}; known: {', '.join(PHASES)}")
    request = Request(
        request_id=str(row["id"]),
        arrival_time=float(row["arrival_step"]),
        prompt=TokenPrompt(tuple(_token(value) for value in row["prompt_token_ids"])),
        max_tokens=int(row["max_tokens"]),
        priority=row.get("priority") or 0,
        context=Context(tenant=salt),
        sampling=Sampling(stop_token_ids=tuple(row.get("stop_token_ids") or ())),
    )
    return ScriptedRequest(request, row["arrival_step"], row.get("cancel_step"), phase, salt)


def _output(index: int, row: Line) -> ForcedOutput:
    return ForcedOutput(index, tuple(_token(value) for value in row.get("output_token_ids") or ()))


def _token(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"token id {value!r} must be an integer")
    return value


def _action(row: Line) -> Line:
    if row["op"] not in OPERATIONS:
        raise ValueError(f"unknown op {row['op']!r}; known: {', '.join(OPERATIONS)}")
    return {"step": int(row["step"]), **row}

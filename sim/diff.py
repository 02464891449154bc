"""Two results side by side, if they may be compared: nothing but the named factor may differ in what they rest on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Follows from other entries, or says the same in other words.
DERIVED = (
    "policies.",
    "memory.",
    "isolation",
    "engine.threat_decision",
    "profile.band",
    "profile.efficiency_source",
    "profile.parts.",
    "vllm_flags",
)
OF_THE_BODY = ("profile.", "front_end", "versions.")  # what a simulator assumes, and what a live body is


def read_result(path: Path) -> dict[str, Any]:
    """Raises ValueError for what is not a result of `simulate --json`."""
    try:
        result = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable result ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(result, dict) or not {"manifest", "metrics"} <= result.keys():
        raise ValueError(f"{path}: not a result of simulate --json: it has no manifest and metrics")
    return result


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested names joined by dots; what is not a mapping is a value."""
    if not isinstance(value, Mapping):
        return {name: value}
    found: dict[str, Any] = {}
    for key, each in value.items():
        found.update(flat(each, f"{name}.{key}" if name else str(key)))
    return found


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Entries of two manifests that are not the same, those that follow from others left out."""
    left, right = flat(a), flat(b)
    derived = DERIVED if left.get("body") == right.get("body") else (*DERIVED, *OF_THE_BODY)
    return {
        name: (left.get(name), right.get(name))
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name) and not name.startswith(derived)
    }


def check_comparable(a: Mapping[str, Any], b: Mapping[str, Any], factor: str) -> dict[str, tuple[Any, Any]]:
    """What differs under the factor's name. Raises ValueError naming what else does, cold against warm included."""
    found = differences(a, b)
    other = {name: values for name, values in found.items() if not _is_under(name, factor)}
    if other:
        told = "; ".join(f"{name}: {x!r} and {y!r}" for name, (x, y) in list(other.items())[:5])
        raise ValueError(
            f"not comparable: besides {factor!r} they differ in {told}; run them alike, or name the factor"
        )
    if not found:
        raise ValueError(f"nothing differs, {factor!r} included: these are two results of the same run")
    return found


def _is_under(name: str, factor: str) -> bool:
    return name == factor or name.startswith(f"{factor}.") or name.endswith(f".{factor}")

"""Shapes of decoder models: by name, or from a Hugging Face config.json."""

from __future__ import annotations

import os.path
from dataclasses import replace
from pathlib import Path

from sim.hardware import look_up
from sim.models.catalogue import BY_ALIAS, BY_NAME, MODELS
from sim.models.config_json import from_config, read_config
from sim.models.shape import Experts, LatentAttention, Model

__all__ = ["MODELS", "Experts", "LatentAttention", "Model", "from_config", "model", "read_config", "stored_as"]

_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp8": "fp8"}
_KV_DTYPES = {**_DTYPES, "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}


def model(name: str) -> Model:
    """A listed name or alias, or the path of a config.json or of its folder. Raises ValueError for anything else."""
    try:
        return look_up("model", name, BY_NAME, BY_ALIAS)
    except ValueError as error:
        path = name.strip()
        if path.endswith(".json") or (path and os.path.isdir(path)):
            return read_config(Path(path))
        raise ValueError(f"{error} The path of a model's config.json will do as well.") from None


def stored_as(the_model: Model, dtype: str = "auto", kv_dtype: str = "auto") -> Model:
    """With weights and KV in these types, spelled as vLLM's users do: auto, bfloat16, half, fp8, fp8_e4m3, ...

    A model published in fp8 stays so whatever `dtype` its activations have; KV follows the activations unless said.
    """
    for name, value, known in (("dtype", dtype, _DTYPES), ("kv_dtype", kv_dtype, _KV_DTYPES)):
        if value != "auto" and value not in known:
            raise ValueError(f"unknown {name} {value!r}; known: auto, {', '.join(known)}")
    weights = the_model.dtype if the_model.dtype == "fp8" else _DTYPES.get(dtype, the_model.dtype)
    return replace(the_model, dtype=weights, kv_dtype=_KV_DTYPES.get(kv_dtype, the_model.kv_dtype))

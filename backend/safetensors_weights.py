"""A decoder from a Hugging Face folder: config.json, and safetensors in one file or in shards with an index."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.config import ModelConfig
from backend.config_json import read_json, to_config
from backend.model import Decoder
from backend.weights import Shape, assemble, check_shapes, expected_shapes

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BUFFERS = ("rotary_emb.inv_freq",)  # written by old versions; computed here


def load_folder(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """Raises ValueError, one line, for files that are missing or damaged, and for another architecture.

    Names and shapes of all tensors are checked before the first is read.
    """
    config = folder_config(folder)
    with ExitStack() as stack:
        shards = {path: _open(path, stack) for path in _files(folder)}
        homes = {name: shard for shard in shards.values() for name in shard.keys()}  # noqa: SIM118
        found = {name: _shape(shard, name) for name, shard in homes.items() if not name.endswith(_BUFFERS)}
        if config.tied_embeddings:
            found.pop("lm_head.weight", None)  # some checkpoints hold the embedding twice
        check_shapes(str(folder), expected_shapes(config), found)

        def read(name: str) -> Tensor:
            tensor: Tensor = homes[name].get_tensor(name)
            return tensor.to(device=device, dtype=dtype)

        return assemble(config, read)


def folder_config(folder: Path) -> ModelConfig:
    """Of config.json; generation_config.json, where there is one, knows all tokens that end an answer."""
    path, values = folder / "config.json", read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        ends = read_json(generation).get("eos_token_id")
        values = values | ({} if ends is None else {"eos_token_id": ends})
    return to_config(values, str(path), folder.name)


def _files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise ValueError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}")
    index = read_json(folder / _INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / _INDEX}: weight_map must name each tensor's file")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{folder / _INDEX}: {name!r} is not a file of this folder")
    return [folder / name for name in names]


def _open(path: Path, stack: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError:
        raise ValueError(f"{path}: is missing") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged or truncated ({str(error).splitlines()[0]})") from None


def _shape(shard: Any, name: str) -> Shape:
    return tuple(shard.get_slice(name).get_shape())

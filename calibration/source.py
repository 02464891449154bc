"""Which kernels were measured: a hash of the code that runs a step."""

from __future__ import annotations

import hashlib
from pathlib import Path

import backend

LEFT_OUT = ("gpu_check.py", "generate.py", "load.py", "tokenizer.py", "gguf_file.py", "gguf_weights.py")


def kernel_hash() -> str:
    """Of all files of the live body but those that only load and check: a profile of other kernels is another's."""
    root = Path(backend.__file__).parent
    hasher = hashlib.sha256()
    for path in sorted(root.rglob("*.*")):
        if path.suffix in (".py", ".json") and path.name not in LEFT_OUT:
            hasher.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]

"""Every kernel compiled ahead of time, without a GPU: for each row of the table and each architecture.

    python -m backend.kernels.aot [--arch 90] [--verbose]

What must hold: it compiles, nothing spills to the stack, its shared memory fits, and where the grid is persistent all
programs of a multiprocessor fit at once. Triton keeps what it compiled in TRITON_CACHE_DIR, so that only what changed
is compiled again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backend.kernels import decode, decode_work, kv_write, prefill
from backend.kernels.configs import Config, Constants, Row, choose, config_of, key_of, read_table
from backend.kernels.shape import FP8, AttentionShape

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of a program; a multiprocessor has 1 KiB more
SHARED_LIMIT_OF_ALL = 99 * 1024  # sm_86, sm_89, sm_120: for rows that name no architecture
TUNED_FOR = 90  # persistent grids are sized for its multiprocessors
REGISTERS = 65536  # of a multiprocessor
NUM_PROGRAMS = 264
LARGEST = 2**30
TYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "fp8e4nv"}
FLOATS = ("scale", "v_scale", "k_factor", "v_factor")
FP32_POINTERS = ("parts", "weights", "cos", "sin")
INT64_POINTERS = ("positions", "slots")
INT32_POINTERS = ("block_tables", "context_lens", "plan", "starts", "spans", "arrivals", "items", "sums")


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of a kernel. `named_arch`: its row names the architecture it is for."""

    name: str
    function: Any
    shape: AttentionShape
    constants: Constants
    config: Config
    named_arch: bool = False

    def signature(self) -> dict[str, str]:
        return {name: self._type(name) for name in self.function.arg_names}

    def _type(self, argument: str) -> str:
        if argument in self.constants:
            return "constexpr"
        if argument in FLOATS:
            return "fp32"
        if argument in FP32_POINTERS:
            return "*fp32"
        if argument in INT64_POINTERS:
            return "*i64"
        if argument in INT32_POINTERS:
            return "*i32"
        if argument in ("k_cache", "v_cache"):
            return "*" + TYPE_NAMES[self.shape.kv_dtype]
        return "*" + TYPE_NAMES[self.shape.dtype] if argument in ("q", "k", "v", "out") else "i32"

    def __str__(self) -> str:
        shape, config = self.shape, self.config
        return (
            f"{self.name} {TYPE_NAMES[shape.kv_dtype]} D{shape.head_dim} G{shape.group} page {shape.block_size} "
            f"{config.rows}x{config.tile} w{config.num_warps} s{config.num_stages}"
        )


@dataclass(frozen=True, slots=True)
class Usage:
    registers: int
    stack_bytes: int
    shared_bytes: int

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.shared_bytes} B shared"


def compile_for(variant: Variant, arch: int) -> Usage:
    signature = variant.signature()
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(signature) if _is_aligned(name, signature)}
    source = ASTSource(variant.function, signature, constexprs=variant.constants, attrs=aligned)
    options = {"num_warps": variant.config.num_warps, "num_stages": variant.config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = _read_cubin(compiled.asm["cubin"])
    return Usage(registers, stack, compiled.metadata.shared)


def _is_aligned(argument: str, signature: Mapping[str, str]) -> bool:
    """Of pointers and strides of tokens to 16, as they are when a model runs."""
    return signature[argument].startswith("*") or argument in ("q_stride", "k_stride", "v_stride")


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, as the bundled disassembler reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found, f"cuobjdump said nothing of registers: {done.stdout}"
    return int(found[1]), int(found[2])


def faults(variant: Variant, arch: int, usage: Usage) -> list[str]:
    """What a GPU of this architecture would refuse, or be slow for."""
    found = []
    if usage.stack_bytes:
        found.append(f"{usage.stack_bytes} B of stack")
    limit = SHARED_LIMIT[arch] if variant.named_arch else SHARED_LIMIT_OF_ALL
    if usage.shared_bytes > limit:
        found.append(f"more than {limit} B of shared memory")
    at_once = variant.config.programs_per_sm
    if variant.name == "decode" and arch == TUNED_FOR:
        if at_once * (usage.shared_bytes + 1024) > SHARED_LIMIT[arch] + 1024:
            found.append(f"{at_once} x {usage.shared_bytes} B of shared memory do not fit at once")
        if at_once * -(-usage.registers // 8) * 8 * 32 * variant.config.num_warps > REGISTERS:
            found.append(f"{at_once} x {variant.config.num_warps} warps of {usage.registers} registers do not fit")
    return found


LAYERS = (  # 8B- and 135M-like, and beside them other groups, pages and types
    AttentionShape(32, 8, 128, 16, torch.bfloat16, torch.bfloat16),
    AttentionShape(9, 3, 64, 16, torch.bfloat16, torch.bfloat16),
    AttentionShape(64, 8, 128, 64, torch.float16, torch.float16),
    AttentionShape(4, 4, 64, 128, torch.float16, torch.float16),
    AttentionShape(32, 8, 128, 16, torch.bfloat16, FP8),
    AttentionShape(9, 3, 64, 32, torch.float32, torch.float32),
)
DTYPES = {"fp32": (torch.float32,) * 2, "half": (torch.bfloat16,) * 2, "fp8": (torch.bfloat16, FP8)}


def layers(rows: Sequence[Row]) -> list[AttentionShape]:
    """The usual layers, and one for each row that names more than its type."""
    named = [row for row in rows if {"head_dim", "group", "block_size"} & set(row)]
    return list(dict.fromkeys((*LAYERS, *map(_layer_of, named))))


def _layer_of(row: Row) -> AttentionShape:
    dtype, kv_dtype = DTYPES[str(row.get("dtype", "half"))]
    num_heads = int(row.get("group", 4)) * 8
    return AttentionShape(num_heads, 8, int(row.get("head_dim", 128)), int(row.get("block_size", 16)), dtype, kv_dtype)


def variants(arch: int, rows: Sequence[Row]) -> list[Variant]:
    """What runs on `arch`: for every layer and size, the kernels with the row that is chosen for them."""
    found = {str(variant): variant for shape in layers(rows) for variant in _of_layer(arch, shape, rows)}
    if arch < 89:  # fp8 is new there
        found = {name: variant for name, variant in found.items() if variant.shape.kv_dtype != FP8}
    return [*found.values(), *_small_kernels()]


def _of_layer(arch: int, shape: AttentionShape, rows: Sequence[Row]) -> Iterator[Variant]:
    sizes = {LARGEST, *(int(row["max_size"]) for row in rows if "max_size" in row)}
    for kernel in ("decode", "prefill", "kv_write"):
        key = replace(key_of(kernel, shape, LARGEST, "cpu"), arch=arch)
        chosen = [choose(replace(key, size=size), rows) for size in sorted(sizes)]
        yield from (of_row(row, shape) for row in chosen)


def of_row(row: Row, shape: AttentionShape) -> Variant:
    """The row's kernel for this layer; of the conventions of RoPE, one a layer."""
    kernel, config, named_arch = str(row["kernel"]), config_of(row), "arch" in row
    if kernel == "decode":
        constants = decode.decode_constants(shape, config, NUM_PROGRAMS, one_launch=True)
        return Variant(kernel, decode._decode_kernel, shape, constants, config, named_arch)
    if kernel == "prefill":
        constants = prefill.prefill_constants(shape, config)
        return Variant(kernel, prefill._prefill_kernel, shape, constants, config, named_arch)
    constants = kv_write.kv_write_constants(shape, config, interleaved=shape.head_dim == 64)
    return Variant(kernel, kv_write._kv_write_kernel, shape, constants, config, named_arch)


def _small_kernels() -> Iterator[Variant]:
    """The plan of a step, and the second launches."""
    shape, config = LAYERS[0], Config(rows=16, tile=64, num_warps=4, num_stages=3)
    plan = decode_work.plan_constants(shape, config, NUM_PROGRAMS, max_num_seqs=4096)
    yield Variant("decode plan", decode_work._plan_kernel, shape, plan, replace(config, num_warps=8))
    two = decode.decode_constants(shape, config, NUM_PROGRAMS, one_launch=False)
    yield Variant("decode, two launches", decode._decode_kernel, shape, two, config)
    sums = decode.sum_constants(shape, config, NUM_PROGRAMS)
    yield Variant("decode sum", decode._sum_kernel, shape, sums, config)
    yield Variant("prefill sum", prefill._sum_kernel, shape, prefill.sum_constants(shape, config), config)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every kernel ahead of time and check what it uses.")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, action="append", help="default: all")
    parser.add_argument("--verbose", action="store_true", help="also what each kernel uses")
    options = parser.parse_args(arguments)
    num_faults = num_compiled = 0
    for arch in options.arch or ARCHITECTURES:
        for variant in variants(arch, read_table()):
            usage = compile_for(variant, arch)
            found = faults(variant, arch, usage)
            if found or options.verbose:
                print(f"sm_{arch} {variant}: {usage}", *found, sep="; ")
            num_compiled, num_faults = num_compiled + 1, num_faults + len(found)
    print(f"triton {triton.__version__}: {num_compiled} kernels compiled, {num_faults} faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())

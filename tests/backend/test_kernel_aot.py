"""Every kernel compiles for every architecture without a GPU, spills nothing, and fits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from backend.kernels import aot
from backend.kernels.configs import Config, choose, config_of, key_of, read_table
from backend.kernels.shape import AttentionShape
from tests.conftest import REPOSITORY

LAYER = AttentionShape(32, 8, 128, 16, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("arch", aot.ARCHITECTURES)
def test_every_kernel_compiles_ahead_of_time(arch: int) -> None:
    """In a process that does not interpret. What is compiled is kept: only what changed is compiled again."""
    kept = {"TRITON_CACHE_DIR": str(REPOSITORY / "build" / "triton")} | os.environ
    compiling = {name: value for name, value in kept.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "backend.kernels.aot", "--arch", str(arch)]
    done = subprocess.run(command, cwd=REPOSITORY, env=compiling, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(aot.variants(arch, read_table()))} kernels compiled, 0 faults" in done.stdout


def test_what_would_not_run_well_is_a_fault() -> None:
    decode, anywhere = (aot.of_row(row, LAYER) for row in (read_table()[0], read_table()[0]))
    assert not aot.faults(decode, 90, aot.Usage(registers=200, stack_bytes=0, shared_bytes=90_000))
    assert "8 B of stack" in aot.faults(decode, 90, aot.Usage(100, 8, 1000))
    assert "more than 101376 B" in aot.faults(anywhere, 80, aot.Usage(100, 0, 102_000))[0]
    one_more = aot.of_row({**read_table()[0], "programs_per_sm": 3}, LAYER)
    assert "3 x 90000 B of shared memory do not fit" in aot.faults(one_more, 90, aot.Usage(100, 0, 90_000))[0]
    assert "3 x 4 warps of 200 registers" in aot.faults(one_more, 90, aot.Usage(200, 0, 1000))[0]


def test_every_row_of_the_table_is_compiled_somewhere() -> None:
    chosen = {
        (variant.name, variant.config)
        for arch in aot.ARCHITECTURES
        for variant in aot.variants(arch, read_table())
    }  # fmt: skip
    assert {(row["kernel"], config_of(row)) for row in read_table()} <= chosen


def test_the_row_that_names_most_is_chosen_then_the_smallest() -> None:
    def row(tile: int, **named: int | str) -> dict[str, int | str]:
        return {"kernel": "decode", "rows": 16, "tile": tile, "num_warps": 4, "num_stages": 3, **named}

    rows = [row(1), row(2, max_size=100), row(3, max_size=10), row(4, dtype="half"), row(5, dtype="half", group=4),
            row(6, dtype="half", group=4, max_size=50), row(7, group=5, head_dim=64),
            row(8, arch=90, group=3)]  # fmt: skip
    large = key_of("decode", LAYER, 1000, "cpu")
    assert config_of(choose(large, rows)) == Config(16, 5, 4, 3)
    small = key_of("decode", LAYER, 50, "cpu")
    assert config_of(choose(small, rows)).tile == 6
    other = key_of("decode", AttentionShape(2, 1, 64, 16, torch.float32, torch.float32), 5, "cpu")
    assert [config_of(choose(key, rows)).tile for key in (other, key_of("decode", LAYER, 101, "cpu"))] == [3, 5]
    with pytest.raises(AssertionError, match=r"configs\.json has no row"):
        choose(key_of("prefill", LAYER, 1, "cpu"), rows)

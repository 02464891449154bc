"""A sweep of 500 runs, killed at random moments: is anything lost or doubled?

    python benchmarks/sweep_resume.py [--num 500] [--kills 8] [--seed 0] [--num-workers 2]

A child plays the sweep and is killed (SIGKILL) while it does, again and again; the last one may end. Its rows are then
compared, to the byte, with those of a sweep that nobody disturbed. The exit status is 1 if any is missing, double or
different.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: policies.py in it is not the package

from sim.experiment.sweep.play import Sweep, sweep  # noqa: E402
from sim.experiment.sweep.space import Range  # noqa: E402
from sim.experiment.sweep.workers import Processes  # noqa: E402
from sim.setup import Setup  # noqa: E402


def what(num: int) -> Sweep:
    """Runs of some hundredths of a second, each at a rate of its own."""
    base = Setup(workload="fixed", num_requests=40, front_end="off", costs="datasheet", engine={"num_blocks": 2000})
    return Sweep(base, (Range("rate", 1.0, 20.0, num_levels=num),))


def kill_once(command: list[str], path: Path, rng: random.Random, num: int) -> str:
    """Let a child get on by some share of what is left, and kill it there."""
    have = num_rows(path)
    until, began = have + rng.randint(1, max(1, (num - have) // 3)), time.monotonic()
    child = subprocess.Popen(command)
    while child.poll() is None and num_rows(path) < until:
        time.sleep(0.001)
    time.sleep(0.05 * rng.random())  # somewhere between two rows, or within one
    child.send_signal(signal.SIGKILL)
    child.wait()
    text = path.read_bytes()
    torn = len(text) - text.rfind(b"\n") - 1
    return f"killed after {time.monotonic() - began:.1f} s with {num_rows(path)} rows, {torn} bytes of another"


def num_rows(path: Path) -> int:
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)  # what a child does
    given = parser.parse_args()
    if given.play is not None:
        sweep(what(given.num), given.play, Processes(given.num_workers))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return _check(given, Path(folder))


def _check(given: argparse.Namespace, folder: Path) -> int:
    killed, whole, rng = folder / "killed.jsonl", folder / "whole.jsonl", random.Random(given.seed)
    sizes = ["--num", str(given.num), "--num-workers", str(given.num_workers)]
    command = [sys.executable, __file__, *sizes, "--play", str(killed)]
    for _ in range(given.kills):
        print(kill_once(command, killed, rng, given.num), flush=True)
    subprocess.run(command, check=True)
    sweep(what(given.num), whole, Processes(given.num_workers))
    found, wanted = killed.read_text().splitlines(), whole.read_text().splitlines()
    lost, doubled = set(wanted) - set(found), len(found) - len(set(found))
    print(f"{len(found) - 1} rows of {given.num}: {len(lost)} lost or different, {doubled} doubled")
    return int(bool(lost) or bool(doubled) or len(found) != len(wanted))


if __name__ == "__main__":
    sys.exit(main())

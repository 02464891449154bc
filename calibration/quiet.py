"""Was the machine ours? Cores that other processes used, or that a hypervisor took away, while we measured."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
COARSE = 0.1  # seconds: so far off may counts of ticks be
MOST = 0.25  # cores: more, and what was measured is somebody else's work too


class Usage(NamedTuple):
    """Seconds since some time: of the machine's cores at work, of those among them that worked for this process."""

    wall: float
    busy: float  # what was stolen is counted
    own: float

    @classmethod
    def now(cls) -> Usage:
        return cls(time.monotonic(), _busy_seconds(), time.process_time())


def others(since: Usage) -> float:
    """Cores, in the mean since then, that were busy for somebody else; 0 where the system does not tell."""
    now = Usage.now()
    foreign = (now.busy - since.busy) - (now.own - since.own) - COARSE
    return max(0.0, foreign) / max(1e-6, now.wall - since.wall)


def _busy_seconds() -> float:
    """user, nice, system, irq, softirq and steal, of all cores."""
    try:
        ticks = list(map(int, STAT.read_text().split("\n", 1)[0].split()[1:]))
    except (OSError, ValueError):
        return 0.0
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")

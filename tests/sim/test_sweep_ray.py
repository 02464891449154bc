"""A sweep on Ray gives the rows that it gives here. `make ray` brings Ray, into an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.experiment.sweep.play import Sweep, sweep
from sim.experiment.sweep.space import parse_knob
from sim.experiment.sweep.workers import Here, workers_named
from sim.setup import Setup

ray: Any = pytest.importorskip("ray", reason="Ray is not installed here: `make ray` brings it, and runs this")
BASE = Setup(workload="fixed", num_requests=12, front_end="off", costs="datasheet", engine={"num_blocks": 2000})
WHAT = Sweep(BASE, (parse_knob("rate=2,6", BASE), parse_knob("engine.block_size=0,16,32", BASE)), num_seeds=2)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of this machine, gone afterwards."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("default")  # Ray's own
def test_rows_are_the_same_on_ray_and_a_torn_file_goes_on_there(tmp_path: Path) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    wanted = sweep(WHAT, here, Here())
    there.write_bytes(here.read_bytes()[:-300])
    found = sweep(WHAT, there, workers_named("ray", 2))
    assert found.num_found < 12 and repr(found.points) == repr(wanted.points)
    assert sorted(there.read_text().splitlines()) == sorted(here.read_text().splitlines())

"""One file of settings, both bodies: every entry of every menu runs in a simulation and live, and replays equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench import Bench
from liverun import play
from policies.catalogue import MENU, build
from policies.journal import replay
from sim.commands import Prepared
from sim.setup import Setup
from tests.specs import examples

ENTRIES = [(menu, name) for menu, entries in MENU.items() for name in entries if menu != "routing"]


def setup_with(tmp_path: Path, menu: str, name: str) -> Setup:
    """The file as a user would write it, with a pool small enough for its policies to be asked."""
    path = tmp_path / "run.toml"
    shares = not (menu == "allocation" and name == "contiguous_max_len")
    path.write_text(
        'workload = "multi-tenant"\nnum_requests = 8\nrate = 40.0\nmax_tokens = 6\nmodel = "tiny"\n'
        'transforms = ["cap,prompt=48"]\n'
        "[engine]\nblock_size = 16\nnum_blocks = 24\nmax_model_len = 256\nmax_num_seqs = 4\n"
        'max_num_batched_tokens = 256\nthreat_decision = "a test"\n'
        f'enable_prefix_caching = {str(shares).lower()}\n{menu} = "{examples(menu, name)[0]}"\n'
    )
    return Setup.from_toml(path)


@pytest.mark.parametrize(("menu", "name"), ENTRIES)
def test_an_entry_runs_in_both_bodies_from_one_file(
    menu: str, name: str, tmp_path: Path, count: Callable[[str, int], None]
) -> None:
    setup = setup_with(tmp_path, menu, name)
    simulated, bench = Prepared.of(setup), Bench.of(setup, "cpu")
    journals: tuple[list[str], list[str]] = ([], [])
    runs = (simulated.run(journal=[journals[0].append]), play(bench.body, bench.workload, journals[1].append)[0])
    for run, lines in zip(runs, journals, strict=True):
        assert len(run.records) == 8 and not run.unfinished
        replayed = replay(lines, build)
        assert replayed.divergence is None, str(replayed.divergence)
        count("live_decisions" if run is runs[1] else "decisions_replayed", replayed.num_decisions)
    for of in ("engine", "policies", "workload", "seed"):
        assert simulated.manifest[of] == bench.manifest[of]

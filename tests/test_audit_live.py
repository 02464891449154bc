"""The leakage audit in both bodies: one protocol, the same requests, and on real KV the same prefixes found.

Beside the clock, which these tests do not judge, a body tells how many tokens of each prompt it had to compute: that
is what the clock measures, without its noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from backend.start import start
from live_audit import LiveProber
from liverun import play
from policies.types import RequestRecord
from sim.experiment.isolation.audit import Play, Probing, Simulated, Times, audit, measure, small
from sim.experiment.isolation.channels import CHANNELS, NUM_TENANTS, POSITIVE, Channel, Pace, Sizes
from sim.experiment.isolation.leakage import leak
from sim.experiment.isolation.price import prepared
from sim.experiment.isolation.scopes import SCOPES
from sim.setup import Setup
from sim.workload.workload import Workload

SIZES = Sizes(prompt_tokens=256)
PACE = Pace(alone=0.03, others=0.01)
SCOPE = {scope.name: scope for scope in SCOPES}
REUSE, COLLEAGUE, OCCUPANCY = CHANNELS["reuse"], CHANNELS["reuse, colleague"], CHANNELS["occupancy"]


def computed(records: list[RequestRecord]) -> dict[str, float]:
    return {record.request_id: float(record.num_prompt_tokens - record.num_cached_tokens) for record in records}


def simulated(setup: Setup, workload: Workload) -> Mapping[str, float]:
    return computed(prepared(setup, workload).run().records)


def live(setup: Setup, workload: Workload) -> Mapping[str, float]:
    run, _ = play(start("tiny", settings=setup.engine), workload)
    return computed(run.records)


def asked(play: Play, scope: str, channel: Channel, num: int = 4) -> Times:
    bare, _ = small(Setup(), SIZES)
    return measure(
        Probing(SCOPE[scope].of(bare, NUM_TENANTS), scope, channel, SIZES, num, load=0.0, pace=PACE, seed=0), play
    )


@pytest.mark.parametrize(
    ("scope", "channel", "is_open"),
    [
        ("global", REUSE, True),
        ("tenant", REUSE, False),
        ("tenant", COLLEAGUE, True),
        ("user", COLLEAGUE, False),
        ("tenant", OCCUPANCY, True),
        ("hard partition", OCCUPANCY, False),
        ("caching off", POSITIVE, False),
    ],
)
def test_both_bodies_compute_the_same_prompts_and_leak_through_the_same_channels(
    scope: str, channel: Channel, is_open: bool
) -> None:
    """S17, T57, T59 with real KV: a salted pool that is shared tells by what it lost, a hard partition does not."""
    times = asked(live, scope, channel)
    assert times == asked(simulated, scope, channel)
    assert leak(*times, channel.slower).advantage == float(is_open)


def test_live_every_probe_has_a_time_and_what_one_engine_cannot_do_is_said() -> None:
    """By the clock, whatever it says; callers come with keys, and their bodies lie."""
    scopes = [SCOPE["tenant"], SCOPE["dedicated workers"]]
    found = audit(Setup(), LiveProber(), scopes=scopes, channels=[REUSE, POSITIVE], num_trials=3, sizes=SIZES)
    assert found.body == "live" and found.not_played == ("dedicated workers",)
    assert [each.channel for each in found.found] == ["reuse", POSITIVE.name]
    assert all(math.isfinite(each.leak.auc.mean) and each.leak.num_yes == 3 for each in found.found)
    assert 0.0 < found.pace.alone < math.inf and 0.0 < found.pace.others < math.inf


def test_both_probers_build_the_same_trials() -> None:
    """One definition: what is played depends on the pace of the body, and on nothing else of it."""
    bare, _ = small(Setup(), SIZES)
    one = Probing(SCOPE["tenant"].of(bare, NUM_TENANTS), "tenant", REUSE, SIZES, 3, 0.0, PACE, 0)
    played: list[Workload] = []

    def spy(setup: Setup, workload: Workload) -> Mapping[str, float]:
        played.append(workload)
        return simulated(setup, workload)

    measure(one, spy)
    measure(replace(one, pace=Pace(2 * PACE.alone, PACE.others)), spy)
    first, second = ([item.request for item in each.items] for each in played)
    assert [replace(each, arrival_time=2 * each.arrival_time) for each in first] == second
    assert Simulated(num_workers=1).can_play(SCOPE["dedicated workers"])


def test_a_live_body_takes_a_pool_cut_into_parts() -> None:
    """The settings were tried with one block, which no two parts can share, and refused."""
    settings = {"isolation": "partition,parts=3", "num_blocks": 30}
    assert start("tiny", settings=settings).config.num_blocks == 30
    with pytest.raises(ValueError, match=r"num_blocks \(2\) must be at least 1 for each of the 3 parts"):
        start("tiny", settings={**settings, "num_blocks": 2})

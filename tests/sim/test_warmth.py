"""Cold, warm and primed runs: what is played before anything counts, and that only the rest does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.prompt import ContentPrompt
from policies.types import Context
from sim.commands import Prepared
from sim.diff import check_comparable
from sim.experiment.ab.compare import compare
from sim.experiment.runner import Simulated, play
from sim.setup import Setup
from sim.simulate import Run
from sim.timings import inter_token_latencies
from sim.warmth import counted, parse_cache_state
from sim.workload.generate import generate
from sim.workload.primed import primed
from sim.workload.workload import WorkItem, Workload
from tests.worlds import request

PREFIXES = "repeated-prefix,num_prefixes=3,num_tenants=2,prefix_tokens=256,own_tokens=20"
SHARED = Setup(workload=PREFIXES, num_requests=24, rate=5.0, costs="datasheet", engine={"isolation": "tenant"})


def run_of(setup: Setup) -> Run:
    return Prepared.of(setup).run()


def cached(run: Run) -> list[int]:
    return [record.num_cached_tokens for record in sorted(run.records, key=lambda record: record.arrival_time)]


def test_s64_primed_every_caller_finds_every_prefix_from_the_start() -> None:
    """Six of 24 are the first of their tenant behind a prefix: cold they find nothing, primed what all find."""
    assert sorted(cached(run_of(SHARED))) == [0] * 6 + [256] * 18
    assert cached(run_of(replace(SHARED, cache_state="primed"))) == [256] * 24


def test_s64_primed_by_one_tenant_is_nothing_to_another() -> None:
    lead = primed(generate(PREFIXES, num_requests=24)).items
    asked = {(item.request.context.tenant, item.request.context.application) for item in lead}
    assert len(asked) == len(lead) == 6
    assert all(item.request.prompt.num_tokens == 256 and item.request.max_tokens == 1 for item in lead)


@pytest.mark.parametrize("front_end", ["default", "off"])
def test_s64_warm_the_first_requests_are_played_and_left_out_and_nothing_else_changes(front_end: str) -> None:
    """A quarter of 24: the others' times are those of the whole run, to the bit."""
    whole = run_of(replace(SHARED, front_end=front_end))
    warm = run_of(replace(SHARED, front_end=front_end, cache_state="warm=0.25"))
    later = sorted(record.arrival_time for record in whole.records)[6:]
    assert sorted(record.arrival_time for record in warm.records) == later
    kept = [record for record in whole.records if record.arrival_time >= later[0]]
    assert [replace(r, token_spans=()) for r in warm.records] == [replace(r, token_spans=()) for r in kept]
    gaps = [inter_token_latencies(rs, np.asarray(run.step_ends)) for run, rs in ((whole, kept), (warm, warm.records))]
    assert gaps[0].tolist() == gaps[1].tolist() != []
    assert len(warm.step_ends) == sum(sample.num_steps for sample in warm.samples) < len(whole.step_ends)
    assert min(sample.time for sample in warm.samples) >= later[0]
    if front_end == "default":
        assert [client.arrival_time for client in warm.clients] == later
        assert warm.summary.itl.num == sum(client.num_tokens - 1 for client in warm.clients)


def test_s64_warm_finds_more_than_cold_as_the_first_of_each_prefix_are_not_counted() -> None:
    cold, warm = (run_of(replace(SHARED, cache_state=state)).summary for state in ("cold", "warm=0.25"))
    assert cold.token_hit_rate == pytest.approx(18 * 256 / (24 * 276))
    assert warm.token_hit_rate == pytest.approx(256 / 276) and warm.num_requests == 18


def test_blocks_evicted_by_what_only_prepares_are_not_counted() -> None:
    """A pool for two of three prefixes: in a loop of one user, evictions of the parts add up to those of the whole."""
    tight = replace(
        SHARED, rate=None, arrivals="closed,users=1", num_requests=30, engine={"isolation": "global", "num_blocks": 48,
        "threat_decision": "one customer", "max_model_len": 512},
    )  # fmt: skip
    whole, warm = (run_of(replace(tight, cache_state=state)).num_evicted_blocks for state in ("cold", "warm=0.4"))
    first = run_of(replace(tight, num_requests=12)).num_evicted_blocks
    assert whole > first > 0 and warm == whole - first


def test_a_closed_loop_goes_on_behind_its_lead() -> None:
    closed = replace(SHARED, rate=None, arrivals="closed,users=2,think=0.1")
    run = run_of(replace(closed, cache_state="primed"))
    assert cached(run) == [256] * 24 and not run.unfinished


def test_of_prefixes_within_each_other_only_the_longest_is_played() -> None:
    """All begin with 1 2, and two of them go on with 3: who plays 1 2 3 has played 1 2."""
    ids = [(1, 2, 9), (1, 2, 3, 8), (1, 2, 3, 7), (6, 5)]
    items = [
        WorkItem(request(index, ContentPrompt(16 * len(each), each, 16), arrival_time=float(index)), 1)
        for index, each in enumerate(ids)
    ]
    lead = primed(Workload("it", items))
    (only,) = [item.request.prompt for item in lead.items]
    assert only == ContentPrompt(48, (1, 2, 3), 16) and lead.num_requests == 1 + 4


def test_what_only_one_session_asks_again_is_not_primed() -> None:
    """Turns of one conversation go on from each other, and that is no shared prefix."""
    prompts = [ContentPrompt(16 * num, tuple(range(num)), 16) for num in (2, 4, 6)]
    items = [
        WorkItem(replace(request(index, prompt, arrival_time=float(index)), context=Context(session="one")), 1)
        for index, prompt in enumerate(prompts)
    ]
    with pytest.raises(ValueError, match="can be primed"):
        primed(Workload("it", items))


def test_s64_the_manifest_tells_the_protocol_and_others_are_refused() -> None:
    cold, warm, warmer = (play(replace(SHARED, cache_state=state)) for state in ("cold", "warm=0.25", "warm=0.5"))
    assert cold.manifest["cache_state"] == "cold"
    assert warm.manifest["cache_state"] == "warm: the first 25 % of requests are played and not counted"
    for a, b in ((cold, warm), (warm, warmer)):
        assert list(check_comparable(a.manifest, b.manifest, "cache_state")) == ["cache_state"]
        with pytest.raises(ValueError, match=r"not comparable|nothing differs"):
            check_comparable(a.manifest, b.manifest, "engine.batching")
    with pytest.raises(ValueError, match=r"caches are 'cold' and 'warm: .*begin both alike"):
        compare(SHARED, replace(SHARED, cache_state="warm=0.25"), Simulated(1), num=2)
    found = compare(
        SHARED, replace(SHARED, cache_state="primed"), Simulated(1), num=2, factor="cache_state", metrics=("ttft.mean",)
    )
    assert [each.split(":")[0] for each in found.cache_states] == ["cold", "primed"], "but where that is the question"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cache_state": "hot"}, "unknown cache state 'hot'; known: cold, primed, warm"),
        ({"cache_state": "warm=1"}, r"share \(1\) of warm must be between 0 and 1"),
        ({"cache_state": "primed", "num_replicas": 2}, "is for one replica, not for 2"),
    ],
)
def test_a_protocol_that_cannot_be_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(SHARED, **change)  # type: ignore[arg-type]


def test_what_shares_nothing_cannot_be_primed() -> None:
    with pytest.raises(ValueError, match="nothing of 'chat' can be primed: no two sessions share a prefix"):
        run_of(Setup(workload="chat", num_requests=5, cache_state="primed"))


def test_what_comes_all_at_once_cannot_warm_itself() -> None:
    made = generate("fixed", num_requests=8, arrivals="closed,users=8")
    with pytest.raises(ValueError, match="4 of 8 requests prepare the cache: none comes after them"):
        counted(Prepared.of(Setup(workload="fixed", num_requests=8), workload=made).run(), 4)


def test_a_setup_that_says_its_protocol_comes_back_from_its_file() -> None:
    setup = replace(SHARED, cache_state="warm=0.3")
    assert setup.to_dict()["cache_state"] == "warm=0.3" and Setup.from_dict(setup.to_dict()) == setup
    assert str(parse_cache_state("cold")) == "cold"

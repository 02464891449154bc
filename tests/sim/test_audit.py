"""The leakage audit: its statistics against closed forms and scipy, its verdicts against what is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp, mannwhitneyu, norm

from policies.prompt import ContentPrompt
from sim.experiment.isolation.audit import Audit, Probing, Simulated, audit, measure, small
from sim.experiment.isolation.channels import CHANNELS, NUM_TENANTS, POSITIVE, STRANGER, VICTIM, Pace, Sizes, trials
from sim.experiment.isolation.leakage import (
    auc,
    best_limit,
    fewest_probes,
    leak,
    permuted_auc,
    probes_to_certainty,
    slack,
    trials_needed,
)
from sim.experiment.isolation.scopes import SCOPES, Scope, scopes_of
from sim.setup import Setup
from sim.workload.workload import Workload

# -- what times tell --------------------------------------------------------------------------------------------------


def normal(seed: int, num: int, apart: float = 0.0) -> tuple[list[float], list[float]]:
    """Times under two truths, `apart` standard deviations."""
    random = np.random.default_rng(seed)
    return random.normal(apart, 1.0, num).tolist(), random.normal(0.0, 1.0, num).tolist()


@pytest.mark.parametrize("apart", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("slower", [True, False])
def test_two_normals_have_the_advantage_and_the_area_of_theory(apart: float, slower: bool) -> None:
    """D = 2 Phi(d'/2) - 1, AUC = Phi(d'/sqrt 2), from whichever side a yes comes."""
    num = 5_000
    yes, no = normal(7, num, apart if slower else -apart)
    found = leak(yes, no, slower)
    assert found.advantage == pytest.approx(2 * norm.cdf(apart / 2) - 1, abs=slack(num, num, 0.9999))
    assert found.auc.mean == pytest.approx(norm.cdf(apart / math.sqrt(2)), abs=2 * found.auc.half_width)
    assert found.least <= 2 * norm.cdf(apart / 2) - 1 <= found.most


TIMES = st.lists(st.integers(0, 8), min_size=2, max_size=30)


@settings(max_examples=200, deadline=None)
@given(yes=TIMES, no=TIMES)
def test_advantage_and_area_are_scipys(yes: list[int], no: list[int]) -> None:
    high, low = np.array(yes, dtype=float), np.array(no, dtype=float)
    tpr, fpr = best_limit(high, low)
    assert tpr - fpr == pytest.approx(ks_2samp(low, high, alternative="greater").statistic, abs=1e-12)
    assert auc(high, low).mean == pytest.approx(mannwhitneyu(high, low).statistic / (len(high) * len(low)))


def test_finding_nothing_claims_no_more_than_the_number_of_trials_allows() -> None:
    """T57. 250 of each kind leave 0.206; an advantage of at most 0.05 takes 4,239."""
    assert slack(250, 250) == pytest.approx(0.2059, abs=1e-4)
    assert trials_needed(0.05) == 4239
    assert slack(4239, 4239) <= 0.05 < slack(4238, 4238)
    found = leak([1.0] * 250, [1.0] * 250, yes_is_slower=True)
    assert found.advantage == 0.0 and found.most == slack(250, 250) and found.probes is None


def test_bounds_and_intervals_hold_as_often_as_they_say() -> None:
    """400 audits of a known leak: the bound on D never fails (it claims 99 % and is generous), DeLong's AUC in 95 %."""
    apart, num = 1.0, 60
    d, area = 2 * norm.cdf(apart / 2) - 1, norm.cdf(apart / math.sqrt(2))
    held = covered = 0
    for seed in range(400):
        yes, no = (np.array(each) for each in normal(seed, num, apart))
        tpr, fpr = best_limit(yes, no)
        held += abs(tpr - fpr - d) <= slack(num, num)
        interval = auc(yes, no)
        covered += interval.low <= area <= interval.high
    assert held >= 396
    assert 0.92 * 400 <= covered <= 0.98 * 400


def test_labels_dealt_out_at_random_leave_nothing() -> None:
    """T58. Whatever the times are, the area is a half, spread as theory has it."""
    yes, no = (np.array(each) for each in normal(1, 250, 3.0))
    found = permuted_auc(yes, no)
    spread = math.sqrt((len(yes) + len(no) + 1) / (12 * len(yes) * len(no)))
    assert found.mean == pytest.approx(0.5, abs=5 * spread / math.sqrt(found.num))
    assert found.low < 0.5 < found.high
    assert found.half_width == pytest.approx(1.96 * spread, rel=0.15)


def test_as_many_probes_make_certain_as_were_said_to() -> None:
    """Wald's test on bits, played: it errs in at most 1 %, and takes what the formula says and its last step more."""
    tpr, fpr, limit, random = 0.7, 0.4, math.log(99.0), np.random.default_rng(3)
    up, down = math.log(tpr / fpr), math.log((1 - tpr) / (1 - fpr))
    lengths, errors = [], 0
    for _ in range(2000):
        odds, num = 0.0, 0
        while abs(odds) < limit:
            odds += up if random.random() < tpr else down
            num += 1
        lengths.append(num)
        errors += odds < 0
    said = probes_to_certainty(tpr, fpr)
    assert errors <= 0.01 * 2000 + 3 * math.sqrt(20)
    assert 0.95 * said <= np.mean(lengths) <= 1.2 * said


@pytest.mark.parametrize(("tpr", "fpr"), [(0.6, 0.4), (0.2, 0.0), (1.0, 0.7)])
def test_no_test_of_fewer_probes_is_certain(tpr: float, fpr: float) -> None:
    """The best test of n bits errs, under the one truth or the other, in 2 % together at least."""
    num = math.ceil(fewest_probes(tpr - fpr)) - 1

    def chance(p: float, hits: int) -> float:
        return math.comb(num, hits) * p**hits * (1 - p) ** (num - hits)

    errors = sum(min(chance(tpr, hits), chance(fpr, hits)) for hits in range(num + 1))
    assert errors >= 0.02 - 1e-12


def test_the_fewest_probes_run_from_one_to_never() -> None:
    assert fewest_probes(1.0) == 1.0
    assert math.isinf(fewest_probes(0.0))
    assert math.ceil(fewest_probes(slack(250, 250))) == 17


# -- the protocol -----------------------------------------------------------------------------------------------------

PACE = Pace(0.05, 0.02)
SMALL = Sizes(prompt_tokens=512)


def test_half_of_the_trials_are_true_in_an_order_nobody_could_guess() -> None:
    asked = trials(CHANNELS["reuse"], SMALL, 50, PACE, load=0.3)
    truths = list(asked.truths.values())
    assert sum(truths) == 50 and len(truths) == 100
    assert truths != sorted(truths) and truths != sorted(truths, reverse=True)
    again = trials(CHANNELS["reuse"], SMALL, 50, PACE, load=0.3)
    assert again == asked and trials(CHANNELS["reuse"], SMALL, 50, PACE, load=0.3, seed=1) != asked


@pytest.mark.parametrize("name", CHANNELS)
def test_only_reuse_shares_content_between_callers_and_only_where_it_is_true(name: str) -> None:
    """So what the other two channels find cannot be reuse."""
    asked = trials(CHANNELS[name], SMALL, 20, PACE, load=0.0)
    for probe, truth in asked.truths.items():
        number = probe.removeprefix("trial ").partition(".")[0]
        mine, theirs = set[int](), set[int]()
        for item in asked.workload.items:
            request = item.request
            if request.request_id.startswith(f"trial {number}.") and isinstance(request.prompt, ContentPrompt):
                (mine if request.request_id == probe else theirs).update(request.prompt.content_ids[:1])
        shared = bool(mine & theirs)
        assert shared is (truth if name.startswith("reuse") else name == "occupancy")


@pytest.mark.parametrize("load", [0.0, 0.5])
def test_a_flood_has_twice_the_time_it_takes_before_the_cache_is_probed(load: float) -> None:
    """Beside the others, too: or the probe would wait behind it, and find the queue, not the cache."""
    asked = trials(CHANNELS["occupancy"], SMALL, 5, PACE, load)
    times = {item.request.request_id: item.request.arrival_time for item in asked.workload.items}
    for probe, truth in asked.truths.items():
        trial = probe.rpartition(".")[0]
        flood = [times[f"{trial}.{index}"] for index in range(1, 1 + SMALL.flood * truth)]
        takes = len(flood) * PACE.alone / (1.0 - load)
        assert all(times[probe] - each >= 2 * takes for each in flood)
        assert (len(flood) == 6) is truth


class Ideal:
    """A body whose only delay is what its endless cache lacks; `namespace` of a tenant tells who shares."""

    def __init__(self, shares: bool) -> None:
        self._shares = shares

    def play(self, setup: Setup, workload: Workload) -> Mapping[str, float]:
        seen, found = set[tuple[str, int]](), dict[str, float]()
        for item in workload.items:
            prompt, owner = item.request.prompt, "" if self._shares else item.request.context.tenant
            ids = prompt.content_ids if isinstance(prompt, ContentPrompt) else ()
            found[item.request.request_id] = float(sum((owner, each) not in seen for each in ids))
            seen.update((owner, each) for each in ids)
        return found


def probing(name: str, num: int = 30) -> Probing:
    return Probing(Setup(), "any", CHANNELS[name], SMALL, num, 0.2, PACE, 0)


def test_whoever_plays_a_workload_can_be_audited() -> None:
    """A body that shares everything tells everything; one that shares within tenants, something to colleagues only."""
    for shares, name, told in ((True, "reuse", 1.0), (False, "reuse", 0.0), (False, "reuse, colleague", 1.0)):
        times = measure(probing(name), Ideal(shares).play)
        assert (len(times.yes), len(times.no)) == (30, 30)
        assert leak(*times, CHANNELS[name].slower).advantage == told


# -- what it finds ----------------------------------------------------------------------------------------------------

NUM = 30  # trials of each kind
BY_NAME = {scope.name: scope for scope in SCOPES}
AUDITED = ("global", "tenant", "user", "hard partition", "dedicated workers", "caching off")
OPEN = {  # what must be found, by channel; all else must not be
    POSITIVE.name: {"global", "tenant", "user", "hard partition", "dedicated workers"},
    "reuse": {"global"},
    "reuse, colleague": {"global", "tenant", "hard partition", "dedicated workers"},
    "occupancy": {"global", "tenant", "user"},
    "queueing": {"global", "tenant", "user", "hard partition", "caching off"},
}


@pytest.fixture(scope="module")
def found() -> Audit:
    scopes = [BY_NAME[name] for name in AUDITED]
    return audit(Setup(), Simulated(num_workers=1), scopes=scopes, num_trials=NUM, loads=(0.2,))


@pytest.mark.parametrize(("channel", "scope"), list(product(OPEN, AUDITED)))
def test_each_scope_closes_what_it_can_close_and_nothing_else(found: Audit, channel: str, scope: str) -> None:
    """S17, T57, T59. A salted pool that is shared still tells by what was evicted; a hard partition does not, and
    still lets wait; replicas of one's own tell nothing."""
    cell = found.of(scope, channel)
    if scope in OPEN[channel]:
        assert cell.leaks and cell.leak.least > 0.3 and cell.leak.probes is not None
    else:
        assert not cell.leaks and cell.leak.probes is None
        assert cell.leak.auc.low <= 0.5 <= cell.leak.auc.high
        assert cell.leak.most >= slack(NUM, NUM), "so few trials prove no more"


def test_in_every_cell_labels_dealt_out_at_random_leave_nothing(found: Audit) -> None:
    """T58."""
    for cell in found.found:
        assert cell.leak.permuted.low < 0.5 < cell.leak.permuted.high
        assert cell.leak.permuted.mean == pytest.approx(0.5, abs=0.02)


def test_more_noise_hides_more() -> None:
    """What others keep busy drowns what the attacker measures."""
    quiet_and_loud = audit(
        Setup(),
        Simulated(num_workers=1),
        scopes=[BY_NAME["global"]],
        channels=[CHANNELS["reuse"]],
        num_trials=NUM,
        loads=(0.0, 0.8),
    )
    quiet, loud = (quiet_and_loud.of("global", "reuse", load).leak for load in (0.0, 0.8))
    assert quiet.advantage == 1.0 and quiet.advantage - loud.advantage > 0.15


def test_the_audits_flood_fills_its_pool_and_no_more() -> None:
    bare, block_size = small(Setup(workload="chat", slo="ttft<1s", num_replicas=3), SMALL)
    assert (bare.workload, bare.slo, bare.num_replicas) == (None, None, 1)
    assert bare.config().num_blocks == SMALL.flood * math.ceil(513 / block_size)


def test_a_setup_with_a_scope_of_its_own_is_audited_as_it_is_too() -> None:
    own = Setup(engine={"isolation": "hierarchical,barrier=256"})
    assert scopes_of(own)[0] == Scope("hierarchical,barrier=256", {"isolation": "hierarchical,barrier=256"})
    assert scopes_of(Setup(engine={"isolation": "partition,parts=4"})) == SCOPES
    assert scopes_of(own)[0].of(own, NUM_TENANTS).engine["threat_decision"].startswith("none given")


def test_victim_and_stranger_differ_in_all_but_the_application() -> None:
    differ = {
        name for name in ("tenant", "user", "session", "request") if getattr(VICTIM, name) == getattr(STRANGER, name)
    }
    assert not differ and VICTIM.application == STRANGER.application


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_trials": 1}, r"trials \(1\) must be at least 2 of each kind"),
        ({"loads": (1.0,)}, r"load \(1.0\) must be a share of the time"),
        ({"sizes": Sizes(prompt_tokens=9000)}, r"a prompt of 9000 tokens is not answered at all: audit with shorter"),
    ],
)
def test_what_cannot_be_audited_is_said_in_a_line(change: dict[str, object], error: str) -> None:
    how = {"num_trials": 2, "scopes": [BY_NAME["tenant"]], **change}
    with pytest.raises(ValueError, match=error):
        audit(Setup(), Simulated(num_workers=1), **how)  # type: ignore[arg-type]


def test_a_probe_without_an_answer_has_no_time_to_judge_by() -> None:
    with pytest.raises(ValueError, match="1 of 3 probes were never answered: lower the load, or make prompts shorter"):
        leak([1.0, math.nan, 1.0], [1.0, 1.0], yes_is_slower=True)
    with pytest.raises(ValueError, match="1 trials of a kind tell nothing: 2 or more, better 250"):
        leak([1.0], [1.0], yes_is_slower=True)


def test_sizes_check_themselves() -> None:
    with pytest.raises(ValueError, match=r"prompt_tokens \(100\) of an audit must be at least 256"):
        Sizes(prompt_tokens=100)
    with pytest.raises(ValueError, match=r"shared \(1.0\) must lie between 0 and 1"):
        Sizes(shared=1.0)

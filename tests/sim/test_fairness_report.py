"""Who gets what: service and bounds by an account kept from the journal, slowdown against a replay alone, no names."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from policies.config import EngineConfig
from sim.commands import Prepared
from sim.cost import AffineCost
from sim.experiment.fairness.accounts import Accounts, Member, Prices
from sim.experiment.fairness.bounds import Bound, bound_of, prices_of
from sim.experiment.fairness.commands import print_fairness, run_fairness, verdicts
from sim.experiment.fairness.groups import MOST, OTHERS, groups_of, only
from sim.experiment.fairness.shares import Fairness, Share, fairness, jain
from sim.setup import Setup
from sim.simulate import simulate
from sim.workload.generate import generate
from sim.workload.transform import assign_classes, assign_tenants
from sim.workload.workload import WorkItem, Workload
from tests.lives import Life, chooser, draw_settings
from tests.worlds import request, tiny_config

SECOND = AffineCost(per_step=1.0)
TWO = ("classes,interactive=0.7,batch=0.3",)
BUSY = Setup(workload="chat", rate=20.0, num_requests=60, transforms=TWO, costs="datasheet", engine={"max_num_seqs": 8})


def journal(*items: tuple[str, float, int, int], **settings: Any) -> list[str]:
    """Of (name, arrival, prompt tokens, output tokens); a name before a hyphen is a client."""
    lines: list[str] = []
    made = [
        WorkItem(request(name, num, max_tokens=out, arrival_time=at, client_id=name.split("-")[0]), out)
        for name, at, num, out in items
    ]
    simulate(tiny_config(**settings), Workload("w", made), SECOND, lines.append)
    return lines


def told(lines: list[str], prices: Prices | None = None) -> Accounts:
    adds = [line for line in map(json.loads, lines) if "add" in line]
    members = {line["add"]: Member(line["add"].split("-")[0], line["max_tokens"]) for line in adds}
    accounts = Accounts(members, prices)
    for line in map(json.loads, lines):
        accounts.hear(line)
    return accounts


# -- the account ------------------------------------------------------------------------------------------------------


def test_service_is_a_prompt_and_twice_an_answer() -> None:
    """a: 8 + 2 x 3; b: 4 + 2 x 5."""
    assert told(journal(("a", 0.0, 8, 3), ("b", 0.0, 4, 5))).service == {"a": 14, "b": 14}
    dear = told(journal(("a", 0.0, 8, 3), ("b", 0.0, 4, 5)), Prices(input_price=3, output_price=1))
    assert dear.service == {"a": 27, "b": 17}


def test_what_is_held_is_counted_block_by_block_and_second_by_second() -> None:
    """Blocks of 4. a: 8 tokens for a step; its third block is taken in the second step, of 4 that follow at once."""
    lines = journal(("a", 0.0, 8, 5))
    assert any(json.loads(line).get("repeat", 1) > 1 for line in lines)
    assert told(lines).block_seconds == {"a": 2 + 4 * 3}
    late = journal(("a", 0.0, 6, 6))  # the block after 8 tokens is taken in the fourth step
    assert told(late).block_seconds == {"a": 2 * 3 + 3 * 3}


@pytest.mark.parametrize("seed", range(8))
def test_the_account_of_whatever_life_is_the_ledgers(seed: int) -> None:
    """Cancelled, preempted, failed, found in the cache: against a count that the tests keep of their own."""
    lines: list[str] = []
    choose = chooser("accounts", seed)
    life = Life(choose, draw_settings(choose, num_blocks=12), lines.append)
    life.repeats = bool(seed % 2)
    bearers: list[Any] = []
    add = life.ledger.add

    def noted(each: Any, now: float) -> Any:
        outcome = add(each, now)
        bearers.extend([life.ledger.live[each.request_id]] if outcome.accepted else [])
        return outcome

    life.ledger.add = noted  # type: ignore[method-assign]
    life.run(60)
    life.end()
    expected: dict[str, int] = defaultdict(int)
    for bearer in bearers:
        prompt = bearer.request.prompt.num_tokens
        paid = min(bearer.farthest, prompt) + 2 * max(0, bearer.farthest - prompt + 1)
        expected[bearer.request.client_id] += paid - bearer.cached - bearer.spared
    clients = {line["add"]: line.get("client", "") for line in map(json.loads, lines) if "add" in line}
    accounts = Accounts(Clients(clients), Prices())
    for line in map(json.loads, lines):
        if "add" in line:
            clients[line["add"]] = line.get("client", "")
        accounts.hear(line)
    assert {name: num for name, num in accounts.service.items() if num} == {k: v for k, v in expected.items() if v}
    assert all(seconds >= 0.0 for seconds in accounts.block_seconds.values())
    assert not any(accounts._held.values()) and not any(accounts._waiting.values()), "all is given back"


class Clients(dict[str, Member]):
    """Members by the client that an id has now: in a random life an id comes back as somebody else's."""

    def __init__(self, clients: dict[str, str]) -> None:
        super().__init__()
        self._clients = clients

    def __missing__(self, name: str) -> Member:
        return Member(self._clients[name], 1)


def test_what_was_served_before_the_other_came_does_not_count() -> None:
    """One at a time: a has had 28 when b begins to wait, and 32 when a's next is let in. They came 4 apart."""
    lines = journal(("a-1", 0.0, 8, 4), ("a-2", 0.0, 8, 4), ("a-3", 0.0, 8, 1), ("b-1", 6.0, 4, 1), max_num_seqs=1)
    assert told(lines).farthest_apart == 4


def backlog(num: int = 60) -> list[tuple[str, float, int, int]]:
    """Two who always wait; one asks for five times as much."""
    greedy = [(f"g-{i}", 0.0, 12 + i % 8, 4 + i % 5) for i in range(num)]
    modest = [(f"m-{i}", 0.0, 2 + i % 6, 1 + i % 5) for i in range(num)]
    return [each for i in range(num) for each in (greedy[i], modest[i])][: 2 * num]


@pytest.mark.parametrize("scheduling", ["vtc", "drr,quantum=20", "dlpm,quantum=20,output_price=2"])
def test_t54_t55_a_fair_policy_keeps_its_bound_and_fcfs_keeps_none(scheduling: str) -> None:
    config = tiny_config(num_blocks=12, max_num_seqs=6, scheduling=scheduling)
    fair = told(journal(*backlog(), num_blocks=12, max_num_seqs=6, scheduling=scheduling))
    bound = bound_of(config, "client", [fair])
    assert bound is not None and 0.0 < fair.farthest_apart <= bound.tokens
    unfair = told(journal(*backlog(), num_blocks=12, max_num_seqs=6))
    assert unfair.farthest_apart > 2 * bound.tokens
    assert bound_of(tiny_config(), "client", [unfair]) is None


def test_what_no_theorem_says_is_not_claimed() -> None:
    """VTC promises nothing to classes, WFQ nothing while several run."""
    accounts = told(journal(*backlog(5)))
    assert bound_of(tiny_config(scheduling="vtc"), "class", [accounts]) is None
    assert bound_of(tiny_config(scheduling="wfq"), "class", [accounts]) is None


def test_prices_are_those_of_the_policy() -> None:
    config = EngineConfig(num_blocks=8, scheduling="vtc,output_price=3,charge_cached=true,weights=a:2/b:1")
    assert prices_of(config) == Prices(1, 3, True, False, {"a": 2, "b": 1})
    assert prices_of(EngineConfig(num_blocks=8)) == Prices()
    assert prices_of(EngineConfig(num_blocks=8, scheduling="dlpm")).output_price == 1


# -- alone and together -----------------------------------------------------------------------------------------------


def test_jain_goes_from_one_of_many_to_one() -> None:
    assert jain([3.0, 3.0, 3.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([0.0, 0.0]) == 1.0


def test_whom_nobody_disturbs_is_slowed_by_nobody() -> None:
    """A request an hour: alone or together is the same, to the bit."""
    found = fairness(Setup(workload="chat", rate=1 / 3600, num_requests=12, transforms=TWO, costs="datasheet"), num=1)
    for share in found.runs[0].shares.values():
        assert (share.slowdown_mean, share.slowdown_p99, share.amplification, share.normalised) == (1.0,) * 4
    assert found.runs[0].jain_service == 1.0
    assert verdicts(found)[-1] == "no two of them ever waited at once: nothing to be fair about"


@pytest.fixture(scope="module")
def busy() -> Fairness:
    return fairness(BUSY, num=2)


def test_slowdown_is_against_a_run_of_the_class_alone(busy: Fairness) -> None:
    """The same by hand: the class's requests played alone, and each of them compared."""
    prepared = Prepared.of(BUSY)
    classes = groups_of(prepared.workload, "class")
    alone = only(prepared.workload, lambda name: classes[name] == "batch")
    by_hand = simulate(prepared.config, alone, prepared.cost, front_end=BUSY.front_end_model())
    together = {client.request_id: client.e2e for client in prepared.run().clients}
    ratios = [together[client.request_id] / client.e2e for client in by_hand.clients]
    assert busy.runs[0].shares["batch"].slowdown_mean == pytest.approx(sum(ratios) / len(ratios))
    assert busy.runs[0].shares["batch"].slowdown_mean > 1.5


def test_shares_are_of_the_whole(busy: Fairness) -> None:
    for run in busy.runs:
        assert sum(share.service for share in run.shares.values()) == pytest.approx(1.0)
        assert sum(share.block_seconds for share in run.shares.values()) == pytest.approx(1.0)
        assert 0.5 <= run.jain_service <= 1.0 and 0.5 <= run.jain_waits <= 1.0
        assert sum(share.num_requests for share in run.shares.values()) == 60


def test_without_the_loudest_the_others_wait_less(busy: Fairness) -> None:
    run = busy.runs[0]
    assert run.loudest == "interactive"
    assert run.shares["batch"].amplification > run.shares["interactive"].amplification > 1.0


def test_intervals_are_over_seeds(busy: Fairness) -> None:
    values = [run.shares["batch"].slowdown_mean for run in busy.runs]
    found = busy.of_group("batch", lambda share: share.slowdown_mean)
    assert found.mean == pytest.approx(sum(values) / 2) and found.low < min(values) and found.num == 2
    once = fairness(replace(BUSY, num_requests=10), num=1)
    assert math.isnan(once.of_run(lambda run: run.jain_service).low), "of one run there is no interval"


# -- no names ---------------------------------------------------------------------------------------------------------


def test_s36_clients_are_numbered_and_the_many_are_pooled(tmp_path: Path) -> None:
    """Twelve tenants: six with a number, the rest together; no name on the terminal or in the file."""
    setup = Setup(
        workload="chat", rate=20.0, num_requests=60, transforms=("tenants=12",), costs="datasheet",
        engine={"isolation": "tenant", "max_num_seqs": 4},
    )  # fmt: skip
    found = fairness(setup, num=1)
    assert found.kind == "client"
    assert found.groups == (*(f"client {rank}" for rank in range(1, MOST + 1)), OTHERS)
    assert found.runs[0].loudest != OTHERS
    run_fairness(setup, 1, None, tmp_path / "f.json")
    for text in (shown(found, 100), (tmp_path / "f.json").read_text(), json.dumps(asdict(found))):
        assert "tenant" not in text
    sent = groups_of(assign_tenants(generate("chat", num_requests=60), 12), "client")
    assert len(set(sent.values())) == MOST + 1


def test_s34_queue_delay_and_completion_stand_by_class() -> None:
    text = shown(fairness(BUSY, num=1), 80)
    assert {"batch", "interactive"} <= {line.split(" ")[0] for line in text.splitlines()}
    assert "wait" in text and "slowed" in text


def shown(found: Fairness, width: int) -> str:
    text = StringIO()
    print_fairness(Console(file=text, width=width, color_system=None), found)
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_and_says_what_it_is(busy: Fairness, width: int) -> None:
    lines = shown(busy, width).splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    assert lines[0].startswith("fcfs, by class: Jain")
    assert any(line.startswith("means of 2 seeds with 95 % intervals.") for line in lines)


def test_a_broken_promise_would_be_said(busy: Fairness) -> None:
    broken = replace(busy, runs=tuple(replace(run, gap=9.0, bound=Bound(5.0, "a rule")) for run in busy.runs))
    assert verdicts(broken)[-1].endswith("bound 5, BROKEN (a rule)")
    kept = replace(busy, runs=tuple(replace(run, gap=4.0, bound=Bound(5.0, "a rule")) for run in busy.runs))
    assert verdicts(kept)[-1].endswith("bound 5, kept (a rule)")


def test_what_cannot_be_fair_is_refused_in_a_line() -> None:
    with pytest.raises(ValueError, match="has one class and one client: nobody to be fair among"):
        fairness(Setup(workload="chat", num_requests=5))
    with pytest.raises(ValueError, match="cannot be fair by 'tenant'; known: class, client"):
        fairness(BUSY, by="tenant")
    with pytest.raises(ValueError, match="0 seeds play nothing"):
        fairness(BUSY, num=0)


def test_sessions_are_played_alone_whole() -> None:
    made = assign_classes(generate("conversation", num_requests=40), {"x": 0.5, "y": 0.5})
    classes = groups_of(made, "class")
    alone = only(made, lambda name: classes[name] == "x")
    assert 0 < alone.num_requests < made.num_requests
    with pytest.raises(ValueError, match="a session is of several groups"):
        only(made, lambda name: name not in {item.request.request_id for item in made.items})


def test_a_share_has_every_figure_asked_for() -> None:
    """Of a group of whom nobody was answered there is no latency, and no crash."""
    setup = Setup(workload="fixed", num_requests=6, transforms=("classes,a=0.5,b=0.5",), costs="datasheet",
                  engine={"admission": "class_budgets,max_queued=a:0"})  # fmt: skip
    shares = fairness(setup, num=1).runs[0].shares
    assert isinstance(shares["a"], Share) and shares["a"].num_refused >= 1

"""What every entry of every menu must keep, those added tomorrow included: entries are drawn from the tables.

An entry whose knobs need a value, or whose defaults never bite in a tiny world, is named in tests/specs.py.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from policies.catalogue import MENU, build, make
from policies.config import MENUS, EngineConfig
from policies.engine import EngineCore
from policies.interfaces import ReplicaLoad, View
from policies.journal import Write, replay
from policies.scheduling.fcfs import FirstComeFirstServed
from policies.types import Context, Request, RequestState
from tests.conftest import REPOSITORY
from tests.lives import Life, chooser, draw_settings
from tests.specs import examples, meetings, without_examples
from tests.watch import watch
from tests.worlds import finish, request, shown, step, tiny_engine

ENTRIES = [(menu, name) for menu in MENUS for name in MENU[menu]]
MEETINGS = meetings(*(list(MENU[menu]) for menu in MENUS))
every_entry = pytest.mark.parametrize("menu, name", ENTRIES, ids=str)


def test_every_entry_can_be_made_here() -> None:
    assert not without_examples(), "say in tests/specs.py how to name it"
    for menu, entries in MENU.items():
        for name in entries:
            for spec in examples(menu, name):
                assert spec.split(",")[0] == name
                make(menu, spec)


# -- in company -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", MEETINGS, ids="-".join)
def test_the_laws_hold_wherever_two_policies_meet(names: tuple[str, ...]) -> None:
    """T21 to T28 after each event of random lives (tests/laws.py, tests/ledger.py); no answer breaks its contract."""
    for seed in range(3):
        choose = chooser(*names, seed)
        life = Life(choose, draw_settings(choose, **dict(zip(MENUS, names, strict=True))))
        watch(life.ledger.engine)
        life.run(80)
        life.end()


def test_in_these_rows_every_two_entries_meet() -> None:
    met = {pair for row in MEETINGS for pair in _pairs(row)}
    wanted = {
        ((one, first), (other, second))
        for i, one in enumerate(MENUS) for other in MENUS[i + 1 :]
        for first in MENU[one] for second in MENU[other]
    }  # fmt: skip
    assert met == wanted


def _pairs(row: Sequence[str]) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    named = list(zip(MENUS, row, strict=True))
    return [(one, other) for i, one in enumerate(named) for other in named[i + 1 :]]


# -- the same again ---------------------------------------------------------------------------------------------------


def journal_of(menu: str, name: str, seed: int = 0, looks: bool = False) -> list[str]:
    """A life's inputs and decisions. `looks`: somebody looks at the line at every turn, now and then to its end."""
    lines: list[str] = []
    choose, peek = chooser("journal", menu, name, seed), chooser("peek", menu, name, seed)
    life = Life(choose, draw_settings(choose, **{menu: name}), lines.append)
    life.repeats = True
    for _ in range(60):
        life.run(1)
        if looks:
            engine = life.ledger.engine
            for state in engine.scheduling.candidates(engine.view, life.now):
                if peek((True, False)) or not state:
                    break
    life.end()
    return lines


def rebuild(config: EngineConfig, write: Write) -> EngineCore:
    return build(config, write)


@every_entry
def test_journals_replay(menu: str, name: str) -> None:
    for seed in range(3):
        found = replay(journal_of(menu, name, seed), rebuild)
        assert found.divergence is None, str(found.divergence)
        assert found.num_decisions


@pytest.mark.parametrize("name", MENU["scheduling"])
def test_who_only_looks_changes_nothing(name: str) -> None:
    for seed in range(6):
        assert journal_of("scheduling", name, seed, looks=True) == journal_of("scheduling", name, seed)


def digest_of_all_journals() -> str:
    hasher = hashlib.sha256()
    for menu, name in ENTRIES:
        hasher.update("\n".join(journal_of(menu, name)).encode())
    return hasher.hexdigest()


def test_decisions_are_the_same_in_another_process_with_another_hash_seed() -> None:
    code = "from tests.policies.test_conformance import digest_of_all_journals; print(digest_of_all_journals())"
    command = [sys.executable, "-c", code]
    found = {
        subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {digest_of_all_journals() + "\n"}


# -- nobody is forgotten ----------------------------------------------------------------------------------------------

SCHEDULINGS = [spec for name in MENU["scheduling"] for spec in examples("scheduling", name)]
HOT = range(12)  # a prompt that the cache holds
RIVALS: dict[str, dict[str, Any]] = {
    "short": {"prompt": 1, "predicted_output_tokens": 1},
    "found": {"prompt": HOT, "client_id": "r"},
    "due": {"prompt": 4, "client_id": "r", "deadline": 0.5},
    "its own": {"prompt": HOT, "client_id": "p"},
    "of another class": {"prompt": 1, "client_id": "p", "class_name": "y"},
}


def waits_for_ever(spec: str, rivals: dict[str, Any], num_steps: int = 300) -> bool:
    """A long, cold request with no deadline, whose client was served before; from then on a rival comes every step."""
    engine = tiny_engine(
        scheduling=spec, max_num_seqs=1, num_blocks=64, max_num_batched_tokens=64, max_model_len=64
    )  # fmt: skip
    engine.add(request("warm", HOT, max_tokens=1, client_id="p"), now=0.0)
    step(engine, now=0.0)
    engine.add(request("poor", 40, max_tokens=9, client_id="p", class_name="x", arrival_time=1.0), now=1.0)
    for now in range(1, num_steps):
        for number in range(3 if now == 1 else 1):
            fields = {**rivals, "deadline": now + rivals["deadline"]} if "deadline" in rivals else rivals
            engine.add(request(f"{now}-{number}", max_tokens=1, arrival_time=now, **fields), float(now))
        plan = step(engine, float(now))
        if "poor" in plan.request_ids:
            return False
    return True


@pytest.mark.parametrize("spec", SCHEDULINGS)
def test_nobody_waits_for_ever_where_a_turn_is_promised_and_only_there(spec: str) -> None:
    starved = [name for name, rivals in RIVALS.items() if waits_for_ever(spec, rivals)]
    if getattr(make("scheduling", spec), "promises_a_turn", False):
        assert not starved
    else:
        assert starved, "it could promise a turn"


# -- what nobody can know ---------------------------------------------------------------------------------------------

Decision = tuple[list[tuple[str, int, int]], tuple[str, ...], tuple[str, ...]]  # chunks, who came in, who went out


def decisions(engine: EngineCore, seed: int, lengths: dict[str, int]) -> list[tuple[Decision, tuple[str, ...]]]:
    """Each step's, and whose answers ended in it, for requests that end at their true lengths."""
    choose, told = chooser("oracle", seed), list[tuple[Decision, tuple[str, ...]]]()
    for number, name in enumerate("abcdefghijkl"):
        num_tokens, client = choose(range(1, 9)), choose("uv")
        engine.add(request(name, range(num_tokens), max_tokens=8, client_id=client, priority=number % 2), now=0.0)
    now = 0.0
    while engine.has_work and now < 200:
        plan = engine.schedule(now)
        now += 1.0
        if plan is None:
            continue
        ended = tuple(
            state.request_id for state, samples in zip(engine._in_flight[0].states, plan.samples, strict=True)
            if samples and state.num_output_tokens + 1 == lengths[state.request_id]
        )  # fmt: skip
        names = tuple(entry.request_id for entry in plan.admitted)
        told.append(((shown(plan), names, plan.preempted), ended))
        finish(engine, plan, now, ended)
    return told


def check_blind(menu: str, spec: str, seed: int) -> None:
    """T30: two worlds that differ in true lengths alone are decided alike until an answer ends in one of them only."""
    runs = []
    for world in range(2):
        choose = chooser("lengths", world, seed)
        lengths = {name: choose(range(1, 9)) for name in "abcdefghijkl"}
        caching = menu != "allocation" or make(menu, spec).shares_blocks
        settings: dict[str, Any] = {menu: spec, "enable_prefix_caching": caching}
        runs.append(decisions(tiny_engine(max_num_seqs=3, num_blocks=9, **settings), seed, lengths))
    for (one, one_ended), (other, other_ended) in zip(*runs, strict=False):
        assert one == other, "T30: decided otherwise before any length could be known"
        if one_ended != other_ended:
            return


@every_entry
def test_no_decision_knows_a_true_length(menu: str, name: str) -> None:
    for seed in range(4):
        for spec in examples(menu, name):
            check_blind(menu, spec, seed)


def test_a_policy_that_knew_them_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clairvoyant(FirstComeFirstServed):
        def candidates(self, view: View, now: float) -> Iterator[RequestState]:
            return iter(sorted(self, key=lambda state: known[state.request_id]))

    known: dict[str, int] = {}
    told = decisions

    def telling(engine: EngineCore, seed: int, lengths: dict[str, int]) -> list[tuple[Decision, tuple[str, ...]]]:
        known.update(lengths)
        return told(engine, seed, lengths)

    monkeypatch.setitem(MENU["scheduling"], "clairvoyant", Clairvoyant)  # type: ignore[arg-type]
    monkeypatch.setattr("tests.policies.test_conformance.decisions", telling)
    with pytest.raises(AssertionError, match="T30"):
        check_blind("scheduling", "clairvoyant", 0)


def test_nothing_that_policies_see_is_a_true_length() -> None:
    """By type: what a request says of its output is a limit and a guess."""
    told = {field.name for field in fields(Request) if "output" in field.name or "tokens" in field.name}
    assert told == {"max_tokens", "predicted_output_tokens"}
    grown = {field.name for field in fields(RequestState) if "output" in field.name}
    assert grown == {"num_output_tokens"}, "the answer so far, and no more"
    assert not [name for name in dir(View) if "output" in name]


# -- policies that stand outside the engine's loop --------------------------------------------------------------------


@pytest.mark.parametrize("name", MENU["isolation"])
def test_who_may_share_follows_from_the_verified_context_alone(name: str) -> None:
    for spec in examples("isolation", name):
        one, again = make("isolation", spec), make("isolation", spec)
        for context in (Context(), Context("t", "u", "a", "s"), Context("t", "v", "a", "s")):
            spaces = one.namespaces(context)
            assert spaces == again.namespaces(context) == one.namespaces(context)
            for space in spaces or ():
                assert space.start_token >= 0 and all(isinstance(field, str) for field in space.fields)


@pytest.mark.parametrize("name", MENU["routing"])
def test_a_router_names_a_replica_that_is_there_and_the_same_again(name: str) -> None:
    for spec, num_replicas, seed in product(examples("routing", name), (1, 3), range(5)):
        assert _routed(spec, num_replicas, seed) == _routed(spec, num_replicas, seed)


def _routed(spec: str, num_replicas: int, seed: int) -> list[int]:
    policy, choose, chosen = make("routing", spec), chooser("routing", seed), list[int]()
    for number in range(30):
        loads = [ReplicaLoad(choose(range(5)), choose(range(5)), choose(range(50))) for _ in range(num_replicas)]
        asked = request(number, range(choose(range(1, 20))), tenant=choose("tu"), client_id=choose("uv"))
        chosen.append(policy.choose_replica(asked, loads, float(number)))
    assert all(0 <= index < num_replicas for index in chosen)
    return chosen

"""The article's requirements on memory that is shared: what is kept, who may find it, what goes, and where it is.

Under each test stands what it was seen to fall for: a change to the project that breaks the requirement. Bounds are
printed (`pytest -s`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.catalogue import EVICTION, ROUTING, build
from policies.config import EngineConfig
from policies.journal import replay
from policies.kv import BlocksRemoved
from policies.prompt import TokenPrompt
from policies.types import Context
from sim.commands import Prepared
from sim.cost import AffineCost
from sim.diff import check_comparable
from sim.setup import Setup
from sim.sharing import check_sharing
from sim.simulate import Run, simulate
from sim.workload.workload import WorkItem, Workload
from tests.laws import check_drained
from tests.requirements.test_article import SMALL, manifest_of, report
from tests.specs import examples
from tests.worlds import finish, request, step, tiny_config, tiny_engine

SECOND = AffineCost(per_step=1.0)
SCOPES = ("request", "session", "user", "tenant", "hierarchical,barrier=4,first=global", "partition")  # not across
EVICTIONS = [spec for name in EVICTION for spec in examples("eviction", name)]
ROUTINGS = [name for name in ROUTING]


def asks(name: str, prompt: Sequence[int] | int, at: float = 0.0, output: int = 1, **fields: Any) -> WorkItem:
    return WorkItem(request(name, prompt, max_tokens=output, arrival_time=at, **fields), output)


def run(items: Sequence[WorkItem], how: dict[str, Any] | None = None, **settings: Any) -> Run:
    return simulate(tiny_config(**settings), Workload("it", list(items)), SECOND, **(how or {}))


def cached(done: Run) -> dict[str, int]:
    return {record.request_id: record.num_cached_tokens for record in done.records}


# -- the life of a block ----------------------------------------------------------------------------------------------


def test_s05_the_log_alone_tells_who_holds_which_block_until_he_has_ended_or_left() -> None:
    """Allocated: named where they are first used. Addressed: tables are what was named, hits first. Evicted: told by
    key. Released: by `left`, on completion and on cancellation, and by `preempted`."""
    lines: list[str] = []
    engine = tiny_engine(lines.append, num_blocks=6, max_num_seqs=2)
    engine.kv.events = []
    for name, prompt, tokens in (("a", range(8), 3), ("b", range(20, 32), 9), ("c", range(8), 2), ("d", 9, 9)):
        engine.add(request(name, prompt, max_tokens=tokens), now=0.0)
    held: dict[str, list[int]] = {}
    for now in range(16):
        if now == 4:
            assert "b" in held and engine.abort("b", 4.0)
        plan = engine.schedule(float(now))
        if plan is not None:
            finish(engine, plan, float(now))
        for line in map(json.loads, lines):
            _follow(line, held)
        lines.clear()
        tables = {state.request_id: state.block_ids for state in engine.running}
        assert {name: set(blocks) for name, blocks in held.items()} == {n: set(t) for n, t in tables.items()}
        used = {block_id for table in tables.values() for block_id in table}
        assert engine.kv.num_free == 6 - len(used)
    assert not held and any(isinstance(event, BlocksRemoved) for event in engine.kv.events)


def _follow(line: dict[str, Any], held: dict[str, list[int]]) -> None:
    for name in line.get("preempted", ()):
        del held[name]
    for name, *_ in line.get("admitted", ()):
        held[name] = []
    for name, _, _, *blocks in line.get("chunks", ()):
        held[name] += blocks[0] if blocks else []
    for name, _ in line.get("left", ()):
        held.pop(name, None)


# Falls if `_plan_line` does not tell the blocks of a hit anew (`_num_blocks_told` kept), if `abort` tells no `left`.


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_s08_whatever_goes_when_blocks_run_out_everybody_is_answered(eviction: str) -> None:
    """S55. Twelve prompts of three families in a pool for two: each policy evicts, nobody is lost, nothing leaks."""
    items = [asks(f"r{i}", [i % 3] * 8 + [i], at=2.0 * i, output=3, class_name="ab"[i % 2]) for i in range(12)]
    done = run(items, num_blocks=7, eviction=eviction)
    assert done.summary.num_completed == 12 and not done.unfinished
    assert done.num_evicted_blocks > 0 or eviction.startswith(("ttl", "class_quota"))
    check_drained(done.engine)


# Falls if a policy forgets a block on `discard`, or gives up one that is held (a `pop` that leaves it in the heap).


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_s09_one_changed_token_spoils_its_block_and_all_after_it_and_none_before(eviction: str) -> None:
    tokens = list(range(17))
    for position in range(17):
        engine = tiny_engine(num_blocks=32, eviction=eviction)
        other = [*tokens[:position], 99, *tokens[position + 1 :]]
        for now, prompt in enumerate((tokens, other)):
            engine.add(request(now, TokenPrompt(tuple(prompt)), max_tokens=1), float(now))
            step(engine, float(now))
        assert engine.drain_records()[1].num_cached_tokens == position // 4 * 4


# Falls if a key leaves out its last token. (Keys without their parents are caught by contents, and by test_prompt.py.)


def test_s39_what_a_cancelled_request_held_is_free_and_what_it_wrote_can_be_found() -> None:
    for eviction in EVICTIONS:
        engine = tiny_engine(num_blocks=16, eviction=eviction)
        engine.add(request("a", range(12), max_tokens=9), now=0.0)
        step(engine, now=0.0)
        engine.abort("a", now=1.0)
        assert engine.kv.num_free == 16
        hard = "mode=hard" in eviction  # keeps less than that of a class without a share
        engine.add(request("b", range(13), max_tokens=1), now=1.0)
        assert step(engine, now=1.0).admitted[0].num_cached_tokens == 12 or hard


# Falls if `abort` leaves the table (`_leave` without `release`).

LOOP = [[number, number, number, number, -1] for number in range(8)]  # a block each, asked for in turn


def loop_hits(eviction: str, num_blocks: int, journal: Path | None = None) -> tuple[int, int]:
    """Blocks found, and evicted, in ten rounds over eight prompts; one block is for what runs."""
    items, lines = [asks(f"{i}", LOOP[i % 8], at=float(2 * i)) for i in range(80)], list[str]()
    done = run(items, {"journal": lines.append}, num_blocks=num_blocks + 1, eviction=eviction)
    if journal is not None:
        journal.write_text("\n".join(lines))
    return sum(cached(done).values()) // 4, done.num_evicted_blocks


def test_s55_one_block_too_few_and_lru_finds_nothing(tmp_path: Path) -> None:
    """The cliff: 72 of 80 found with room for all eight, none with room for seven, as each round evicts what it will
    ask for next. Thrashing shows: there are as many evictions as misses. Others find most of it; nobody more than who
    knows the future."""
    journal = tmp_path / "loop.jsonl"
    assert loop_hits("lru", 8) == (72, 0)
    assert loop_hits("lru", 7, journal) == (0, 80 - 7)
    found = {eviction: loop_hits(eviction, 7)[0] for eviction in EVICTION}
    best, num_evicted = loop_hits(f"belady,journal={journal}", 7)
    print("of 72 blocks, with one block too few:", found, "and by Belady with the future known", best)
    assert best == 62 and num_evicted == 80 - 7 - 62
    assert found["slru"] > 40 and found["s3fifo"] > 40 and max(found.values()) <= best


# Falls if lru gives up what was released last, or if evictions are not counted.

# -- who may find it --------------------------------------------------------------------------------------------------

HERS = Context("acme", "ann", "chat", "s1", "call")


@pytest.mark.parametrize("isolation", SCOPES)
@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "queue_informed"])
def test_s57_with_one_prompt_one_finds_it_again_and_another_tenant_does_not(isolation: str, eviction: str) -> None:
    """S18, S56. Paired, in one run: the same prompt by the same caller, by another tenant's, by the first again; and
    what was answered is not found either. Of a hierarchy the shared block before the barrier, and no more."""
    engine = tiny_engine(num_blocks=64, max_model_len=64, isolation=isolation, eviction=eviction)
    theirs = replace(HERS, tenant="globex")
    found = {}
    for now, (name, context) in enumerate((("first", HERS), ("again", HERS), ("other", theirs), ("third", HERS))):
        asked = request(name, TokenPrompt(tuple(range(21))), max_tokens=1)
        engine.add(replace(asked, context=context), float(now))
        found[name] = step(engine, float(now)).admitted[0].num_cached_tokens
    shared = 4 if "hierarchical" in isolation else 0
    assert found == {"first": 0, "again": 20, "other": shared, "third": 20}


# Falls if `seals` returns nothing, if the seal leaves out the tenant (tried on each scope), if caching is off.


def test_s20_a_tenant_named_in_the_body_opens_nothing() -> None:
    """All that a body may say says acme; the credential says globex."""
    body: dict[str, Any] = {"client_id": "acme", "class_name": "acme", "priority": 0}
    for isolation in SCOPES[:4]:
        engine = tiny_engine(num_blocks=32, isolation=isolation)
        engine.add(replace(request("theirs", range(17), max_tokens=1, **body), context=HERS), now=0.0)
        step(engine, now=0.0)
        spoof = replace(request("spoof", range(17), max_tokens=1, **body), context=replace(HERS, tenant="globex"))
        engine.add(spoof, now=1.0)
        assert step(engine, now=1.0).admitted[0].num_cached_tokens == 0


# Falls if a scope reads `request.client_id` (the engine handing it the request instead of the context).


def test_s60_tenants_share_only_if_somebody_wrote_down_why() -> None:
    many, one = Setup(workload="multi-tenant", num_requests=20).load(), Setup(num_requests=20).load()
    for isolation in ("global", "application", "hierarchical"):
        with pytest.raises(ValueError, match=rf"isolation '{isolation}' lets \d+ tenants find out") as error:
            check_sharing(EngineConfig(isolation=isolation), many)
        assert "--isolation tenant" in str(error.value) and "--threat-decision" in str(error.value)
        check_sharing(EngineConfig(isolation=isolation, threat_decision="one company"), many)
        check_sharing(EngineConfig(isolation=isolation), one)  # who is alone has nobody to hide from
    for isolation in ("tenant", "user", "session", "no_reuse", "partition"):
        check_sharing(EngineConfig(isolation=isolation), many)
    check_sharing(EngineConfig(enable_prefix_caching=False), many)
    with pytest.raises(ValueError, match="isolation 'global' lets"):
        Prepared.of(Setup(workload="multi-tenant", num_requests=20, engine={"num_blocks": 1024}))


def test_s60_every_report_prints_the_decision() -> None:
    decided = {"isolation": "global", "threat_decision": "one company, [all] staff trust each other"}
    assert f"tenants may share, as decided: {decided['threat_decision']}" in report(SMALL.summary, engine=decided)


# Falls if `check_sharing` counts clients, or is not called, or if the report leaves the decision out.


def test_s60_the_decision_itself_keeps_no_two_results_apart() -> None:
    shared = manifest_of(engine={"isolation": "global", "threat_decision": "all are one"})
    check_comparable(shared, manifest_of(engine={"isolation": "tenant"}), factor="engine.isolation")


# Falls if the decision is taken for a factor.


def test_s21_stronger_separation_can_be_chosen_and_costs_what_it_costs() -> None:
    """Four tenants with one prompt of four blocks, four times each: tokens computed, by how far they are apart."""
    items = [asks(f"{i}", range(17), at=float(4 * i), tenant=f"t{i % 4}") for i in range(16)]
    one = {"num_blocks": 64}
    computed = {
        "shared": run(items, **one),
        "tenant": run(items, **one, isolation="tenant"),
        "partition": run(items, **one, isolation="partition,parts=4"),
        "dedicated": run(items, {"num_replicas": 4, "routing": "pinned,exclusive=true"}, **one, isolation="tenant"),
        "no reuse": run(items, **one, isolation="no_reuse"),
        "no cache": run(items, **one, enable_prefix_caching=False),
    }
    price = {name: 16 * 17 - sum(cached(done).values()) for name, done in computed.items()}
    print("prompt tokens computed, of 272:", price)
    assert price == {"shared": 32, "tenant": 80, "partition": 80, "dedicated": 80, "no reuse": 272, "no cache": 272}


# Falls if `pinned` sends by request, if a part is shared, if `no_reuse` shares with anybody.

# -- attacks ----------------------------------------------------------------------------------------------------------


def under_attack(attack: Sequence[WorkItem], **settings: Any) -> dict[str, tuple[int, float]]:
    """A victim's turns over one long prefix: tokens found, and the time to the first token."""
    turns = [asks(f"turn {i}", [*range(16), 100 + i], at=20.0 * i, output=4, tenant="victim") for i in range(6)]
    items = sorted([*turns, *attack], key=lambda item: item.request.arrival_time)
    done = run(items, num_blocks=32, max_num_seqs=64, max_num_batched_tokens=2048, **settings)
    assert not done.unfinished, "nothing wedges"
    check_drained(done.engine)
    return {
        record.request_id: (record.num_cached_tokens, (record.first_token_time or 0.0) - record.arrival_time)
        for record in done.records if record.request_id.startswith("turn")
    }  # fmt: skip


FLOOD = [asks(f"flood {i}", 24, at=float(i), output=1, tenant="attacker") for i in range(110)]
# Fills memory with long answers, and keeps asking while it is full.
SQUEEZE = [asks(f"squeeze {i}", 8, at=0.5 * i, output=23, tenant="attacker") for i in range(60)]


@pytest.mark.parametrize("attack", [FLOOD, SQUEEZE], ids=["kv flood", "fill and squeeze"])
@pytest.mark.parametrize("eviction", ["lru", "sieve", "gdsf"])
def test_s31_an_attack_on_memory_stops_at_the_parts_of_a_partition(attack: list[WorkItem], eviction: str) -> None:
    """With slots and tokens to spare. In a shared pool the attack is felt (the positive control); in a partition the
    victim finds and waits exactly what it does alone."""
    for isolation in ("tenant", "partition"):
        alone = under_attack([], isolation=isolation, eviction=eviction)
        attacked = under_attack(attack, isolation=isolation, eviction=eviction)
        worst = max(wait for _, wait in attacked.values()) / max(wait for _, wait in alone.values())
        lost = sum(hit for hit, _ in alone.values()) - sum(hit for hit, _ in attacked.values())
        print(f"{isolation}, {eviction}: first token {worst:.0f} times as late, {lost} cached tokens lost")
        if isolation == "partition":
            assert attacked == alone
        else:
            assert worst > 1 or lost > 0


# Falls if eviction or preemption looks beyond its own part (blocks beyond a quota: see test_isolation.py), or if a
# step in which another part preempted lets nobody in.

# -- where it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
def test_s67_a_router_is_another_choice_and_replicas_know_nothing_of_it(routing: str) -> None:
    """Each replica's journal replays by itself, and every request has one place."""
    items = [asks(f"{i}", [i % 4] * 8 + [i], at=0.5 * i, output=4, tenant=f"t{i % 3}") for i in range(40)]
    journals: list[list[str]] = [[], [], []]
    how = {"num_replicas": 3, "routing": routing, "journal": [journal.append for journal in journals]}
    done = run(items, how, num_blocks=16)
    assert done.summary.num_completed == 40
    added = [line["add"] for journal in journals for line in map(json.loads, journal) if "add" in line]
    assert sorted(added) == sorted(f"{i}" for i in range(40))
    for journal in journals:
        assert replay(journal, build).divergence is None
    num_used = sum(any('"add"' in line for line in journal) for journal in journals)
    assert num_used == 3 or routing == "prefix_aware"


# Falls if the router gives a request to two replicas, or looks into an engine by a call that a journal would have told.


def test_s69_each_mechanism_of_the_cache_has_a_switch_of_its_own() -> None:
    """An ablation: one setting at a time, and what it alone changes. Two tenants ask one prompt in turn, under pressure
    from others in the middle."""
    own = [asks(f"{i}", range(17), at=float(3 * i), tenant=f"t{i % 2}") for i in range(8)]
    others = [asks(f"o{i}", 24, at=12.0 + i, output=2, tenant="t0") for i in range(2)]
    items = sorted([*own, *others], key=lambda item: item.request.arrival_time)
    base: dict[str, Any] = {"num_blocks": 14}
    arms = {
        "base": base,
        "caching": {**base, "enable_prefix_caching": False},
        "isolation": {**base, "isolation": "tenant"},
        "eviction": {**base, "eviction": "lfu"},
        "partition": {**base, "isolation": "partition"},
        "when cached": {**base, "cache_at": "step_end"},
        "content of no worth": {**base, "isolation": "no_reuse"},
    }
    found = {name: sum(cached(run(items, **settings)).values()) for name, settings in arms.items()}
    print("prompt tokens found, by what is changed:", found)
    assert found["caching"] == found["content of no worth"] == 0
    assert found["isolation"] < found["base"] <= found["eviction"]
    assert found["when cached"] == found["base"], "one at a time: a step's end is soon enough"
    answers = {
        name: [(r.request_id, r.num_output_tokens) for r in sorted(run(items, **s).records, key=lambda r: r.request_id)]
        for name, s in arms.items()
    }
    assert len({tuple(each) for each in answers.values()}) == 1, "what is cached changes no answer"


# Falls if a switch moves another: caching off by isolation alone, or an eviction that hangs on the scope.

"""Who shares with whom, and that nobody else can: scopes, seals, contents, and a pool cut into parts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalogue import EVICTION, ISOLATION, build, make
from policies.config import MENUS
from policies.engine import EngineCore, Policies
from policies.interfaces import IsolationPolicy
from policies.journal import replay
from policies.prompt import TokenPrompt, digest
from policies.types import Context
from tests.caches import PATHS, numbered
from tests.ledger import Ledger
from tests.worlds import finish, request, run_to_end, shown, state_of, step, tiny_config, tiny_engine

PROMPT = range(17)  # four blocks of 4, and a token that is always computed


def hits(isolation: str, *contexts: Context, **settings: Any) -> list[int]:
    """Tokens that the same prompt finds, asked by one after another."""
    engine = tiny_engine(isolation=isolation, num_blocks=32, **settings)
    for now, context in enumerate(contexts):
        engine.add(replace(request(now, PROMPT, max_tokens=1), context=context), float(now))
        step(engine, float(now))
    return [record.num_cached_tokens for record in engine.drain_records()]


# Each differs from the first in what is named.
ME = Context("acme", "ann", "mail", "s1", "call-1")
OTHERS = {
    "nothing": ME,
    "request": replace(ME, request="call-2"),
    "session": replace(ME, request="call-2", session="s2"),
    "user": replace(ME, request="call-2", session="s1", user="bob"),
    "tenant": replace(ME, request="call-2", tenant="globex"),
    "application": replace(ME, request="call-2", application="chat"),
    "all": Context("globex", "bob", "chat", "s2", "call-2"),
}
ALL, BARRIER = 16, 8
SHARES = {  # with whoever differs in: nothing, request, session, user, tenant, application, all
    "no_reuse": (0, 0, 0, 0, 0, 0, 0),
    "request": (ALL, 0, 0, 0, 0, 0, 0),
    "session": (ALL, ALL, 0, 0, 0, ALL, 0),
    "user": (ALL, ALL, ALL, 0, 0, ALL, 0),
    "tenant": (ALL, ALL, ALL, ALL, 0, ALL, 0),
    "partition": (ALL, ALL, ALL, ALL, 0, ALL, 0),
    "application": (ALL, ALL, ALL, ALL, ALL, 0, 0),
    "global": (ALL,) * 7,
    "hierarchical,barrier=8": (ALL, ALL, ALL, ALL, BARRIER, 0, 0),
    "hierarchical,barrier=8,first=global": (ALL, ALL, ALL, ALL, BARRIER, ALL, BARRIER),
}


@pytest.mark.parametrize("isolation", SHARES)
def test_each_scope_shares_within_and_with_nobody_beyond(isolation: str) -> None:
    """S18. Paired: who may find the prefix does, in the same world in which another does not."""
    found = [hits(isolation, ME, other)[1] for other in OTHERS.values()]
    assert found == list(SHARES[isolation])


def test_every_scope_of_the_menu_is_in_the_table() -> None:
    assert {name.partition(",")[0] for name in SHARES} == set(ISOLATION)


@pytest.mark.parametrize("isolation", ["request", "session", "user", "application"])
def test_who_does_not_say_where_he_belongs_is_alone(isolation: str) -> None:
    assert hits(isolation, Context(), Context()) == [0, 0]
    assert hits(isolation, Context(tenant="acme"), Context(tenant="acme")) == [0, 0]


def test_without_an_application_a_hierarchy_is_the_tenants_from_its_first_token() -> None:
    alone = replace(ME, application="")
    assert hits("hierarchical,barrier=8", alone, alone) == [0, 16]
    assert hits("hierarchical,barrier=8", alone, replace(alone, tenant="globex")) == [0, 0]


@settings(max_examples=40, deadline=None)
@given(paths=PATHS, who=st.lists(st.tuples(*[st.sampled_from("xy")] * 3), min_size=40, max_size=40))
def test_a_stricter_scope_never_finds_more(paths: list[tuple[int, ...]], who: list[tuple[str, str, str]]) -> None:
    """T51, with room for all: global, tenant, user, session, nobody."""
    found = []
    for isolation in ("global", "tenant", "user", "session", "no_reuse"):
        engine = tiny_engine(isolation=isolation, num_blocks=400, block_size=1)
        for now, (path, (tenant, user, session)) in enumerate(zip(paths, who, strict=False)):
            context = Context(tenant, user, "", session)
            engine.add(replace(request(now, (*numbered(path), -1), max_tokens=1), context=context), float(now))
            step(engine, float(now))
        found.append([record.num_cached_tokens for record in engine.drain_records()])
    for wide, strict in pairwise(found):
        assert all(more >= less for more, less in zip(wide, strict, strict=True))


# -- nobody gets in by another's name ---------------------------------------------------------------------------------


def test_a_policy_is_given_the_verified_context_and_nothing_of_the_body() -> None:
    """S19, S20: by type. The only argument has five fields, all of the server's making."""
    seen: list[object] = []

    class Spy:
        def namespaces(self, context: Context) -> None:
            seen.append(context)

    policy: IsolationPolicy = Spy()
    engine = tiny_engine()
    object.__setattr__(engine._policies, "isolation", policy)
    spoof = replace(request("spoof", PROMPT, client_id="acme", class_name="acme"), context=Context(tenant="globex"))
    engine.add(spoof, now=0.0)
    assert seen == [Context(tenant="globex")]
    assert set(Context.__slots__) == {"tenant", "user", "application", "session", "request"}


@pytest.mark.parametrize("isolation", [name for name in SHARES if name.partition(",")[0] not in ("global", "no_reuse")])
def test_no_scope_can_be_spelt_as_another(isolation: str) -> None:
    """Fields are length-prefixed and carry the name of their scope: neither a moved letter nor an adapter's name."""
    policy: IsolationPolicy = make("isolation", isolation)
    contexts = [Context("ab", "c", "d", "e", "f"), Context("a", "bc", "d", "e", "f"), Context("ab", "c", "de", "", "f"),
                Context("tenant", "ab", "c", "d", "e"), Context("ab\0c", "", "d", "e", "f")]  # fmt: skip
    seen: dict[object, Context] = {}
    for context in contexts:
        for namespace in policy.namespaces(context) or ():
            fields = namespace.fields
            mark = digest(b"s", *(field.encode() for field in fields))
            other = seen.setdefault((namespace.start_token, mark), context)
            assert (
                other is context
                or policy.namespaces(other) == policy.namespaces(context)
                or (fields in {each.fields for each in policy.namespaces(other) or ()})
            ), "two names, one seal"


def test_a_salt_that_is_named_like_an_adapter_is_another_namespace() -> None:
    """vLLM #44701: untagged, an adapter "x" and a salt "x" were one. Here the kind is part of the seal."""
    marks = {digest(b"s", kind.encode(), b"x") for kind in ("tenant", "user", "application", "adapter")}
    assert len(marks) == 4


def test_a_key_tells_nothing_without_the_servers_secret() -> None:
    by_secret = []
    for secret in (b"one", b"two"):
        engine = tiny_engine(isolation="tenant", secret=secret)
        engine.add(request("a", PROMPT, tenant="acme"), now=0.0)
        by_secret.append(set(state_of(engine, "a").chain.keys))
    assert not by_secret[0] & by_secret[1]


# -- contents are compared --------------------------------------------------------------------------------------------


def one_bit(secret: bytes, *parts: bytes, size: int = 8) -> int:
    return digest(secret, *parts, size=size) % 2 + 1


@pytest.mark.parametrize("isolation", ["global", "tenant"])
def test_a_hash_of_one_bit_costs_hits_and_never_makes_a_false_one(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys are 1 or 2. The ledger knows what each block really holds and refuses a hit on anything else."""
    monkeypatch.setattr("policies.prompt.digest", one_bit)
    assert _seal("x") != _seal("y"), "or they would be one tenant"
    num_hits = 0
    for seed in range(12):
        random = Random(seed)
        engine = tiny_engine(num_blocks=14, block_size=2, isolation=isolation)
        for now in range(25):
            tokens = tuple(random.randrange(2) for _ in range(random.randint(3, 9)))
            tenant = random.choice("xy")
            engine.add(request(now, TokenPrompt(tokens), max_tokens=1, tenant=tenant), float(now))
            hit = engine.find_cached(state_of(engine, str(now)))
            content = hit[-1].content if hit else None
            for depth in reversed(range(len(hit))):
                assert content is not None and content.mark.endswith(
                    b"".join(token.to_bytes(8, "little") for token in tokens[2 * depth : 2 * depth + 2])
                ), "a hit on other tokens"
                content = content.before
            assert not hit or isolation == "global" or hit[0].content.mark[:16] == _seal(tenant), "another's block"
            num_hits += len(hit)
            step(engine, float(now))
        engine.drain_records()
    assert num_hits > 20, "nothing was found, nothing is proved"


def _seal(tenant: str) -> bytes:
    return one_bit(b"", b"tenant", tenant.encode(), size=16).to_bytes(16, "little")


# -- a pool cut into parts --------------------------------------------------------------------------------------------


def lives_of_two(seed: int, num_others: int, **settings: Any) -> list[list[Any]]:
    """What `victim` sees, step by step, while another tenant sends `num_others` requests: its chunks, its hits."""
    random, flood = Random(seed), Random(seed + 1)
    engine = tiny_engine(num_blocks=24, max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=32, **settings)
    seen: list[list[Any]] = []
    for now in range(40):
        if random.random() < 0.5:
            prompt = [random.randrange(2) for _ in range(random.randint(1, 12))]
            engine.add(request(f"v{now}", prompt, max_tokens=random.randint(1, 6), tenant="victim"), float(now))
        if now < num_others:
            engine.add(request(f"o{now}", flood.randint(8, 24), max_tokens=8, tenant="other"), float(now))
        plan = engine.schedule(float(now))
        if plan is None:
            seen.append([])
            continue
        seen.append([each for each in shown(plan) if each[0].startswith("v")])
        seen.append([tuple(each) for each in plan.admitted if each.request_id.startswith("v")])
        finish(engine, plan, float(now))
        check_parts(engine)
    return [each for each in seen if each]


def check_parts(engine: EngineCore) -> None:
    """No part holds, promises or caches more than its quota, and the books say what the tables do."""
    parts = engine.kv.parts
    assert parts is not None
    for part in range(parts.num):
        mine = [state for state in engine.running if state.part == part]
        held = {block_id for state in mine for block_id in state.block_ids}
        cached = len(engine.kv._eviction.of[part])  # type: ignore[attr-defined]
        assert parts.num_held[part] == len(held), "blocks of a part are miscounted"
        assert parts.num_held_back[part] == sum(state.num_held_blocks for state in mine)
        assert len(held) + cached <= parts.quota, "a part has taken what is another's"


@pytest.mark.parametrize("allocation", ["paged", "paged_full_prompt", "paged_reserve_output"])
@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "ttl,seconds=5", "queue_informed", "class_quota"])
def test_a_flood_in_one_part_changes_nothing_in_another(eviction: str, allocation: str) -> None:
    """Closes the occupancy channel: with slots and tokens to spare, a victim runs as if it were alone."""
    knobs = {"isolation": "partition", "eviction": eviction, "allocation": allocation}
    for seed in range(4):
        assert lives_of_two(seed, 40, **knobs) == lives_of_two(seed, 0, **knobs)


def occupancy_probe(isolation: str) -> int:
    """Tokens of its own prefix that a tenant still finds after another has filled the cache."""
    engine = tiny_engine(num_blocks=16, isolation=isolation)
    engine.add(request("prime", range(9), max_tokens=1, tenant="a"), now=0.0)
    step(engine, now=0.0)
    for now in range(1, 8):
        engine.add(request(f"fill {now}", 20, max_tokens=1, tenant="b"), float(now))
        step(engine, float(now))
    engine.add(request("probe", range(9), max_tokens=1, tenant="a"), now=8.0)
    return step(engine, now=8.0).admitted[0].num_cached_tokens


def test_a_namespace_alone_leaves_the_occupancy_channel_open_and_a_partition_closes_it() -> None:
    """T59. The positive control: the salted pool does tell `a` that `b` was there."""
    assert occupancy_probe("tenant") == 0
    assert occupancy_probe("partition") == 8


def test_a_tenant_who_comes_too_late_is_refused_and_told_why() -> None:
    engine = tiny_engine(isolation="partition,parts=2")
    outcomes = [engine.add(request(name, 4, tenant=name), now=0.0) for name in ("a", "b", "c", "a2")]
    assert [each.accepted for each in outcomes[:3]] == [True, True, False]
    assert (
        outcomes[2].reason == "each part of the cache belongs to another tenant: raise the parts of isolation partition"
    )
    assert engine.add(request("again", 4, tenant="a"), now=0.0).accepted


def test_what_no_part_could_hold_is_refused_and_blocks_nobody() -> None:
    engine = tiny_engine(num_blocks=8, isolation="partition")
    outcome = engine.add(request("large", 20, max_tokens=1), now=0.0)
    assert not outcome.accepted and "holds 16 (4 blocks of 4)" in outcome.reason
    with pytest.raises(ValueError, match=r"num_blocks \(8\) must be at least 1 for each of the 9 parts"):
        tiny_engine(num_blocks=8, isolation="partition,parts=9")
    with pytest.raises(ValueError, match=r"parts \(0\) must be at least 1, a tenant each"):
        make("isolation", "partition,parts=0")


def test_who_finds_no_room_in_his_part_keeps_nobody_of_another_waiting() -> None:
    """The second of `a` waits for its first; `b`, behind both, enters at once. Within a part the line holds."""
    engine = tiny_engine(num_blocks=8, isolation="partition")
    for name, length in (("a1", 12), ("a2", 12), ("a3", 1)):
        engine.add(request(name, length, max_tokens=2, tenant="a"), now=0.0)
    engine.add(request("b", 4, max_tokens=2, tenant="b"), now=0.0)
    assert shown(step(engine, now=0.0)) == [("a1", 0, 12), ("b", 0, 4)]


def test_only_ones_own_part_makes_way() -> None:
    """`a1` grows into its last block; `a2` yields, though `b` was admitted last."""
    engine = tiny_engine(num_blocks=8, isolation="partition")
    for name, tenant, length in (("a1", "a", 8), ("a2", "a", 8), ("b", "b", 12)):
        engine.add(request(name, length, max_tokens=4, tenant=tenant), now=0.0)
    step(engine, now=0.0)
    assert step(engine, now=1.0).preempted == ("a2",)
    assert {record.num_output_tokens for record in run_to_end(engine, now=2.0).values()} == {4}


@pytest.mark.parametrize("eviction", EVICTION)
def test_a_journal_of_parts_can_be_replayed_and_names_no_tenant(eviction: str) -> None:
    lines: list[str] = []
    engine = tiny_engine(lines.append, isolation="partition,parts=3", eviction=eviction)
    random = Random(5)
    for now in range(30):
        tenant = random.choice(("acme", "globex", "initech", "umbrella"))
        engine.add(request(now, random.randint(1, 12), max_tokens=3, tenant=tenant), float(now))
        plan = engine.schedule(float(now))
        if plan is not None:
            finish(engine, plan, float(now))
    assert replay(lines, build).divergence is None
    assert {json.loads(line).get("part", "-") for line in lines} == {0, 1, 2, None, "-"}
    assert not any(name in "".join(lines) for name in ("acme", "globex", "initech", "umbrella"))


@pytest.mark.parametrize("allocation", ["paged", "paged_full_prompt", "paged_reserve_output"])
def test_the_laws_hold_in_parts_whatever_happens(allocation: str) -> None:
    """T21 to T28 after every event, and each part within its quota."""
    num_preempted = 0
    for seed in range(12):
        random = Random(repr((allocation, seed)))
        ledger = Ledger(tiny_engine(num_blocks=12, isolation="partition", allocation=allocation, max_num_seqs=6))
        now = 0.0
        for turn in range(60):
            now += random.choice((0.0, 0.25))
            event = random.random()
            if event < 0.4 and str(turn) not in ledger.live:
                prompt = [random.randrange(2) for _ in range(random.randint(1, 16))]
                ledger.add(request(turn, prompt, max_tokens=random.randint(1, 6), tenant=random.choice("xyz")), now)
            elif event < 0.5:
                ledger.abort(str(turn - 3), now)
            elif ledger.flights:
                ledger.update(now)
            else:
                ledger.schedule(now)
            check_parts(ledger.engine)
        num_preempted += ledger.engine.num_preemptions
        ledger.drive_to_end(now)
    assert num_preempted > 0 or allocation == "paged_reserve_output", "no pressure, no proof"


def test_a_partition_without_an_eviction_policy_a_part_is_refused() -> None:
    config = tiny_config(isolation="partition")
    chosen = {menu: make(menu, getattr(config, menu)) for menu in MENUS}
    with pytest.raises(ValueError, match="isolation 'partition' needs an eviction policy for each part"):
        EngineCore(config, Policies(**chosen))

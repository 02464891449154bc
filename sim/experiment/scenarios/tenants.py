"""Tenants with identical prefixes: each finds its own again, and nobody what is another's.

Live, every request comes with an API key and a body that claims to be somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.experiment.scenarios.checks import all_answered, is_exactly
from sim.experiment.scenarios.scenario import Arms, Check, Scale, Scenario
from sim.setup import Setup

DECISION = "the same prefixes are shown to show what sharing would find"
NUM_TENANTS, USERS, NUM_PREFIXES, ROUNDS = 2, 2, 2, 2


def _asked(scale: Scale, num_prefixes: int, users: int, num_requests: int, isolation: str) -> Setup:
    lengths = f"prefix_tokens={scale.long},own_tokens={scale.short},output_tokens={scale.answer}"
    people = f"num_prefixes={num_prefixes},num_tenants={NUM_TENANTS},users_per_tenant={users}"
    return scale.setup(
        f"repeated-prefix,{people},{lengths}",
        scale.users(1),
        num_requests,
        isolation=isolation,
        threat_decision=DECISION,
        max_num_batched_tokens=scale.long,
    )


def _found(arm: str, arms: Arms, scale: Scale, num_requests: int, num_first: int) -> Check:
    """All but the first of each scope find the whole prefix."""
    expected = (num_requests - num_first) * scale.long
    return is_exactly(arms[arm], "num_cached_tokens", expected, f"tokens found, {num_first} of {num_requests} cold,")


# -- S56 --------------------------------------------------------------------------------------------------------------

NUM_OF_TWO = 3 * NUM_TENANTS * ROUNDS


def _two(scale: Scale) -> Mapping[str, Setup]:
    return {each: _asked(scale, 1, 1, NUM_OF_TWO, each) for each in ("global", "tenant", "no_reuse")}


def _each_finds_its_own(arms: Arms, scale: Scale) -> Sequence[Check]:
    return [
        all_answered(arms.values()),
        _found("global", arms, scale, NUM_OF_TWO, 1),
        _found("tenant", arms, scale, NUM_OF_TWO, NUM_TENANTS),
        _found("no_reuse", arms, scale, NUM_OF_TWO, NUM_OF_TWO),
    ]


TWO_TENANTS = Scenario(
    "two-tenants",
    "S56",
    "Two authenticated tenants, one prefix: does each find its own again, and only that?",
    "engine.isolation",
    _two,
    _each_finds_its_own,
    is_counted=True,
)

# -- S57 --------------------------------------------------------------------------------------------------------------

NUM_OF_ALL = NUM_PREFIXES * NUM_TENANTS * USERS * ROUNDS
# How many requests come first to their scope and find nothing; any hit beyond the rest is reuse that nobody meant.
COLD = {
    "global": NUM_PREFIXES,
    "application": NUM_PREFIXES,  # a prefix is an application here
    "tenant": NUM_PREFIXES * NUM_TENANTS,
    "user": NUM_PREFIXES * NUM_TENANTS * USERS,
    "session": NUM_OF_ALL,
    "no_reuse": NUM_OF_ALL,
}


def _scopes(scale: Scale) -> Mapping[str, Setup]:
    return {scope: _asked(scale, NUM_PREFIXES, USERS, NUM_OF_ALL, scope) for scope in COLD}


def _nothing_unintended(arms: Arms, scale: Scale) -> Sequence[Check]:
    return [
        all_answered(arms.values()),
        *(_found(scope, arms, scale, NUM_OF_ALL, num) for scope, num in COLD.items()),
    ]


CROSS_TENANT = Scenario(
    "cross-tenant",
    "S57",
    "The same prefixes under every scope of sharing: is ever more found than the scope allows, or less?",
    "engine.isolation",
    _scopes,
    _nothing_unintended,
    is_counted=True,
)

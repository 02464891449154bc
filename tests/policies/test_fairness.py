"""Who pays for what, whose turn it is, and how far apart clients may come: vtc, drr, dlpm, wfq.

An account of the test's own is kept from plans alone, token by token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import Any

import pytest

from policies.scheduling._served import Served, Tariff
from policies.types import RequestState, StepPlan
from tests.lives import Life, chooser, draw_settings
from tests.worlds import finish, request, shown, state_of, step, tiny_engine

INPUT, OUTPUT = 1, 2  # prices


@dataclass
class Account:
    """What each client has been served, from plans: prompt tokens computed for the first time, and answers' tokens."""

    client_of: dict[str, str]
    prompt_of: dict[str, int]
    output_price: int = OUTPUT
    total: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    farthest: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def see(self, plan: StepPlan) -> None:
        for entry in plan.admitted:
            self.farthest[entry.request_id] = max(self.farthest[entry.request_id], entry.num_cached_tokens)
        for name, start, num in shown(plan):
            end, client, prompt = start + num, self.client_of[name], self.prompt_of[name]
            for position in range(max(start, self.farthest[name]), end):
                self.total[client] += INPUT if position < prompt else 0
                self.total[client] += self.output_price if position >= prompt - 1 else 0
            self.farthest[name] = max(self.farthest[name], end)


# -- what is charged --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("charge_cached, charge_recompute", [(False, False), (True, False), (False, True)])
def test_all_that_is_computed_is_charged_once_and_nothing_else(
    seed: int, charge_cached: bool, charge_recompute: bool
) -> None:
    """In whatever life, steps taken at once or one by one, asked early or late: held against the ledger's own count."""
    choose = chooser("served", seed)
    life = Life(choose, draw_settings(choose, num_blocks=12))
    life.repeats = bool(seed % 2)
    served, paid = Served(Tariff(1, 100, charge_cached, charge_recompute)), Counter[str]()
    discard, bearers = life.ledger.engine.scheduling.discard, dict[RequestState, Any]()

    def noted(state: RequestState) -> None:
        discard(state)
        served.admit(state)
        bearers[state] = life.ledger.live[state.request_id]

    life.ledger.engine.scheduling.discard = noted  # type: ignore[method-assign]
    for turn in range(80):
        life.run(1)
        if turn % 3 == 0:
            paid.update(served.collect())
    life.end()
    paid.update(served.collect())
    assert bearers and +paid
    expected = Counter[str]()
    for state, bearer in bearers.items():
        prompt, reached, client = state.num_prompt_tokens, bearer.farthest, state.request.client_id
        expected[client] += min(reached, prompt) + 100 * max(0, reached - prompt + 1)
        expected[client] -= 0 if charge_cached else bearer.cached + bearer.spared
        expected[client] += bearer.recomputed if charge_recompute else 0
    assert paid == expected
    assert not served.collect() and not served._charged, "whoever has left is forgotten"


def test_a_chunk_is_paid_for_when_it_is_computed() -> None:
    engine = tiny_engine(max_num_batched_tokens=5)
    engine.add(request("a", 8, max_tokens=3), now=0.0)
    served, state, told = Served(Tariff(INPUT, OUTPUT)), state_of(engine, "a"), []
    served.admit(state)
    for now in range(4):
        plan = engine.schedule(float(now))
        told.append(sum(served.collect().values()))
        if plan:
            finish(engine, plan, now + 1.0)
    assert told == [5, 3 + 2, 2, 2], "the step that ends the prompt yields the first of its three tokens"


def test_what_somebody_else_computed_in_the_meantime_is_not_charged() -> None:
    """a computes 4 of 12 tokens and yields; b computes the rest; a finds 8 and computes 4. It pays 8, not 12."""
    engine = tiny_engine(scheduling="priority", max_num_seqs=1, max_num_batched_tokens=4, num_blocks=20)
    engine.add(request("a", range(12), max_tokens=1, priority=1), now=0.0)
    served, state = Served(Tariff(INPUT, 0)), state_of(engine, "a")
    served.admit(state)
    step(engine, 0.0)
    engine.preempt(state, 1.0)
    engine.add(request("b", range(12), max_tokens=1), now=1.0)
    for now in range(1, 4):
        step(engine, float(now))
    assert not engine.has_work and state.num_spared_tokens == 4
    assert served.collect() == {"": 8}


# -- vtc --------------------------------------------------------------------------------------------------------------


def come_in(scheduling: str, *told: tuple[str, str, int, int], **settings: Any) -> str:
    """(name, client, prompt, answer) of those who wait from the start; in which order they come in, one at a time."""
    engine, names, now = tiny_engine(scheduling=scheduling, **{"max_num_seqs": 1, **settings}), "", 0.0
    for name, client, prompt, answer in told:
        engine.add(request(name, prompt, max_tokens=answer, client_id=client), now)
    while engine.has_work:
        names += "".join(entry.request_id for entry in step(engine, now).admitted)
        now += 1.0
    return names


LOAD = [("a", "u", 4, 3), ("b", "u", 4, 3), ("c", "u", 2, 1), ("x", "v", 1, 1), ("y", "v", 3, 2), ("z", "v", 8, 1)]


def test_vtc_serves_whoever_was_served_least() -> None:
    """u: a 4+2*3 = 10. v: x 3, y 7 makes 10, a tie: b of u came before z. Then u has 20, v 10: z, and c."""
    assert come_in("vtc", *LOAD) == "axybzc"


def test_vtc_prices_are_knobs() -> None:
    """u's cost 8 and 1 token, v's 1 and 5."""
    load = [("a", "u", 8, 1), ("b", "u", 8, 1), ("x", "v", 1, 5), ("y", "v", 1, 5)]
    assert come_in("vtc", *load) == "axby", "10 and 11"
    assert come_in("vtc,output_price=0", *load) == "axyb", "8 and 1"
    assert come_in("vtc,input_price=0", *load) == "axby", "2 and 10"


def test_vtc_divides_by_weight() -> None:
    """u pays a third: 10/3, 20/3, 24/3. v pays 3, 10, 20."""
    assert come_in("vtc,weights=u:3/v:1", *LOAD) == "axybcz"


def two_waves(scheduling: str, second: float = 9.0) -> str:
    """u is served alone for a while; then v, who was idle, and u come together, or v when nobody waits."""
    engine, names, now = tiny_engine(scheduling=scheduling, max_num_seqs=1), "", 0.0
    for number in range(3):
        engine.add(request(f"u{number}", 4, max_tokens=3, client_id="u"), now)
    while now <= second or engine.has_work:
        if now == second:
            for name, client in (("v0", "v"), ("v1", "v"), ("v2", "v"), ("u3", "u")):
                engine.add(request(name, 4, max_tokens=3, client_id=client), now)
        if plan := engine.schedule(now):
            names += " ".join(("", *(entry.request_id for entry in plan.admitted)))
            finish(engine, plan, now + 1.0)
        now += 1.0
    return names


def test_vtc_the_papers_lift_brings_a_newcomer_to_whoever_left_the_line_last() -> None:
    assert two_waves("vtc") == " u0 u1 u2 v0 u3 v1 v2", "both have 30; v0 makes v 40, u3 makes u 40"
    assert two_waves("vtc,lift=none") == " u0 u1 u2 v0 v1 v2 u3", "v catches up on 30"
    assert two_waves("vtc,lift=artifact") == " u0 u1 u2 v0 v1 v2 u3", "nobody waits: the artifact lifts nobody"


def test_vtc_both_lifts_bring_a_newcomer_to_the_least_of_those_who_wait() -> None:
    """v comes while u2 waits and u has 18; a step later it has 20, then v 28, u 30, v 38."""
    for scheduling in ("vtc", "vtc,lift=artifact"):
        assert two_waves(scheduling, second=5.0) == " u0 u1 v0 u2 v1 u3 v2"
    assert two_waves("vtc,lift=none", second=5.0) == " u0 u1 v0 v1 u2 v2 u3", "v catches up from nothing: 10, 20"


def test_vtc_within_a_step_prompts_to_come_count() -> None:
    """Four places: u's first costs 8, so v may bring three of 2 before u is next."""
    told = [("a", "u", 8, 1), ("b", "u", 8, 1), *((name, "v", 2, 1) for name in "wxyz")]
    assert come_in("vtc", *told, max_num_seqs=4) == "awxybz"


def test_vtc_whoever_is_thrown_out_pays_again_only_if_it_is_said() -> None:
    """v has 17. u's request is thrown out after 9 tokens and computes them again: 9 + 2 * 2 = 13, or 22."""
    for knob, expected in (("false", "uv"), ("true", "vu")):
        engine = tiny_engine(
            scheduling=f"vtc,lift=none,charge_recompute={knob}", max_num_seqs=1, enable_prefix_caching=False
        )
        engine.add(request("v0", 15, max_tokens=1, client_id="v"), 0.0)
        step(engine, 0.0)
        engine.add(request("u0", 9, max_tokens=2, client_id="u"), 1.0)
        step(engine, 1.0)
        engine.preempt(state_of(engine, "u0"), 2.0)
        step(engine, 2.0)
        for name in "vu":
            engine.add(request(name, 1, max_tokens=1, client_id=name), 3.0)
        assert "".join(step(engine, now).admitted[0].request_id for now in (3.0, 4.0)) == expected


def test_vtc_cached_tokens_are_free_unless_it_is_said() -> None:
    """u finds 8 of its 9 tokens: it pays 1 + 2, or 11. v has 7."""
    for knob, expected in (("false", "uv"), ("true", "vu")):
        engine = tiny_engine(scheduling=f"vtc,lift=none,charge_cached={knob}", max_num_seqs=1)
        for now, (name, prompt, client) in enumerate((("w", range(9), "w"), ("u0", range(9), "u"), ("v0", 5, "v"))):
            engine.add(request(name, prompt, max_tokens=1, client_id=client), float(now))
            step(engine, float(now))
        for name in "vu":
            engine.add(request(name, 1, max_tokens=1, client_id=name), 3.0)
        assert "".join(step(engine, now).admitted[0].request_id for now in (3.0, 4.0)) == expected


# -- drr --------------------------------------------------------------------------------------------------------------


def test_drr_a_turn_lasts_until_its_credit_is_used_up() -> None:
    """Each of u's costs 10, each of v's 3. A quantum of 12: u two (20, 8 too much), v four (12), v is at 0; then u has
    12 - 8 = 4: one; v the rest."""
    load = [(name, "u", 4, 3) for name in "abcd"] + [(name, "v", 1, 1) for name in "qrstwxyz"]
    assert come_in("drr,quantum=12", *load) == "ab" + "qrst" + "c" + "wxyz" + "d"
    assert come_in("drr,quantum=1", *load) == "a" + "q" * 0 + _by_ones()


def _by_ones() -> str:
    """A quantum of one: whoever owes least after a round is next; u owes 10 after each, v 3."""
    owed, names, lines = {"u": 9, "v": 0}, "", {"u": list("bcd"), "v": list("qrstwxyz")}
    ring = ["v", "u"]
    while any(lines.values()):
        client = ring.pop(0)
        if not lines[client]:
            continue
        owed[client] -= 1
        if owed[client] < 0:
            names += lines[client].pop(0)
            owed[client] += {"u": 10, "v": 3}[client]
        ring.append(client)
    return names


def test_drr_within_a_step_prompts_to_come_count() -> None:
    """Four places: u's first costs 8 and ends its turn, two of v's cost 4 each."""
    load = [(name, "u", 8, 1) for name in "ab"] + [(name, "v", 4, 1) for name in "xyz"]
    assert come_in("drr,quantum=7", *load, max_num_seqs=4, num_blocks=20) == "axybz"


def test_drr_weights_are_longer_turns() -> None:
    """Each costs 3; u's turns are of 6 tokens, v's of 3."""
    load = [(name, "u", 1, 1) for name in "abcdef"] + [(name, "v", 1, 1) for name in "xyz"]
    assert come_in("drr,quantum=3,weights=u:2", *load) == "abxcdyefz"


def test_drr_a_turn_that_ends_with_an_empty_line_forfeits_the_rest() -> None:
    """u uses 3 of 100 and comes back later: it stands at the end, and has a turn like any other, not a longer one."""
    engine = tiny_engine(scheduling="drr,quantum=100", max_num_seqs=1)
    engine.add(request("a", 1, max_tokens=1, client_id="u"), 0.0)
    step(engine, 0.0)
    for name, client in (("x", "v"), ("b", "u")):
        engine.add(request(name, 1, max_tokens=1, client_id=client), 1.0)
    assert engine.scheduling._credit == {"u": 0, "v": 0}  # type: ignore[attr-defined]
    assert [step(engine, now).admitted[0].request_id for now in (1.0, 2.0)] == ["x", "b"]


# -- dlpm -------------------------------------------------------------------------------------------------------------


def locality(scheduling: str) -> str:
    """Client u's requests find 8 of 9 tokens, v's find nothing of 4; each gives one token."""
    engine, names = tiny_engine(scheduling=scheduling, max_num_seqs=1, num_blocks=40), ""
    engine.add(request("warm", range(9), max_tokens=1, client_id="w"), 0.0)
    step(engine, 0.0)
    for name in "xyz":
        engine.add(request(name, 4, max_tokens=1, client_id="v"), 1.0)
    for name in "abcdef":
        engine.add(request(name, range(9), max_tokens=1, client_id="u"), 1.0)
    for now in range(1, 10):
        names += step(engine, float(now)).admitted[0].request_id
    return names


def test_dlpm_the_longest_match_is_next_among_those_with_credit() -> None:
    """A hit costs u 1 + 1, a miss costs v 4 + 1. With 4 tokens: u two, v one (it owes 1); refill: u two, v (3 left, so
    it may) one; and so on. With credit for all, hits first; with next to none, each as it owes."""
    assert locality("dlpm,quantum=4") == "ab" + "x" + "cd" + "y" + "ef" + "z"
    assert locality("dlpm,quantum=1000") == locality("lpm") == "abcdefxyz"


def test_dlpm_a_large_quantum_lets_a_newcomer_come_at_once() -> None:
    engine = tiny_engine(scheduling="dlpm,quantum=1000", max_num_seqs=1)
    for name in "ab":
        engine.add(request(name, 4, max_tokens=1, client_id="u"), 0.0)
    step(engine, 0.0)
    engine.add(request("n", [3] * 4, max_tokens=1, client_id="new"), 1.0)
    step(engine, 1.0)
    assert step(engine, 2.0).admitted[0].request_id == "n"


def test_dlpm_a_client_is_forgotten_after_a_while_and_not_before() -> None:
    for seconds, credit in ((50.0, -95), (150.0, 5)):
        engine = tiny_engine(scheduling="dlpm,quantum=5,forget_after=100,output_price=97")
        engine.add(request("a", 3, max_tokens=1, client_id="u"), 0.0)
        step(engine, 0.0)
        engine.add(request("b", 3, max_tokens=1, client_id="u"), seconds)
        policy: Any = engine.scheduling
        policy._settle()
        assert policy._credit.get("u", policy._quantum) == credit


def test_dlpm_a_refill_counts_only_if_somebody_came_in_by_it() -> None:
    """u is in debt, and memory is full: to look again and again forgives nothing. When there is room again it has
    5 - 13, and gets the two quanta that bring it out of debt; v, who only waits, has no debt and gets none."""
    engine = tiny_engine(scheduling="dlpm,quantum=5", num_blocks=4, max_num_seqs=2)
    engine.add(request("a", 9, max_tokens=4, client_id="u"), 0.0)
    step(engine, 0.0)
    engine.add(request("b", 9, max_tokens=1, client_id="u"), 1.0)
    policy: Any = engine.scheduling
    for now in (1.0, 2.0):
        step(engine, now)
    policy._settle()
    assert policy._credit == {"u": 5 - (9 + 3)}, "of a: the prompt, and three tokens"
    step(engine, 3.0)
    assert step(engine, 4.0).admitted[0].request_id == "b"
    assert policy._credit == {"u": 5 - 13 + 2 * 5}


# -- wfq --------------------------------------------------------------------------------------------------------------


def classes(scheduling: str, *told: tuple[str, str, int, int]) -> str:
    engine, names, now = tiny_engine(scheduling=scheduling, max_num_seqs=1), "", 0.0
    for name, class_name, prompt, answer in told:
        engine.add(request(name, prompt, max_tokens=answer, class_name=class_name), 0.0)
    while engine.has_work:
        names += "".join(entry.request_id for entry in step(engine, now).admitted)
        now += 1.0
    return names


def test_wfq_goes_by_when_each_would_end_if_classes_shared_the_server() -> None:
    """x's cost 10 each: tags 10, 20, 30. y's cost 3, 9, 18: tags 3, 12, 30. A tie goes to x's, which came first."""
    load = [("a", "x", 4, 3), ("b", "x", 4, 3), ("c", "x", 4, 3), ("q", "y", 1, 1), ("r", "y", 5, 2), ("s", "y", 2, 8)]
    assert classes("wfq", *load) == "qarbcs"


def test_wfq_weights_divide_and_predictions_count() -> None:
    load = [(name, "x", 1, 1) for name in "abcd"] + [(name, "y", 1, 1) for name in "yz"]
    assert classes("wfq,weights=x:2/y:1", *load) == "abycdz", "x ends at 1.5, 3, 4.5, 6; y at 3, 6; ties to x"
    engine = tiny_engine(scheduling="wfq")
    for name, class_name, predicted in (("a", "x", 3), ("b", "y", None), ("c", "z", 1)):
        engine.add(request(name, 4, max_tokens=8, class_name=class_name, predicted_output_tokens=predicted), 0.0)
    assert "".join(state.request_id for state in engine.scheduling.candidates(engine.view, 0.0)) == "cab"


def test_wfq_a_class_that_was_idle_begins_at_the_clock() -> None:
    engine, names = tiny_engine(scheduling="wfq", max_num_seqs=1), ""
    for number in range(5):
        engine.add(request(f"x{number}", 1, max_tokens=1, class_name="x"), 0.0)
    for now in range(3):
        step(engine, float(now))
    for number in range(3):
        engine.add(request(f"y{number}", 1, max_tokens=1, class_name="y"), 3.0)
    for now in range(3, 8):
        names += " " + step(engine, float(now)).admitted[0].request_id
    assert names == " x3 y0 x4 y1 y2", "the clock is at 9: both classes are at 12, 15 from there, y's third at 18"


# -- how far apart (T54, T55) -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Clients who always have somebody waiting; the greedy one has many more, and longer ones."""

    num_clients: int
    seed: int
    num_blocks: int = 12
    max_num_seqs: int = 6

    def requests(self) -> list[tuple[str, str, int, int]]:
        random, told = Random(f"{self.num_clients}-{self.seed}"), []
        for number in range(500):
            greedy = random.random() < 0.8
            client = 0 if greedy else random.randrange(self.num_clients)
            told.append(
                (str(number), f"client-{client}", random.randint(1, 20 if greedy else 8), random.randint(1, 12))
            )
        return told

    @property
    def num_tokens_in_memory(self) -> int:
        return 4 * self.num_blocks


@dataclass
class Spread:
    """Over any stretch of time in which two clients always had somebody waiting: how far apart what they got came."""

    widest: float = 0.0
    most_in_flight: int = 0  # the most that the running requests of one client were ever worth
    num_steps: int = 0


def spread(scheduling: str, load: Load, weights: dict[str, int] | None = None) -> Spread:
    engine = tiny_engine(scheduling=scheduling, num_blocks=load.num_blocks, max_num_seqs=load.max_num_seqs)
    told, found, weights = load.requests(), Spread(), weights or {}
    client_of = {name: client for name, client, *_ in told}
    account = Account(client_of, {name: prompt for name, _, prompt, _ in told})
    worth = {name: INPUT * prompt + OUTPUT * answer for name, _, prompt, answer in told}
    for name, client, prompt, answer in told:
        engine.add(request(name, prompt, max_tokens=answer, client_id=client), 0.0)
    clients = sorted(set(client_of.values()))
    low: dict[tuple[str, str], float] = {}
    high: dict[tuple[str, str], float] = {}
    now = 0.0
    num_waiting = Counter(client_of.values())
    while len(+num_waiting) > 1:
        for pair in combinations(clients, 2):
            if not all(num_waiting[client] for client in pair):
                low.pop(pair, None), high.pop(pair, None)
                continue
            one, other = (account.total[client] / weights.get(client, 1) for client in pair)
            low[pair] = min(low.get(pair, one - other), one - other)
            high[pair] = max(high.get(pair, one - other), one - other)
            found.widest = max(found.widest, high[pair] - low[pair])
        plan = engine.schedule(now)
        assert plan is not None
        account.see(plan)
        num_waiting.subtract(client_of[entry.request_id] for entry in plan.admitted)
        num_waiting.update(client_of[name] for name in plan.preempted)
        running: dict[str, int] = defaultdict(int)
        for state in engine.running:
            running[client_of[state.request_id]] += worth[state.request_id]
        found.most_in_flight = max(found.most_in_flight, *running.values())
        finish(engine, plan, now + 1.0)
        now += 1.0
        found.num_steps += 1
    assert found.num_steps > 80
    return found


def largest_share(load: Load) -> int:
    """max(input price x longest prompt, output price x tokens that fit into memory), U in the papers."""
    return max(INPUT * 20, OUTPUT * 4 * load.num_blocks)


LOADS = [Load(num_clients, seed) for num_clients, num_seeds in ((2, 5), (5, 2), (12, 2)) for seed in range(num_seeds)]


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_vtc_keeps_clients_within_two_shares_and_fcfs_does_not(load: Load) -> None:
    """T54, the theorem of the paper."""
    bound = 2 * largest_share(load)
    assert spread(f"vtc,lift={('paper', 'artifact', 'none')[load.seed % 3]}", load).widest <= bound
    assert spread("fcfs", load).widest > 10 * bound


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_vtc_lets_nobody_in_but_of_the_client_who_has_had_least(load: Load) -> None:
    """By the account kept apart, whoever is the first to come in."""
    engine = tiny_engine(scheduling="vtc,lift=none", num_blocks=load.num_blocks, max_num_seqs=load.max_num_seqs)
    told, now, num_seen = load.requests(), 0.0, 0
    client_of = {name: client for name, client, *_ in told}
    account = Account(client_of, {name: prompt for name, _, prompt, _ in told})
    for name, client, prompt, answer in told:
        engine.add(request(name, prompt, max_tokens=answer, client_id=client), now)
    num_waiting = Counter(client_of.values())
    while len(+num_waiting) > 1 and (plan := engine.schedule(now)):
        least = min(account.total[client] for client in +num_waiting)
        for entry in plan.admitted[:1]:
            assert account.total[client_of[entry.request_id]] == least
            num_seen += 1
        account.see(plan)
        num_waiting.subtract(client_of[entry.request_id] for entry in plan.admitted)
        num_waiting.update(client_of[name] for name in plan.preempted)
        now += 1.0
        finish(engine, plan, now)
    assert num_seen > 30


@pytest.mark.parametrize("load", LOADS[::3], ids=str)
def test_vtc_keeps_weighted_clients_within_it_by_weight(load: Load) -> None:
    weights = {"client-0": 3}
    assert spread("vtc,weights=client-0:3", load, weights).widest <= 2 * largest_share(load)
    assert spread("vtc", load, weights).widest > 2 * largest_share(load), "the weight is heard of"


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_drr_keeps_clients_within_two_flights_and_a_quantum_and_fcfs_does_not(load: Load) -> None:
    """T55. A flight is all that one client's running requests are worth: nobody knows it while they run."""
    for quantum in (10, 100):
        found = spread(f"drr,quantum={quantum}", load)
        assert found.widest <= 2 * found.most_in_flight + quantum
    found = spread("fcfs", load)
    assert found.widest > 10 * (2 * found.most_in_flight + 100)


@pytest.mark.parametrize("load", LOADS[::2], ids=str)
def test_dlpm_keeps_clients_within_two_shares_and_two_quanta(load: Load) -> None:
    for quantum in (10, 100):
        found = spread(f"dlpm,quantum={quantum},output_price={OUTPUT}", load)
        assert found.widest <= 2 * (largest_share(load) + quantum)
    assert spread("lpm", load).widest > 10 * 2 * (largest_share(load) + 100)


@pytest.mark.parametrize("seed", range(4))
def test_wfq_keeps_classes_within_the_largest_request_of_each(seed: int) -> None:
    """One at a time, lengths known: |W_f - W_g| <= l_f + l_g by weight, over any stretch (Golestani, 1994)."""
    random = Random(seed)
    engine = tiny_engine(scheduling="wfq,weights=x:3/y:1", max_num_seqs=1)
    told = [
        request(number, random.randint(1, 20), max_tokens=random.randint(1, 12), class_name=random.choice("xy"))
        for number in range(150)
    ]
    for each in told:
        engine.add(each, 0.0)
    total, apart, now = {"x": 0, "y": 0}, [0.0], 0.0
    while {state.request.class_name for state in engine.scheduling.candidates(engine.view, now)} == {"x", "y"}:
        for entry in step(engine, now).admitted:
            served = told[int(entry.request_id)]
            total[served.class_name] += INPUT * served.prompt.num_tokens + OUTPUT * served.max_tokens
            apart.append(total["x"] / 3 - total["y"])
        now += 1.0
    largest = INPUT * 20 + OUTPUT * 12
    assert len(apart) > 60 and max(apart) - min(apart) <= largest / 3 + largest

"""Each order in the smallest world that shows its rule; what they come to on one server; what changes none of them."""

from __future__ import annotations

from itertools import permutations, product
from random import Random
from typing import Any

import pytest

from policies.catalogue import MENU, make
from policies.engine import EngineCore
from policies.scheduling.srpt import ShortestRemaining
from policies.types import Request
from tests.specs import examples
from tests.worlds import finish, request, run_to_end, shown, state_of, step, tiny_engine

SCHEDULINGS = [spec for name in MENU["scheduling"] for spec in examples("scheduling", name)]


def order(engine: EngineCore, now: float = 0.0) -> str:
    return "".join(state.request_id for state in engine.scheduling.candidates(engine.view, now))


def line(scheduling: str, *requests: Request, **settings: Any) -> EngineCore:
    """An engine with these waiting, added in this order."""
    engine = tiny_engine(scheduling=scheduling, **settings)
    for each in requests:
        engine.add(each, now=max(0.0, each.arrival_time))
    return engine


def served(scheduling: str, *requests: Request, **settings: Any) -> str:
    """In which order they come in, one at a time."""
    engine, told, now = line(scheduling, *requests, max_num_seqs=1, **settings), "", 0.0
    while engine.has_work:
        told += "".join(entry.request_id for entry in step(engine, now).admitted)
        now += 1.0
    return told


@pytest.mark.parametrize("name", [name for name in MENU["scheduling"] if name != "fcfs"])
def test_bands_come_first(name: str) -> None:
    engine = line(name, *(request(who, priority=priority) for who, priority in (("c", 2), ("b", 1), ("a", 0))))
    assert order(engine) == "abc"


# -- sjf --------------------------------------------------------------------------------------------------------------


def test_sjf_takes_the_fewest_tokens_to_compute_and_what_is_cached_is_none() -> None:
    engine = tiny_engine(scheduling="sjf")
    engine.add(request("warm", range(13), max_tokens=1), now=0.0)
    step(engine, now=0.0)
    for name, prompt in (("a", range(14)), ("b", [9] * 3), ("c", [8] * 2), ("d", [7] * 2)):
        engine.add(request(name, prompt), now=1.0)
    assert order(engine) == "acdb", "12 of a's 14 are cached: 2 are left"


def test_sjf_gives_the_head_a_seat_after_so_many_others() -> None:
    shorts = [request(name, 1, max_tokens=1) for name in "abcdef"]
    assert served("sjf,patience=2", request("L", 9, max_tokens=1), request("M", 8, max_tokens=1), *shorts) == "abLcdMef"
    assert served("sjf,patience=0", request("L", 9, max_tokens=1), *shorts) == "abcdefL"


def test_sjf_whoever_is_cancelled_has_passed_nobody() -> None:
    engine = line(
        "sjf,patience=1", request("L", 9), *(request(name, 1, max_tokens=1) for name in "abc"), max_num_seqs=1
    )
    engine.abort("a", now=0.0)
    assert order(engine) == "bcL", "nobody was let in before L"
    step(engine, now=0.0)
    assert order(engine) == "Lc"


def test_sjf_looks_up_only_a_window_of_the_shortest() -> None:
    engine = tiny_engine(scheduling="sjf,window=1")
    engine.add(request("warm", range(13), max_tokens=1), now=0.0)
    step(engine, now=0.0)
    for name, prompt in (("a", range(14)), ("b", [9] * 3)):
        engine.add(request(name, prompt), now=1.0)
    assert order(engine) == "ba"


# -- edf --------------------------------------------------------------------------------------------------------------


def test_edf_goes_by_deadline_and_whoever_has_none_comes_last() -> None:
    told = [request("c"), request("b", deadline=5.0), request("d"), request("a", deadline=4.0)]
    assert order(line("edf", *told)) == "abcd"


def test_edf_may_give_a_deadline_to_those_who_have_none() -> None:
    told = [request("b"), request("c", deadline=5.0), request("a", deadline=2.0), request("d", arrival_time=3.0)]
    assert order(line("edf,otherwise=3", *told)) == "abcd", "b's is 3, d's is 6"


# -- srpt -------------------------------------------------------------------------------------------------------------


def test_srpt_goes_by_the_prediction_or_the_limit_where_there_is_none() -> None:
    told = [
        request("c", max_tokens=7, predicted_output_tokens=5),
        request("b", max_tokens=4),
        request("a", max_tokens=9, predicted_output_tokens=1),
    ]
    assert order(line("srpt", *told)) == "abc"


def test_srpt_counts_what_has_been_answered() -> None:
    engine = line("srpt", request("a", predicted_output_tokens=4, max_tokens=8), num_blocks=20)
    for now in range(3):
        step(engine, now=float(now))
    engine.preempt(state_of(engine, "a"), now=3.0)
    engine.add(request("b", predicted_output_tokens=2), now=3.0)
    assert order(engine) == "ab", "one token is left of a's four"


def test_srpt_can_count_the_prompt() -> None:
    told = [request("a", prompt=20, predicted_output_tokens=1), request("b", prompt=2, predicted_output_tokens=3)]
    assert order(line("srpt", *told)) == "ab"
    assert order(line("srpt,input_price=1,output_price=5", *told)) == "ba"


def test_srpt_errors_are_as_large_as_they_are_said_to_be_and_even() -> None:
    policy, told = ShortestRemaining(error=0.5), list[int]()
    state = state_of(line("fcfs", request("a", predicted_output_tokens=1000)), "a")
    for number in range(2000):
        state.sequence = number
        told.append(policy._predicted(state))
    assert min(told) < 510 and max(told) > 1490 and all(500 <= each <= 1500 for each in told)
    assert abs(sum(told) / len(told) - 1000) < 20
    assert len({each // 100 for each in told}) == 11


# -- lpm: SGLang's rules ----------------------------------------------------------------------------------------------


def warm(scheduling: str, **settings: Any) -> EngineCore:
    """The cache holds 12 tokens: 0 to 11."""
    engine = tiny_engine(scheduling=scheduling, num_blocks=40, **settings)
    engine.add(request("warm", range(13), max_tokens=1), now=0.0)
    step(engine, now=0.0)
    return engine


def test_lpm_the_longest_match_is_next_and_ties_go_by_arrival() -> None:
    engine = warm("lpm")
    told = {"d": [5] * 9, "b": [*range(8), 5, 5], "a": range(13), "c": [*range(8), 6, 6, 6], "e": [5, 5]}
    for name, prompt in told.items():
        engine.add(request(name, prompt), now=1.0)
    assert order(engine) == "abcde"


def test_lpm_falls_back_to_the_order_of_arrival_above_a_threshold() -> None:
    engine = warm("lpm,fallback_above=3")
    for name, prompt in (("b", [5] * 9), ("a", range(13)), ("c", [6] * 4)):
        engine.add(request(name, prompt), now=1.0)
    assert order(engine) == "abc"
    engine.add(request("d", [7] * 4), now=1.0)
    assert order(engine) == "bacd"


def test_lpm_of_those_that_begin_alike_one_goes_first_so_that_the_others_find_it() -> None:
    """a and c begin with the same 8 tokens, and nothing of them is cached; c is put off behind d, as is e."""
    engine = warm("lpm,alike=8,next_to_nothing=4", cache_at="step_end")
    told = {"a": [5] * 9, "b": range(13), "c": [*[5] * 8, 6], "d": [7] * 3, "e": [*[5] * 8, 7, 7]}
    for name, prompt in told.items():
        engine.add(request(name, prompt), now=1.0)
    assert order(engine) == "badce"
    step(engine, now=1.0)
    assert [record.num_cached_tokens for record in run_to_end(engine, now=2.0).values()][-1] == 8


def test_lpm_puts_nobody_off_who_finds_more_than_next_to_nothing() -> None:
    engine = warm("lpm,alike=8,next_to_nothing=4")
    for name in "ab":
        engine.add(request(name, [*range(8), 5, 5]), now=1.0)
    engine.add(request("c", [6] * 3), now=1.0)
    assert order(engine) == "abc", "both find 8"


def test_lpm_without_aging_starves_the_cold_and_with_it_does_not() -> None:
    """A hot one every second, room for one (the replay of sglang #31954)."""
    waited = {}
    for scheduling in ("lpm", "lpm,aging=2"):
        engine = warm(scheduling, max_num_seqs=1)
        engine.add(request("cold", [9] * 12, max_tokens=1, arrival_time=1.0), now=1.0)
        waited[scheduling] = 40
        for now in range(1, 40):
            engine.add(request(now, range(13), max_tokens=1, arrival_time=now), now=float(now))
            if "cold" in step(engine, float(now)).request_ids:
                waited[scheduling] = now - 1
                break
    assert waited == {"lpm": 40, "lpm,aging=2": 6}, "a match of 12 tokens is worth 6 s at 2 tokens a second"


# -- one server, one at a time ----------------------------------------------------------------------------------------


def waits(scheduling: str, told: list[tuple[int, int]]) -> list[float]:
    """All come at once, one runs at a time, and a step takes as long as it has tokens: when each is done."""
    engine = tiny_engine(scheduling=scheduling, max_num_seqs=1, num_blocks=64, max_model_len=64,
                         max_num_batched_tokens=64)  # fmt: skip
    for number, (length, deadline) in enumerate(told):
        engine.add(request(number, length, max_tokens=1, deadline=float(deadline)), now=0.0)
    now = 0.0
    while plan := engine.schedule(now):
        now += plan.num_tokens
        finish(engine, plan, now)
    return [record.finish_time for record in sorted(engine.drain_records(), key=lambda each: int(each.request_id))]


@pytest.mark.parametrize("seed", range(20))
def test_sjf_has_the_least_mean_wait_of_all_orders(seed: int) -> None:
    """Smith's rule, against all 120 orders of five."""
    random = Random(seed)
    lengths = [random.randint(1, 30) for _ in range(5)]
    least = min(
        sum(sum(each[: at + 1]) for at in range(5)) for each in permutations(lengths)
    )  # fmt: skip
    totals = {
        name: sum(waits(spec, [(length, 0) for length in lengths]))
        for name, spec in (("sjf", "sjf,patience=0"), ("fcfs", "fcfs"))
    }
    assert totals["sjf"] == least <= totals["fcfs"]


@pytest.mark.parametrize("seed", range(20))
def test_edf_keeps_all_deadlines_if_any_order_does(seed: int) -> None:
    """Jackson's rule: the largest lateness is the least possible, against all orders of five."""
    random = Random(seed)
    told = [(random.randint(1, 20), random.randint(5, 60)) for _ in range(5)]

    def lateness(each: tuple[tuple[int, int], ...]) -> int:
        return max(sum(length for length, _ in each[: at + 1]) - each[at][1] for at in range(5))

    ends = waits("edf", told)
    found = max(end - deadline for end, (_, deadline) in zip(ends, told, strict=True))
    assert found == min(map(lateness, permutations(told)))


@pytest.mark.parametrize("seed", range(3))
def test_equal_work_waits_as_long_in_any_order(seed: int) -> None:
    """T11, Kleinrock's conservation law, exactly: no order that looks at no size changes the sum of waits."""
    random = Random(seed)
    told = [
        request(number, 3, max_tokens=4, arrival_time=float(random.randint(0, 200)), client_id=random.choice("uvw"),
                class_name=random.choice("xy"), priority=random.randint(0, 1), deadline=float(random.randint(0, 300)))
        for number in range(40)
    ]  # fmt: skip
    totals = set()
    for scheduling in SCHEDULINGS:
        engine, now = tiny_engine(scheduling=scheduling, max_num_seqs=1, enable_prefix_caching=False), 0.0
        coming = sorted(told, key=lambda each: each.arrival_time)
        while coming or engine.has_work:
            while coming and coming[0].arrival_time <= now:
                engine.add(coming.pop(0), now)
            if plan := engine.schedule(now):
                finish(engine, plan, now + 1.0)
            now += 1.0
        totals.add(sum(record.finish_time - record.arrival_time for record in engine.drain_records()))
    assert len(totals) == 1


def srpt_by_hand(told: list[tuple[int, int]]) -> int:
    """Sum of sojourns where each second goes to whoever has least left."""
    left, total, now = dict[int, int](), 0, 0
    while left or now <= max(arrival for arrival, _ in told):
        left |= {number: work for number, (arrival, work) in enumerate(told) if arrival == now}
        if left:
            number = min(left, key=lambda each: (left[each], each))
            left[number] -= 1
            if not left[number]:
                del left[number]
                total += now + 1 - told[number][0]
        now += 1
    return total


@pytest.mark.parametrize("seed", range(8))
def test_srpt_with_preemption_and_true_lengths_is_the_best_there_is(seed: int) -> None:
    """T12: blocks of one token in the cache make a return free, so one server serves by the token."""
    random = Random(seed)
    told = sorted((random.randint(0, 60), random.choice((1, 2, 3, 12))) for _ in range(20))
    totals = {}
    for scheduling, preempts in product(("srpt", "fcfs", "edf", "vtc", "srpt,error=1"), (True, False)):
        if preempts and not hasattr(make("scheduling", scheduling), "outranks"):
            continue
        engine = tiny_engine(scheduling=scheduling, preempt_for_waiting=preempts, block_size=1, num_blocks=1000,
                             max_num_seqs=1)  # fmt: skip
        coming, now = list(enumerate(told)), 0.0
        while coming or engine.has_work:
            while coming and coming[0][1][0] <= now:
                number, (arrival, work) = coming.pop(0)
                engine.add(request(number, [number], max_tokens=work, arrival_time=float(arrival),
                                   deadline=float(number * 7 % 50)), now)  # fmt: skip
            if plan := engine.schedule(now):
                assert plan.num_tokens == 1, "a return costs nothing"
                finish(engine, plan, now + 1.0)
            now += 1.0
        totals[scheduling, preempts] = sum(each.finish_time - each.arrival_time for each in engine.drain_records())
    assert totals["srpt", True] == srpt_by_hand(told) == min(totals.values())
    assert totals["srpt", True] < totals["fcfs", False]


# -- what changes nothing ---------------------------------------------------------------------------------------------


def day(
    scheduling: str, seed: int, cancelled: bool = False, num_blocks: int = 60, caching: bool = True, **same: Any
) -> list[Any]:
    """Thirty requests of three clients and two classes in forty seconds. `same` is what all of them have alike.

    `cancelled`: now and then somebody comes and is gone before anybody looks.
    """
    random, told, now = Random(seed), list[Any](), 0.0
    engine = tiny_engine(scheduling=scheduling, num_blocks=num_blocks, max_num_seqs=3, enable_prefix_caching=caching)
    for number in range(40):
        for each in range(random.randint(0, 2)):
            fields: dict[str, Any] = {
                "prompt": [random.randint(0, 1)] * random.randint(1, 14), "max_tokens": random.randint(1, 9),
                "client_id": random.choice("uvw"), "class_name": random.choice("xy"), "priority": random.randint(0, 1),
                "deadline": now + random.randint(1, 9), "predicted_output_tokens": random.randint(1, 9),
            }  # fmt: skip
            if cancelled:
                engine.add(request("gone", **{**fields, **same}), now)
                engine.abort("gone", now)
            engine.add(request(f"{number}.{each}", arrival_time=now, **{**fields, **same}), now)
        told.append(_one_step(engine, now))
        now += 1.0
    while engine.has_work:
        told.append(_one_step(engine, now))
        now += 1.0
    return told


def _one_step(engine: EngineCore, now: float) -> Any:
    plan = engine.schedule(now)
    if plan is None:
        return None
    finish(engine, plan, now + 1.0)
    return shown(plan), plan.preempted


ALIKE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one band is first come first served": ("priority", "fcfs", {"priority": 0}),
    "one client": ("vtc", "fcfs", {"priority": 0, "client_id": "u", "num_blocks": 12}),
    "one client, in turns": ("drr,quantum=5", "fcfs", {"priority": 0, "client_id": "u", "num_blocks": 12}),
    "one class": ("wfq", "fcfs", {"priority": 0, "class_name": "x", "num_blocks": 12}),
    "no deadline": ("edf", "fcfs", {"priority": 0, "deadline": None}),
    "one prediction": ("srpt", "fcfs", {"priority": 0, "predicted_output_tokens": 3}),
    "one length, nothing cached": ("sjf", "fcfs", {"priority": 0, "prompt": 5, "caching": False}),
    "nothing cached": ("lpm,alike=0", "fcfs", {"priority": 0, "caching": False}),
    "endless credit": ("dlpm,quantum=1000000000", "lpm", {}),
    "weights times seven": ("vtc,weights=u:2/v:3/w:1", "vtc,weights=u:14/v:21/w:7", {}),
    "a client who never comes": ("vtc,weights=u:2", "vtc,weights=u:2/nobody:7", {}),
    "a class that never comes": ("wfq,weights=x:2", "wfq,weights=x:2/nobody:7", {}),
    "no room for patience": ("sjf,patience=1000", "sjf,patience=0", {}),
    "an error of nothing": ("srpt,error=0", "srpt", {}),
}


@pytest.mark.parametrize("one, other, same", ALIKE.values(), ids=ALIKE.keys())
def test_two_orders_are_one_where_their_difference_has_nothing_to_bite(
    one: str, other: str, same: dict[str, Any]
) -> None:
    """T42, T43: every step, for ten days."""
    for seed in range(10):
        assert day(one, seed, **same) == day(other, seed, **same)


@pytest.mark.parametrize("one, other", [(one, "fcfs") for one in MENU["scheduling"] if one != "fcfs"])
def test_and_they_differ_where_it_has(one: str, other: str) -> None:
    assert any(day(one, seed) != day(other, seed) for seed in range(10))


KEEPS_TRACE = {"vtc": "the lift at arrival stays", "srpt,error": "errors are drawn by order of adding"}


@pytest.mark.parametrize("spec", [spec for spec in SCHEDULINGS if not spec.startswith(tuple(KEEPS_TRACE))])
def test_who_is_cancelled_before_anybody_looks_was_never_there(spec: str) -> None:
    """T44."""
    if "forget_after" in spec:
        spec = spec.replace("forget_after=1", "forget_after=1000")  # to have come is to be remembered
    for seed in range(6):
        assert day(spec, seed, cancelled=True) == day(spec, seed)

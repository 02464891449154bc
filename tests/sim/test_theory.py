"""Queues that theory can solve: the simulator must agree, and the same check must see a mistake of 2 %.

One step gives every running request one token, so the cost of a step decides which queue an engine is. An answer of n
tokens to a prompt of one takes n steps, the first of which is its prefill. How an interval comes about is told in
tests/theory.py.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from policies.config import EngineConfig
from sim.cost import AffineCost
from sim.simulate import Run, simulate
from sim.workload.generate import from_lengths
from tests.theory import (
    LONG_ANSWERS,
    LOST_ARRIVALS,
    SLOW_STEPS,
    Bug,
    Floats,
    Lengths,
    Quantity,
    Queue,
    Visits,
    Window,
    check,
    erlang_c,
    factorial_moments,
    fixed,
    geometric,
    hyper_geometric,
    many_servers,
    mean_wait,
    occupancy,
    pollaczek_khinchine,
    product_form,
    shared_server,
    single_server,
    time_per_token,
    uniform,
)

MEAN = 400  # tokens
TOKEN = 1 / MEAN  # seconds
FIXED, UNIFORM, GEOMETRIC, HYPER = fixed(MEAN), uniform(2 * MEAN - 1), geometric(MEAN), hyper_geometric(200, 1200, 0.2)


def check_sees(queue: Queue, bug: Bug) -> None:
    check(queue)
    with pytest.raises(AssertionError, match="outside"):
        check(queue, bug)


# -- the closed forms themselves --------------------------------------------------------------------------------------


def test_one_server_waits_by_erlang_c_as_by_pollaczek_khinchine() -> None:
    assert erlang_c(1, 0.6) / (1 - 0.6) == pytest.approx(pollaczek_khinchine(0.6, 1.0, 2.0))


def test_erlang_c_of_two_servers_is_the_textbook_one() -> None:
    load = 0.6
    assert erlang_c(2, 2 * load) == pytest.approx(2 * load**2 / (1 + load))


def test_product_form_is_geometric_for_a_linear_cost_and_poisson_for_a_constant_one() -> None:
    linear = product_form(0.5, MEAN, lambda n: n * TOKEN)
    constant = product_form(3.0, MEAN, lambda n: TOKEN)
    assert linear[:20] == pytest.approx([0.5 ** (n + 1) for n in range(20)])
    assert constant[:20] == pytest.approx([math.exp(-3) * 3**n / math.factorial(n) for n in range(20)])


# -- one at a time: a constant cost and one slot ----------------------------------------------------------------------


def one_at_a_time(lengths: Lengths) -> Queue:
    wait = pollaczek_khinchine(0.5, lengths.mean * TOKEN, lengths.second_moment * TOKEN**2)
    return Queue(
        rate=0.5,
        lengths=lengths,
        cost=AffineCost(per_step=TOKEN),
        max_num_seqs=1,
        reference=partial(single_server, service_time=TOKEN),
        measure=mean_wait,
        quantities=(Quantity("mean wait", wait, 0.01 * wait),),
        num_runs=80 if lengths is HYPER else 50,
        num_customers=100_000,
    )


def test_equal_answers_wait_as_in_an_md1_queue() -> None:
    """T2: half of what exponential services would wait."""
    queue = one_at_a_time(FIXED)
    assert queue.quantities[0].value == pytest.approx(0.5 * 1.0 / (2 * (1 - 0.5)))
    check_sees(queue, SLOW_STEPS)


@pytest.mark.parametrize("lengths", [UNIFORM, GEOMETRIC, HYPER], ids=str)
def test_waits_grow_with_the_second_moment_of_the_answers(lengths: Lengths) -> None:
    """T3, Pollaczek and Khinchine."""
    check_sees(one_at_a_time(lengths), LONG_ANSWERS)


# -- all at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [FIXED, GEOMETRIC, HYPER], ids=str)
def test_a_linear_cost_shares_the_server_and_slows_every_length_alike(lengths: Lengths) -> None:
    """T4, M/G/1 processor sharing: E[T(x)] = x / (1 - load), whatever the distribution of lengths."""
    names = ("all",) if lengths is FIXED else ("all", "short", "long")
    edges = () if lengths is FIXED else (MEAN,)
    stretch = TOKEN / (1 - 0.5)
    queue = Queue(
        rate=0.5,
        lengths=lengths,
        cost=AffineCost(per_step=0.0, per_token=TOKEN),
        max_num_seqs=256,
        reference=partial(shared_server, step_time=lambda n: n * TOKEN),
        measure=partial(time_per_token, edges=edges),
        quantities=tuple(
            Quantity(f"time per token, {name}", stretch, 0.01 * stretch, stretch / (2 * MEAN)) for name in names
        ),
        num_runs=30 if lengths is FIXED else 100,
        control=TOKEN,
    )
    check_sees(queue, SLOW_STEPS)


@pytest.mark.parametrize(("lengths", "bug"), [(FIXED, LOST_ARRIVALS), (GEOMETRIC, SLOW_STEPS)], ids=str)
def test_a_constant_cost_serves_everybody_alone_and_their_number_is_poisson(lengths: Lengths, bug: Bug) -> None:
    """T5, M/G/infinity: factorial moments of a Poisson number are the powers of its mean, and only of that."""
    load = 3.0

    def moments(visits: Visits, window: Window) -> Floats:
        return factorial_moments(occupancy(visits, window), 3)

    queue = Queue(
        rate=load,
        lengths=lengths,
        cost=AffineCost(per_step=TOKEN),
        max_num_seqs=256,
        reference=partial(shared_server, step_time=lambda n: TOKEN),
        measure=moments,
        quantities=tuple(
            Quantity(f"factorial moment {k}", load**k, 0.01 * load**k, k * load**k / (2 * MEAN)) for k in (1, 2, 3)
        ),
        num_runs=60 if lengths is FIXED else 150,
        control=TOKEN / load / 2,
    )
    check_sees(queue, bug)


@pytest.mark.parametrize(
    ("lengths", "bug"), [(FIXED, SLOW_STEPS), (GEOMETRIC, LONG_ANSWERS), (HYPER, SLOW_STEPS)], ids=str
)
def test_an_affine_cost_gives_the_product_form_whatever_the_answers(lengths: Lengths, bug: Bug) -> None:
    """T6: steps of a + b n seconds; P(n present) is proportional to the product of rate * mean * (a + b i) / i."""

    def step_time(num: int) -> float:
        return TOKEN * (1 + 0.4 * num)

    def mean_and_shares(visits: Visits, window: Window) -> Floats:
        shares = occupancy(visits, window)
        return np.concatenate((factorial_moments(shares, 1), shares[:8]))

    expected = product_form(1.0, MEAN, step_time)
    mean = float(factorial_moments(expected, 1)[0])
    queue = Queue(
        rate=1.0,
        lengths=lengths,
        cost=AffineCost(per_step=TOKEN, per_token=0.4 * TOKEN),
        max_num_seqs=256,
        reference=partial(shared_server, step_time=step_time),
        measure=mean_and_shares,
        quantities=(
            Quantity("mean present", mean, 0.01 * mean, mean / (2 * MEAN)),
            *(Quantity(f"share with {n} present", float(expected[n]), 0.005) for n in range(8)),
        ),
        num_runs=60,
        control=0.6 * TOKEN,
    )
    check_sees(queue, bug)


@pytest.mark.parametrize(("num_slots", "load", "bug"), [(2, 0.6, LONG_ANSWERS), (3, 0.6, SLOW_STEPS)])
def test_slots_are_servers_and_their_queue_waits_by_erlang_c(num_slots: int, load: float, bug: Bug) -> None:
    """T7, M/M/c: a constant cost, geometric answers. Who finds a slot free still waits for the end of a step."""
    wait = erlang_c(num_slots, num_slots * load) / (num_slots * (1 - load))
    queue = Queue(
        rate=num_slots * load,
        lengths=GEOMETRIC,
        cost=AffineCost(per_step=TOKEN),
        max_num_seqs=num_slots,
        reference=partial(many_servers, service_time=TOKEN, num_servers=num_slots),
        measure=mean_wait,
        quantities=(Quantity("mean wait", wait, 0.01 * wait, TOKEN / 2),),
        num_runs=280 if num_slots > 2 else 100,
        control=TOKEN / num_slots,
    )
    check_sees(queue, bug)


# -- static batching --------------------------------------------------------------------------------------------------

GROUP = 16


def served_in_groups(arrivals: list[float], lengths: list[int], token: float) -> Run:
    """Groups of 16, waited for as long as it takes."""
    config = EngineConfig(
        num_blocks=GROUP,
        block_size=2**16,
        max_model_len=2**16,
        max_num_seqs=GROUP,
        enable_prefix_caching=False,
        batching="static,max_wait=1e9",
    )
    return simulate(config, from_lengths(arrivals, [1] * len(lengths), lengths), AffineCost(per_step=token))


def slot_efficiency(run: Run) -> float:
    """Share of slots that gave a token."""
    useful = sum(sample.num_tokens * sample.num_steps for sample in run.samples)
    padding = sum(sample.num_padding_tokens * sample.num_steps for sample in run.samples)
    return useful / (useful + padding)


def test_static_slots_are_filled_to_the_mean_over_the_largest_of_a_group() -> None:
    """T13, exactly: a group lasts as long as its longest answer."""
    lengths = np.random.default_rng(0).geometric(1 / 100, (20, GROUP))
    run = served_in_groups([0.0] * lengths.size, lengths.ravel().tolist(), token=1 / 128)
    assert slot_efficiency(run) == lengths.sum() / (GROUP * lengths.max(axis=1).sum())


def test_geometric_answers_fill_three_tenths_of_static_slots() -> None:
    """T13: E[L] / E[max of 16] = 0.2976, about 1 / (1 + 1/2 + ... + 1/16) = 0.2958. Each length once in a random order
    of the quantiles of the distribution leaves little to chance."""
    num = 200 * GROUP
    quantiles = (np.random.default_rng(1).permutation(num) + 0.5) / num
    lengths = np.ceil(np.log1p(-quantiles) / math.log1p(-1 / 100)).astype(int)
    steps = np.arange(10_000)
    largest = float((1 - (1 - 0.99**steps) ** GROUP).sum())
    found = slot_efficiency(served_in_groups([0.0] * num, lengths.tolist(), token=1 / 128))
    assert found == pytest.approx(100 / largest, rel=0.03)


def test_static_batching_waits_least_at_a_middling_rate() -> None:
    """T13: few arrivals wait for their group to fill, many for the group before them."""
    num, rng = 100 * GROUP, np.random.default_rng(2)
    gaps, lengths = rng.standard_exponential(num), rng.geometric(1 / 100, num).tolist()
    waits = []
    for rate in (0.25, 1.5, 2.2):
        run = served_in_groups((np.cumsum(gaps) / rate).tolist(), lengths, token=0.02)
        waits.append(run.summary.queue_delay.mean)
    few, middling, many = waits
    assert few == pytest.approx((GROUP - 1) / 2 / 0.25, rel=0.05)  # the k-th of a group waits for 16 - k arrivals
    assert middling < 0.3 * few
    assert middling < 0.6 * many


# -- the token bound --------------------------------------------------------------------------------------------------

BUDGET, PROMPT, ANSWER = 64, 16, 48


def backlog(batching: str) -> list[int]:
    """Requests present at eight times of a run at 97 % of the token bound; everything is evenly spaced and equal.

    The bound: rate * (prompt + answer - 1) tokens are at most a full budget a step, and such a step takes 1/8 s.
    """
    cost = AffineCost(per_step=1 / 16, per_token=1 / 16 / BUDGET)
    rate = 0.97 * 8 * BUDGET / (PROMPT + ANSWER - 1)
    arrivals = np.arange(2000) / rate
    config = EngineConfig(
        num_blocks=BUDGET,
        block_size=PROMPT + ANSWER,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=BUDGET,
        enable_prefix_caching=False,
        batching=batching,
    )
    run = simulate(config, from_lengths(arrivals.tolist(), [PROMPT] * 2000, [ANSWER] * 2000), cost)
    departures = np.array([record.finish_time for record in run.records])
    times = arrivals[-1] * np.arange(1, 9) / 8
    return [int((arrivals <= time).sum() - (departures <= time).sum()) for time in times]


@pytest.mark.parametrize("batching", ["chunked", "stall_free,chunk_size=64"])
def test_mixed_steps_are_stable_at_97_percent_of_the_token_bound(batching: str) -> None:
    present = backlog(batching)
    assert max(present) <= BUDGET
    assert max(present[4:]) <= max(present[:4]) + 1


def test_prefill_first_diverges_at_97_percent_of_the_token_bound() -> None:
    """Steps of a few prompts cost as much as full ones, so the backlog grows by the same number in every quarter."""
    quarters = np.diff(backlog("prefill_first")[1::2])
    assert min(quarters) > 40
    assert max(quarters) < 1.5 * min(quarters)

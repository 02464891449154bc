"""Costs from a profile: what it prices, what the datasheet still does, and how sure both are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.commands import Prepared, run_banded
from sim.cost import DatasheetCost, MeasuredCost, StepCost, StepWork
from sim.cost.draws import PARTS, Draw, draws
from sim.cost.gauge import Gauge
from sim.cost.kinds import Decode, Gemm, Prefill
from sim.cost.mixed import Mixed
from sim.cost.op_model import OpModel
from sim.cost.profile import FittedOp, Profile, shipped, to_json
from sim.hardware import Device, Efficiency, Link, device
from sim.models import MODELS, Model, model, stored_as
from sim.report import Banded, extrapolation, intervals
from sim.setup import Setup, manifest

LLAMA = model("llama-3-8b")
H100, H200 = (DatasheetCost(LLAMA, device(name)) for name in ("h100", "h200"))
(H100_TABLES,), (H200_TABLES,) = shipped("h100"), shipped("h200")
MEASURED = MeasuredCost.of(H100_TABLES, H100)


def decode_step(batch: int, context: int) -> StepWork:
    return StepWork(batch, batch, batch, batch, batch * context)


def prefill_step(num_tokens: int, start: int = 0, num_prefills: int = 1) -> StepWork:
    pairs = num_prefills * num_tokens * (2 * start + num_tokens + 1)
    total, context = num_prefills * num_tokens, num_prefills * (start + num_tokens)
    return StepWork(total, num_prefills, num_prefills, 0, 0, num_prefills, pairs, context)


# -- worked by hand ---------------------------------------------------------------------------------------------------

ALL = Efficiency("made up", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
TOY = Model("toy", 1, 64, 4, 2, 16, 128, 256, 512)
UNIT = Device("unit", 1.0, 1.0, 1.0, 1.0, 1, ALL, Link(1.0, 1e-6, 2e-6, 1.0))
TOY_COST = DatasheetCost(TOY, UNIT)
SERVES = {"head_dim": 16, "kv_dtype": "bf16", "grouped": True}


def priced(kind: Any, **prices: float) -> OpModel:
    return OpModel(kind, tuple(prices.get(name, 0.0) for name in kind.names))


def toy_profile(*ops: FittedOp) -> Profile:
    return Profile("toy", "unit", "public tables", ops, 1.1, "made up")


DECODE_OP = FittedOp(priced(Decode(16, 2, 1e6, 1), launch=1e-3), SERVES)
PREFILL_OP = FittedOp(priced(Prefill(16, 2, 1), launch=2e-3, flops=1e-9), SERVES)
GEMM_OP = FittedOp(priced(Gemm(2), launch=1e-4), {"dtype": "bf16"})


def test_each_operation_takes_its_own_price_and_the_rest_the_datasheets() -> None:
    # One layer of 4 GEMMs, the head, attention; the datasheet's small kernels: 5 * 3 us, 2.432 us a token by bytes,
    # 2.56 us of sampling (see test_cost).
    cost = MeasuredCost.of(toy_profile(DECODE_OP, PREFILL_OP, GEMM_OP), TOY_COST)
    work = decode_step(1, 10)
    assert cost.device_time(work) == pytest.approx(4e-4 + 1e-4 + 1e-3 + (15 + 2.432 + 2.56) * 1e-6)
    assert cost.host_time(work) == TOY_COST.host_time(work)
    assert cost.device_time(StepWork()) == 0.0


def test_what_a_profile_does_not_price_costs_what_the_datasheet_says() -> None:
    work = StepWork(33, 2, 2, 1, 50, 1, 32 * 33, 32)
    nothing = MeasuredCost.of(toy_profile(), TOY_COST)
    assert nothing.device_time(work) == pytest.approx(TOY_COST.device_time(work), rel=1e-12)
    assert nothing.ops.are_none
    for op, part in ((DECODE_OP, "decode attention"), (PREFILL_OP, "prefill attention"), (GEMM_OP, "gemm")):
        cost = MeasuredCost.of(toy_profile(op), TOY_COST)
        assert cost.device_time(work) != pytest.approx(TOY_COST.device_time(work), rel=1e-3)
        assert [name for name, source in cost.parts.items() if source == "public tables"] == [part]


def test_chunks_of_unlike_length_cost_their_pairs() -> None:
    # 1,000 and 3,000 tokens: 1,000 * 1,001 + 3,000 * 3,001 pairs, counted twice as everywhere
    cost = MeasuredCost.of(toy_profile(PREFILL_OP), TOY_COST)
    pairs = 1000 * 1001 + 3000 * 3001
    prefill = cost.part_times(StepWork(4000, 2, 0, 0, 0, 2, pairs, 4000)).prefill
    assert prefill == pytest.approx(2e-3 + pairs * 4 * 2 * 16 * 1e-9, rel=0.01)


def test_one_launch_for_both_attentions_stands_for_both() -> None:
    kind = Mixed(4, 2, 16, 2, 1e6, 1)
    op = FittedOp(
        priced(kind, launch=1e-3, decodes_beside=1e-2),
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "kv_dtype": "bf16"},
    )
    cost = MeasuredCost.of(toy_profile(op), TOY_COST)
    assert cost.part_times(decode_step(8, 100)).prefill == pytest.approx(1e-3)
    both = StepWork(24, 9, 9, 8, 800, 1, 16 * 17, 16)
    assert cost.part_times(both).prefill == pytest.approx(1e-3 + 8e-2)
    assert cost.parts["decode attention"] == cost.parts["prefill attention"] == "public tables"


def test_a_profile_of_another_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="profile public-tables is of h100, not of h200"):
        MeasuredCost.of(H100_TABLES, H200)
    with pytest.raises(ValueError, match=r"scale \(0.0\) must be above 0"):
        replace(MEASURED, scale=0.0)


# -- the shipped tables, against measurements of others ---------------------------------------------------------------


def layer_attention_time(cost: MeasuredCost, work: StepWork) -> float:
    parts = cost.part_times(work)
    return (parts.decode + parts.prefill) / cost.model.num_layers


@pytest.mark.parametrize(
    ("batch", "context", "low_us", "high_us"),
    [(1, 65536, 75.2, 84.3), (32, 4096, 131.0, 135.5), (128, 1024, 143.9, 148.6), (128, 4096, 490.7, 520.6)],
)
def test_decodes_take_what_three_engines_measured(batch: int, context: int, low_us: float, high_us: float) -> None:
    """KV beyond the L2 of an H200; what fits in it is charged as read from memory, which no loop of launches shows."""
    predicted = layer_attention_time(MeasuredCost.of(H200_TABLES, H200), decode_step(batch, context)) * 1e6
    assert low_us / 1.06 <= predicted <= high_us * 1.06


def test_a_kv_that_fits_in_the_cache_is_read_from_memory_in_a_server() -> None:
    kept = H200_TABLES.model("decode attention", head_dim=128, kv_dtype="bf16", grouped=True)
    assert kept is not None
    warm = kept.shaped(8.0, 4.0).time(8, 1024)  # 33.6 MB of 50
    cold = layer_attention_time(MeasuredCost.of(H200_TABLES, H200), decode_step(8, 1024))
    assert warm * 1.05 < cold < warm + 33.6e6 / 3e12


@pytest.mark.parametrize(
    ("length", "num_prompts", "tflops"),
    [(1024, 1, 244), (2048, 1, 393), (4096, 1, 513), (4096, 8, 549), (8192, 1, 586)],
)
def test_prefills_take_what_vllm_measured(length: int, num_prompts: int, tflops: float) -> None:
    work = prefill_step(length, num_prefills=num_prompts)
    time = layer_attention_time(MeasuredCost.of(H200_TABLES, H200), work)
    assert work.prefill_pairs * 32 * 2 * 128 / time / 1e12 == pytest.approx(tflops, rel=0.08)


STEPS = st.tuples(st.integers(1, 600), st.integers(1, 20_000), st.integers(1, 4000), st.integers(0, 20_000))
COSTS = [MEASURED, MeasuredCost.of(H200_TABLES, replace(H200, model=stored_as(LLAMA, "fp8", "fp8")))]
COSTS += [MeasuredCost.of(H100_TABLES, replace(H100, model=shape, tensor_parallel=4)) for shape in MODELS[1:3]]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.sampled_from(COSTS), STEPS, STEPS)
def test_more_work_of_any_kind_never_takes_less(
    cost: MeasuredCost, step: tuple[int, int, int, int], more: tuple[int, int, int, int]
) -> None:
    """More decodes of the same context, longer contexts, longer chunks, longer prefixes."""

    def time(batch: int, context: int, chunk: int, start: int) -> float:
        prefill = prefill_step(chunk, start)
        decodes = (batch, batch * context)
        return cost.device_time(
            StepWork(batch + chunk, batch + 1, batch, *decodes, 1, prefill.prefill_pairs, start + chunk)
        )

    larger = tuple(a + b for a, b in zip(step, more, strict=True))
    assert time(*larger) >= time(*step) * (1 - 1e-12)
    for i in range(4):
        assert time(*(larger[j] if i == j else step[j] for j in range(4))) >= time(*step) * (1 - 1e-12)


# -- the best there is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [*COSTS[:2], replace(MEASURED, scale=1.3)], ids=["bf16", "fp8", "scaled"])
@given(batch=st.integers(1, 600), context=st.integers(1, 200_000))
@settings(max_examples=60, deadline=None)
def test_the_short_way_for_plain_decodes_gives_the_same_bits(cost: MeasuredCost, batch: int, context: int) -> None:
    work = decode_step(batch, context)
    assert cost.is_plain(work)
    assert cost.device_time(work) == cost.total(work, cost.part_times(work))


def cost_of(**changes: Any) -> Any:
    setup = Setup(**changes)
    return setup.cost(setup.config())


def test_the_best_costs_are_taken_and_others_on_demand(tmp_path: Path) -> None:
    assert cost_of().provenance == "public tables"
    assert isinstance(cost_of(costs="datasheet"), DatasheetCost)
    assert cost_of(costs="public-tables").profile.name == "public-tables"
    assert cost_of(gpu="b200").provenance == "datasheet"
    path = tmp_path / "mine.json"
    path.write_text(to_json(replace(H100_TABLES, name="mine", content_hash="")))
    assert cost_of(costs=str(path)).profile.name == "mine"
    with pytest.raises(ValueError, match="no costs 'tables' of h100; known: auto, datasheet, public-tables"):
        cost_of(costs="tables")


def test_a_manifest_says_which_part_rests_on_what() -> None:
    setup = Setup(num_requests=3, workload="chat")
    config = setup.config()
    found = manifest(setup, config, setup.load(), setup.cost(config))["profile"]
    assert (found["provenance"], found["profile"], found["band"]) == ("public tables", "public-tables", 1.15)
    assert found["parts"]["gemm"] == "public tables" and len(found["profile_hash"]) == 64
    assert found["parts"]["small kernels, all-reduces, experts, host"] == "datasheet"


# -- how sure ---------------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_and_more_draws_go_on() -> None:
    assert draws(8, seed=3) == draws(8, seed=3) == draws(32, seed=3)[:8]
    assert draws(8, seed=3) != draws(8, seed=4)
    with pytest.raises(ValueError, match=r"draws \(2\) must be at least 4"):
        draws(2, seed=0)


def test_scores_are_standard_normal_and_each_part_has_its_own() -> None:
    many = draws(4000, seed=0)
    for part in PARTS:
        scores = [draw.score(part) for draw in many]
        assert abs(mean(scores)) < 0.05 and abs(stdev(scores) - 1.0) < 0.05
    assert len({draw.score("gemm") - draw.score("datasheet") for draw in many}) == 4000


def test_a_draw_moves_each_part_by_its_own_error() -> None:
    work = decode_step(32, 1000)
    base = MEASURED.part_times(work)
    off = MEASURED.drawn(Draw(0, {"decode attention": 1.0})).part_times(work)
    spread = H100_TABLES.model("decode attention", head_dim=128, kv_dtype="bf16", grouped=True)
    assert spread is not None
    assert off.decode / base.decode == pytest.approx(math.exp(spread.spread), rel=0.03)  # and its bootstrap prices
    slow = MEASURED.drawn(Draw(0, {"datasheet": 1.0}))
    assert slow.host_time(work) == pytest.approx(1.35 * MEASURED.host_time(work))
    assert H100.drawn(Draw(0, {"datasheet": -1.0})).device_time(work) == pytest.approx(H100.device_time(work) / 1.35)


def test_an_interval_is_the_middle_of_the_draws() -> None:
    assert intervals([{"a": float(n), "b": [n, None], "c": "x"} for n in range(101)], 0.5) == {
        "a": [25.0, 75.0],
        "b": [[25.0, 75.0], None],
        "c": None,
    }


def test_two_settings_meet_the_same_luck() -> None:
    work = decode_step(8, 100)
    few, many = (Prepared.of(Setup(num_requests=3, engine={"max_num_seqs": n})) for n in (64, 128))
    costs = [each.other_costs(band=True, num_draws=4) for each in (few, many)]
    assert [cost.device_time(work) for cost in costs[0]] == [cost.device_time(work) for cost in costs[1]]
    assert len({cost.device_time(work) for cost in costs[0]}) == 4


def test_draws_reach_every_figure() -> None:
    prepared = Prepared.of(Setup(num_requests=8, rate=20.0, workload="chat"))
    _, found = run_banded(prepared, prepared.other_costs(band=True, num_draws=4))
    assert len(found.others) == 4 and found.share == 0.68
    for pick in (lambda s: s.tpot.p50, lambda s: s.ttft.p99, lambda s: s.output_throughput):
        interval = found.interval(pick)
        values = sorted(map(pick, found.others))
        assert interval is not None and values[0] <= interval[0] < interval[1] <= values[-1]


# -- beyond what was measured -----------------------------------------------------------------------------------------


def test_a_gauge_prices_as_its_cost_and_counts_what_was_extrapolated() -> None:
    gauge: Any = Gauge(MEASURED)
    cost: StepCost = gauge
    inside, beyond = prefill_step(2048), prefill_step(512, start=4096)
    for work in (inside, beyond, decode_step(8, 100), StepWork()):
        assert cost.device_time(work) == MEASURED.device_time(work)
        assert cost.host_time(work) == MEASURED.host_time(work)
    parts = [MEASURED.part_times(work) for work in (inside, beyond, decode_step(8, 100))]
    assert gauge.shares == pytest.approx({"prefill attention": parts[1].prefill / sum(map(sum, parts))})


def test_results_beyond_what_was_measured_say_so_first() -> None:
    setup = Setup(workload="chat", num_requests=3)
    prepared = Prepared.of(setup)
    _, found = run_banded(prepared, [])
    told = extrapolation(Banded("it", found.summary, extrapolated={"prefill attention": 0.231, "gemm": 0.004}))
    assert told == ["extrapolated: 24 % of the device's time lies beyond what was measured (prefill attention 23 %)"]
    assert extrapolation(Banded("it", found.summary, extrapolated={"gemm": 0.004})) == []

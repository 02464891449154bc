"""Fitted operations as the simulator reads them: terms, factors and surfaces that never fall as a count grows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.kinds import Decode, Gemm, Kind, Prefill, octaves, octaves_beyond, spaced
from sim.cost.mixed import Mixed
from sim.cost.op_model import Grid, OpModel
from sim.cost.surface import Line, Surface, monotone

DECODE = Decode(head_dim=128, kv_dtype_bytes=2, l2_bytes=50e6, num_sms=132)
PREFILL = Prefill(head_dim=128, kv_dtype_bytes=2, num_sms=132)
GEMM = Gemm(weight_dtype_bytes=2)
MIXED = Mixed(32, 8, 128, 2, 128e6, 188)
KINDS: list[Kind] = [DECODE, PREFILL, GEMM, MIXED]
SHAPES: dict[str, tuple[float, ...]] = {
    "decode attention": (8.0, 4.0),
    "prefill attention": (8.0, 4.0),
    "gemm": (6144.0, 4096.0),
    "mixed attention": (),
}
RANGES = {
    "decode attention": [(1, 5000), (1, 300_000)],
    "prefill attention": [(1, 600), (1, 40_000), (0, 200_000)],
    "gemm": [(1, 100_000)],
    "mixed attention": [(0, 5000), (0, 40_000), (0, 600), (0, 40_000)],
}


def priced(kind: Kind, **prices: float) -> OpModel:
    return OpModel(kind, tuple(prices.get(name, 0.0) for name in kind.names))


def larger(kind: Kind) -> st.SearchStrategy[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Two sets of counts, none of the second's less than the first's."""
    ranges = RANGES[kind.name]
    low = st.tuples(*[st.integers(*ends) for ends in ranges])
    more = st.tuples(*[st.one_of(st.just(0), st.integers(0, ends[1])) for ends in ranges])
    return st.tuples(low, more).map(lambda pair: (pair[0], tuple(a + b for a, b in zip(*pair, strict=True))))


# -- terms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))
def test_no_term_falls_as_a_count_grows(kind: Kind) -> None:
    @settings(derandomize=True, max_examples=300, deadline=None)
    @given(larger(kind))
    def check(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        low, high = (kind.terms(*counts, *SHAPES[kind.name]) for counts in pair)
        for name, less, more in zip(kind.names, low, high, strict=True):
            assert more >= less * (1 - 1e-12), name

    check()


def test_a_decode_reads_keys_and_values_of_its_context() -> None:
    terms = dict(zip(DECODE.names, DECODE.terms(32, 4096, 8, 4), strict=True))
    assert terms["kv_bytes"] == 512 * 1024**2  # 32 * 4096 tokens * 2 (K, V) * 8 heads * 128 * 2 bytes
    assert terms["items"] == 256 and terms["items_above_sms"] == 256 - 132
    assert terms["tiles"] == 256 * 32
    assert terms["qo_bytes"] == 2 * 32 * 32 * 128 * 2


def test_what_fits_in_the_cache_is_not_missed_unless_the_loop_was_cold() -> None:
    warm = dict(zip(DECODE.names, DECODE.terms(1, 4096, 8, 4), strict=True))  # 16.8 of 50 MB
    cold = dict(zip(DECODE.names, replace(DECODE, is_cold=True).terms(1, 4096, 8, 4), strict=True))
    assert warm["missed_1"] == warm["missed_2"] == warm["missed_3"] == 0.0
    assert cold["missed_1"] == cold["kv_bytes"] == warm["kv_bytes"]
    large = dict(zip(DECODE.names, DECODE.terms(32, 4096, 8, 4), strict=True))
    assert large["missed_3"] == large["kv_bytes"]


def test_a_prefill_counts_the_causal_half() -> None:
    terms = dict(zip(PREFILL.names, PREFILL.terms(2, 4, 0, 8, 4), strict=True))
    assert terms["flops"] == 2 * 10 * 4 * 128 * 32  # 10 pairs of each of two prompts, as test_cost counts them
    assert terms["sequences"] == 2 and terms["length"] == 4


def test_a_few_tiles_take_as_long_as_one_for_each_sm() -> None:
    few = dict(zip(PREFILL.names, PREFILL.terms(1, 128, 8192, 8, 4), strict=True))  # 32 tiles of 132 SMs
    more = dict(zip(PREFILL.names, PREFILL.terms(4, 128, 8192, 8, 4), strict=True))  # 128 tiles
    assert few["spread_128"] == more["spread_128"] and few["waves_128"] == more["waves_128"]
    assert few["tiled_flops"] == pytest.approx(more["tiled_flops"] / 4)


def test_decodes_beside_a_chunk_lose_what_heads_share() -> None:
    alone = dict(zip(MIXED.names, MIXED.terms(0, 0, 64, 4096), strict=True))
    beside = dict(zip(MIXED.names, MIXED.terms(16, 0, 64, 4096), strict=True))
    assert alone["tiles_beside"] == 0.0 and alone["decodes_beside"] == 0.0
    assert beside["tiles_beside"] == 64 * 32 * 64 * (2 * 4096 + 65) * 256
    assert alone["kv_bytes"] == beside["kv_bytes"]


# -- small numbers ----------------------------------------------------------------------------------------------------


def test_octaves_are_exact_at_powers_of_two_and_straight_between() -> None:
    assert [octaves(x) for x in (0.5, 1.0, 2.0, 3.0, 1024.0)] == [-1.0, 0.0, 1.0, 1.5, 10.0]


def test_distances_are_octaves_beyond_the_nearer_end() -> None:
    assert octaves_beyond(100, 1, 1000) == 0.0
    assert octaves_beyond(2001, 1, 1000) == 1.0
    assert octaves_beyond(0, 3, 1000) == 2.0
    assert octaves_beyond(512, 0, 0, unit=512) == 1.0  # a prefix as long as the chunk


def test_nodes_lie_evenly_between_powers_of_two() -> None:
    assert spaced(2, 4, 2) == (4.0, 6.0, 8.0, 12.0, 16.0)


# -- surfaces ---------------------------------------------------------------------------------------------------------

PLANE = Surface(((0.0, 2.0), (1.0, 2.0, 4.0)), (0.0, 1.0, 3.0, 4.0, 5.0, 7.0))  # 2 x + y - 1


def test_between_nodes_times_are_linear_in_each_count() -> None:
    assert PLANE.at((1.0, 3.0)) == 4.0
    assert PLANE.at((0.5, 1.5)) == 1.5
    assert PLANE.at((2.0, 4.0)) == 7.0


def test_beyond_its_edges_a_surface_holds() -> None:
    assert PLANE.at((-5.0, 0.0)) == 0.0
    assert PLANE.at((9.0, 9.0)) == 7.0


def test_a_slice_is_the_surface_with_a_count_fixed() -> None:
    assert PLANE.fixed(0, 1.0) == Surface((PLANE.axes[1],), (2.0, 3.0, 5.0))
    assert PLANE.fixed(1, 3.0) == Surface((PLANE.axes[0],), (2.0, 6.0))
    assert PLANE.fixed(1, 9.0).at((2.0,)) == 7.0


def test_a_line_goes_on_in_proportion() -> None:
    line = Line((1.0, 2.0, 4.0), (1.0, 3.0, 4.0))
    assert [line.at(x) for x in (0.0, 1.5, 3.0, 4.0, 8.0)] == [1.0, 2.0, 3.5, 4.0, 8.0]


def test_a_dent_is_filled_and_its_rim_lowered_alike() -> None:
    assert monotone(Surface(((0.0, 1.0, 2.0, 3.0),), (1.0, 3.0, 2.0, 4.0))).values == (1.0, 2.5, 2.5, 4.0)
    assert monotone(PLANE) == PLANE


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.floats(0.0, 10.0), min_size=24, max_size=24), st.data())
def test_what_was_made_monotone_rises_along_every_axis(values: list[float], data: st.DataObject) -> None:
    surface = monotone(Surface(((0.0, 1.0, 3.0, 4.0), (1.0, 2.0, 5.0), (0.0, 1.0)), tuple(values)))
    point = [data.draw(st.floats(-1.0, 6.0)) for _ in range(3)]
    beyond = [x + data.draw(st.floats(0.0, 3.0)) for x in point]
    assert surface.at(beyond) >= surface.at(point) - 1e-12


# -- models -----------------------------------------------------------------------------------------------------------


def test_prices_multiply_terms() -> None:
    model = priced(DECODE, launch=1e-5, kv_bytes=1e-13)
    assert model.terms_time(32, 4096, 8, 4) == pytest.approx(1e-5 + 512 * 1024**2 * 1e-13)


@pytest.mark.parametrize(("norm", "joined"), [(1.0, 7.0), (2.0, 5.0), (4.0, 337.0**0.25), (math.inf, 4.0)])
def test_a_norm_joins_memory_and_compute(norm: float, joined: float) -> None:
    m, n, k = 1.0, 10.0, 10.0  # 200 bytes of weights, 200 flops
    model = replace(priced(GEMM, launch=1.0, weight_bytes=3 / 200, flops=4 / 200), norm=norm)
    assert model.terms_time(m, n, k) == pytest.approx(1.0 + joined)


def test_a_factor_corrects_at_nodes_and_fades_beyond_them() -> None:
    model = replace(priced(DECODE, context=1.0), grids=(Grid({"context": (1.0, 1023.0)}, (1.0, 1.5)),))
    assert model.fitted_time(1, 1, 8, 4) == 1.0
    assert model.fitted_time(1, 512, 8, 4) == pytest.approx(512 * 1.25)
    assert model.fitted_time(1, 1023, 8, 4) == 1023 * 1.5
    assert model.fitted_time(1, 2047, 8, 4) == 2047 * 1.25  # an octave on: half of it is left
    assert model.fitted_time(1, 8191, 8, 4) == 8191 * 1.0625


def test_gemms_hold_their_utilisation_beyond_what_was_measured() -> None:
    model = replace(priced(GEMM, flops=1.0), grids=(Grid({"m": (1.0, 1024.0)}, (1.0, 1.5)),))
    assert model.fitted_time(8192, 16, 16) == 1.5 * model.terms_time(8192, 16, 16)


def test_grids_multiply() -> None:
    grids = (Grid({"batch": (1.0, 3.0)}, (1.0, 2.0)), Grid({"kv_heads": (1.0, 9.0)}, (1.0, 3.0)))
    model = replace(priced(DECODE, launch=1.0), grids=grids)
    assert model.fitted_time(2, 100, 5, 4) == pytest.approx(1.5 * 2.0)


def test_a_shape_is_tabled_once_and_read_fast() -> None:
    model = priced(DECODE, launch=1e-5, kv_bytes=1e-13)
    op = model.shaped(8.0, 4.0)
    for batch, context in ((1, 1), (32, 4096), (48, 5000), (20_000, 100), (3, 3_000_000)):
        assert op.time(batch, context) == pytest.approx(model.terms_time(batch, context, 8, 4), rel=0.03)
    assert op.line(48.0).at(5000.0) == pytest.approx(op.time(48, 5000))
    assert op.line(20_000.0).at(100.0) == pytest.approx(op.time(20_000, 100))


@pytest.mark.parametrize("kind", [DECODE, PREFILL, GEMM], ids=lambda kind: str(kind.name))
def test_whatever_was_fitted_more_never_takes_less(kind: Kind) -> None:
    """Random prices and factors, so rough that the product falls in many places."""

    @settings(derandomize=True, max_examples=5, deadline=None)
    @given(st.randoms(use_true_random=False), st.data())
    def check(random: Any, data: st.DataObject) -> None:
        prices = tuple(random.choice((0.0, 10.0 ** random.uniform(-14, -5))) for _ in kind.names)
        first, size = kind.counts[0], kind.shape[0]
        grid = Grid({first: (1.0, 4.0, 32.0, 500.0), size: (1.0, 8.0)}, tuple(random.uniform(0.5, 2) for _ in range(8)))
        op = OpModel(kind, prices, random.choice((1.0, 2.0)), (grid,)).shaped(*SHAPES[kind.name])
        for low, high in data.draw(st.lists(larger(kind), min_size=20, max_size=20)):
            assert op.time(*high) >= op.time(*low) * (1 - 1e-12)

    check()


def test_far_is_an_octave_beyond_what_was_measured() -> None:
    model = replace(priced(PREFILL, launch=1.0), hull={"batch": (1.0, 256.0), "chunk": (1.0, 16384.0), "start": (0, 0)})
    assert model.outside(4, 1000, 0, 8, 4) == 0.0
    assert model.outside(4, 1000, 1000, 8, 4) == 1.0
    assert model.outside(4, 32769, 0, 8, 4) == 1.0


def test_a_draw_is_off_by_what_held_out_points_were_off_by() -> None:
    model = replace(priced(GEMM, launch=1.0), spread=0.04, far_spread=0.3, hull={"m": (1.0, 1023.0)})
    assert model.drawn(0, 2.0).fitted_time(8, 16, 16) == pytest.approx(math.exp(0.08))
    assert model.drawn(0, -1.0).fitted_time(4095, 16, 16) == pytest.approx(math.exp(-math.hypot(0.04, 0.3)))
    assert model.drawn(0, 0.0).fitted_time(8, 16, 16) == 1.0


def test_a_draw_takes_its_bootstrap_prices_in_turn() -> None:
    others = tuple((float(number), 0.0, 0.0, 0.0, 0.0) for number in (1, 2, 3))
    model = replace(priced(GEMM, launch=1.0), draws=others)
    assert [model.drawn(number, 0.0).fitted_time(8, 16, 16) for number in range(4)] == [1.0, 2.0, 3.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prices": (1.0,)}, r"gemm: 5 prices of 0 or more wanted, got \(1.0,\)"),
        ({"prices": (-1.0, 0.0, 0.0, 0.0, 0.0)}, "5 prices of 0 or more"),
        ({"draws": ((1.0, 2.0),)}, "5 prices of 0 or more"),
        ({"norm": 3.0}, r"norm \(3.0\) must be one of 1.0, 2.0, 4.0, inf"),
        ({"hull": {"batch": (1.0, 2.0)}}, "gemm has no count or size 'batch'; it has m, n, k"),
        ({"grids": (Grid({"context": (1.0, 2.0)}, (1.0, 1.0)),)}, "has no count or size 'context'"),
    ],
)
def test_models_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(priced(GEMM, launch=1.0), **change)


@pytest.mark.parametrize(
    ("axes", "factors", "message"),
    [
        ({"m": (1.0, 2.0)}, (1.0,), "2 factors above 0 wanted"),
        ({"m": (1.0, 2.0)}, (1.0, 0.0), "2 factors above 0 wanted"),
        ({}, (1.0,), "factors above 0 wanted"),
        ({"m": (2.0, 1.0)}, (1.0, 1.0), "must rise along each axis"),
    ],
)
def test_grids_that_cannot_be_are_refused(
    axes: dict[str, tuple[float, ...]], factors: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(axes, factors)

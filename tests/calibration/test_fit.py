"""Fits of kernel times: known prices come back, odd rows weigh little, bad data is refused, the forest is beaten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.choose import Errors, best_form, calibrated, refitted, rounded
from calibration.commands import check
from calibration.commands import fit as fit_profiles
from calibration.fit import Form, additive_prices, fit, predicted
from calibration.forms import DECODE_FORMS, DECODE_GRID, MIXED_FORMS, PREFILL_FORMS
from calibration.profile import differences, write
from calibration.recipes import Recipe, jobs, make, recipe_of, remake
from calibration.samples import Ceilings, Floats, Samples, screened
from calibration.tables import Table, attention_samples, decode_kind, tables_directory, wanted
from sim.cost.kinds import Decode, Gemm
from sim.cost.op_model import OpModel
from sim.cost.profile import Profile, read, shipped, to_json
from sim.hardware import device

DECODE = Decode(128, 2, 50e6, 132)
GEMM = Gemm(2)
CEILINGS = Ceilings(bytes_per_second=4.8e12, flops_per_second=989e12, l2_bytes=50e6)


def decode_points() -> Floats:
    batches, contexts, heads = (2.0 ** np.arange(0, 9, 2), 2.0 ** np.arange(6, 15, 2), np.array([1.0, 2.0, 8.0]))
    return np.array([(b, c, h, 4.0) for b in batches for c in contexts for h in heads])


def gemm_points() -> Floats:
    return np.array([(m, n, k) for m in (1.0, 16, 128, 1024, 8192) for n in (512.0, 4096) for k in (1024.0, 8192)])


def measured(kind: Decode | Gemm, points: Floats, noise: float = 0.0, norm: float = 1.0, **prices: float) -> Samples:
    """As if a kernel took exactly its terms, but for a lognormal noise."""
    model = OpModel(kind, tuple(prices.get(name, 0.0) for name in kind.names), norm)
    times = np.array([model.terms_time(*point) for point in points.tolist()])
    return Samples(kind, points, times * np.exp(noise * np.random.default_rng(1).standard_normal(len(points))))


KNOWN = {"launch": 1e-5, "missed_1": 2e-13, "items": 2e-8, "root_context": 5e-8}
SAMPLES = measured(DECODE, decode_points(), **KNOWN)


# -- prices -----------------------------------------------------------------------------------------------------------


def test_known_prices_come_back() -> None:
    model = fit(SAMPLES, Form("additive"))
    for name, price in zip(DECODE.names, model.prices, strict=True):
        assert price == pytest.approx(KNOWN.get(name, 0.0), rel=1e-4, abs=1e-16), name
    assert predicted(model, SAMPLES) == pytest.approx(SAMPLES.times, rel=1e-6)


def test_a_few_odd_rows_weigh_little() -> None:
    times = SAMPLES.times.copy()
    times[::10] *= 5.0
    model = fit(replace(SAMPLES, times=times), Form("additive"))
    assert np.median(np.abs(predicted(model, SAMPLES) / SAMPLES.times - 1.0)) < 0.01


def test_a_term_left_out_costs_nothing() -> None:
    model = fit(SAMPLES, Form("no items", without=("items",)))
    assert dict(zip(DECODE.names, model.prices, strict=True))["items"] == 0.0


def test_prices_are_never_negative() -> None:
    rng = np.random.default_rng(0)
    prices, _ = additive_prices(SAMPLES.terms(), np.exp(rng.standard_normal(len(SAMPLES.times))) * 1e-4)
    assert prices.min() >= 0.0


def test_a_roofline_comes_back() -> None:
    known = {"launch": 3e-6, "weight_bytes": 2.5e-13, "row_bytes": 3e-13, "flops": 1.3e-15}
    samples = measured(GEMM, gemm_points(), norm=2.0, **known)
    model = fit(samples, Form("roofline", norm=2.0))
    assert predicted(model, samples) == pytest.approx(samples.times, rel=1e-3)
    assert dict(zip(GEMM.names, model.prices, strict=True))["flops"] == pytest.approx(1.3e-15, rel=0.01)


# -- factors ----------------------------------------------------------------------------------------------------------


def test_factors_take_what_the_terms_miss() -> None:
    samples = replace(SAMPLES, times=SAMPLES.times * np.where(SAMPLES.column("context") > 1000, 1.2, 1.0))
    alone, corrected = (fit(samples, form) for form in (Form("a"), Form("f", grids=DECODE_GRID)))
    missed = [float(np.median(np.abs(predicted(each, samples) / samples.times - 1.0))) for each in (alone, corrected)]
    assert missed[0] > 0.02 and missed[1] < 0.005


def test_nodes_lie_within_what_was_measured() -> None:
    grid = fit(SAMPLES, Form("f", grids=DECODE_GRID)).grids[0]
    assert grid.axes["context"][0] == 64.0 and grid.axes["context"][-1] == 16384.0
    assert grid.axes["kv_heads"] == (1.0, 2.0, 4.0, 8.0)


# -- choice and evidence ----------------------------------------------------------------------------------------------


def test_cross_validation_picks_the_form_that_made_the_data() -> None:
    often = measured(DECODE, np.repeat(decode_points(), 6, axis=0), noise=0.01, **KNOWN)
    bumpy = replace(often, times=often.times * np.where(often.column("batch") == 16, 1.3, 1.0))
    plain, curved = Form("plain"), Form("curved", grids=DECODE_GRID)
    assert best_form(bumpy, (plain, curved), "context", seed=0)[0] is curved
    noisy = measured(DECODE, decode_points(), noise=0.05, **KNOWN)
    lacking = Form("lacking", without=("missed_1", "kv_bytes", "missed_2", "missed_3", "tiles"))
    assert best_form(noisy, (lacking, plain), "context", seed=0)[0] is plain


def test_intervals_cover_what_they_say() -> None:
    noisy = measured(DECODE, np.repeat(decode_points(), 4, axis=0), noise=0.05, **KNOWN)
    op = calibrated(noisy, (Form("additive"),), "context", {})
    assert op.model.spread == pytest.approx(0.05, rel=0.25)  # 68 % of a lognormal lie within its sigma
    assert op.evidence["held_out"]["num"] == pytest.approx(0.3 * len(noisy.times), rel=0.2)
    assert sum(regime["num"] for regime in op.evidence["regimes"].values()) <= op.evidence["held_out"]["num"]


def test_bootstrap_draws_lie_around_the_fit() -> None:
    noisy = measured(DECODE, decode_points(), noise=0.05, **KNOWN)
    model = fit(noisy, Form("additive"), num_draws=32)
    point = (64.0, 4096.0, 8.0, 4.0)
    times = [model.drawn(number, 0.0).terms_time(*point) for number in range(32)]
    assert min(times) < model.terms_time(*point) < max(times)
    assert 0.002 < np.std(times) / np.mean(times) < 0.05
    roofline = fit(measured(GEMM, gemm_points(), noise=0.05, norm=2.0, launch=3e-6, flops=1e-15, weight_bytes=2e-13),
                   Form("roofline", norm=2.0), num_draws=8)  # fmt: skip
    assert 0.0 < np.std([prices[-1] for prices in roofline.draws]) < 0.2 * roofline.prices[-1]


def test_fits_and_draws_are_the_same_every_time() -> None:
    noisy = measured(DECODE, decode_points(), noise=0.05, **KNOWN)
    one, two = (calibrated(noisy, DECODE_FORMS[:2], "context", {}) for _ in range(2))
    assert one == two
    assert refitted(noisy, next(f for f in DECODE_FORMS if f.name == one.evidence["form"]), one) == one
    assert rounded(one.model) == one.model


# -- bad data ---------------------------------------------------------------------------------------------------------


def samples_of(times: Floats, points: Floats | None = None) -> Samples:
    return Samples(DECODE, decode_points() if points is None else points, times)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (SAMPLES.times * 1e6, r"half of all launches take over .* s: times are in seconds, are these\?"),
        (SAMPLES.times * 1e-6, "half of all launches take over .*-11 s: times are in seconds, are these"),
        (-SAMPLES.times, "a time of -.*: no measurement gives that"),
        (SAMPLES.times * 0.0, "a time of 0: no measurement gives that"),
        (SAMPLES.times * np.nan, "a time is not a finite number"),
        (
            SAMPLES.times[:-1],
            r"points of shape \(75, 4\) for 74 times: a column each of batch, context, kv_heads, group",
        ),
    ],
)
def test_times_that_cannot_be_are_refused_in_one_line(times: Floats, message: str) -> None:
    with pytest.raises(ValueError, match=f"decode attention: {message}"):
        samples_of(times)


def test_too_few_points_and_missing_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="decode attention: 11 points, a fit needs 12: measure more"):
        fit(samples_of(SAMPLES.times[:11], decode_points()[:11]), Form("additive"))
    with pytest.raises(ValueError, match="a column each of"):
        samples_of(SAMPLES.times, decode_points()[:, :3])
    with pytest.raises(ValueError, match="a count of -1"):
        samples_of(SAMPLES.times, decode_points() - 2.0)
    with pytest.raises(ValueError, match="table: no column latency; it has m, n"):
        wanted({"m": np.ones(1), "n": np.ones(1)}, ("m", "latency"), "table")


def test_rows_beyond_a_ceiling_are_rejected_and_listed() -> None:
    times = np.maximum(SAMPLES.times, 1.0 / 4.8e12 * SAMPLES.terms()[:, 1])
    times[-1] = times[-1] / 40.0
    kept, rejected = screened(replace(SAMPLES, times=times), CEILINGS)
    assert len(kept.times) == len(times) - 1
    assert rejected[0].point == tuple(SAMPLES.points[-1]) and "% of the memory's bandwidth" in rejected[0].reason
    gemms = measured(GEMM, gemm_points(), launch=3e-6, flops=1.2e-15, weight_bytes=2.5e-13)
    times = gemms.times.copy()
    times[-1] /= 5.0
    (row,) = screened(replace(gemms, times=times), replace(CEILINGS, bytes_per_second=1e18))[1]
    assert row.point == (8192.0, 4096.0, 8192.0) and "% of the peak FLOP/s" in row.reason


def test_another_unit_is_told_by_what_the_device_can_do() -> None:
    gemms = measured(GEMM, gemm_points(), launch=3e-6, flops=1.2e-15, weight_bytes=2.5e-13)
    for factor, message in (
        (1e3, "no row reaches 2 % of the device"),
        (1 / 10, "of the rows beat the device's ceilings"),
    ):
        with pytest.raises(ValueError, match=message):
            screened(replace(gemms, times=gemms.times * factor), CEILINGS)


def test_a_directory_or_gpu_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no kernel tables at"):
        tables_directory(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no kernel tables of 'b200' are fitted; known: h100, h200, a100, l40s, rtx"):
        recipe_of("b200")
    with pytest.raises(ValueError, match="cannot read kernel table"):
        make(recipe_of("a100"), tmp_path)


# -- the public tables ------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(shared: Path) -> Path:
    return shared / "data/kernel-tables/aiconfigurator"


TRITON = Recipe(
    "rtx-pro-6000", "rtx_pro_6000_server", recipe_of("rtx-pro-6000").parts[:1], 1.25, "as shipped", name="triton"
)


def test_a_profile_of_tables_comes_out_again(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("calibration.commands.RECIPES", (TRITON,))
    fit_profiles([], tables, tmp_path)
    assert "2 operations, 0 rows rejected" in " ".join(capsys.readouterr().out.split())
    assert check([], tables, tmp_path) == 0
    assert capsys.readouterr().out == "triton.json of rtx-pro-6000: fitted again, equal\n"
    path = tmp_path / "rtx-pro-6000" / "triton.json"
    kept = read(path)
    prices = (kept.ops[0].model.prices[0] * 1.001, *kept.ops[0].model.prices[1:])
    op = replace(kept.ops[0], model=replace(kept.ops[0].model, prices=prices))
    write(replace(kept, ops=(op, kept.ops[1])), tmp_path)
    assert check([], tables, tmp_path) == 1
    assert "price of launch" in capsys.readouterr().out


def test_the_shipped_triton_fits_are_those_of_the_tables(tables: Path) -> None:
    """One operation of each kind of the five profiles; `servetwin calibrate check` refits all."""
    (profile,) = shipped("rtx-pro-6000")
    few = replace(profile, ops=profile.ops[:2])
    assert differences(few, remake(TRITON, few, tables)) == []
    assert to_json(few) == to_json(few)
    with pytest.raises(ValueError, match="has 8 operations, its recipe 2"):
        remake(TRITON, profile, tables)


def split_errors(samples: Samples, form: Form, inside: np.typing.NDArray[np.bool_]) -> Errors:
    asked = samples.where(~inside)
    return Errors.of(predicted(fit(samples.where(inside), form), asked), asked.times)


def test_decodes_on_an_h200_are_within_the_goals_and_below_the_forest(tables: Path) -> None:
    """A forest on Vidur's features is off by 2.9 / 50 % on the same rows, and by 68 / 92 % beyond (benchmarks)."""
    gpu = device("h200")
    table = Table("h200_sxm", "attention", "vllm", "0.24.0", "generation_attention_perf")
    samples = attention_samples(tables, table, decode_kind(gpu, 128, "bf16"), "bf16", grouped=True)
    held = np.random.default_rng(0).random(len(samples.times)) < 0.3
    within = split_errors(samples, DECODE_FORMS[1], ~held)
    assert within.median <= 2.0 and within.p95 <= 11.0
    context = samples.column("context")
    few = samples.where((context <= 4096) | (context >= 16384))
    beyond = split_errors(few, DECODE_FORMS[2], few.column("context") <= 4096)
    assert beyond.median <= 7.0 and beyond.p95 <= 16.0
    keys = [f"{h:g}/{g:g}" for h, g in samples.points[:, 2:].tolist()]
    forest = forest_errors(samples, held, np.array(keys) == "8/4")
    assert within.median < forest.median and within.p95 < forest.p95


def forest_errors(samples: Samples, held: np.typing.NDArray[np.bool_], chosen: np.typing.NDArray[np.bool_]) -> Errors:
    """Of a random forest on Vidur's features (batch, context), for one shape of heads."""
    from sklearn.ensemble import RandomForestRegressor

    known, asked = samples.where(chosen & ~held), samples.where(chosen & held)
    trees = RandomForestRegressor(100, random_state=0).fit(known.points[:, :2], known.times)
    return Errors.of(trees.predict(asked.points[:, :2]), asked.times)


def test_every_recipe_finds_its_rows(tables: Path) -> None:
    (small,) = (recipe_of(name) for name in ("a100",))
    found = jobs(small, tables)
    assert [job.samples.kind.name for job in found] == ["decode attention", "prefill attention"] * 2 + ["gemm"]
    assert sum(len(job.samples.times) for job in found) == 4731 + 3927 + 700 + 1530 + 9240
    assert all(form.name for form in (*PREFILL_FORMS, *MIXED_FORMS))


def test_profiles_are_written_whole(tmp_path: Path) -> None:
    (profile,) = shipped("a100")
    path = write(profile, tmp_path)
    again: Profile = read(path)
    assert again == profile and path == tmp_path / "a100" / "public-tables.json"

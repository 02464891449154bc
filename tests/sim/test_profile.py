"""Profiles as files: whole or refused, the same bits wherever they are read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.cost.kinds import Decode, Gemm
from sim.cost.op_model import Grid, OpModel
from sim.cost.profile import FittedOp, Profile, content_hash, from_json, named, read, shipped, to_json
from tests.conftest import REPOSITORY

DECODE = OpModel(
    Decode(128, 2, 50e6, 132),
    (1e-05, 1.234567e-13, *(0.0,) * 10),
    grids=(Grid({"batch": (1.0, 64.0), "context": (2.0, 4096.0)}, (1.0, 0.9, 1.1, 1.3)),),
    hull={"batch": (1.0, 64.0), "context": (2.0, 4096.0)},
    draws=((1.1e-05, 1.2e-13, *(0.0,) * 10),),
    spread=0.021,
    far_spread=0.09,
)
GEMM = OpModel(Gemm(2), (3e-06, 0.0, 2.5e-13, 2.5e-13, 1.3e-15), float("inf"))
PROFILE = Profile(
    "mine",
    "h100",
    "public tables",
    (
        FittedOp(DECODE, {"head_dim": 128, "kv_dtype": "bf16", "grouped": True}, {"form": "additive, factors"}),
        FittedOp(GEMM, {"dtype": "bf16"}),
    ),
    1.2,
    "made up",
    {"recipe": "by hand"},
)


def changed(change: Callable[[dict[str, Any]], object], rehash: bool = True) -> str:
    """The profile's text with something else in it, hashed again unless told."""
    content = json.loads(to_json(PROFILE))
    change(content)
    if rehash:
        content["content_hash"] = content_hash(content)
    return json.dumps(content)


def test_a_profile_comes_back_as_it_was_written() -> None:
    again = from_json(to_json(PROFILE), "mine.json")
    assert replace(again, content_hash="") == PROFILE
    assert to_json(again) == to_json(PROFILE)
    for batch, context in ((1, 2), (7, 100), (300, 100_000)):
        assert again.ops[0].model.fitted_time(batch, context, 8, 4) == DECODE.fitted_time(batch, context, 8, 4)


def test_an_operation_is_found_by_what_it_serves() -> None:
    assert PROFILE.op("decode attention", head_dim=128, grouped=True) is PROFILE.ops[0]
    assert PROFILE.op("decode attention", head_dim=64) is None
    assert PROFILE.model("gemm", dtype="bf16") is GEMM
    assert PROFILE.model("gemm", dtype="fp8") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"mine.json: not a profile \(.*\)"),
        ("[]", "mine.json: schema version None, this servetwin reads 1: fit it again"),
        (changed(lambda c: c.update(schema_version=2)), "schema version 2, this servetwin reads 1"),
        (changed(lambda c: c.update(band=1.3), rehash=False), "does not match its hash: edited, or not whole"),
        (changed(lambda c: c.update(band=float("nan"))), r"not a profile \(it holds NaN\)"),
        (changed(lambda c: c.update(band=float("inf"))), r"not a profile \(it holds Infinity\)"),
        (changed(lambda c: c.update(band=0.5)), r"band \(0.5\) must be 1 or more"),
        (changed(lambda c: c.update(provenance="own kernels")), "unknown provenance 'own kernels'; known: measured"),
        (changed(lambda c: c.pop("device")), "mine.json: lacks 'device'"),
        (changed(lambda c: c["ops"][0].update(op="magic")), "unknown operation 'magic'; known: decode attention"),
        (changed(lambda c: c["ops"][0]["prices"].pop("items")), "decode attention: prices of launch, kv_bytes"),
        (changed(lambda c: c["ops"][0]["prices"].update(items=-1.0)), "12 prices of 0 or more wanted"),
        (changed(lambda c: c["ops"][0]["grids"][0]["factors"].pop()), "4 factors above 0 wanted"),
        (changed(lambda c: c["ops"][0]["constants"].pop("num_sms")), "num_sms"),
    ],
)
def test_what_is_not_whole_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        from_json(text, "mine.json")
    assert "\n" not in str(error.value) and str(error.value).startswith("mine.json: ")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read profile"):
        read(tmp_path / "nothing.json")


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"no costs 'best' of h100; known: auto, datasheet, public-tables, or the path"
    ):
        named("best", "h100")


def test_a_profile_may_be_given_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(to_json(PROFILE))
    assert replace(named(str(path), "h100"), content_hash="") == PROFILE


# -- those that come with the package ---------------------------------------------------------------------------------


def test_profiles_of_five_gpus_come_with_the_package() -> None:
    assert [(p.device, p.provenance) for p in shipped()] == [
        (gpu, "public tables") for gpu in ("a100", "h100", "h200", "l40s", "rtx-pro-6000")
    ]


def test_nothing_shipped_claims_kernels_of_our_own() -> None:
    for profile in shipped():
        assert "aiconfigurator" in profile.about["source"]
        assert "own" not in json.dumps(profile.about).split()
        assert all(len(rows) == 64 for rows in (text.split("sha256 ")[1] for text in profile.about["tables"]))


def test_shipped_fits_say_how_far_they_are_off() -> None:
    for profile in shipped():
        for op in profile.ops:
            assert 0.005 < op.model.spread < 0.15 and len(op.model.draws) == 32
            held = op.evidence["held_out"]
            assert held["num"] > 100 and 0.0 < held["median"] < 6.0
            assert op.evidence["form"] in op.evidence["cross_validation"]


def test_triton_prices_attention_where_our_kernels_are_not_measured() -> None:
    (profile,) = shipped("rtx-pro-6000")
    attention = [text for text in profile.about["tables"] if "attention" in text]
    assert len(attention) == 6 and all("kernel_source triton" in text for text in attention)


def test_a_profile_gives_equal_bits_in_another_process() -> None:
    code = (
        "from sim.cost.profile import shipped\n"
        "(p,) = shipped('h200')\n"
        "op = p.model('decode attention', head_dim=128, kv_dtype='bf16', grouped=True).shaped(8.0, 4.0)\n"
        "print([op.time(b, c).hex() for b, c in ((1, 1), (3, 777), (64, 5000), (900, 300000))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    (profile,) = shipped("h200")
    model = profile.model("decode attention", head_dim=128, kv_dtype="bf16", grouped=True)
    assert model is not None
    op = model.shaped(8.0, 4.0)
    here = [op.time(b, c).hex() for b, c in ((1, 1), (3, 777), (64, 5000), (900, 300000))]
    assert done.stdout.strip() == str(here)

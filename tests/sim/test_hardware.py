"""GPUs by name: their peaks, the shares of them that kernels reach, and where those come from."""

from __future__ import annotations

import pytest

from sim.hardware import ASSUMED_BAND, DEVICES, MEASURED_BAND, device


@pytest.mark.parametrize("name", ["h100", "H100", " h100 ", "H100-SXM", "nvidia h100 80gb hbm3"])
def test_a_gpu_is_found_by_any_of_its_names(name: str) -> None:
    assert device(name).bandwidth_gb_s == 3350.0


def test_an_unknown_gpu_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError) as error:
        device("h1000")
    assert str(error.value) == (
        "unknown GPU 'h1000'; known: a100, a100-40gb, a100-pcie, a10g, b200, h100, h100-pcie, h200, l4, l40s, mi300x, "
        "rtx-pro-6000. Did you mean 'h100'?"
    )


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    with pytest.raises(ValueError) as error:
        device("tpu")
    assert str(error.value).endswith("rtx-pro-6000.")


def test_no_two_gpus_share_a_name() -> None:
    names = [name.lower() for each in DEVICES for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))


def test_efficiencies_are_shares() -> None:
    for each in DEVICES:
        shares = each.efficiency
        for share in (shares.decode_bandwidth, shares.gemm, shares.weight_bandwidth, shares.prefill_attention):
            assert 0.4 <= share < 0.95
        assert 0.4 <= shares.fp8_gemm <= shares.gemm
        assert 0.4 <= shares.fp8_weight_bandwidth <= shares.weight_bandwidth


def test_what_was_not_measured_says_so_and_has_the_wider_band() -> None:
    measured = {each.name for each in DEVICES if each.efficiency_source.startswith("measured")}
    assert measured == {"a100", "h100", "h200", "l40s", "b200", "rtx-pro-6000"}
    for each in DEVICES:
        assert each.band == (MEASURED_BAND if each.name in measured else ASSUMED_BAND)
        assert each.name in measured or each.efficiency_source.startswith("assumed: ")


def test_fp8_doubles_the_peak_where_there_are_units_for_it() -> None:
    for each in DEVICES:
        if each.fp8_tflops is None:
            assert each.name in {"a100", "a100-40gb", "a100-pcie", "a10g"}
        else:
            assert each.fp8_tflops == pytest.approx(2 * each.bf16_tflops, rel=0.02)

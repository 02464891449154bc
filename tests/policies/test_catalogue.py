"""Names become policies, knobs become arguments, and every mistake becomes one line that says the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.catalogue import EVICTION, MENU, PRESETS, build, describe, make, parameters, preset
from policies.config import MENUS, EngineConfig
from tests.worlds import request, run_to_end, tiny_config

ENTRIES = [(menu, name) for menu in MENUS for name in MENU[menu]]


@pytest.mark.parametrize("menu, name", ENTRIES)
def test_every_entry_of_every_menu_builds_and_runs(menu: str, name: str) -> None:
    caching = name != "contiguous_max_len"
    engine = build(tiny_config(**{menu: name, "enable_prefix_caching": caching}))
    engine.add(request("a"), now=0.0)
    assert run_to_end(engine)["a"].num_output_tokens == 4


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_runs(name: str) -> None:
    engine = build(EngineConfig(**preset(name)))
    engine.add(request("a"), now=0.0)
    assert run_to_end(engine)["a"].num_output_tokens == 4


def test_every_entry_is_made_by_its_name_and_has_knobs_that_can_be_read_from_text() -> None:
    for menu in MENU:
        for name, factory in MENU[menu].items():
            assert make(menu, name) is not make(menu, name), "a policy keeps books of its own"
            for knob in parameters(factory).values():
                assert type(knob.default) in (bool, int, float, str), f"{menu} {name} {knob}"


def test_knobs_are_read_as_the_type_of_their_default() -> None:
    static = make("batching", "static,group_size=3,max_wait=2")
    assert (static.group_size, static.max_wait) == (3, 2.0)
    assert type(static.max_wait) is float
    assert make("allocation", "paged,watermark=1e-2").watermark == 0.01
    assert make("batching", "stall_free").chunk_size == 512


def test_the_class_behind_each_name_can_be_told() -> None:
    told = describe(tiny_config(batching="static,group_size=3"))
    assert list(told) == list(MENUS)
    assert told["batching"] == "policies.batching.static.StaticBatches"


KNOWN_EVICTIONS = ", ".join(sorted(EVICTION))
WRONG = {
    "unknown": ("eviction", "lur", f"unknown eviction policy 'lur'; known: {KNOWN_EVICTIONS}. Did you mean 'lru'?"),
    "unlike any": ("eviction", "zzzzz", f"unknown eviction policy 'zzzzz'; known: {KNOWN_EVICTIONS}"),
    "almost": (
        "batching",
        "chunk",
        "unknown batching policy 'chunk'; known: chunked, decode_first, prefill_first, stall_free, static, "
        "tpot_budget. Did you mean 'chunked'?",
    ),
    "empty": (
        "batching",
        "",
        "unknown batching policy ''; known: chunked, decode_first, prefill_first, stall_free, static, tpot_budget",
    ),
    "unknown knob": (
        "batching",
        "static,groupsize=2",
        "unknown knob 'groupsize' of batching policy 'static'; known: group_size, max_wait. Did you mean 'group_size'?",
    ),
    "no knobs": (
        "eviction",
        "lru,size=2",
        "unknown knob 'size' of eviction policy 'lru'; known: none",
    ),
    "not a number": ("batching", "static,group_size=two", "group_size=two of batching static must be int"),
    "not whole": ("batching", "static,group_size=2.5", "group_size=2.5 of batching static must be int"),
    "no value": ("batching", "static,group_size=", "'group_size=' after batching policy 'static' must read knob=value"),
    "no equals sign": ("batching", "static,2", "'2' after batching policy 'static' must read knob=value"),
    "trailing comma": ("batching", "static,", "'' after batching policy 'static' must read knob=value"),
    "out of range": ("batching", "static,group_size=-1", "group_size (-1) must be 0 (as many as may run) or more"),
    "endless": ("batching", "static,max_wait=inf", "max_wait (inf) must be a finite number of seconds, 0 or more"),
    "no number": ("batching", "static,max_wait=nan", "max_wait (nan) must be a finite number of seconds, 0 or more"),
    "no chunk": ("batching", "stall_free,chunk_size=0", "chunk_size (0) must be at least 1 token"),
    "no share": ("allocation", "paged,watermark=1", "watermark (1.0) must be a share of the pool: 0 or more, below 1"),
}


@pytest.mark.parametrize("menu, spec, complaint", WRONG.values(), ids=WRONG.keys())
def test_a_mistake_names_the_value_the_rule_and_the_way_out(menu: str, spec: str, complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        build(tiny_config(**{menu: spec}))
    assert str(error.value) == complaint


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'vllm_v1'; known: .*. Did you mean 'vllm-v1'"):
        preset("vllm_v1")


def test_a_preset_is_a_copy() -> None:
    name = next(iter(PRESETS))
    preset(name).clear()
    assert PRESETS[name]


# -- somebody's own file ----------------------------------------------------------------------------------------------

MINE = """
from policies.types import RequestState

class LeastComputed:
    def __init__(self, most: int = 9) -> None:
        self.most = most

    def choose_victim(self, candidates, beneficiary, now):
        return min(candidates, key=lambda state: (state.num_computed_tokens, state.request_id))
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "my_file.py"
    path.write_text(MINE)
    return path


def test_a_policy_from_ones_own_file_is_as_good_as_one_of_the_menu(mine: Path) -> None:
    engine = build(tiny_config(num_blocks=5, preemption=f"{mine}:LeastComputed,most=3"))
    assert engine.preemption.most == 3  # type: ignore[attr-defined]
    for name, prompt in (("long", 8), ("short", 5)):
        engine.add(request(name, prompt, max_tokens=8), now=0.0)
    assert {name: record.num_preemptions for name, record in run_to_end(engine).items()} == {"long": 0, "short": 1}


def test_knobs_of_ones_own_file_are_checked_too(mine: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown knob 'mots' .* known: most. Did you mean 'most'"):
        make("preemption", f"{mine}:LeastComputed,mots=3")


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("def broken(:", "failed to load: SyntaxError"),
        ("import no_such_module", "failed to load: ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "failed to load: ZeroDivisionError"),
        ("class Other: pass", "has no class 'LeastComputed'; it has: Other"),
        ("LeastComputed = 3", "has no class 'LeastComputed'; it has: none"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "my_file.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as error:
        make("preemption", f"{path}:LeastComputed")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["missing.py:Mine", "missing:Mine", ":Mine", "tests:Mine"])
def test_a_file_that_is_not_there_is_named(spec: str) -> None:
    with pytest.raises(ValueError, match=r"there is no Python file .*; write my_file.py:MyPolicy"):
        make("preemption", spec)

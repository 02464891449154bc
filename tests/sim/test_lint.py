"""What the lint of prompts predicts is what a simulated cache finds; and it advises nothing without its caveat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from policies.config import EngineConfig
from policies.prompt import ContentPrompt, LengthPrompt
from policies.types import Request
from sim.cost import AffineCost
from sim.simulate import simulate
from sim.workload.generate import generate
from sim.workload.lint import CAVEAT, Lint, lint
from sim.workload.lint_report import print_lint
from sim.workload.transform import inject_volatile_token
from sim.workload.workload import WorkItem, Workload


def prompts(*texts: tuple[int, Sequence[int]], content_size: int = 16, num_outputs: int = 2) -> Workload:
    """(tokens, content ids) of each, so far apart that each is answered before the next comes."""
    return Workload(
        "w",
        [
            WorkItem(Request(str(i), 1e5 * i, ContentPrompt(num, tuple(ids), content_size), num_outputs), num_outputs)
            for i, (num, ids) in enumerate(texts)
        ],
    )


def simulated_hits(workload: Workload, block_size: int, num_blocks: int = 400) -> int:
    """Prompt tokens that a cache found from which nothing had to go."""
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, max_model_len=200_000)
    run = simulate(config, workload, AffineCost(per_step=1e-3))
    assert run.num_evicted_blocks == 0
    return run.summary.num_cached_tokens


def linted(workload: Workload, block_size: int | None = None) -> Lint:
    found = lint(workload, block_size)
    assert found is not None
    return found


def shown(found: Lint) -> str:
    text = StringIO()
    print_lint(Console(file=text, width=500, color_system=None), found)
    return text.getvalue()


@pytest.mark.parametrize("name", ["shared-prefix", "tool-schema", "conversation", "claude-code"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_what_can_be_found_is_what_a_large_cache_finds(name: str, block_size: int) -> None:
    """Of requests that come one after the other; of sessions their answers, too."""
    made = generate(name, num_requests=60, rate=1e-6)
    assert linted(made, block_size).num_found_tokens == simulated_hits(made, block_size, 60_000) > 0


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("position", [0, 16, 47, 48, 64, 4_000])
def test_s14_what_a_volatile_token_costs_is_what_it_costs_in_a_simulation(position: int, block_size: int) -> None:
    """The workload is changed and played: the lint never saw that one."""
    made = prompts(*[(100, (1, 2, 3, 4, 10 * i, 10 * i + 1, 10 * i + 2)) for i in range(1, 9)])
    changed = inject_volatile_token(made, position)
    assert linted(changed, block_size).num_found_tokens == simulated_hits(changed, block_size)
    told = {each.position: each.num_found_tokens for each in linted(made, block_size).volatile}
    if position in told and position % 16 == 0:  # elsewhere the changed workload loses the whole content id
        assert told[position] == simulated_hits(changed, block_size)


def test_a_volatile_token_leaves_the_blocks_before_its_own() -> None:
    """Nine of ten prompts find 64 tokens; one at 16 leaves them a block; from 64 on nothing is lost."""
    found = linted(prompts(*[(96, (1, 2, 3, 4, 10 * i, 10 * i + 1)) for i in range(1, 11)]))
    assert [tuple(each) for each in found.volatile] == [(0, 0), (16, 9 * 16)]
    assert found.num_found_tokens == 9 * 64
    assert found.num_computed(found.num_found_tokens) == 96 - 57.6


@pytest.mark.parametrize(("block_size", "found", "num_short"), [(16, 240, 0), (32, 224, 0), (256, 0, 1), (512, 0, 1)])
def test_a_shared_beginning_shorter_than_a_block_is_never_found(block_size: int, found: int, num_short: int) -> None:
    """240 shared tokens are a whole number of small blocks, and no block at all of 256: not bad luck but a rule."""
    made = prompts((800, (*range(15), *range(100, 135))), (800, (*range(15), *range(200, 235))))
    row = next(each for each in linted(made).blocks if each.block_size == block_size)
    assert row == (block_size, found, num_short)
    assert simulated_hits(made, block_size) == found


def test_the_last_token_is_never_found() -> None:
    """The same prompt twice: of 64 tokens 48 are found, as the last must be computed."""
    made = prompts((64, (1, 2, 3, 4)), (64, (1, 2, 3, 4)))
    assert linted(made).num_found_tokens == simulated_hits(made, 16) == 48


texts = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 1), min_size=3, max_size=3)), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(texts, st.sampled_from([1, 2, 4, 8]), st.integers(1, 6))
def test_the_rule_holds_whatever_is_shared(
    drawn: list[tuple[int, list[int]]], block_size: int, num_outputs: int
) -> None:
    made = prompts(*[(num, ids[: -(-num // 4)]) for num, ids in drawn], content_size=4, num_outputs=num_outputs)
    assert linted(made, block_size).num_found_tokens == simulated_hits(made, block_size)


def test_what_has_no_content_is_not_linted() -> None:
    assert lint(generate("chat", num_requests=3)) is None


def test_blocks_that_do_not_fit_the_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size 10 neither divides nor is a multiple of the content ids' 16"):
        lint(prompts((16, (1,))), 10)


def test_ids_that_no_block_of_16_fits_have_blocks_of_their_own() -> None:
    assert linted(prompts((24, (1,)), content_size=24)).block_size == 24


def test_a_prompt_without_content_shares_nothing() -> None:
    made = prompts((32, (1, 2)), (32, (1, 2)))
    other = WorkItem(Request("x", 1e6, LengthPrompt(32), 2), 2)
    assert linted(replace(made, items=[*made.items, other])).num_found_tokens == 16


def test_s14_no_advice_without_its_caveat() -> None:
    """Whatever there is to say, and nothing else tells anybody to move what his prompts hold."""
    alike = prompts((64, (1, 2, 3, 4)), (64, (1, 2, 3, 5)))
    short = prompts((64, (1, 2, 3, 4)), (64, (1, 2, 3, 5)))
    nothing = prompts((64, (1, 2, 3, 4)), (64, (5, 6, 7, 8)))
    for found in (linted(alike), linted(short, 64), linted(nothing)):
        assert shown(found).rstrip().endswith(CAVEAT)
    assert "only where the answers stay right and the prompt stays plain" in CAVEAT


def test_the_lint_reads_like_this() -> None:
    text = shown(linted(prompts((64, (1, 2, 3, 4)), (64, (1, 2, 3, 5)))))
    assert "1 of 2 prompts begin like an earlier one, half of them for 48 tokens or more; 37.5 % of all" in text
    assert [line.split() for line in text.splitlines() if line.startswith(("nowhere", "at position"))] == [
        ["nowhere", "37.5", "%", "40"],
        ["at", "position", "16", "12.5", "%", "56", "+40", "%"],
        ["at", "position", "0", "0.0", "%", "64", "+60", "%"],
    ]
    assert ["64", "0.0", "%", "1", "of", "1"] in [line.split() for line in text.splitlines()]

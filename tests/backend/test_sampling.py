"""Drawing tokens: the distribution that was asked for, and one that only (seed, position) can change."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.config import PRESETS
from backend.sampling import Draw, sample, uniform
from backend.weights import random_model
from policies.config import EngineConfig
from policies.prompt import TokenPrompt
from policies.types import Request, Sampling
from tests.backend.serving import Server

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0])
FINITE = torch.tensor(True)
NUM_DRAWS = 4000


def drawn(**fields: Any) -> list[int]:
    """A token at each of the first positions."""
    sampling = Sampling(**{"temperature": 1.0, **fields})
    draws = [Draw(sampling, seed=7, position=position) for position in range(NUM_DRAWS)]
    return sample(LOGITS.expand(NUM_DRAWS, -1), FINITE, draws)


def assert_shares(tokens: list[int], expected: torch.Tensor) -> None:
    """Within five standard errors of each share; what must not come does not."""
    for token, share in enumerate(expected.tolist()):
        error = sqrt(share * (1.0 - share) / NUM_DRAWS)
        assert abs(tokens.count(token) / NUM_DRAWS - share) <= 5 * error


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_shares_are_those_of_the_softmax_at_that_temperature(temperature: float) -> None:
    assert_shares(drawn(temperature=temperature), torch.softmax(LOGITS / temperature, -1))


def test_top_k_keeps_the_likeliest() -> None:
    kept = torch.tensor([2.0, -torch.inf, -torch.inf, 3.0, -torch.inf])
    assert_shares(drawn(top_k=2), torch.softmax(kept, -1))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, [3]), (0.6, [3]), (0.7, [0, 3]), (0.93, [0, 2, 3]), (1.0, range(5))]
)
def test_top_p_keeps_the_fewest_that_weigh_as_much(top_p: float, kept: list[int]) -> None:
    """Their shares are .646, .238, .053, .032, .012 from the likeliest on."""
    masked = torch.full_like(LOGITS, -torch.inf)
    masked[list(kept)] = LOGITS[list(kept)]
    assert_shares(drawn(top_p=top_p), torch.softmax(masked, -1))


def test_no_temperature_and_a_very_low_one_take_the_likeliest() -> None:
    draw = Draw(Sampling(temperature=1e-300), 1, 1)
    assert sample(torch.stack((LOGITS, LOGITS)), FINITE, [None, draw]) == [3, 3]


def test_logits_that_are_no_numbers_void_the_step() -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(LOGITS[None], torch.tensor(False), [None])
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(FloatingPointError, match="not finite"):
            sample(torch.stack((LOGITS, LOGITS + wrong)), FINITE, [None, None])


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**40))
def test_chance_is_uniform_and_known_by_seed_and_position(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0
    assert uniform(seed, position) == uniform(seed, position) != uniform(seed, position + 1)


def test_chance_spreads_evenly_over_positions_and_over_seeds() -> None:
    """Of 10,000 draws a tenth falls into each tenth, within five standard errors (150)."""
    for chances in ([uniform(3, at) for at in range(10_000)], [uniform(at, 3) for at in range(10_000)]):
        assert all(abs(sum(int(10 * each) == tenth for each in chances) - 1000) < 150 for tenth in range(10))


# -- within a server ------------------------------------------------------------------------------------------------

DECODER = random_model(PRESETS["tiny"])
ENGINE = EngineConfig(num_blocks=40, block_size=4, max_num_batched_tokens=24, max_num_seqs=8, max_model_len=64)
ASKED = [
    Request(str(index), 0.0, TokenPrompt(tuple(range(3 + index))), 12, sampling=Sampling(1.5, top_p=0.95, seed=seed))
    for index, seed in enumerate((5, 6, None, None, 2**64 - 1, -1))
]


def answers(*asked: Request, **changes: Any) -> dict[str, list[int]]:
    server = Server(DECODER, replace(ENGINE, **changes))
    for request in asked:
        assert server.add(request)
    return server.run()


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 12}, {"max_num_batched_tokens": 8}, {"async_depth": 2}])
def test_what_a_request_draws_does_not_depend_on_its_company(changes: dict[str, Any]) -> None:
    together = answers(*ASKED, **changes)
    for request in ASKED:
        assert answers(request)[request.request_id] == together[request.request_id]


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    seeds = {"a": 1, "b": 1, "c": 2}
    said = answers(
        *(replace(ASKED[0], request_id=name, sampling=Sampling(1.5, seed=seed)) for name, seed in seeds.items())
    )
    assert said["a"] == said["b"] != said["c"]

"""Keys: equal keys, equal prefix, and the same right to share it; nothing else decides them but the secret."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prompt import ContentPrompt, LengthPrompt, Namespace, Prompt, TokenPrompt, seals
from tests.conftest import REPOSITORY

SECRET = b"secret"
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)
block_sizes = st.integers(1, 5)
quick = settings(derandomize=True, deadline=None, max_examples=100)


def keys(prompt: Prompt, block_size: int, *namespaces: Namespace, secret: bytes = SECRET, owner: int = 0) -> list[int]:
    return prompt.chain(block_size, seals(namespaces, block_size, secret), secret, owner).keys


def content(token_ids: Sequence[int], content_size: int = 1) -> ContentPrompt:
    """A prompt whose content ids stand for `content_size` tokens each."""
    return ContentPrompt(len(token_ids) * content_size, tuple(token_ids), content_size)


PROMPTS: dict[str, Callable[[Sequence[int]], Prompt]] = {
    "tokens": lambda ids: TokenPrompt(tuple(ids)),
    "content": content,
}
kinds = st.sampled_from(sorted(PROMPTS))


# -- equal prefix, equal keys -----------------------------------------------------------------------------------------


@quick
@given(kinds, tokens, tokens, block_sizes)
def test_keys_are_equal_exactly_as_far_as_the_prefixes_are(
    kind: str, one: list[int], other: list[int], block_size: int
) -> None:
    ours, theirs = (keys(PROMPTS[kind](ids), block_size) for ids in (one, other))
    assert [len(ours), len(theirs)] == [len(one) // block_size, len(other) // block_size], "only full blocks have keys"
    for index, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * block_size
        assert (left == right) == (one[:end] == other[:end])


@quick
@given(kinds, tokens, block_sizes, st.data())
def test_one_changed_token_kills_the_keys_from_its_block_on(
    kind: str, ids: list[int], block_size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    before, after = (keys(PROMPTS[kind](each), block_size) for each in (ids, changed))
    first = at // block_size
    assert before[:first] == after[:first]
    assert not set(before[first:]) & set(after[first:])


@quick
@given(kinds, tokens, block_sizes)
def test_no_two_blocks_of_a_prompt_share_a_key(kind: str, ids: list[int], block_size: int) -> None:
    ours = keys(PROMPTS[kind](ids), block_size)
    assert len(set(ours)) == len(ours)


@quick
@given(tokens, st.integers(1, 8), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]))
def test_content_ids_and_their_tokens_share_alike(ids: list[int], cut: int, content_size: int, block_size: int) -> None:
    """Block sizes that divide the tokens of a content id, or are a multiple of them: one rule."""
    other = [*ids[:cut], *(each + 1 for each in ids[cut:])]
    ours, theirs = (keys(content(each, content_size), block_size) for each in (ids, other))
    num_common = len(ids[:cut]) * content_size // block_size
    assert ours[:num_common] == theirs[:num_common]
    assert not set(ours[num_common:]) & set(theirs[num_common:])


# -- block sizes and content sizes ------------------------------------------------------------------------------------


def test_a_content_id_may_cover_several_blocks_or_a_block_several_content_ids() -> None:
    prompt = content((5, 6, 7, 8), content_size=4)
    assert [len(keys(prompt, block_size)) for block_size in (1, 2, 4, 8, 16)] == [16, 8, 4, 2, 1]


@pytest.mark.parametrize("block_size", [3, 6, 5])
def test_block_sizes_that_do_neither_are_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size {block_size} neither divides nor is a multiple of the trace's 4"):
        keys(content((5, 6), content_size=4), block_size)


def test_the_last_content_id_covers_the_remainder() -> None:
    whole, cut = ContentPrompt(12, (1, 2, 3), 4), ContentPrompt(10, (1, 2, 3), 4)
    assert keys(cut, 2) == keys(whole, 2)[:5]
    assert keys(cut, 4) == keys(whole, 4)[:2], "a block that is not full has no key"
    assert keys(cut, 8) == keys(whole, 8) == keys(ContentPrompt(8, (1, 2), 4), 8)


def test_content_ids_must_cover_the_prompt_and_no_more() -> None:
    for ids in ((1, 2), (1, 2, 3, 4)):
        with pytest.raises(ValueError, match=f"a prompt of 10 tokens needs 3 content ids of 4 tokens, not {len(ids)}"):
            ContentPrompt(10, ids, 4)


def test_a_prompt_shorter_than_a_block_has_no_key() -> None:
    for prompt in (LengthPrompt(3), TokenPrompt((1, 2, 3)), content((1, 2, 3))):
        assert keys(prompt, 4) == []


# -- content that is one's own ----------------------------------------------------------------------------------------


def test_prompts_of_known_length_only_are_like_no_other() -> None:
    one, other = keys(LengthPrompt(8), 4, owner=1), keys(LengthPrompt(8), 4, owner=2)
    assert len(one) == 2
    assert not set(one) & set(other)


def test_answers_known_by_position_belong_to_their_request() -> None:
    for prompt in (LengthPrompt(4), content((1, 2, 3, 4))):
        chains = [prompt.chain(4, {}, SECRET, owner) for owner in (1, 2)]
        for chain in chains:
            chain.extend(3)
            assert len(chain.keys) == 3
        assert not set(chains[0].keys[1:]) & set(chains[1].keys[1:])


def test_answers_known_by_their_tokens_are_shared_as_prompts_are() -> None:
    """The next turn of a conversation finds what was answered."""
    chain = TokenPrompt((1, 2, 3)).chain(2, {}, SECRET, owner=1)
    chain.append((4,))
    chain.append((5, 6, 7))
    chain.extend(3)
    assert chain.keys == keys(TokenPrompt((1, 2, 3, 4, 5, 6, 7, 8)), 2)[:3]


# -- a later turn tells the answer ------------------------------------------------------------------------------------


def test_a_later_turn_tells_the_keys_of_the_answer_before_it() -> None:
    """Ids 1 and 2 are the prompt; the next turn goes on from them with the answer, 3, and the next question, 4."""
    turn, later = ContentPrompt(8, (1, 2), 4), ContentPrompt(16, (1, 2, 3, 4), 4)
    assert keys(turn.followed_by(later), 4) == keys(later, 4)
    assert len(keys(turn, 4)) == 2


def test_the_last_id_of_a_turn_is_taken_from_the_later_one_where_it_was_not_full() -> None:
    turn, later = ContentPrompt(6, (1, 8), 4), ContentPrompt(12, (1, 2, 3), 4)
    assert keys(turn.followed_by(later), 2) == keys(later, 2)


def test_a_prompt_that_does_not_go_on_tells_nothing() -> None:
    turn = ContentPrompt(8, (1, 2), 4)
    for other in (ContentPrompt(12, (1, 9, 3), 4), ContentPrompt(8, (1, 2), 4), ContentPrompt(16, (1, 2), 8)):
        assert turn.followed_by(other) is turn


def test_what_lies_behind_the_known_answer_is_the_requests_own() -> None:
    turn = ContentPrompt(4, (1,), 4).followed_by(ContentPrompt(8, (1, 2), 4))
    chains = [turn.chain(4, {}, SECRET, owner) for owner in (1, 2)]
    for chain in chains:
        chain.extend(4)
    assert chains[0].keys[:2] == chains[1].keys[:2]
    assert not set(chains[0].keys[2:]) & set(chains[1].keys[2:])


# -- namespaces -------------------------------------------------------------------------------------------------------

ALICE, BOB = ("tenant", "alice"), ("tenant", "bob")


@pytest.mark.parametrize("kind", sorted(PROMPTS))
def test_a_namespace_is_folded_into_the_block_it_begins_in_and_so_into_all_after_it(kind: str) -> None:
    prompt = PROMPTS[kind](range(12))
    for start_token, num_common in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3)):
        alice, bob = (keys(prompt, 4, Namespace(start_token, who)) for who in (ALICE, BOB))
        assert alice[:num_common] == bob[:num_common] == keys(prompt, 4)[:num_common]
        assert not set(alice[num_common:]) & set(bob[num_common:] + keys(prompt, 4)[num_common:])
        assert alice == keys(prompt, 4, Namespace(start_token, ALICE)), "who may share, shares"


def test_a_namespace_that_begins_inside_a_content_id_makes_all_of_the_id_private() -> None:
    """One hash a content id: a barrier can only be drawn before it."""
    prompt = content((1, 2), content_size=8)
    alice = keys(prompt, 4, Namespace(4, ALICE))
    assert not set(alice) & set(keys(prompt, 4))


def test_namespaces_may_be_nested() -> None:
    prompt = content(range(8))
    nested = [Namespace(0, ALICE), Namespace(4, ("user", "carol"))]
    assert keys(prompt, 4, *nested)[0] == keys(prompt, 4, nested[0])[0]
    assert keys(prompt, 4, *nested)[1] != keys(prompt, 4, nested[0])[1]


def test_prompts_of_known_length_need_no_namespace() -> None:
    assert keys(LengthPrompt(8), 4, Namespace(0, ALICE)) == keys(LengthPrompt(8), 4)


# -- nothing else decides them ----------------------------------------------------------------------------------------

SHOW = (
    "from policies.prompt import *\n"
    "prompts = [TokenPrompt((1, 2, 3, 4)), ContentPrompt(4, (9, 8), 2), LengthPrompt(4)]\n"
    "mark = seals([Namespace(0, ('tenant', 'alice'))], 2, b'secret')\n"
    "print([prompt.chain(2, mark, b'secret', 1).keys for prompt in prompts])"
)


def test_keys_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    shown = {
        subprocess.run(
            [sys.executable, "-c", SHOW], cwd=REPOSITORY, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "2")
    }  # fmt: skip
    assert len(shown) == 1


@pytest.mark.parametrize(
    "prompt",
    [TokenPrompt((1, 2, 3, 4)), ContentPrompt(4, (9, 8), 2), LengthPrompt(4)],
    ids=lambda each: type(each).__name__,
)
def test_keys_differ_under_another_secret(prompt: Prompt) -> None:
    assert not set(keys(prompt, 2)) & set(keys(prompt, 2, secret=b"another"))


def test_marks_of_namespaces_differ_under_another_secret() -> None:
    assert seals([Namespace(0, ALICE)], 4, SECRET) != seals([Namespace(0, ALICE)], 4, b"another")

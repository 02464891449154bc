"""Transforms: what each changes, what it leaves alone, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from policies.config import EngineConfig
from policies.prompt import ContentPrompt, LengthPrompt, Prompt, TokenPrompt
from policies.types import Context, Request
from sim.cost import AffineCost
from sim.simulate import simulate
from sim.workload.every import every_item, follow_ups
from sim.workload.generate import generate
from sim.workload.joining import concatenate
from sim.workload.reshaping import shortened
from sim.workload.reuse import reuse
from sim.workload.sessions import FollowUp, Sessions
from sim.workload.transform import (
    assign_classes,
    assign_tenants,
    cancel_share,
    cap_length,
    inject_volatile_token,
    parse_transform,
    repeat,
    scale_rate,
)
from sim.workload.workload import WorkItem, Workload


def item(name: str, arrival: float = 0.0, prompt: Prompt | None = None, output: int = 5) -> WorkItem:
    return WorkItem(Request(name, arrival, prompt or LengthPrompt(8), max_tokens=9), output)


def content(num_tokens: int, *ids: int) -> ContentPrompt:
    return ContentPrompt(num_tokens, ids, content_size=4)


def prompts(workload: Workload) -> list[Prompt]:
    return [each.request.prompt for each in every_item(workload)]


def arrivals(workload: Workload) -> list[float]:
    return [each.request.arrival_time for each in workload.items]


def names(workload: Workload) -> list[str]:
    return [each.request.request_id for each in every_item(workload)]


def chat() -> Sessions:
    """Two users: a, then b after its answer; c alone."""
    second = content(16, 1, 2, 3, 4)
    first = content(6, 1, 9).followed_by(second)
    follow_ups = [FollowUp(item("b", prompt=second), ("a",), delay=2.0)]
    return Sessions("chat", [item("a", 1.0, first), item("c", 3.0)], follow_ups=follow_ups)


ALL: dict[str, Callable[[Workload], Workload]] = {
    text: parse_transform(text)
    for text in (
        "scale_rate=2", "volatile=4", "classes,interactive=0.5,batch=0.5", "tenants=3", "cancel=0.5,patience=5",
        "cap,prompt=6,output=2", "repeat=2,gap=60",
    )
}  # fmt: skip


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("name", ["mooncake-conversation", "conversation", "multi-tenant"])
def test_a_transform_says_what_it_did_and_leaves_the_old_workload_alone(text: str, name: str) -> None:
    plain, again = generate(name, num_requests=50), generate(name, num_requests=50)
    changed = ALL[text](plain)
    assert plain == again and type(changed) is type(plain)
    assert changed.findings[: len(plain.findings)] == plain.findings
    assert len(changed.findings) == len(plain.findings) + 1
    assert changed.source.startswith(plain.source + "; ") and text.split(",")[0].split("=")[0] in changed.source


# Rates


def test_twice_the_rate_halves_every_time() -> None:
    workload = scale_rate(Workload("two", [item("a", 1.0), item("b", 4.0)]), 2.0)
    assert arrivals(workload) == [0.5, 2.0]
    assert workload.findings == ("arrival times divided by 2",)


def test_users_think_as_long_as_before() -> None:
    workload = scale_rate(chat(), 2.0)
    assert arrivals(workload) == [0.5, 1.5] and [each.delay for each in follow_ups(workload)] == [2.0]
    assert workload.findings[-1] == "times at which sessions begin divided by 2"


# Volatile tokens


def test_a_volatile_token_leaves_only_what_stands_before_its_content_id() -> None:
    workload = Workload("w", [item("a", 0.0, content(16, 1, 2, 3, 4)), item("b", 1.0, content(16, 1, 2, 3, 5))])
    changed = inject_volatile_token(workload, position=9)
    assert prompts(changed) == [content(16, 1, 2, 6, 7), content(16, 1, 2, 8, 9)]
    assert changed.findings == (
        "a token of its own at position 9 of each prompt: reuse with an endless cache falls from 37.5% to 25.0% of "
        "prompt tokens",
    )


def test_at_the_beginning_it_destroys_all_reuse() -> None:
    plain = generate("mooncake-conversation", num_requests=300)
    changed = inject_volatile_token(plain)
    assert reuse(prompts(plain)) > 0.05 and reuse(prompts(changed)) == 0.0
    assert "to 0.0% of prompt tokens" in changed.findings[-1]
    assert [each.num_tokens for each in prompts(changed)] == [each.num_tokens for each in prompts(plain)]


def test_behind_the_shared_prefix_it_costs_nothing() -> None:
    plain = generate("tool-schema", num_requests=100)
    assert reuse(prompts(inject_volatile_token(plain, 12_288))) == reuse(prompts(plain))


def test_an_answer_is_not_found_again_behind_a_volatile_token() -> None:
    for position, known in ((0, 0), (5, 0), (9, 8), (15, 12), (16, 16)):
        prompt = prompts(inject_volatile_token(chat(), position))[0]
        assert isinstance(prompt, ContentPrompt) and prompt.num_known_tokens == known
        assert len(prompt.continuation) == max(0, known // 4 - 1)


def test_a_prompt_shorter_than_the_position_or_without_content_stays() -> None:
    workload = Workload("w", [item("a", 0.0, content(6, 1, 2)), item("b", 1.0, LengthPrompt(99))])
    assert prompts(inject_volatile_token(workload, 6)) == prompts(workload)


def test_a_simulated_cache_finds_what_was_predicted() -> None:
    config = EngineConfig(num_blocks=20_000, block_size=16, max_model_len=4096, max_num_batched_tokens=4096)
    workload = inject_volatile_token(generate("shared-prefix", num_requests=50, rate=0.1), 512)
    records = simulate(config, workload, AffineCost(per_step=0.01)).records
    found = sum(record.num_cached_tokens for record in records) / sum(record.num_prompt_tokens for record in records)
    assert found == pytest.approx(reuse(prompts(workload)), abs=1e-12)


# Classes, tenants


def test_classes_come_in_their_shares_and_by_session() -> None:
    workload = assign_classes(generate("conversation", num_requests=4000), {"interactive": 0.8, "batch": 0.2}, seed=1)
    by_session: dict[str, set[str]] = {}
    for each in every_item(workload):
        by_session.setdefault(each.request.context.session, set()).add(each.request.class_name)
    assert all(len(classes) == 1 for classes in by_session.values())
    share = sum(classes == {"batch"} for classes in by_session.values()) / len(by_session)
    assert share == pytest.approx(0.2, abs=0.03)


def test_tenants_follow_zipf_and_are_their_own_clients() -> None:
    workload = assign_tenants(generate("chat", num_requests=5000), 8, zipf=1.0)
    clients = [each.request.client_id for each in workload.items]
    assert clients == [each.request.context.tenant for each in workload.items]
    assert clients.count("tenant-0") / 5000 == pytest.approx(1 / sum(1 / rank for rank in range(1, 9)), abs=0.02)
    assert workload.findings[-1] == "8 tenants assigned by session, the first with 36.8% of them"


def test_a_tenant_is_all_that_changes_in_a_context() -> None:
    context = Context(tenant="t", user="u", application="a", session="s")
    workload = Workload("w", [WorkItem(Request("a", 0.0, LengthPrompt(1), 1, context=context), 1)])
    assert assign_tenants(workload, 1).items[0].request.context == Context("tenant-0", "u", "a", "s")


# Patience


def test_a_share_gives_up_after_exponential_times() -> None:
    workload = cancel_share(generate("fixed", num_requests=20_000), 0.1, patience=5.0, seed=2)
    times = np.array([each.patience for each in workload.items if each.patience is not None])
    assert len(times) / 20_000 == pytest.approx(0.1, abs=0.01)
    assert times.mean() == pytest.approx(5.0, rel=0.07) and times.std() == pytest.approx(5.0, rel=0.1)
    assert workload.findings[-1] == f"clients give up on {len(times)} of 20000 requests, 5 s after arrival on average"


def test_patience_belongs_to_the_request_whatever_else_changes() -> None:
    """The number of requests, their arrivals, their lengths and other transforms leave it where it was."""
    few = cancel_share(generate("chat", num_requests=100), 0.5, 5.0)
    patience = {each.request.request_id: each.patience for each in every_item(few)}
    others = [
        generate("chat", num_requests=300),
        generate("chat", num_requests=100, arrivals="closed,users=7,think=2"),
        generate("mooncake-conversation", num_requests=100, arrivals="gamma,cv=3"),
        assign_classes(scale_rate(generate("chat", num_requests=100), 3.0), {"a": 0.5, "b": 0.5}),
    ]
    for other in others:
        for each in every_item(cancel_share(other, 0.5, 5.0)):
            assert patience.get(each.request.request_id, each.patience) == each.patience


def test_more_impatience_only_adds_to_those_who_give_up() -> None:
    plain = generate("chat", num_requests=500)
    few, many = (cancel_share(plain, share, 5.0) for share in (0.1, 0.3))
    assert all(a.patience is None or a.patience == b.patience for a, b in zip(few.items, many.items, strict=True))


def test_the_sooner_of_two_reasons_to_give_up_counts() -> None:
    once = cancel_share(generate("chat", num_requests=200), 1.0, 5.0)
    twice = cancel_share(once, 1.0, 5.0, seed=1)
    assert all(b.patience is not None and a.patience is not None and b.patience <= a.patience
               for a, b in zip(once.items, twice.items, strict=True))  # fmt: skip


def test_nobody_gives_up_unless_told() -> None:
    assert all(each.patience is None for each in every_item(generate("conversation", num_requests=50)))


# Lengths


def test_prompts_lose_their_tail_and_answers_their_end() -> None:
    workload = Workload("w", [item("a", 0.0, content(10, 1, 2, 3)), item("b", 1.0, LengthPrompt(3), output=2)])
    changed = cap_length(workload, prompt=5, output=3)
    assert prompts(changed) == [content(5, 1, 2), LengthPrompt(3)]
    assert [(each.num_output_tokens, each.request.max_tokens) for each in changed.items] == [(3, 3), (2, 3)]
    assert changed.findings == ("lengths capped at prompt=5,output=3: 1 prompts and 1 answers cut short",)


def test_a_capped_prompt_knows_of_the_answer_only_what_fits() -> None:
    first = content(6, 1, 9).followed_by(content(16, 1, 2, 3, 4))
    assert shortened(first, 16) == first
    assert shortened(first, 12) == ContentPrompt(6, (1, 9), 4, continuation=(2, 3), num_known_tokens=12)
    assert shortened(first, 6) == content(6, 1, 9) and shortened(first, 5) == content(5, 1, 9)
    assert shortened(first, 4) == content(4, 1)
    assert shortened(TokenPrompt((7, 8, 9)), 2) == TokenPrompt((7, 8))


def test_a_cap_of_nothing_changes_nothing() -> None:
    plain = generate("conversation", num_requests=50)
    assert every_item(cap_length(plain)) == every_item(plain)


# One after another


def test_the_same_again_shares_content_and_has_new_names() -> None:
    workload = repeat(Workload("w", [item("a", 1.0, content(8, 1, 2)), item("b", 4.0)]), 3, gap=10.0)
    assert arrivals(workload) == [1.0, 4.0, 14.0, 17.0, 27.0, 30.0]
    assert names(workload) == ["a", "b", "1:a", "1:b", "2:a", "2:b"]
    assert reuse(prompts(workload)) == pytest.approx(16 / 48)


def test_unless_told_a_mean_gap_lies_between() -> None:
    workload = Workload("w", [item("a", 0.0), item("b", 2.0), item("c", 3.0)])
    assert arrivals(repeat(workload, 2)) == [0.0, 2.0, 3.0, 4.0, 6.0, 7.0]


def test_repeating_twice_names_everyone_anew() -> None:
    workload = repeat(repeat(Workload("w", [item("a", 1.0)]), 3), 3)
    assert len(set(names(workload))) == 9


def test_repeated_sessions_wait_for_their_own_answers() -> None:
    workload = repeat(chat(), 2, gap=100.0)
    assert [(each.item.request.request_id, each.after) for each in follow_ups(workload)] == [
        ("b", ("a",)),
        ("1:b", ("1:a",)),
    ]
    config = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    records = simulate(config, workload, AffineCost(per_step=1.0)).records
    lives = {record.request_id: record.finish_time - record.arrival_time for record in records}
    assert lives == dict.fromkeys(("a", "b", "c", "1:a", "1:b", "1:c"), 5.0)


def test_joined_workloads_keep_their_content_apart() -> None:
    one, two = generate("shared-prefix", num_requests=20), generate("tool-schema", num_requests=20)
    joined = concatenate([one, two, generate("shared-prefix", num_requests=20)], gap=5.0)
    assert joined.num_requests == 60 and len(set(names(joined))) == 60
    ids = [{i for prompt in prompts(part) if isinstance(prompt, ContentPrompt) for i in prompt.content_ids}
           for part in (Workload("a", joined.items[:20]), Workload("b", joined.items[20:40]),
                        Workload("c", joined.items[40:]))]  # fmt: skip
    assert not ids[0] & ids[1] and not ids[1] & ids[2] and not ids[0] & ids[2]
    shared = concatenate([one, one], shares_content=True)
    assert reuse(prompts(shared)) > reuse(prompts(joined))


def test_sessions_and_plain_requests_may_be_joined_but_not_two_kinds_of_sessions() -> None:
    joined = concatenate([generate("chat", num_requests=5), chat()])
    assert isinstance(joined, Sessions) and joined.num_requests == 8
    closed = generate("chat", num_requests=5, arrivals="closed,users=2")
    with pytest.raises(ValueError, match="cannot be joined: make them alike"):
        concatenate([closed, chat()])


# Texts


def test_texts_name_the_functions() -> None:
    plain = generate("chat", num_requests=50)
    same: dict[str, Any] = {
        "scale_rate=2": scale_rate(plain, 2.0),
        "volatile": inject_volatile_token(plain, 0),
        "classes,interactive=0.8,batch=0.2": assign_classes(plain, {"interactive": 0.8, "batch": 0.2}, seed=4),
        "tenants=8,zipf=0.5": assign_tenants(plain, 8, 0.5, seed=4),
        "cancel=0.1,patience=5": cancel_share(plain, 0.1, 5.0, seed=4),
        "cancel=0.1,patience=5,seed=9": cancel_share(plain, 0.1, 5.0, seed=9),
        "cap=100": cap_length(plain, 100),
        "cap,output=10": cap_length(plain, output=10),
        "repeat=3,gap=60": repeat(plain, 3, 60.0),
    }
    for text, expected in same.items():
        assert parse_transform(text, seed=4)(plain) == expected, text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scale_rat=2", "unknown transform 'scale_rat'; known: cancel, cap, classes, repeat, scale_rate, storm, "
                        "tenants, volatile. Did you mean 'scale_rate'?"),
        ("scale_rate", "transform 'scale_rate' needs factor: add factor=..."),
        ("scale_rate=nan", "factor of scale_rate (nan) must be from 1e-06 to 1e+06"),
        ("scale_rate=0", "factor of scale_rate (0) must be from 1e-06 to 1e+06"),
        ("cancel=0.1", "transform 'cancel' needs patience: add patience=..."),
        ("cancel=1.5,patience=1", "share of cancel (1.5) must be from 0 to 1"),
        ("cancel=0.1,patience=-1", "patience of cancel (-1) must be from 0 to 1e+09"),
        ("cancel=0.1,pateince=1", "unknown knob 'pateince' of transform 'cancel'; known: share, patience, seed. "
                                  "Did you mean 'patience'?"),
        ("classes,a=0.5", "shares of classes sum to 0.5: they must sum to 1"),
        ("classes,a=nan,b=1", "a of classes (nan) must be from 0 to 1"),
        ("tenants=0", "num of tenants (0) must be from 1 to 1e+06"),
        ("tenants=2.5", "num=2.5 of transform 'tenants' must be a whole number"),
        ("volatile=-1", "position of volatile (-1) must be from 0 to 1e+09"),
        ("cap=0", "prompt of cap (0) must be from 1 to 1e+09"),
        ("repeat=0", "times of repeat (0) must be from 1 to 100000"),
        ("repeat=2,gap=nan", "gap (nan) between workloads must be a number of seconds from 0 to 1e9"),
    ],
)  # fmt: skip
def test_a_wrong_text_is_answered_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_transform(text)(generate("chat", num_requests=3))
    assert str(caught.value) == said


def test_a_volatile_token_cannot_stand_among_real_ones() -> None:
    with pytest.raises(ValueError, match="cannot be put among real token ids"):
        inject_volatile_token(Workload("w", [item("a", 0.0, TokenPrompt((1, 2)))]))


def test_in_a_storm_a_share_of_those_present_hang_up_within_its_time() -> None:
    made = generate("fixed", num_requests=2000, rate=100.0)
    stormy = parse_transform("storm=0.8,at=5,within=0.5", 3)(made)
    start = made.items[0].request.arrival_time
    present = [item for item in stormy.items if item.request.arrival_time <= start + 5]
    left = [item.request.arrival_time + item.patience - start for item in present if item.patience is not None]
    assert 0.7 < len(left) / len(present) < 0.9 and min(left) >= 5.0 and max(left) <= 5.5
    assert all(item.patience is None for item in stormy.items[len(present) :])
    assert f"{len(left)} of the {len(present)} clients that came by then hang up 5 s" in stormy.findings[-1]
    assert [item.request for item in stormy.items] == [item.request for item in made.items]

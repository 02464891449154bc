"""Random lives of tiny engines: requests come, go and fail, time passes, steps are taken. `choose` draws everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from policies.catalogue import MENU, make
from policies.config import MENUS
from policies.interfaces import Outranks
from policies.journal import Write
from policies.prompt import ContentPrompt, LengthPrompt, Prompt, TokenPrompt
from policies.types import Request, StepPlan
from tests.ledger import Ledger
from tests.specs import examples
from tests.worlds import request, tiny_engine

Choose = Callable[[Sequence[Any]], Any]  # one of them

IDS = tuple("abcdefg")
LENGTHS = range(1, 21)
KINDS = (LengthPrompt, ContentPrompt, TokenPrompt)
EVENTS = ("add",) * 6 + ("abort",) * 2 + ("schedule",) * 7 + ("update",) * 6 + ("fail", "reset", "reset_running")


def chooser(*seed: object) -> Choose:
    """The same choices for the same seed, whatever PYTHONHASHSEED is."""
    return Random(repr(seed)).choice


def draw_settings(choose: Choose, **fixed: Any) -> dict[str, Any]:
    """Settings of a tiny engine; policies given by their name are made as one of their examples."""
    max_num_seqs, block_size = choose(range(1, 6)), choose(range(1, 5))
    settings = {
        "num_blocks": choose(range(3, 25)),
        "block_size": block_size,
        "max_num_batched_tokens": choose(range(max(4, max_num_seqs), 33)),
        "max_num_seqs": max_num_seqs,
        "max_model_len": choose(range(4, 33)),
        "admission": choose(("accept_all",) * 4 + tuple(MENU["admission"])),
        "scheduling": choose(("fcfs", "priority", *MENU["scheduling"])),
        "isolation": choose(("global", "tenant", "no_reuse")),
        "enable_prefix_caching": choose((True, True, True, False)),
        "enable_chunked_prefill": choose((True, True, False)),
        "long_prefill_token_threshold": choose((0, 0, 3)),
        "async_depth": choose((1, 2)),
        "cache_at": choose(("schedule", "step_end")),
        "hol_skip": choose((0, 2)),
        "unhashed_first": choose((True, False)),
        "preempt_min_steps": choose((0, 0, 2)),
        "num_host_blocks": choose((0, 0, 6, 24)),
        **fixed,
    }
    for menu in MENUS:
        if settings.get(menu) in MENU[menu]:
            settings[menu] = choose(examples(menu, settings[menu]))
    can_outrank = isinstance(make("scheduling", settings["scheduling"]), Outranks)
    settings.setdefault("preempt_for_waiting", can_outrank and choose((True, False)))
    if settings["max_num_batched_tokens"] < settings["max_model_len"]:
        settings["enable_chunked_prefill"] = True
    if not make("allocation", settings.get("allocation", "paged")).shares_blocks:
        settings |= {"unhashed_first": True, "enable_prefix_caching": False}
    if settings["async_depth"] > 1:
        settings["num_host_blocks"] = 0
    if "reserve" in settings["admission"]:
        settings["preempt_for_waiting"] = False
    return settings


class Life:
    """One engine and its ledger. Times are multiples of 1/4 s."""

    def __init__(self, choose: Choose, settings: dict[str, Any], journal: Write | None = None) -> None:
        self.choose = choose
        self.ledger = Ledger(tiny_engine(journal, **settings))
        self.now = 0.0
        self.repeats = False  # whether equal steps are taken at once
        self._kinds = choose((KINDS, KINDS[:2], KINDS[:1]))  # no step repeats once somebody's tokens are known by name
        size = settings["block_size"]
        self._content_size = choose([each for each in (1, 2, 4, 8) if each % size == 0 or size % each == 0])

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.pass_time()
            getattr(self, self.choose(EVENTS))()

    def end(self) -> None:
        self.now = self.ledger.drive_to_end(self.now)

    # -- events ---------------------------------------------------------------------------------------------------

    def pass_time(self) -> None:
        self.now += self.choose((0.0, 0.0, 0.25, 1.5))

    def add(self) -> None:
        free = [request_id for request_id in IDS if request_id not in self.ledger.live]
        if free:
            self.ledger.add(self.draw_request(self.choose(free)), self.now)

    def abort(self) -> None:
        request_id = self.choose((*IDS, "nobody"))
        self.ledger.abort(request_id, self.now)

    def schedule(self) -> StepPlan | None:
        if len(self.ledger.flights) == self.ledger.config.async_depth:
            return None
        return self.ledger.schedule(self.now, self._draw_repeats if self.repeats else None)

    def update(self) -> None:
        if self.ledger.flights:
            self.ledger.update(self.now, stop=self.choose(((), (), (), *IDS)))

    def fail(self) -> None:
        if self.ledger.flights:
            self.ledger.fail(self.now)

    def reset(self) -> None:
        self.ledger.reset(self.now, reset_running=False)

    def reset_running(self) -> None:
        self.ledger.reset(self.now, reset_running=True)

    # -- draws ----------------------------------------------------------------------------------------------------

    def draw_request(self, request_id: str) -> Request:
        return request(
            request_id,
            self._draw_prompt(),
            max_tokens=self.choose(range(1, 10)),
            arrival_time=self.now - self.choose((0.0, 0.5)),
            tenant=self.choose("xy"),
            client_id=self.choose("uvw"),
            class_name=self.choose("xy"),
            deadline=self.choose((None, None, self.now + 2.0)),
            predicted_output_tokens=self.choose((None, 3)),
            priority=self.choose(range(3)),
        )

    def _draw_repeats(self, plan: StepPlan, limit: int) -> int:
        return int(self.choose(range(1, limit + 1)))

    def _draw_prompt(self) -> Prompt:
        """Prompts of content or tokens begin alike, but for some of their first; a later turn may tell the answer."""
        kind, num_tokens, first = self.choose(self._kinds), self.choose(LENGTHS), self.choose((7, 7, 8))
        if kind is LengthPrompt:
            return LengthPrompt(num_tokens)
        if kind is TokenPrompt:
            return TokenPrompt((first, *(position % 2 for position in range(1, num_tokens))))
        prompt = self._content(num_tokens, first)
        later = self._content(num_tokens + self.choose(range(1, 9)), first)
        return prompt.followed_by(later) if self.choose((True, False)) else prompt

    def _content(self, num_tokens: int, first: int) -> ContentPrompt:
        num_ids = -(-num_tokens // self._content_size)
        return ContentPrompt(num_tokens, (first,) + (0,) * (num_ids - 1), self._content_size)

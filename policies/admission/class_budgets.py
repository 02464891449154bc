"""Each class within its budget; what is reserved for one is lent to others until it is wanted back.

Limits are hard: running requests, KV blocks at their longest, and a queue whose overflow is refused. A reserve is not:
others use it while its class does not, and yield to it, borrowers first, when it comes (`Reclaims`). A request keeps
its class's order, and waits in admission until its class has room, so that it blocks no other's line.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.interfaces import View
from policies.named import counts_by_name
from policies.types import Admit, Hold, Reject, Request, RequestState, Verdict


class ClassBudgets:
    """Per class, as `interactive:40/batch:20`; who is not named has no limit and no reserve. `max_running`: requests
    past admission. `max_blocks`: KV blocks they may come to hold. `max_queued`, `max_queued_tokens`: requests, and
    prompt tokens, not yet running. `reserve_blocks`: KV blocks that the class gets whenever it wants them.
    `retry_after`: seconds, the hint to who is refused."""

    steady = True  # while nobody comes, enters or leaves, rooms only shrink

    def __init__(
        self,
        max_running: str = "",
        max_blocks: str = "",
        max_queued: str = "",
        max_queued_tokens: str = "",
        reserve_blocks: str = "",
        retry_after: float = 1.0,
    ) -> None:
        if not 0 <= retry_after < float("inf"):
            raise ValueError(f"retry_after ({retry_after}) must be a finite number of seconds, 0 or more")
        self.max_running = _at_least_one("max_running", max_running)
        self.max_blocks = _at_least_one("max_blocks", max_blocks)
        self.max_queued = counts_by_name("max_queued", max_queued)
        self.max_queued_tokens = counts_by_name("max_queued_tokens", max_queued_tokens)
        self.reserve_blocks = counts_by_name("reserve_blocks", reserve_blocks)
        self.lends = any(self.reserve_blocks.values())
        self.retry_after = retry_after
        self._promised: dict[str, int] = {}  # blocks at their longest, of those past admission, by request
        self._promised_by_class: dict[str, int] = {}

    # -- who may come, and who may go on to the line ------------------------------------------------------------

    def decide(self, request: Request, view: View, now: float) -> Verdict:
        refusal = self._refusal(request, view)
        if refusal is not None:
            return refusal
        if view.num_held(request.class_name) or not self._has_room(request, view):
            return Hold(request.class_name)
        return self._admit(request, view)

    def release(self, request: Request, view: View, now: float) -> Verdict:
        return self._admit(request, view) if self._has_room(request, view) else Hold(request.class_name)

    def finished(self, state: RequestState, now: float) -> None:
        blocks = self._promised.pop(state.request_id, 0)
        if blocks:
            self._promised_by_class[state.request.class_name] -= blocks

    def _refusal(self, request: Request, view: View) -> Reject | None:
        name, totals = request.class_name, view.of_class(request.class_name)
        blocks, limit = _longest(request, view), self.max_blocks.get(name)
        if limit is not None and blocks > limit:
            return Reject(f"it may need {blocks} KV blocks, but class {name!r} may hold {limit}: lower max_tokens")
        queued = totals.num_waiting + totals.num_held
        if queued >= self.max_queued.get(name, queued + 1):
            return Reject(f"the queue of class {name!r} is full: {queued} requests wait", self.retry_after)
        tokens = totals.num_waiting_tokens + totals.num_held_tokens
        if tokens and tokens + request.prompt.num_tokens > self.max_queued_tokens.get(name, float("inf")):
            return Reject(f"the queue of class {name!r} is full: {tokens} tokens wait", self.retry_after)
        return None

    def _has_room(self, request: Request, view: View) -> bool:
        name, totals = request.class_name, view.of_class(request.class_name)
        num_past = totals.num_running + totals.num_waiting
        if num_past >= self.max_running.get(name, num_past + 1):
            return False
        promised = self._promised_by_class.get(name, 0) + _longest(request, view)
        return promised <= self.max_blocks.get(name, promised) and self._finds_room(request, view)

    def _finds_room(self, request: Request, view: View) -> bool:
        """With reserves, nobody lines up before there is room for him: he would stand in the way of who has a claim."""
        if not self.lends:
            return True
        needed, lined_up = _blocks(request.prompt.num_tokens, view), view.of_class(request.class_name)
        if self.may_claim(request.class_name, needed + lined_up.num_waiting_blocks, view):
            return True
        return view.num_waiting_blocks + needed <= view.num_free_blocks

    def _admit(self, request: Request, view: View) -> Verdict:
        blocks = _longest(request, view)
        self._promised[request.request_id] = blocks
        self._promised_by_class[request.class_name] = self._promised_by_class.get(request.class_name, 0) + blocks
        return Admit()

    # -- reserves -----------------------------------------------------------------------------------------------

    def may_claim(self, class_name: str, num_blocks: int, view: View) -> bool:
        reserve = self.reserve_blocks.get(class_name, 0)
        return num_blocks <= reserve and _held_blocks(view.running).get(class_name, 0) + num_blocks <= reserve

    def borrowers(self, running: Sequence[RequestState], view: View) -> Sequence[RequestState]:
        held = _held_blocks(running)
        return [
            state for state in running
            if held[state.request.class_name] > self.reserve_blocks.get(state.request.class_name, 0)
        ]  # fmt: skip


def _at_least_one(knob: str, text: str) -> dict[str, int]:
    found = counts_by_name(knob, text)
    for name, value in found.items():
        if value < 1:
            raise ValueError(f"{knob} of class {name!r} (0) must be at least 1: nobody of it could ever run")
    return found


def _blocks(num_tokens: int, view: View) -> int:
    return -(-num_tokens // view.block_size)


def _longest(request: Request, view: View) -> int:
    """Blocks of prompt and whole answer; the last token's KV is never computed."""
    return _blocks(min(request.prompt.num_tokens + request.max_tokens, view.max_model_len) - 1, view)


def _held_blocks(running: Sequence[RequestState]) -> dict[str, int]:
    """By class, as tables show them: a shared block counts for each that uses it."""
    held: dict[str, int] = {}
    for state in running:
        name = state.request.class_name
        held[name] = held.get(name, 0) + len(state.block_ids)
    return held

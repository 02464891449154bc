"""A workload with a lead: requests that are played one after another before its clock starts.

Primed: what sessions share of each other's prompts is asked once by each caller, so that all find it from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from policies.prompt import ContentPrompt
from policies.types import Context, Request, RequestRecord
from sim.workload.every import every_item
from sim.workload.reuse import named_chain
from sim.workload.workload import WorkItem, Workload

LEAD = "lead-"  # ids of the requests before the clock starts


@dataclass(frozen=True)
class Led(Workload):
    """`items` are the lead's, and `following` begins, from its first arrival on, when the last of them has left."""

    following: Workload = field(default_factory=lambda: Workload("nothing", ()))

    @property
    def num_requests(self) -> int:
        return len(self.items) + self.following.num_requests

    def initial(self) -> Sequence[WorkItem]:
        return self.items[:1]

    def on_outcome(self, record: RequestRecord, now: float) -> Sequence[WorkItem]:
        if not record.request_id.startswith(LEAD):
            return self.following.on_outcome(record, now)
        position = int(record.request_id.removeprefix(LEAD)) + 1
        if position < len(self.items):
            return [_at(self.items[position], now)]
        start = self.following.items[0].request.arrival_time
        return [_at(item, now + item.request.arrival_time - start) for item in self.following.initial()]


def primed(workload: Workload) -> Led:
    """Raises ValueError where sessions share nothing."""
    lead = [
        WorkItem(Request(f"{LEAD}{index}", _first(workload), prompt, 1, context.tenant, context=context), 1)
        for index, (context, prompt) in enumerate(_shared(workload))
    ]
    if not lead:
        raise ValueError(f"nothing of {workload.name!r} can be primed: no two sessions share a prefix; say cold")
    return Led(workload.name, lead, workload.findings, workload.source, following=workload)


def _first(workload: Workload) -> float:
    return workload.items[0].request.arrival_time if workload.items else 0.0


def _at(item: WorkItem, time: float) -> WorkItem:
    return replace(item, request=replace(item.request, arrival_time=time))


def _shared(workload: Workload) -> Iterator[tuple[Context, ContentPrompt]]:
    """What each caller asks that another session, anybody's, asks too; of one within another only the longer."""
    requests = [item.request for item in every_item(workload)]
    names: dict[tuple[int, int], int] = {}
    chains = [named_chain(_ids(request), names) for request in requests]
    common = _common(requests, chains)
    found: dict[tuple[Context, int], ContentPrompt] = {}
    inner: set[tuple[Context, int]] = set()
    for request, chain in zip(requests, chains, strict=True):
        depth = sum(each in common for each in chain)
        if depth and isinstance(request.prompt, ContentPrompt):
            caller = replace(request.context, session="", request="")
            found.setdefault((caller, chain[depth - 1]), _beginning(request.prompt, depth))
            inner.update((caller, each) for each in chain[: depth - 1])
    yield from ((caller, prompt) for (caller, end), prompt in found.items() if (caller, end) not in inner)


def _common(requests: Sequence[Request], chains: Sequence[Sequence[int]]) -> set[int]:
    """Places in the tree of prompts where more than one session has been."""
    owners: dict[int, str] = {}
    common: set[int] = set()
    for request, chain in zip(requests, chains, strict=True):
        session = request.context.session or request.request_id
        common.update(each for each in chain if owners.setdefault(each, session) != session)
    return common


def _ids(request: Request) -> Sequence[int]:
    return request.prompt.content_ids if isinstance(request.prompt, ContentPrompt) else ()


def _beginning(prompt: ContentPrompt, num_ids: int) -> ContentPrompt:
    num_tokens = min(num_ids * prompt.content_size, prompt.num_tokens)
    return ContentPrompt(num_tokens, prompt.content_ids[:num_ids], prompt.content_size)

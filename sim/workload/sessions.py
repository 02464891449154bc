"""Closed loops: requests that follow from outcomes, as turns of a session, branches of an agent, or a user's next ask.

A follow-up arrives `delay` seconds after the last of those it waits for has left, however it left; what a session does
when one of its requests was not answered is the caller's choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from policies.types import FinishReason, RequestRecord
from sim.workload.workload import WorkItem, Workload

ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class FollowUp:
    """An item that arrives `delay` seconds after all of `after` have left; its own arrival time is set then."""

    item: WorkItem
    after: tuple[str, ...]
    delay: float = 0.0


@dataclass(frozen=True)
class Sessions(Workload):
    """`items` arrive by the clock and begin the sessions; `follow_ups` come of their outcomes.

    `goes_on`: whether a follow-up still comes when a request it waits for was aborted, rejected or failed. Otherwise it
    never arrives, and neither does what waits for it.
    """

    follow_ups: Sequence[FollowUp] = ()
    goes_on: bool = False
    _waiting: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_cause: dict[str, list[FollowUp]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = {item.request.request_id for item in self.items}
        for each in self.follow_ups:
            missing = [cause for cause in each.after if cause not in known]
            if missing or not each.after:
                raise ValueError(
                    f"workload {self.name!r}: request {each.item.request.request_id!r} must follow requests listed "
                    f"before it, not {missing[:1] or 'nothing'}"
                )
            known.add(each.item.request.request_id)
        if len(known) != len(self.items) + len(self.follow_ups):
            raise ValueError(f"workload {self.name!r} lists a request id twice: give each request its own")

    @property
    def num_requests(self) -> int:
        return len(self.items) + len(self.follow_ups)

    def initial(self) -> Sequence[WorkItem]:
        """Starts the loop anew: what was waited for in an earlier run is forgotten."""
        by_cause: defaultdict[str, list[FollowUp]] = defaultdict(list)
        for each in self.follow_ups:
            for cause in each.after:
                by_cause[cause].append(each)
        self._by_cause.clear()
        self._by_cause.update(by_cause)
        self._waiting.clear()
        self._waiting.update({each.item.request.request_id: len(each.after) for each in self.follow_ups})
        return self.items

    def on_outcome(self, record: RequestRecord, now: float) -> Sequence[WorkItem]:
        if record.reason not in ANSWERED and not self.goes_on:
            return ()
        return list(self._due(record.request_id, now))

    def _due(self, cause: str, now: float) -> Iterator[WorkItem]:
        for each in self._by_cause.get(cause, ()):
            name = each.item.request.request_id
            self._waiting[name] -= 1
            if not self._waiting[name]:
                yield replace(each.item, request=replace(each.item.request, arrival_time=now + each.delay))

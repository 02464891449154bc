"""What an attacker does to find something out, as requests to send and a time to take: the same in every body.

A trial asks one question whose answer is yes or no. Its requests come at fixed times, in units of what one prompt takes
this body beside the others; so a faster body is asked faster, and channels stay apart: before the cache is probed, the
queue of those who may have filled it is gone. Trials of both kinds are shuffled, and others come and go meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from policies.prompt import ContentPrompt, LengthPrompt, Prompt
from policies.types import Context, Request
from sim.workload.streams import lognormal_lengths, poisson_arrivals, stream
from sim.workload.workload import WorkItem, Workload

CONTENT_SIZE = 128  # tokens a content id
MOST_IDS = 2**16  # of a prompt

VICTIM = Context("victim", "alice", "app", "session-a", "call-a")
COLLEAGUE = Context("victim", "bob", "app", "session-b", "call-b")
STRANGER = Context("attacker", "mallory", "app", "session-m", "call-m")
OTHERS = Context("others", "carol", "app")
NUM_TENANTS = 3  # victim, attacker, others


@dataclass(frozen=True, slots=True)
class Sizes:
    """`prompt_tokens`: of the victim's prompts and of probes; `shared`: of these, what a probe and its victim's begin
    with. `flood`: prompts that fill the audit's pool."""

    prompt_tokens: int = 2048
    shared: float = 0.95
    flood: int = 6
    short_tokens: int = 64  # of a probe that only waits

    def __post_init__(self) -> None:
        if self.prompt_tokens < 2 * CONTENT_SIZE:
            raise ValueError(f"prompt_tokens ({self.prompt_tokens}) of an audit must be at least {2 * CONTENT_SIZE}")
        if not 0.0 < self.shared < 1.0:
            raise ValueError(f"shared ({self.shared}) must lie between 0 and 1: a probe has a token of its own")

    @property
    def num_ids(self) -> int:
        return -(-self.prompt_tokens // CONTENT_SIZE)

    @property
    def num_shared_ids(self) -> int:
        return min(int(self.shared * self.prompt_tokens) // CONTENT_SIZE, self.num_ids - 1)

    def num_blocks(self, block_size: int) -> int:
        """Of the audit's pool: what `flood` prompts fill, a token of answer each."""
        return self.flood * -(-(self.prompt_tokens + 1) // block_size)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a long prompt, and others' requests on average, take a body when nobody else is there."""

    alone: float
    others: float


class Ask(NamedTuple):
    """`at`: after the trial's begin. The answer to a probe is timed."""

    at: float
    caller: Context
    prompt: Prompt
    is_probe: bool = False


@dataclass(frozen=True, slots=True)
class Channel:
    """`question`: what is true in half of the trials. `period`: of a trial. `slower`: whether a yes slows the probe."""

    name: str
    question: str
    attacker: Context
    slower: bool
    trial: Callable[[int, bool, Context, Sizes], Sequence[Ask]]
    period: Callable[[Sizes], float]


def _reuse(number: int, truth: bool, attacker: Context, sizes: Sizes) -> Sequence[Ask]:
    """The victim asks; then somebody else asks what begins alike, or would have if that had been asked."""
    cut, secret = sizes.num_shared_ids, _ids(number, 0, sizes)
    asked = secret if truth else _ids(number, 1, sizes)
    theirs = _prompt((*asked[:cut], *_ids(number, 2, sizes)[cut:]), sizes)
    mine = _prompt((*secret[:cut], *_ids(number, 3, sizes)[cut:]), sizes)
    return (Ask(0.0, VICTIM, theirs), Ask(2.0, attacker, mine, is_probe=True))


def _occupancy(number: int, truth: bool, attacker: Context, sizes: Sizes) -> Sequence[Ask]:
    """The attacker fills his part of the cache, and looks later what is left of it: no content is shared at all."""
    own = _prompt(_ids(number, 0, sizes), sizes)
    num = sizes.flood if truth else 0
    flood = [Ask(2.0, VICTIM, _prompt(_ids(number, kind, sizes), sizes)) for kind in range(1, num + 1)]
    return (Ask(0.0, attacker, own), *flood, Ask(3.0 + 2.0 * sizes.flood, attacker, own, is_probe=True))


def _queueing(number: int, truth: bool, attacker: Context, sizes: Sizes) -> Sequence[Ask]:
    """The attacker waits behind what the victim's long prompt keeps busy."""
    probe = Ask(0.2, attacker, LengthPrompt(sizes.short_tokens), is_probe=True)
    return (Ask(0.0, VICTIM, LengthPrompt(sizes.prompt_tokens)), probe) if truth else (probe,)


def _ids(number: int, kind: int, sizes: Sizes) -> range:
    """Content ids of a prompt like no other."""
    first = (number * 64 + kind) * MOST_IDS
    return range(first, first + sizes.num_ids)


def _prompt(ids: Sequence[int], sizes: Sizes) -> ContentPrompt:
    return ContentPrompt(sizes.prompt_tokens, tuple(ids), CONTENT_SIZE)


ASKED = "did the victim ask what this begins with?"
CHANNELS = {
    each.name: each
    for each in (
        Channel("reuse", ASKED, STRANGER, False, _reuse, lambda sizes: 4.0),
        Channel("reuse, colleague", ASKED, COLLEAGUE, False, _reuse, lambda sizes: 4.0),
        Channel(
            "occupancy", "did the victim use the cache?", STRANGER, True, _occupancy, lambda s: 5.0 + 2.0 * s.flood
        ),
        Channel("queueing", "is the victim being served?", STRANGER, True, _queueing, lambda sizes: 3.0),
    )
}
POSITIVE = replace(CHANNELS["reuse"], name="reuse, by itself", attacker=VICTIM)  # must be found, or nothing can be


@dataclass(frozen=True, slots=True)
class Trials:
    """A workload, and of each probe in it, by request id, the truth."""

    workload: Workload
    truths: dict[str, bool]


def trials(channel: Channel, sizes: Sizes, num: int, pace: Pace, load: float, seed: int = 0) -> Trials:
    """`num` trials of each kind, shuffled.

    `load`: the share of the time in which others' requests would keep the server busy if they came one by one.
    """
    truth_of = stream(seed, "truths").permutation([True, False] * num).tolist()
    unit = pace.alone / (1.0 - load)
    period, items, truths = channel.period(sizes) * unit, list[WorkItem](), dict[str, bool]()
    for number, truth in enumerate(truth_of):
        for index, ask in enumerate(channel.trial(number, truth, channel.attacker, sizes)):
            name = f"trial {number}.{index}"
            items.append(_item(name, number * period + ask.at * unit, ask.caller, ask.prompt))
            if ask.is_probe:
                truths[name] = truth
    if load:
        items += others(sizes, load / pace.others, len(truth_of) * period, seed)
    items.sort(key=lambda item: item.request.arrival_time)
    source = f"audit({channel.name!r}, {sizes!r}, num={num}, pace={pace!r}, load={load!r}, seed={seed})"
    return Trials(Workload(f"audit of {channel.name}", items, source=source), truths)


def others(sizes: Sizes, rate: float, duration: float, seed: int) -> list[WorkItem]:
    """Prompts like no others', a quarter as long as the victim's in the middle."""
    num, most = max(1, round(rate * duration)), sizes.prompt_tokens
    lengths = lognormal_lengths(stream(seed, "others"), num, max(1, most // 4), 0.8, most)
    arrivals = poisson_arrivals(rate, num, seed)
    return [
        _item(f"other {number}", at, OTHERS, LengthPrompt(length))
        for number, (at, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]


def _item(name: str, at: float, caller: Context, prompt: Prompt) -> WorkItem:
    return WorkItem(Request(name, at, prompt, max_tokens=1, client_id=caller.tenant, context=caller), 1)

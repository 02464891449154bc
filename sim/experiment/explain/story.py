"""Where one request's time went, and who held what it waited for, read off a journal.

Its time is cut into spans without a gap, so the parts add up to the whole. A step is shared with others: what it takes
longer than steps of as many decodes alone (the median of this journal's) is put down to the prefills in it, by their
tokens. So its own share of a step is the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from policies.catalogue import build
from policies.journal import follow
from sim.experiment.explain.blame import STEP, Cause
from sim.experiment.explain.life import FRONT_END, QUEUE, STREAMING, Life, Span
from sim.visit import ClientRecord


@dataclass(frozen=True, slots=True)
class Explained:
    """One request's life in seconds. `spans` follow each other from `arrival_time` to `finish_time`."""

    request_id: str
    class_name: str
    reason: str
    arrival_time: float
    finish_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    spans: tuple[Span, ...]
    classes: Mapping[str, str]  # of everybody named as a holder
    sees_client: bool  # whether the front end is told apart, and the way back is in it

    @property
    def e2e(self) -> float:
        return self.finish_time - self.arrival_time

    def parts(self) -> dict[str, float]:
        """Seconds by stage, in the order of life."""
        return {
            stage: math.fsum(span.duration for span in self.spans if span.stage == stage)
            for stage in dict.fromkeys(span.stage for span in self.spans)
        }

    def causes(self) -> dict[tuple[str, str], float]:
        """Seconds by stage and by what was waited for, where something was."""
        found: dict[tuple[str, str], float] = {}
        for span in self.spans:
            if span.cause.what:
                found[span.stage, span.cause.what] = found.get((span.stage, span.cause.what), 0.0) + span.duration
        return found

    def holders(self, stage: str, what: str) -> dict[str, float]:
        """Seconds by request of those that held it, the longest first."""
        found: dict[str, float] = {}
        for span in self.spans:
            if (span.stage, span.cause.what) == (stage, what):
                for name, share in span.cause.holders.items():
                    found[name] = found.get(name, 0.0) + share * span.duration
        return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))


def explain(lines: Iterable[str], request_id: str, client: ClientRecord | None = None) -> Explained:
    """From a journal; with what its client saw, if that is known, from the client's end.

    Raises ValueError for a journal without the request, and for one whose decisions do not come out the same.
    """
    life = Life(request_id)
    for line, engine, divergence in follow(lines, build):
        if divergence is not None:
            raise ValueError(f"the journal cannot be followed: {str(divergence).splitlines()[0]}; see servetwin replay")
        if life.hear(line, engine):
            return _explained(life, client)
    if life.classes.get(request_id) is None:
        raise ValueError(f"no request {request_id!r} in the journal: {_known(list(life.classes))}")
    raise ValueError(f"request {request_id!r} has not left by the end of the journal: explain one that has")


def _known(names: Sequence[str]) -> str:
    return f"it has {len(names):,}, {names[0]!r} to {names[-1]!r}" if names else "it has none"


def _explained(life: Life, client: ClientRecord | None) -> Explained:
    spans = tuple(life.spans()) if client is None else tuple(_seen_by(client, list(life.spans())))
    state = None if life.ours is None else life.ours.state
    return Explained(
        life.request_id,
        life.classes[life.request_id],
        life.reason if client is None else client.reason.value,
        life.arrival_time if client is None else client.arrival_time,
        life.finish_time if client is None else client.finish_time,
        life.num_prompt_tokens,
        0 if state is None else state.num_cached_tokens,
        0 if state is None else state.num_output_tokens,
        0 if state is None else state.num_preemptions,
        spans,
        {name: life.classes[name] for span in spans for name in span.cause.holders},
        client is not None,
    )


def _seen_by(client: ClientRecord, spans: Sequence[Span]) -> Iterator[Span]:
    """The engine's spans between the way there and the way back; nothing after the client has left or is served."""
    stops = (
        (client.gateway_out_time, FRONT_END, "the gateway"),
        (client.api_out_time, FRONT_END, "the API server"),
        (client.tokenised_time, FRONT_END, "the tokeniser"),
        (client.added_time, QUEUE, STEP),
    )
    begin, until = client.arrival_time, client.finish_time
    for time, stage, what in stops:
        if time is not None:
            yield from _cut(Span(begin, time, stage, Cause(what)), until)
            begin = time
    for span in spans:
        if span.stage != FRONT_END:
            yield from _cut(span, until)
            begin = span.end
    yield from _cut(Span(begin, until, STREAMING), until)


def _cut(span: Span, until: float) -> Iterator[Span]:
    if span.begin < min(span.end, until):
        yield span._replace(end=min(span.end, until))

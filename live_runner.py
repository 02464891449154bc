"""Plays setups on the live body, one after another, where an experiment asks for runs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from backend.principals import Principals
from bench import Bench
from policies.types import Context, Request
from sim.experiment.runner import Outcome
from sim.setup import Setup
from sim.workload.every import every_item, with_requests
from sim.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Live:
    """A Runner. Callers that have a tenant come with an API key, as they would to a server."""

    device: str = "cpu"

    def run(self, setups: Sequence[Setup]) -> Iterator[Outcome]:
        for setup in setups:
            bench = Bench.of(setup, self.device)
            run, _ = bench.run(workload=authenticated(bench.workload))
            yield Outcome(bench.manifest, bench.summary(run).to_dict())

    def settled(self, setup: Setup) -> Setup:
        """As the body runs it: with the blocks and the context limit that it has room for."""
        return Bench.of(setup, self.device).setup


def authenticated(workload: Workload) -> Workload:
    """The same requests as a server takes them in: by their keys, whatever their bodies say. Here every body lies.

    Each claims to be the first of the callers, so that a server which believed it would see but one. Those without a
    tenant have no key, and claim nothing.
    """
    principals = Principals(secrets.token_bytes(32))
    requests = [item.request for item in every_item(workload)]
    callers: dict[Context, list[Request]] = {}
    for request in requests:
        if request.context.tenant:
            callers.setdefault(request.context, []).append(request)
    keys = {context: _enrolled(principals, context, asked) for context, asked in callers.items()}
    first = next(iter(callers), Context())

    def taken_in(request: Request) -> Request:
        if request.context not in keys:
            return request
        claimed = replace(request, context=first, client_id=first.tenant)
        return principals.vouch(keys[request.context], claimed)

    return with_requests(workload, taken_in)


def _enrolled(principals: Principals, context: Context, asked: Sequence[Request]) -> str:
    """A key for the classes and the urgency that this caller's requests need."""
    classes = list(dict.fromkeys(request.class_name for request in asked))
    return principals.enrol(context, classes, min(request.priority for request in asked))

"""Changes to a workload: each gives a new one, with a finding that says what was done, and leaves the old one alone.

Draws are keyed by request, those of classes and tenants by session, so that no change shifts the draws of another.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from policies.types import Request
from sim.workload.every import every_item, follow_ups, with_items, with_requests, with_times
from sim.workload.joining import concatenate
from sim.workload.reshaping import Volatile, shortened
from sim.workload.reuse import reuse
from sim.workload.sessions import Sessions
from sim.workload.spec import parse
from sim.workload.streams import keyed_uniforms, zipf_weights
from sim.workload.workload import WorkItem, Workload

Transform = Callable[[Workload], Workload]


def parse_transform(text: str, seed: int = 0) -> Transform:
    """`scale_rate=2`, `volatile=32`, `classes,interactive=0.8,batch=0.2`, `tenants=8,zipf=1`, `cancel=0.1,patience=5`,
    `cap,prompt=4096,output=512`, `repeat=3,gap=60`,
    `storm=0.8,at=5,within=1`; `seed` is used where the text gives none.

    Raises ValueError of one line.
    """
    change = parse("transform", text, TRANSFORMS)
    assert isinstance(change, partial)
    seeded = "seed" in inspect.signature(change.func).parameters and "seed" not in change.keywords
    return partial(change, seed=seed) if seeded else change


def scale_rate(workload: Workload, factor: float) -> Workload:
    """More of the same load: all times divided by `factor`; of sessions only when they begin, not how users think."""
    _require("factor of scale_rate", factor, 1e-6, 1e6)
    what = "times at which sessions begin" if isinstance(workload, Sessions) else "arrival times"
    faster = with_times(workload, lambda time: time / factor)
    return _told(faster, f"scale_rate={factor:g}", f"{what} divided by {factor:g}")


def inject_volatile_token(workload: Workload, position: int = 0) -> Workload:
    """A timestamp or an id of the request at `position`: no prompt is like another from there on.

    Content is lost from the beginning of the content id that holds it.
    """
    _require("position of volatile", position, 0, 1e9)
    prompts = [item.request.prompt for item in every_item(workload)]
    volatile = Volatile(prompts, position)
    changed = with_requests(workload, lambda request: replace(request, prompt=volatile.changed(request.prompt)))
    after = [item.request.prompt for item in every_item(changed)]
    finding = (
        f"a token of its own at position {position} of each prompt: reuse with an endless cache falls from "
        f"{reuse(prompts):.1%} to {reuse(after):.1%} of prompt tokens"
    )
    return _told(changed, f"volatile={position}", finding)


def assign_classes(workload: Workload, shares: Mapping[str, float], seed: int = 0) -> Workload:
    """Each session, or request where there are none, is of a class; shares are of sessions and sum to 1."""
    for name, share in shares.items():
        _require(f"{name} of classes", share, 0.0, 1.0)
    if not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        raise ValueError(f"shares of classes sum to {sum(shares.values()):g}: they must sum to 1")
    names = _drawn(workload, "classes", list(shares), list(shares.values()), seed)
    changed = with_requests(workload, lambda request: replace(request, class_name=names[request.request_id]))
    told = ",".join(f"{name}={share:g}" for name, share in shares.items())
    return _told(changed, f"classes,{told},seed={seed}", f"classes assigned by session: {told}")


def assign_tenants(workload: Workload, num: int, zipf: float = 1.0, seed: int = 0) -> Workload:
    """Each session, or request where there are none, is of a tenant; the tenant of rank k has weight k ** -zipf."""
    _require("num of tenants", num, 1, 1e6)
    _require("zipf of tenants", zipf, 0.0, 10.0)
    weights = zipf_weights(num, zipf)
    names = _drawn(workload, "tenants", [f"tenant-{index}" for index in range(num)], weights, seed)
    changed = with_requests(workload, lambda request: _with_tenant(request, names[request.request_id]))
    finding = f"{num} tenants assigned by session, the first with {weights[0] / sum(weights):.1%} of them"
    return _told(changed, f"tenants={num},zipf={zipf:g},seed={seed}", finding)


def cancel_share(workload: Workload, share: float, patience: float, seed: int = 0) -> Workload:
    """The clients of a share of all requests give up, after times exponential with mean `patience`, in seconds."""
    _require("share of cancel", share, 0.0, 1.0)
    _require("patience of cancel", patience, 0.0, 1e9)
    names = [item.request.request_id for item in every_item(workload)]
    gives_up = keyed_uniforms(seed, "cancel", names) < share
    times = -np.log1p(-keyed_uniforms(seed, "patience", names)) * patience
    until = {name: time for name, time, up in zip(names, times.tolist(), gives_up.tolist(), strict=True) if up}
    finding = f"clients give up on {len(until)} of {len(names)} requests, {patience:g} s after arrival on average"
    changed = with_items(workload, lambda item: _with_patience(item, until.get(item.request.request_id)))
    return _told(changed, f"cancel={share:g},patience={patience:g},seed={seed}", finding)


def storm(workload: Workload, share: float, at: float, within: float, seed: int = 0) -> Workload:
    """Of the clients that are there `at` seconds after the first arrival a share hang up, within so many seconds.

    Those that come by the clock only: who asks after an answer is not known to be there.
    """
    _require("share of storm", share, 0.0, 1.0)
    _require("at of storm", at, 0.0, 1e9)
    _require("within of storm", within, 0.0, 1e9)
    begin = at + (workload.items[0].request.arrival_time if workload.items else 0.0)
    there = [item.request for item in workload.items if item.request.arrival_time <= begin]
    names = [request.request_id for request in there]
    leaves = keyed_uniforms(seed, "storm", names) < share
    delays = begin + within * keyed_uniforms(seed, "storm time", names) - [request.arrival_time for request in there]
    until = {name: delay for name, delay, is_off in zip(names, delays.tolist(), leaves.tolist(), strict=True) if is_off}
    finding = f"{len(until)} of the {len(names)} clients that came by then hang up {at:g} s after the first arrival"
    changed = with_items(workload, lambda item: _with_patience(item, until.get(item.request.request_id)))
    return _told(changed, f"storm={share:g},at={at:g},within={within:g},seed={seed}", finding)


def cap_length(workload: Workload, prompt: int | None = None, output: int | None = None) -> Workload:
    """Prompts lose their tail, and answers their end, beyond so many tokens; None caps nothing."""
    _require("prompt of cap", 1 if prompt is None else prompt, 1, 1e9)
    _require("output of cap", 1 if output is None else output, 1, 1e9)
    items = every_item(workload)
    num_prompts = sum(prompt is not None and item.request.prompt.num_tokens > prompt for item in items)
    num_outputs = sum(output is not None and item.num_output_tokens > output for item in items)
    changed = with_items(workload, lambda item: _capped(item, prompt, output))
    caps = ",".join(f"{name}={cap}" for name, cap in (("prompt", prompt), ("output", output)) if cap is not None)
    finding = f"lengths capped at {caps or 'nothing'}: {num_prompts} prompts and {num_outputs} answers cut short"
    return _told(changed, f"cap,{caps}", finding)


def repeat(workload: Workload, times: int, gap: float | None = None) -> Workload:
    """The same again, `times` in all: each `gap` seconds after the last arrival of the one before, or a mean gap.

    Content is the same, too: what the cache still holds of it is found.
    """
    _require("times of repeat", times, 1, 1e5)
    again = concatenate([workload] * times, gap, shares_content=True, name=workload.name)
    return replace(again, source=f"{workload.source}; repeat={times},gap={gap}")


def _classes(workload: Workload, seed: int = 0, **shares: float) -> Workload:
    return assign_classes(workload, shares, seed)


TRANSFORMS: dict[str, Callable[..., Workload]] = {
    "cancel": cancel_share,
    "cap": cap_length,
    "classes": _classes,
    "repeat": repeat,
    "scale_rate": scale_rate,
    "storm": storm,
    "tenants": assign_tenants,
    "volatile": inject_volatile_token,
}


def _require(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{what} ({value:g}) must be from {low:g} to {high:g}")


def _told(workload: Workload, what: str, finding: str) -> Workload:
    """With the change added to what it takes to get the same items again."""
    return replace(workload, findings=(*workload.findings, finding), source=f"{workload.source}; {what}")


def _drawn(
    workload: Workload, name: str, choices: Sequence[str], weights: Sequence[float], seed: int
) -> dict[str, str]:
    """Request id -> a choice, the same for all that follow from one request."""
    roots = _roots(workload)
    edges = np.cumsum(weights)[:-1] / sum(weights)
    firsts = sorted(set(roots.values()))
    drawn = np.searchsorted(edges, keyed_uniforms(seed, name, firsts), side="right").tolist()
    chosen = dict(zip(firsts, drawn, strict=True))
    return {request_id: choices[chosen[root]] for request_id, root in roots.items()}


def _roots(workload: Workload) -> dict[str, str]:
    """Request id -> that of the request its session began with."""
    roots = {item.request.request_id: item.request.request_id for item in workload.items}
    for each in follow_ups(workload):
        roots[each.item.request.request_id] = roots[each.after[0]]
    return roots


def _with_tenant(request: Request, tenant: str) -> Request:
    return replace(request, client_id=tenant, context=replace(request.context, tenant=tenant))


def _with_patience(item: WorkItem, patience: float | None) -> WorkItem:
    """The sooner of two, where it had some."""
    if patience is None or (item.patience is not None and item.patience < patience):
        return item
    return replace(item, patience=patience)


def _capped(item: WorkItem, prompt: int | None, output: int | None) -> WorkItem:
    request, num_output_tokens = item.request, item.num_output_tokens
    if prompt is not None:
        request = replace(request, prompt=shortened(request.prompt, prompt))
    if output is not None:
        request = replace(request, max_tokens=min(request.max_tokens, output))
        num_output_tokens = min(num_output_tokens, output)
    return replace(item, request=request, num_output_tokens=num_output_tokens)

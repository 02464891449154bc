"""What an isolation experiment says: the price of each scope, and what an attacker learns under it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table

from sim.experiment.isolation.audit import Audit, Found
from sim.experiment.isolation.channels import POSITIVE
from sim.experiment.isolation.leakage import slack, trials_needed
from sim.experiment.isolation.prices import Priced, Prices
from sim.experiment.isolation.scopes import NOTHING_KEPT
from sim.report import seconds

SPREAD = {"token_hit_rate": "hits", "prefill_gpu_seconds_per_hour": "prefill", "ttft_p50": "p50", "ttft_p99": "p99"}

# -- what it costs ----------------------------------------------------------------------------------------------------


def price_parts(found: Prices) -> Iterator[str | Table]:
    yield (
        f"{found.workload}: {found.num_tenants} tenants, {found.num_requests:,} requests at {found.rate:.3g} a second, "
        f"by who may share a prefix:"
    )
    yield _effort_table(found)
    yield f"what it serves, and the most it can at {found.slo}:"
    yield _service_table(found)
    yield (
        f"means over seeds {', '.join(map(str, found.seeds))}, the most of seed {found.seeds[0]}. prefill: what steps "
        f"take longer for the prompts in them. copies: blocks whose content lies in the pool already, for somebody else"
    )
    yield _spread(found)
    for each in found.scopes:
        if (share := each.mean("share_completed")) < 0.999:
            yield f"{each.scope}: {100 * (1 - share):.1f} % of requests were refused or failed"


def _spread(found: Prices) -> str:
    """How far off the means may be, at worst."""
    if len(found.seeds) < 2:
        return "one run a scope: no intervals"
    told = []
    for name, words in SPREAD.items():
        known = [it for each in found.scopes if (it := each.interval(name)) is not None and it.mean]
        if known:
            told.append(f"{words} {100 * max(it.relative for it in known):.0f} %")
    return f"95 % intervals over the seeds reach, at most: {', '.join(told)} of the mean to either side"


def _effort_table(found: Prices) -> Table:
    table = _table("scope", "GPUs", "hits", "prefill GPU-s/h", "copies, mean", "most")
    for each in found.scopes:
        table.add_row(
            each.scope,
            f"{each.num_gpus}",
            f"{100 * each.mean('token_hit_rate'):.1f} %",
            f"{each.mean('prefill_gpu_seconds_per_hour'):,.0f}",
            _number(each.mean("duplicate_blocks_mean"), 0),
            _number(max(run.duplicate_blocks_max for run in each.runs), 0),
        )
    return table


def _service_table(found: Prices) -> Table:
    table = _table("scope", "TTFT p50", "p99", "most req/s", "a GPU")
    for each in found.scopes:
        rate = each.largest_rate
        table.add_row(
            each.scope,
            _time(each, "ttft_p50"),
            _time(each, "ttft_p99"),
            _number(rate),
            _number(rate / each.num_gpus),
        )
    return table


def _time(each: Priced, name: str) -> str:
    return "overload" if math.isnan(each.mean(name)) else seconds(each.mean(name))


def _number(value: float, digits: int | None = None) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3g}" if digits is None else f"{value:,.{digits}f}"


# -- what leaks -------------------------------------------------------------------------------------------------------


def audit_parts(found: Audit) -> Iterator[str | Table]:
    num, spare = found.num_trials, min(1.0, slack(found.num_trials, found.num_trials))
    channels = list(dict.fromkeys(each.channel for each in found.found if each.channel != POSITIVE.name))
    for load in dict.fromkeys(each.load for each in found.found):
        yield f"leakage audit, {found.body}, others at load {load:g}: an attacker's advantage (probes), or its bound:"
        yield _audit_table(found, channels, load)
    yield (
        f"{num} trials of each kind, shuffled. D (probes): what saying yes beyond the best limit on a time gains over "
        f"guessing, and the probes until that makes 99 % sure. < b: nothing found, which proves nothing safe; D is "
        f"below b with 99 %. {num} trials leave {spare:.3f} at best: D <= 0.05 takes {trials_needed(0.05):,}"
    )
    if any(each.leaks for each in found.found):
        yield "what was found:"
        yield _found_table(found)
    yield "controls:"
    yield from _controls(found)
    yield from _basis(found)


def _audit_table(found: Audit, channels: Sequence[str], load: float) -> Table:
    table = _table("scope", *channels)
    for scope in dict.fromkeys(each.scope for each in found.found):
        table.add_row(scope, *(_leak(found.of(scope, channel, load)) for channel in channels))
    return table


def _leak(each: Found) -> str:
    it = each.leak
    if not each.leaks or it.probes is None:
        return f"< {math.ceil(1000 * it.most) / 1000:.3f}"
    return f"{it.advantage:.2f} ({math.ceil(it.probes)})"


def _found_table(found: Audit) -> Table:
    """Scopes under which the same blocks are found give the same times, and stand in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in found.found:
        if each.leaks and each.leak.probes is not None and each.channel != POSITIVE.name:
            it, auc = each.leak, each.leak.auc
            figures = (f"{it.advantage:.3f}", f"{it.least:.3f}", f"{auc.mean:.3f}", f"{auc.low:.3f}–{auc.high:.3f}")
            probes = f"{it.probes:.1f}"
            rows.setdefault((each.channel, f"{each.load:g}", *figures, probes), []).append(each.scope)
    table = _table("channel", "load", "D", "at least", "AUC", "95 %", "probes")
    table.add_column("under", no_wrap=True)
    for row, scopes in sorted(rows.items()):
        table.add_row(*row, scopes[0] if len(scopes) == 1 else f"{len(scopes)} scopes")
    return table


def _controls(found: Audit) -> Iterator[str]:
    """What says whether the audit would have seen a leak, and would not have seen one where there is none."""
    own = {each.scope: each.leaks for each in found.found if each.channel == POSITIVE.name}
    kept = [scope for scope in dict.fromkeys(own) if scope != NOTHING_KEPT]
    yield f"positive, one's own prompt again: found under {', '.join(s for s in kept if own[s]) or 'no scope'}"
    if blind := [scope for scope in kept if not own[scope]]:
        yield f"not found under {', '.join(blind)}: too few trials, or too much noise, to tell anything there"
    if NOTHING_KEPT in own:
        yield f"negative, the same with caching off: {'found, which is wrong' if own[NOTHING_KEPT] else 'not found'}"
    lows, highs = [e.leak.permuted.low for e in found.found], [e.leak.permuted.high for e in found.found]
    means = [e.leak.permuted.mean for e in found.found]
    yield (
        f"labels dealt out at random: mean AUC {min(means):.3f} to {max(means):.3f} by cell, the middle 95 % within "
        f"{min(lows):.2f} to {max(highs):.2f}"
    )


def _basis(found: Audit) -> Iterator[str]:
    yield (
        f"the audit's pool holds {found.num_blocks:,} blocks of {found.block_size}, which {found.sizes.flood} prompts "
        f"of {found.sizes.prompt_tokens:,} tokens fill (a larger pool takes a larger flood); a prompt alone takes "
        f"{seconds(found.pace.alone)}"
    )
    if found.not_played:
        yield f"not played in this body: {', '.join(found.not_played)}"


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in ("scope", "channel") else "right", no_wrap=True)
    return table

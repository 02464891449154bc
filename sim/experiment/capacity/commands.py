"""What `servetwin capacity` prints: the answer first, then what it rests on, by objective and by rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sim.experiment.capacity.answer import capacity
from sim.experiment.capacity.misses import Term
from sim.experiment.capacity.observed import Processes
from sim.experiment.capacity.plan import Capacity, Check, Point, Recovery, pareto
from sim.experiment.capacity.slo_rate import SloRate, Unmet
from sim.experiment.statistics import Interval
from sim.files import whole_file, write_json
from sim.report import seconds
from sim.setup import Setup

Line = tuple[str, str]


def run_capacity(
    setup: Setup,
    *,
    precision: float,
    attainment: float,
    price: float | None,
    curve: str | None,
    tuned: bool,
    num_workers: int,
    json: Path | None,
    html: Path | None,
) -> None:
    rates = _rates(curve) if curve else ()
    with Processes(setup, num_workers) as player:
        found = capacity(
            setup, player, precision=precision, attainment=attainment, price=price, curve=rates, tuned=tuned
        )
    if json is not None:
        write_json(json, {"answer": answer(found), **asdict(found)})
    if html is not None:
        from sim.experiment.capacity.page import page_of

        with whole_file(html) as file:
            file.write(page_of(found))
    if "-" not in (str(json), str(html)):
        print_capacity(Console(), found)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(each) for each in text.split(","))
    except ValueError:
        raise ValueError(f"curve {text!r} must be rates of equal parts of a day: 2,3,8,12,9,4") from None
    if not rates or not all(0.0 <= each < math.inf for each in rates) or not max(rates):
        raise ValueError(f"curve {text!r}: rates must be finite, 0 or more, and not all 0")
    return rates


def print_capacity(console: Console, found: Capacity) -> None:
    console.print(answer(found), style="bold", highlight=False)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in lines(found):
        grid.add_row(name, escape(text))
    console.print(grid, highlight=False)
    for table in tables(found):
        console.print()
        console.print(table, highlight=False)


# -- the answer -------------------------------------------------------------------------------------------------------


def answer(found: Capacity) -> str:
    slo = " and ".join(_objectives(found))
    if isinstance(found.found, Unmet):
        worst = ", ".join(f"{100 * share:.0f} % miss {name}" for name, share in found.found.missed.items())
        return f"no number of GPUs keeps {slo}: even where requests hardly meet, {worst}"
    assert found.plan is not None, "a rate without a plan"
    plan, gpus = found.plan, found.gpus_per_replica
    few, many = plan.fewest * gpus, plan.most * gpus
    how_sure = "at either end of the interval" if few == many else f"{few} to {many} over the interval"
    each = f", {plan.num_replicas} replicas of {gpus}" if gpus > 1 else ""
    return f"{found.num_gpus} {_gpu(found)}{each} ({how_sure}) for {plan.rate:.3g} req/s at {slo}"


def _gpu(found: Capacity) -> str:
    return f"{found.manifest['profile']['gpu']} GPU{'' if found.num_gpus == 1 else 's'}"


def _objectives(found: Capacity) -> list[str]:
    if isinstance(found.found, Unmet):
        return [str(found.manifest["slo"])]
    return list(dict.fromkeys(_bounds(each.term) for each in found.by_term))


def _bounds(term: Term) -> str:
    texts = []
    for objective in term.objectives:
        at = "" if objective.percentile is None else f" p{objective.percentile:g}"
        texts.append(f"{objective.metric.replace('_', ' ').upper()}{at} < {seconds(objective.limit)}")
    share = "" if term.objectives[0].percentile is not None else f" by {100 * (1 - term.allowed):g} %"
    return " and ".join(texts) + share


# -- what goes with it ------------------------------------------------------------------------------------------------


def lines(found: Capacity) -> Iterator[Line]:
    if isinstance(found.found, SloRate):
        yield from _of_plan(found, found.found)
    yield "costs", found.provenance
    yield from (("record", each) for each in found.record or ("no record: nothing published was compared with these",))
    yield from (("note", each) for each in found.notes)
    yield "how", _how(found)


def _of_plan(found: Capacity, rate: SloRate) -> Iterator[Line]:
    assert found.plan is not None and found.binding is not None, "a rate without a plan"
    yield "a replica", f"serves {_range(rate.rate)} req/s, {_by(rate)}"
    yield "headroom", _headroom(found)
    if found.price_per_million is not None:
        output, every = found.price_per_million
        yield "price", f"${output:.3g} per million tokens of answers, ${every:.3g} of prompts and answers"
    yield "binding", _binding(found)
    if found.band is not None:
        yield "costs' band", _band(found)
    if found.check is not None:
        yield "check", _check(found.check)
    if found.day is not None:
        peak, mean = found.day.peak * found.gpus_per_replica, found.day.mean * found.gpus_per_replica
        yield "over the day", f"GPUs: {peak} at the peak, {mean:.3g} in the mean if they follow it ({found.day.source})"
    if found.recovery is not None:
        yield "overload", _recovery(found.recovery)
    yield "flags", _flags(found)
    yield "rate", f"{found.plan.rate:.4g} req/s: {found.target}"


def _range(interval: Interval) -> str:
    return f"{interval.mean:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


def _by(rate: SloRate) -> str:
    if rate.by == "bound":
        return "as many as it can serve at all: the objectives hold until there"
    if rate.by == "stability":
        return "surely kept at the one, overloaded at the other; no objective gives way before"
    enough = "" if rate.is_enough else ", wider than asked for"
    return f"{100 * rate.rate.level:g} % interval (± {100 * rate.rate.relative:.1f} %{enough}), {rate.num} replications"


def _headroom(found: Capacity) -> str:
    whole = f"{100 * found.headroom:.0f} % more than the rate"
    assert found.plan is not None
    if found.plan.num_replicas == 1:
        return f"{whole}; with the only replica lost nothing is served"
    rest = found.headroom_without_one
    verdict = (
        f"still {100 * rest:.0f} % more" if rest >= 0 else f"{-100 * rest:.0f} % too little: objectives are missed"
    )
    return f"{whole}; with one replica lost {verdict}"


def _binding(found: Capacity) -> str:
    assert found.binding is not None
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found.binding.shares.items())
    objective = found.binding.objective
    first = f"{_bounds(objective)} gives way, to {found.binding.limit}" if objective else found.binding.limit
    return f"{first}; in use there: {shares}{_room(found)}"


def _room(found: Capacity) -> str:
    """What fits at most: known where costs are a straight line, elsewhere said of a mean step if it is not too low."""
    assert isinstance(found.found, SloRate)
    if found.bound_is_exact:
        return f"; no more than {found.bound:.3g} req/s fit, by {found.bound_by}"
    if found.bound < (found.found.high or found.found.low):
        return ""
    return f"; a mean step would meet its {found.bound_by} at about {found.bound:.3g} req/s"


def _band(found: Capacity) -> str:
    band = found.band
    assert band is not None
    gpus = sorted({plan.num_replicas * found.gpus_per_replica for plan in (band.plan_low, band.plan_high)})
    flips = f"{gpus[0]} GPUs at low costs, {gpus[-1]} at high: the answer depends on them" if len(gpus) > 1 else (
        "the answer is the same within it"
    )  # fmt: skip
    ends = f"{band.high_cost.mean:.3g} to {band.low_cost.mean:.3g} req/s"
    return f"times ÷ or × {band.factor:g}: a replica serves {ends}; {flips}"


def _check(check: Check) -> str:
    worst = ", ".join(f"{name} missed by {100 * share:.2g} %" for name, share in check.missed.items() if share)
    verdict = "kept" if check.kept else "NOT kept: its mix is heavier than the whole load's"
    what = (
        f"the heaviest {check.num_requests:,} requests in the order they came, at {check.rate:.3g} req/s, on the plan"
    )
    return f"{what}: {verdict} ({worst or 'nobody missed anything'})"


def _flags(found: Capacity) -> str:
    """What pays is recommended, else what was simulated."""
    if not found.tried:
        return f"{found.flags} (as simulated; --tune tries others)"
    best = next((each for each in found.tried if each.pays), None)
    if best is None:
        return f"{found.flags} (as simulated: of {len(found.tried)} other settings none surely serves more)"
    return (
        f"{best.flags} ({best.setting} {best.value} serves about {100 * best.gain.mean:.0f} % "
        f"[{100 * best.gain.low:.0f}, {100 * best.gain.high:.0f}] more)"
    )


def _recovery(of: Recovery) -> str:
    back = "not back to usual within that run" if of.after is None else f"back to usual {of.after:.3g} s later"
    return f"{of.seconds:.3g} s at {of.factor:g} times what a replica serves, from {of.rate:.3g} req/s: {back}"


def _how(found: Capacity) -> str:
    return (
        f"{found.num_runs} runs of at most {found.length:,} requests; {found.how}. The same luck at every rate; left "
        "out are requests before the number in the system has settled, and those answered while nobody came any more"
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def tables(found: Capacity) -> Iterator[Table]:
    if found.plan is not None:
        yield objectives_table(found)
        yield rates_table(found.points)


def objectives_table(found: Capacity) -> Table:
    """Each objective, in each class, as if it were the only one."""
    several = any(each.term.class_name for each in found.by_term)
    table = _table("objective", ("class",) if several else (), ("rate, req/s", "missed", "allowed"))
    for each in found.by_term:
        where = (escape(each.term.class_name or "all"),) if several else ()
        rate = f"{'> ' if each.is_above else ''}{each.rate:.3g}"
        table.add_row(
            _bounds(each.term), *where, rate, f"{100 * each.missed:.2g} %", f"{100 * each.term.allowed:.2g} %"
        )
    if found.by_term:
        table.caption = f"the rate that each alone allows; missed: at {found.by_term[0].at:.3g} req/s"
        table.caption_justify = "left"
    return table


def rates_table(points: Sequence[Point]) -> Table:
    """One replica at each rate that was played."""
    front = pareto(points)
    table = _table("req/s", (), ("kept", "all met", "goodput", "tok/s a user", "tok/s a GPU", "runs"))
    for each in points:
        if each.attained is None:
            table.add_row(f"{each.rate:.3g}", "no", "overloaded", "-", "-", "-", str(each.num))
            continue
        met = f"{100 * each.attained.mean:.1f} %"
        user = "-" if each.tokens_per_user is None else f"{each.tokens_per_user:.3g}"
        mark = "" if each in front else " (bettered)"
        table.add_row(
            f"{each.rate:.3g}", "yes" if each.keeps else "no", met, f"{each.goodput:.3g}", user,
            f"{each.tokens_per_gpu:,.0f}{mark}", str(each.num),
        )  # fmt: skip
    table.caption = "a user's: of the median request; goodput: req/s that met every bound"
    table.caption_justify = "left"
    return table


def _table(first: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in (first, *left):
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table

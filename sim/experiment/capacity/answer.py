"""How many GPUs a load needs at its objectives: the rate of one replica with its interval, and what follows from it.

A plan is for the low end of the interval, so it is never below the rate over what a replica was seen to serve. It takes
replicas to be alike and the router to spread evenly; the heaviest part of the load is then played on the plan as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.cost import MeasuredCost
from sim.experiment.capacity.balance import FRONT_END, Balance, Mix, device_shares
from sim.experiment.capacity.misses import Curve, Seen, Term, steady, terms_of
from sim.experiment.capacity.observed import Load, Observed, Part, Player, Surge, Task, Usage, World, here
from sim.experiment.capacity.plan import Band, Binding, Capacity, Check, Day, Plan, Point, Recovery
from sim.experiment.capacity.record import record_of
from sim.experiment.capacity.replications import day_curve, heaviest_part
from sim.experiment.capacity.slo_rate import SloRate, Unmet, attained, rate_at_costs, slo_rate, term_rates
from sim.experiment.capacity.tune import Tried, tune
from sim.saturation import MIN_REQUESTS
from sim.setup import Setup, manifest
from sim.workload.sessions import Sessions

FIRST, MOST = 6, 64  # replications
RESIDENTS = 20  # requests of a replication for each that is in the system at once
ENOUGH = 8  # so many at least
SHORTEST, LONGEST = 800, 4000
LIGHTER = (-3, -7)  # steps of the ladder below the crossing that are played for the curve's sake
PLAIN_SHARE = 0.35  # of the way from the shortest step to a limit on TPOT, that the mean step has gone at the start
SURGE = 1.5  # times what a replica serves at its objectives
MOST_CHECKED = 12  # replicas, beyond which a plan is not played


def capacity(
    setup: Setup,
    player: Player,
    *,
    rate: float | None = None,
    precision: float = 0.05,
    attainment: float = 0.99,
    price: float | None = None,
    curve: Sequence[float] = (),
    tuned: bool = False,
) -> Capacity:
    """`rate`: what is to be served; of a recording its busiest part unless given, or the most of `curve`, rates in
    equal parts of a day. `precision`: half of the interval's width, as a share. `price`: of a GPU for an hour.
    `tuned`: also try other engine settings.

    Raises ValueError for a setup that cannot be, or has no objectives or no rate.
    """
    for name, value in (("rate", rate), ("price", price)):
        if value is not None and not 0.0 < value < math.inf:
            raise ValueError(f"{name} ({value}) must be a finite number above 0")
    rate = setup.rate if rate is None else rate
    setup = replace(setup, num_replicas=1, rate=None)
    world = here(setup)
    classes = sorted({item.request.class_name for item in world.source.whole.items})
    terms = terms_of(setup.objectives(), classes, attainment)
    search = Search.of(world, player)
    ladder = Curve(setup, terms, player, search.length, search.start, search.ceiling)
    found = slo_rate(ladder, precision, FIRST, MOST)
    return search.report(ladder, found, _Wanted(rate, tuple(curve), price, tuned))


@dataclass(frozen=True, slots=True)
class _Wanted:
    rate: float | None
    curve: tuple[float, ...]
    price: float | None
    tuned: bool


@dataclass(frozen=True)
class Search:
    """Where to begin, and what to make of what was found."""

    world: World
    player: Player
    balance: Balance

    @classmethod
    def of(cls, world: World, player: Player) -> Search:
        mix = Mix.of(world.source.whole, world.config.block_size)
        return cls(world, player, Balance(mix, world.config, world.cost, world.setup.front_end_model()))

    @property
    def ceiling(self) -> float:
        """Sure where the bound is exact; elsewhere that is a guess, and runs tell, far below this."""
        bound, limit = self.balance.most
        return bound if self.balance.is_exact or limit == FRONT_END else 10.0 * bound

    @property
    def start(self) -> float:
        limits = [each.limit for each in self.world.setup.objectives() if each.metric == "tpot"]
        shortest = self.balance.step(1e-6).time
        most = shortest + PLAIN_SHARE * max(0.0, min(limits) - shortest) if limits else math.inf
        plain = self.balance.rate_at_step_time(most)
        return max(min(plain, 0.8 * self.balance.most[0]), 1e-3 * self.balance.most[0])

    @property
    def length(self) -> int:
        """Requests of a replication; as many as asked for, of a built-in workload."""
        if self.world.setup.trace is None and self.world.setup.num_requests is not None:
            return self.world.setup.num_requests
        residents = self.balance.residents(self.start)
        most = min(LONGEST, self.world.source.whole.num_requests) if self.world.setup.trace else LONGEST
        return min(most, max(SHORTEST, round(RESIDENTS * residents), self.seen_by))

    @property
    def seen_by(self) -> int:
        """Requests in which four may miss."""
        percentiles = [each.percentile for each in self.world.setup.objectives() if each.percentile is not None]
        return math.ceil(4.0 / (1.0 - max([*percentiles, 50.0]) / 100.0))

    # -- the parts of a report ----------------------------------------------------------------------------------------

    def report(self, ladder: Curve, found: SloRate | Unmet, wanted: _Wanted) -> Capacity:
        world, (bound, limit) = self.world, self.balance.most
        rate, target = self._target(wanted)
        bare = Capacity(
            manifest=manifest(world.setup, world.config, world.source.whole, world.cost),
            gpus_per_replica=world.setup.tensor_parallel,
            found=found,
            bound=bound,
            bound_by=limit,
            bound_is_exact=self.balance.is_exact or limit == FRONT_END,
            target=target,
            length=self.length,
            num_runs=ladder.num_runs,
            how=world.source.told,
            provenance=_provenance(world),
            record=tuple(record_of(world.cost)),
            flags=str(manifest(world.setup, world.config, world.source.whole, world.cost)["vllm_flags"]),
            tokens_per_request=(self.balance.mix.prompt, self.balance.mix.output),
            price=wanted.price,
        )
        if isinstance(found, Unmet):
            return bare
        return self._filled(bare, ladder, found, Plan.of(rate, found.rate), wanted)

    def _filled(self, bare: Capacity, ladder: Curve, found: SloRate, plan: Plan, wanted: _Wanted) -> Capacity:
        band = self._band(ladder, found, plan)
        below = [step for each in LIGHTER if (step := ladder.step_of(found.low) + each) > -40]
        ladder.grow([ladder.rate(step) for step in below], 1)
        recovery, check = self._tried(ladder, found, plan)
        return replace(
            bare,
            plan=plan,
            by_term=tuple(term_rates(ladder, found.low)),
            binding=self._binding(ladder, found),
            band=band,
            points=tuple(self._point(ladder, seen) for seen in ladder.seen[1:]),
            day=self._day(found, plan, wanted),
            recovery=recovery,
            check=check,
            num_runs=ladder.num_runs + (recovery is not None) + (check is not None),
            notes=(*found.notes, *self._too_short(found)),
            tried=self._tuned(ladder, found) if wanted.tuned else (),
        )

    def _too_short(self, found: SloRate) -> tuple[str, ...]:
        residents = self.balance.residents(found.low)
        if self.length >= ENOUGH * residents:
            return ()
        return (
            f"{self.length:,} requests are few where about {residents:,.0f} are in the system at once: it may not have "
            "settled, and then serves less; ask for more (--num-requests)",
        )

    def _tuned(self, ladder: Curve, found: SloRate) -> tuple[Tried, ...]:
        return tuple(tune(self.world.setup, self.player, ladder, found, self.balance.residents(found.low)))

    def _target(self, wanted: _Wanted) -> tuple[float, str]:
        if wanted.rate is not None:
            return wanted.rate, "as given"
        if wanted.curve:
            return max(wanted.curve), "the most of the curve given"
        whole = self.world.source.whole
        if self.world.setup.trace is None:
            return whole.num_requests / whole.duration if whole.duration else 1.0, "the workload's own"
        curve = day_curve(whole)
        return max(curve), f"the busiest of {len(curve)} parts of the recording"

    def _band(self, ladder: Curve, found: SloRate, plan: Plan) -> Band | None:
        factor = self.world.cost.band
        if factor == 1.0:
            return None
        low, high = (rate_at_costs(ladder, found, times) for times in (1.0 / factor, factor))
        return Band(factor, low, high, Plan.of(plan.rate, low), Plan.of(plan.rate, high))

    def _binding(self, ladder: Curve, found: SloRate) -> Binding:
        """As it is at the highest rate that keeps the objectives."""
        at = next(seen for seen in ladder.seen if seen.rate == found.low)
        usage = _mean_usage(at.runs)
        step = self.balance.at_rate(found.low)
        shares = {
            **device_shares(self.world.cost, step),
            "slots": usage.running / self.world.config.max_num_seqs,
            "KV memory": usage.kv_held,
            "tokens a step": usage.tokens_a_step / self.world.config.max_num_batched_tokens,
            FRONT_END: found.low / self.balance.front_end_rate,
            "time of the engine": usage.busy,
        }
        return Binding(self._limit(found, at, shares), _worst(ladder, found), shares)

    def _limit(self, found: SloRate, at: Seen, shares: Mapping[str, float]) -> str:
        """What requests wait for; where they hardly wait, what the steps take their time for."""
        if found.by == "bound":
            return self.balance.most[1]
        if shares[FRONT_END] > 0.9:
            return FRONT_END
        waits = [run.usage.waits_for for run in at.runs if not run.usage.waits_for.startswith("nothing")]
        if 2 * len(waits) > len(at.runs):
            return waits[0].partition(" (")[0]
        of_device = {
            name: share for name, share in shares.items() if name in ("compute", "memory bandwidth", "the host")
        }
        return max(of_device, key=lambda name: of_device[name]) if of_device else "the time of a step"

    def _point(self, ladder: Curve, seen: Seen) -> Point:
        share = attained(ladder, seen, self.world.setup.objectives())
        usage = _mean_usage(seen.runs)
        keeps = not seen.is_saturated and ladder.keeps(seen.rate)
        return Point(
            rate=seen.rate,
            num=len(seen.runs),
            attained=share,
            goodput=None if share is None else seen.rate * share.mean,
            tokens_per_user=None if seen.is_saturated or not usage.tpot else 1.0 / usage.tpot,
            tokens_per_gpu=seen.rate * self.balance.mix.output / self.world.setup.tensor_parallel,
            keeps=keeps,
        )

    def _day(self, found: SloRate, plan: Plan, wanted: _Wanted) -> Day | None:
        if wanted.curve:
            rates, source = list(wanted.curve), "the curve given"
        elif self.world.setup.trace is not None:
            rates, source = day_curve(self.world.source.whole), "the recording's own"
            if wanted.rate is not None:
                by = wanted.rate / max(rates)
                rates, source = [by * each for each in rates], f"{source}, its busiest part at {wanted.rate:g} req/s"
        else:
            return None
        needs = [Plan.of(each, found.rate).num_replicas if each else 0 for each in rates]
        return Day(tuple(rates), source, float(np.mean(needs)), max(needs))

    # -- the plan, played ---------------------------------------------------------------------------------------------

    def _tried(self, ladder: Curve, found: SloRate, plan: Plan) -> tuple[Recovery | None, Check | None]:
        """Both runs at once: there are most often two cores."""
        surge, heaviest = self._surge(ladder, found, plan), self._heaviest(ladder, plan)
        runs = iter(self.player.play([task for task in (surge, heaviest) if task is not None]))
        recovery = _recovery(next(runs), surge.load) if surge else None
        return recovery, _check(next(runs), ladder.terms) if heaviest else None

    def _surge(self, ladder: Curve, found: SloRate, plan: Plan) -> Task | None:
        """One replica under its share of the plan's rate, then under too much for a while."""
        if isinstance(self.world.source.whole, Sessions):
            return None
        rate = min(plan.rate / plan.num_replicas, 0.9 * found.rate.mean)
        part = ladder.length // 4
        return Task(self.world.setup, Surge(rate, 0, ladder.length, part, part, SURGE * found.rate.mean / rate))

    def _heaviest(self, ladder: Curve, plan: Plan) -> Task | None:
        """Of a recording, at the speed at which its busiest part comes at the plan's rate."""
        whole = self.world.source.whole
        num = min(ladder.length * plan.num_replicas, len(whole.items))
        if self.world.setup.trace is None or plan.num_replicas > MOST_CHECKED or num < MIN_REQUESTS:
            return None
        load = Part(plan.rate, heaviest_part(whole, num), num, plan.rate / max(day_curve(whole)))
        return Task(replace(self.world.setup, num_replicas=plan.num_replicas), load)


def _recovery(run: Observed, load: Load) -> Recovery:
    assert isinstance(load, Surge), "another load"
    end = min(load.first + load.num, len(run.arrivals)) - 1
    usual = float(np.percentile(run.present[load.first // 2 : load.first], 95))
    back = np.flatnonzero(run.present[end:] <= usual)
    after = float(run.arrivals[end + back[0]] - run.arrivals[end]) if len(back) else None
    return Recovery(SURGE, float(run.arrivals[end] - run.arrivals[load.first]), load.rate, after)


def _check(run: Observed, terms: Sequence[Term]) -> Check:
    chosen = steady(run, len(run.arrivals) // 8)
    counts = {str(term): (term.count(run, chosen, 1.0), term.allowed) for term in terms}
    missed = {name: m / max(1, n) for name, ((n, m), _) in counts.items()}
    kept = all(m <= allowed * n for (n, m), allowed in counts.values())
    return Check(len(run.arrivals), len(run.arrivals) / float(run.arrivals[-1] - run.arrivals[0]), missed, kept)


def _mean_usage(runs: Sequence[Observed]) -> Usage:
    names = [name for name in Usage._fields if name != "waits_for"]
    means = {name: float(np.mean([getattr(run.usage, name) for run in runs])) for name in names}
    return Usage(**means, waits_for=runs[0].usage.waits_for)


def _worst(ladder: Curve, found: SloRate) -> Term | None:
    if found.by != "objective" or found.high is None:
        return None
    high = found.high
    return ladder.terms[max(range(len(ladder.terms)), key=lambda index: ladder.excess_of(high, index))]


def _provenance(world: World) -> str:
    cost = world.cost
    band = f", ×/÷{cost.band:g} covers 68 %" if cost.band != 1.0 else ""
    source = f" ({cost.profile.name}: {cost.profile.about['source']})" if isinstance(cost, MeasuredCost) else ""
    return f"{cost.provenance}{source}{band}"

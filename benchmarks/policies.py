"""Which entry of a menu wins on which load: small loads, common seeds, paired intervals.

    python benchmarks/policies.py --menu scheduling [--candidate file.py:Class] [--load NAME] [--seeds 6] [--first 0]

Every entry whose knobs need no value plays every load of its menu on the same seeds, and so does each `--candidate`. A
row is a measure: the best entry by its mean, and by how much it is better than the second, as a mean of paired
differences with its 95 % interval. It wins if that interval excludes zero for each of the others. Knobs or loads that
were picked on some seeds are to be confirmed on others (`--first 100`). Costs are the datasheet's, of an 8B model on an
H100; TTFT counts from the arrival.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from policies.catalogue import MENU, parameters  # noqa: E402
from policies.config import EngineConfig  # noqa: E402
from policies.prompt import ContentPrompt  # noqa: E402
from policies.types import RequestRecord  # noqa: E402
from sim.cost import DatasheetCost  # noqa: E402
from sim.experiment.statistics import Effect, paired_effect  # noqa: E402
from sim.hardware import device  # noqa: E402
from sim.models import model  # noqa: E402
from sim.simulate import simulate  # noqa: E402
from sim.workload.every import every_item, follow_ups, with_requests  # noqa: E402
from sim.workload.generate import Chat, generate  # noqa: E402
from sim.workload.generators.conversation import Conversation  # noqa: E402
from sim.workload.joining import concatenate  # noqa: E402
from sim.workload.recipe import Recipe  # noqa: E402
from sim.workload.sessions import Sessions  # noqa: E402
from sim.workload.shared_prefix import SharedPrefix  # noqa: E402
from sim.workload.streams import stream  # noqa: E402
from sim.workload.workload import WorkItem, Workload  # noqa: E402

# -- loads ------------------------------------------------------------------------------------------------------------


Draw = Callable[[int], Workload]


@dataclass(frozen=True, slots=True)
class Load:
    """`draw`: seed -> the requests. `engine`: settings of EngineConfig that make the question matter."""

    draw: Draw
    measures: tuple[str, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)


def drawn(recipe: Recipe, num: int, rate: float, class_name: str = "default") -> Draw:
    """All of one class, and of a client of its name."""

    def draw(seed: int) -> Workload:
        workload = generate(class_name, num_requests=num, rate=rate, seed=seed, recipe=recipe)
        return with_requests(workload, lambda request: replace(request, class_name=class_name, client_id=class_name))

    return draw


def together(*draws: Draw) -> Draw:
    """Loads at the same time; neither their names nor what they say are the same."""

    def draw(seed: int) -> Workload:
        parts = [apart(each(seed + 7919 * number), number) for number, each in enumerate(draws)]
        items = sorted((item for part in parts for item in part.items), key=lambda item: item.request.arrival_time)
        following = [each for part in parts for each in follow_ups(part)]
        return Sessions("together", items, follow_ups=following) if following else Workload("together", items)

    return draw


def apart(workload: Workload, number: int) -> Workload:
    """Its requests renamed, its content moved to where no other's is."""
    before, shift = f"{number}:", number << 40

    def moved(item: WorkItem) -> WorkItem:
        request, prompt = item.request, item.request.prompt
        if isinstance(prompt, ContentPrompt):
            ids, continuation = ([each + shift for each in some] for some in (prompt.content_ids, prompt.continuation))
            prompt = replace(prompt, content_ids=tuple(ids), continuation=tuple(continuation))
        return replace(item, request=replace(request, request_id=before + request.request_id, prompt=prompt))

    if not isinstance(workload, Sessions):
        return replace(workload, items=[moved(item) for item in workload.items])
    following = [
        replace(each, item=moved(each.item), after=tuple(before + cause for cause in each.after))
        for each in workload.follow_ups
    ]
    return replace(workload, items=[moved(item) for item in workload.items], follow_ups=following)


def one_after_another(draw: Draw, times: int) -> Draw:
    """The same again, about something else."""
    return lambda seed: concatenate([draw(seed)] * times)


def due(draw: Draw, least: float, most: float) -> Draw:
    """A deadline for each first token: so many seconds after its request came, evenly drawn."""

    def with_deadlines(seed: int) -> Workload:
        workload = draw(seed)
        waits = iter(stream(seed, "deadlines").uniform(least, most, workload.num_requests).tolist())
        return with_requests(workload, lambda request: replace(request, deadline=request.arrival_time + next(waits)))

    return with_deadlines


def foretold(draw: Draw, sigma: float) -> Draw:
    """Each answer's length is predicted, off by a lognormal factor."""

    def predicted(seed: int) -> Workload:
        workload = draw(seed)
        lengths = {item.request.request_id: item.num_output_tokens for item in every_item(workload)}
        noise = iter(np.exp(stream(seed, "predictions").normal(0.0, sigma, workload.num_requests)).tolist())
        return with_requests(
            workload,
            lambda request: replace(
                request, predicted_output_tokens=max(1, round(lengths[request.request_id] * next(noise)))
            ),
        )

    return predicted


MIXED = Chat(prompt_median=600, prompt_sigma=1.4, prompt_most=16_000, output_median=40, output_most=200)
ALIKE = Chat(prompt_median=1000, prompt_sigma=0.1, prompt_most=4000, output_median=40, output_most=200)
POPULAR = SharedPrefix(num_applications=40, application_skew=0.9, prefix_tokens=1024, own_median=64, output_median=32)
UNPOPULAR = replace(POPULAR, num_applications=200, application_skew=0.5)
SCAN = Chat(prompt_median=2000, prompt_sigma=0.5, prompt_most=6000, output_median=20)
TALK = Conversation(turns_sigma=1.3, think_median=8.0, question_median=200, output_median=100)
LONG_TALK = Conversation(
    turns_sigma=1.3, think_median=8.0, question_median=2000, question_most=8000, output_median=100
)  # fmt: skip
ANSWER = Chat(prompt_median=300, prompt_sigma=1.0, output_median=300, output_sigma=1.0)
talk, scan, unnamed_scan = drawn(TALK, 400, 2.5, "talk"), drawn(SCAN, 150, 2.0, "scan"), drawn(SCAN, 150, 2.0, "talk")

LATENCY = ("ttft mean", "ttft p99", "slowdown p90", "slowdown p99", "in time by length", "e2e mean")
DEADLINES = ("deadlines met", "ttft mean", "ttft p99")
CACHE = ("token hit rate", "ttft mean", "ttft p90", "ttft p99")
MEMORY = ("recomputed tokens", "e2e mean", "e2e p99", "worst class e2e p99")
LONG = {"max_model_len": 20_000}

LOADS: Mapping[str, Mapping[str, Load]] = {
    "scheduling": {
        "mixed lengths, busy": Load(drawn(MIXED, 500, 22.0), LATENCY, LONG),
        "mixed lengths, busier": Load(drawn(MIXED, 500, 26.0), LATENCY, LONG),
        "deadlines, mixed lengths": Load(due(drawn(MIXED, 500, 24.0), 0.2, 3.0), DEADLINES, LONG),
        "deadlines, like lengths": Load(due(drawn(ALIKE, 500, 48.0), 0.2, 3.0), DEADLINES, LONG),
    },
    "eviction": {
        "popular prefixes": Load(drawn(POPULAR, 400, 8.0), CACHE, {"num_blocks": 2000}),
        "popular prefixes and scans": Load(
            together(drawn(POPULAR, 400, 8.0), drawn(SCAN, 120, 2.4, "scan")), CACHE, {"num_blocks": 2500}
        ),
        "popularity that moves": Load(one_after_another(drawn(POPULAR, 150, 8.0), 4), CACHE, {"num_blocks": 2000}),
        "popularity that moves, and scans": Load(
            together(one_after_another(drawn(POPULAR, 200, 8.0), 2), drawn(SCAN, 100, 2.0, "scan")),
            CACHE,
            {"num_blocks": 2500},
        ),
        "conversations": Load(drawn(TALK, 500, 3.0), CACHE, {**LONG, "num_blocks": 4000}),
        "conversations and scans": Load(together(talk, scan), CACHE, {**LONG, "num_blocks": 4500}),
        "conversations and scans of one class": Load(together(talk, unnamed_scan), CACHE, {**LONG, "num_blocks": 4500}),
        "long conversations": Load(
            drawn(LONG_TALK, 300, 0.8),
            (*CACHE, "in 0.3 s"),
            {"max_model_len": 65_000, "num_blocks": 12_000, "max_num_batched_tokens": 8192},
        ),
        "a quiet tenant and a loud one": Load(
            together(drawn(POPULAR, 100, 2.0, "quiet"), drawn(UNPOPULAR, 400, 8.0, "loud")),
            (*CACHE, "worst class ttft p99", "quiet one's ttft p99", "quiet one's hit rate"),
            {"num_blocks": 2500},
        ),
    },
    "preemption": {
        "answers foretold": Load(foretold(drawn(ANSWER, 300, 8.0), 0.3), MEMORY, {"num_blocks": 1200}),
        "answers unknown": Load(drawn(ANSWER, 300, 8.0), MEMORY, {"num_blocks": 1200}),
        "a quiet tenant and a loud one": Load(
            together(drawn(ANSWER, 60, 1.2, "quiet"), drawn(ANSWER, 300, 6.0, "loud")), MEMORY, {"num_blocks": 1200}
        ),
    },
}
SPECS = {
    "ttl": "ttl,seconds=30",
    "least_slack": "least_slack,prefill_rate=25000",
}  # how entries are named whose knobs need a value
FUTURE = {"belady"}  # plays no game whose next request is not known

# -- measures ---------------------------------------------------------------------------------------------------------


class Played(NamedTuple):
    """Those who were answered, and when each was to be."""

    records: Sequence[RequestRecord]
    deadlines: Mapping[str, float]


class Measure(NamedTuple):
    of: Callable[[Played], float]
    is_better_high: bool
    unit: str = "s"


def ttft(record: RequestRecord) -> float:
    assert record.first_token_time is not None, f"request {record.request_id} was not answered"
    return record.first_token_time - record.arrival_time


def e2e(record: RequestRecord) -> float:
    return record.finish_time - record.arrival_time


def slowdown(record: RequestRecord) -> float:
    """How many times as long a first token took as it does alone, nearly: 20 ms, and 25,000 tokens a second."""
    return ttft(record) / (0.02 + (record.num_prompt_tokens - record.num_cached_tokens) / 25_000)


def mean(of: Callable[[RequestRecord], float]) -> Callable[[Played], float]:
    return lambda played: float(np.mean([of(record) for record in played.records]))


def quantile(of: Callable[[RequestRecord], float], percent: float) -> Callable[[Played], float]:
    return lambda played: float(np.percentile([of(record) for record in played.records], percent))


def worst_class(of: Callable[[RequestRecord], float], percent: float) -> Callable[[Played], float]:
    def worst(played: Played) -> float:
        by_class: dict[str, list[float]] = {}
        for record in played.records:
            by_class.setdefault(record.class_name, []).append(of(record))
        return max(float(np.percentile(values, percent)) for values in by_class.values())

    return worst


def _met(played: Played) -> float:
    met = (r.arrival_time + ttft(r) <= played.deadlines[r.request_id] for r in played.records)
    return sum(met) / len(played.records)


def _in_time(played: Played) -> float:
    """A first token within 0.2 s and half a second for each thousand tokens of the prompt."""
    return sum(ttft(r) <= 0.2 + 0.0005 * r.num_prompt_tokens for r in played.records) / len(played.records)


def of_the_quiet(measure: Callable[[Played], float]) -> Callable[[Played], float]:
    return lambda played: measure(Played([r for r in played.records if r.class_name == "quiet"], played.deadlines))


def _hit_rate(played: Played) -> float:
    return sum(r.num_cached_tokens for r in played.records) / sum(r.num_prompt_tokens for r in played.records)


MEASURES: Mapping[str, Measure] = {
    "ttft mean": Measure(mean(ttft), False),
    "ttft p90": Measure(quantile(ttft, 90), False),
    "ttft p99": Measure(quantile(ttft, 99), False),
    "e2e mean": Measure(mean(e2e), False),
    "e2e p99": Measure(quantile(e2e, 99), False),
    "worst class ttft p99": Measure(worst_class(ttft, 99), False),
    "worst class e2e p99": Measure(worst_class(e2e, 99), False),
    "slowdown mean": Measure(mean(slowdown), False, ""),
    "slowdown p90": Measure(quantile(slowdown, 90), False, ""),
    "slowdown p99": Measure(quantile(slowdown, 99), False, ""),
    "in 0.3 s": Measure(lambda played: sum(ttft(r) <= 0.3 for r in played.records) / len(played.records), True, ""),
    "in time by length": Measure(_in_time, True, ""),
    "deadlines met": Measure(_met, True, ""),
    "token hit rate": Measure(_hit_rate, True, ""),
    "quiet one's ttft p99": Measure(of_the_quiet(quantile(ttft, 99)), False),
    "quiet one's hit rate": Measure(of_the_quiet(_hit_rate), True, ""),
    "recomputed tokens": Measure(lambda played: float(sum(r.num_recomputed_tokens for r in played.records)), False, ""),
}

# -- playing ----------------------------------------------------------------------------------------------------------


def entries(menu: str, candidates: Sequence[str]) -> list[str]:
    """Names as `make` reads them: those that need no value, those with one above, and the candidates."""
    names = [SPECS.get(name, name) for name in MENU[menu] if name not in FUTURE]
    needs_none = [name for name in names if "," in name or not _needs_a_value(menu, name)]
    return needs_none + list(candidates)


def _needs_a_value(menu: str, name: str) -> bool:
    return any(knob.default is inspect.Parameter.empty for knob in parameters(MENU[menu][name]).values())


def play(menu: str, name: str, load: Load, workload: Workload) -> Played:
    config = EngineConfig(**{"num_blocks": 8192, **load.engine, menu: name})
    run = simulate(config, workload, DatasheetCost(model("llama-3-8b"), device("h100")))
    assert not run.unfinished, f"{name} left {len(run.unfinished)} requests unanswered"
    items = every_item(workload)
    answered = [record for record in run.records if record.first_token_time is not None]
    return Played(answered, {item.request.request_id: item.request.deadline or math.inf for item in items})


class Row(NamedTuple):
    """The best on a measure and the second. `wins`: against each of the others."""

    best: str
    value: float
    rival: str
    effect: Effect
    wins: bool


def judged(measure: Measure, values: Mapping[str, Sequence[float]]) -> Row:
    """Over the seeds, pair by pair."""
    sign = 1.0 if measure.is_better_high else -1.0
    best = max(values, key=lambda name: sign * float(np.mean(values[name])))
    others = {name: paired_effect(each, values[best]) for name, each in values.items() if name != best}
    rival = min(others, key=lambda name: sign * others[name].difference.mean)
    wins = all(excludes_zero(effect) for effect in others.values())
    return Row(best, float(np.mean(values[best])), rival, others[rival], wins)


def excludes_zero(effect: Effect) -> bool:
    return not effect.difference.low <= 0.0 <= effect.difference.high


def measured(menu: str, names: Iterable[str], load: Load, seeds: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """Measure -> entry -> a value a seed."""
    found: dict[str, dict[str, list[float]]] = {measure: {} for measure in load.measures}
    for seed in seeds:
        workload = load.draw(seed)
        for name in names:
            played = play(menu, name, load, workload)
            for measure in load.measures:
                found[measure].setdefault(name, []).append(MEASURES[measure].of(played))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--menu", choices=sorted(LOADS), required=True)
    parser.add_argument("--load", action="append", help="only this one; may be given again")
    parser.add_argument("--only", action="append", help="only this entry; may be given again")
    parser.add_argument(
        "--candidate", action="append", default=[], help="file.py:Class, with knobs; may be given again"
    )
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--all", action="store_true", help="the mean of every entry, too")
    options = parser.parse_args()
    names = entries(options.menu, options.candidate)
    if options.only:
        names = [*options.only, *options.candidate]
    for load_name in options.load or LOADS[options.menu]:
        load = LOADS[options.menu][load_name]
        seeds = range(options.first, options.first + options.seeds)
        show(load_name, measured(options.menu, names, load, seeds), options.all)


def show(load_name: str, found: Mapping[str, Mapping[str, Sequence[float]]], shows_all: bool) -> None:
    console = Console(width=160)
    table = Table(load_name, "best", "mean", "second", "difference", "wins", box=None, padding=(0, 2, 0, 0))
    for name, values in found.items():
        row, unit = judged(MEASURES[name], values), MEASURES[name].unit
        d = row.effect.difference
        difference = f"{d.mean:+.4g} ({d.low:+.4g} to {d.high:+.4g})"
        table.add_row(name, row.best, f"{row.value:.4g} {unit}", row.rival, difference, "yes" if row.wins else "no")
    console.print(table, highlight=False)
    if shows_all:
        every = Table("", *found, box=None, padding=(0, 2, 0, 0))
        for name in next(iter(found.values())):
            every.add_row(
                name.rpartition("/")[2], *(f"{float(np.mean(values[name])):.4g}" for values in found.values())
            )
        console.print(every, highlight=False)


if __name__ == "__main__":
    main()

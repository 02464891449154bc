"""Entries of the menus as the tests choose them: knobs set for tiny worlds, and rows in which all entries meet."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import combinations, product

from policies.catalogue import MENU, parameters

# How entries are named whose knobs have no default, or whose defaults are too large to bite in a tiny world.
EXAMPLES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "admission": {
        "bounded_queue": ("bounded_queue,max_waiting=2", "bounded_queue,max_prompt_tokens=30"),
        "class_budgets": (
            "class_budgets,max_running=x:1/y:2,max_blocks=y:12,max_queued=x:2",
            "class_budgets,reserve_blocks=x:4,max_queued_tokens=y:40",
            "class_budgets,reserve_blocks=x:2/y:2",
        ),
        "token_buckets": (
            "token_buckets,rate=8,burst=4,output_share=0.5,uncached_only=true",
            "token_buckets,rate=8,rates=u:2,burst=2,waits=false,long_prompt=8",
        ),
        "shed_late": ("shed_late,prefill_rate=8,ttft=4",),
    },
    "allocation": {
        "paged": ("paged", "paged", "paged,watermark=0.2"),
        "new_token_ratio": ("new_token_ratio", "new_token_ratio,conservativeness=0.1"),
        "past_future": ("past_future", "past_future,quantile=0.1,window=3"),
    },
    "scheduling": {
        "sjf": ("sjf,patience=2", "sjf,window=1", "sjf,patience=0"),
        "srpt": ("srpt", "srpt,error=0.5,input_price=1"),
        "hrrn": ("hrrn", "hrrn,window=1"),
        "edf": ("edf", "edf,otherwise=2"),
        "least_slack": ("least_slack,prefill_rate=4", "least_slack,prefill_rate=1,window=1"),
        "lpm": ("lpm,alike=4,next_to_nothing=4", "lpm,fallback_above=6", "lpm,aging=3"),
        "vtc": (
            "vtc",
            "vtc,lift=artifact,charge_cached=true",
            "vtc,lift=none,charge_recompute=true,weights=u:3/v:2",
        ),
        "dlpm": (
            "dlpm,quantum=4",
            "dlpm,quantum=50,forget_after=1,charge_recompute=true",
            "dlpm,fallback_above=3,quantum=10,aging=3",
        ),
        "drr": ("drr,quantum=4", "drr,quantum=3,weights=u:2,charge_cached=true"),
        "wfq": ("wfq", "wfq,weights=x:1/y:3,charge_recompute=true"),
    },
    "batching": {
        "tpot_budget": (
            "tpot_budget,tpot=4,step_time=1,token_time=1,min_chunk=1",
            "tpot_budget,tpot=8,step_time=0,token_time=1,context_time=0.1,min_chunk=2",
        ),
        "stall_free": ("stall_free,chunk_size=1", "stall_free,chunk_size=3", "stall_free,chunk_size=8"),
        "static": ("static", "static,group_size=2,max_wait=0", "static,group_size=3,max_wait=2"),
    },
    "eviction": {
        "slru": ("slru", "slru,segments=2"),
        "s3fifo": ("s3fifo", "s3fifo,small=0.4,ghost=2,threshold=1"),
        "gdsf": ("gdsf", "gdsf,ns_per_token=1,ns_per_context_token=9"),
        "queue_informed": ("queue_informed", "queue_informed,lookahead=1"),
        "ttl": ("ttl,seconds=2", "ttl"),
        "class_quota": (
            "class_quota,shares=x:0.3/y:0.3",
            "class_quota,shares=x:0.2,mode=hard",
            "class_quota,shares=x:0.5/y:0.1,mode=protect",
        ),
        "workload_aware": ("workload_aware", "workload_aware,memory=0.5"),
    },
    "isolation": {
        "hierarchical": ("hierarchical,barrier=4,first=global", "hierarchical,barrier=3"),
        "partition": ("partition", "partition,parts=3"),
    },
}


def examples(menu: str, name: str) -> tuple[str, ...]:
    """Ways to name an entry; an entry without examples goes by its name."""
    return EXAMPLES.get(menu, {}).get(name, (name,))


def without_examples() -> list[str]:
    """Entries that need a knob and have no example here."""
    return [
        f"{menu} {name}"
        for menu, entries in MENU.items()
        for name, factory in entries.items()
        if examples(menu, name) == (name,)
        and any(knob.default is inspect.Parameter.empty for knob in parameters(factory).values())
    ]


def meetings(*menus: Sequence[str]) -> list[tuple[str, ...]]:
    """Few rows, an entry of each menu, in which any two entries of different menus meet at least once."""
    pairs = {
        ((i, one), (j, other)): None
        for (i, first), (j, second) in combinations(enumerate(menus), 2)
        for one, other in product(first, second)
    }
    rows = []
    while pairs:
        row: dict[int, str] = dict(next(iter(pairs)))
        for column, menu in enumerate(menus):
            if column not in row:
                row[column] = max(menu, key=lambda entry: sum(_pair(column, entry, at, row[at]) in pairs for at in row))
        for one, other in combinations(sorted(row.items()), 2):
            pairs.pop((one, other), None)
        rows.append(tuple(row[column] for column in range(len(menus))))
    return rows


def _pair(column: int, entry: str, at: int, other: str) -> tuple[tuple[int, str], tuple[int, str]]:
    return ((column, entry), (at, other)) if column < at else ((at, other), (column, entry))

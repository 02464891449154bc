"""A run as people read it: the answer first, then the figures with their band, then what they rest on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sim.capacity import GIB
from sim.metrics import Distribution, Summary
from sim.slo import Kept

Pick = Callable[[Summary], float]


@dataclass(frozen=True, slots=True)
class Banded:
    """A summary, and those of the same run with costs that might be as well: at both ends of their band, or drawn.

    An interval covers the middle `share` of what these `others` say; of two ends all. `extrapolated`: by operation, the
    share of the device's time that lies beyond what was measured.
    """

    name: str
    summary: Summary
    others: tuple[Summary, ...] = ()
    share: float = 1.0
    extrapolated: Mapping[str, float] = field(default_factory=dict)

    def interval(self, pick: Pick) -> tuple[float, float] | None:
        """None where there are no others; nan where they have no figure."""
        known = sorted(value for value in map(pick, self.others) if not math.isnan(value))
        if not self.others:
            return None
        tail = 0.5 * (1.0 - self.share)
        return (_quantile_of(known, tail), _quantile_of(known, 1.0 - tail)) if known else (math.nan, math.nan)


def intervals(others: Sequence[Any], share: float) -> Any:
    """Of figures nested alike: a pair in the place of each number, None where nobody has one."""
    if isinstance(others[0], Mapping):
        return {name: intervals([each.get(name) for each in others], share) for name in others[0]}
    if isinstance(others[0], list):
        return [intervals(list(each), share) for each in zip(*others, strict=False)]
    known = sorted(each for each in others if isinstance(each, (int, float)) and not isinstance(each, bool))
    tail = 0.5 * (1.0 - share)
    return [_quantile_of(known, tail), _quantile_of(known, 1.0 - tail)] if known else None


def _quantile_of(ordered: Sequence[float], q: float) -> float:
    """Between the two nearest, in proportion."""
    at = q * (len(ordered) - 1)
    low = ordered[math.floor(at)]
    return low + (at - math.floor(at)) * (ordered[math.ceil(at)] - low)


LATENCIES: tuple[tuple[str, Callable[[Summary], Distribution]], ...] = (
    ("TTFT", lambda s: s.ttft),
    ("TPOT", lambda s: s.tpot),
    ("ITL", lambda s: s.itl),
    ("E2E", lambda s: s.e2e),
    ("queue delay", lambda s: s.queue_delay),
)
HITS_BY_REQUEST = "prefix hits by request"
RATES: tuple[tuple[str, Pick, str], ...] = (
    ("completed, req/s", lambda s: s.request_throughput, ""),
    ("input, tok/s", lambda s: s.input_throughput, ""),
    ("output, tok/s", lambda s: s.output_throughput, ""),
    ("prefix hits by token", lambda s: s.token_hit_rate, "%"),
    (HITS_BY_REQUEST, lambda s: s.request_hit_rate, "%"),
    ("KV held, mean", lambda s: s.mean_kv_held, "%"),
    ("KV held, most", lambda s: s.max_kv_held, "%"),
    ("KV cached idle, mean", lambda s: s.mean_kv_cached, "%"),
    ("running, mean", lambda s: s.mean_running, ""),
    ("waiting, mean", lambda s: s.mean_waiting, ""),
    ("cached blocks evicted", lambda s: s.num_evicted_blocks, "n"),
    ("evicted, blocks/s", lambda s: s.num_evicted_blocks / s.duration if s.duration else 0.0, ""),
    ("preemptions", lambda s: s.num_preemptions, "n"),
    ("recomputed tokens", lambda s: s.num_recomputed_tokens, "n"),
    ("padding tokens", lambda s: s.num_padding_tokens, "n"),
    ("rejections", lambda s: s.num_rejected, "n"),
    ("errors", lambda s: s.num_failed, "n"),
)


def seconds(*values: float) -> str:
    """Three digits in the unit that suits the largest; two values are a range."""
    if any(math.isnan(value) for value in values):
        return "-"
    in_seconds = max(values) >= 0.9995
    shown = [_digits(value if in_seconds else value * 1e3) for value in values]
    return f"{'–'.join(dict.fromkeys(shown))} {'s' if in_seconds else 'ms'}"


def quantity(unit: str, *values: float) -> str:
    """A count ("n"), a share ("%") or a rate; two values are a range."""
    if any(math.isnan(value) for value in values):
        return "-"
    shown = [f"{100 * v:.1f}" if unit == "%" else f"{v:,.0f}" if unit == "n" else _digits(v) for v in values]
    return f"{'–'.join(dict.fromkeys(shown))} {'' if unit == 'n' else unit}".strip()


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def answer(run: Banded) -> str:
    """What the run came to, in a sentence."""
    s = run.summary
    lost = [
        (s.num_rejected, "rejected"),
        (s.num_aborted, "cancelled"),
        (s.num_failed, "failed"),
        (s.num_unfinished, "never answered"),
    ]
    tail = "".join(f", {num:,} {word}" for num, word in lost if num)
    if not s.num_completed:
        return f"{run.name}: none of {s.num_requests:,} requests completed{tail}"
    done = f"{run.name}: {s.num_completed:,} of {s.num_requests:,} requests completed{tail} in {seconds(s.duration)}; "
    out = f"{quantity('tok/s', s.output_throughput)} out"
    if s.saturation.is_saturated:
        return f"{done}overloaded, no steady state; TPOT p50 {seconds(s.tpot.p50)}; {out}"
    return f"{done}TTFT p50 {seconds(s.ttft.p50)}, p99 {seconds(s.ttft.p99)}; TPOT p50 {seconds(s.tpot.p50)}; {out}"


def verdicts(run: Banded) -> list[str]:
    """Objectives kept or missed, and by how much; whether the server kept up; what stood in the way."""
    s = run.summary
    lines = [_kept(each) for each in s.objectives]
    if lines:
        lines.append(f"{100 * s.attainment:.1f} % of all arrivals met every bound; goodput {s.goodput:.3g} req/s")
    if s.saturation.is_saturated:
        recovery = s.saturation.time_to_recover
        after = "never" if recovery is None else f"{seconds(recovery)} after the last arrival"
        lines.append(
            f"overloaded: {s.saturation.reason}; the queue grew by {s.saturation.growth:.3g} req/s and was empty "
            f"{after}. Percentiles of what waits grow with the length of the trace and are left out"
        )
    lines.append(f"requests waited for {s.binding}" if "nothing" not in s.binding else "hardly anybody waited")
    if gone := s.cancel_latency.num:
        freed = f"p50 {seconds(s.cancel_latency.p50)}, p99 {seconds(s.cancel_latency.p99)}"
        lines.append(f"{gone:,} cancelled in the engine: their blocks were free {freed} after they gave up")
    return [*lines, *warnings(s)]


def warnings(s: Summary) -> list[str]:
    """What was switched on and came to nothing: a setting is no success."""
    if s.prefix_caching and s.num_prompt_tokens and not s.num_cached_tokens:
        return ["warning: prefix caching is on, but not one request found a token of its prompt in the cache"]
    return []


def _kept(kept: Kept) -> str:
    objective, measured = kept.objective, kept.measured
    if objective.percentile is None:
        share = f"{100 * measured:.1f} % of arrivals"
        return f"{'kept' if kept.is_met else 'missed'}: {objective} by {share}"
    if math.isnan(measured):
        return f"missed: {objective}, nothing was measured"
    word = "kept" if kept.is_met else f"missed by {100 * (measured / objective.limit - 1):.0f} %"
    return f"{word}: {objective} (measured {seconds(measured)})"


def latency_table(run: Banded) -> Table:
    """A row a latency, and beneath it the band of each figure."""
    table = _table(f"latency ({run.summary.convention})", QUANTILES)
    for name, pick in LATENCIES:
        if run.summary.saturation.is_saturated and name in GROWING:
            table.add_row(name, *["-"] * len(QUANTILES))
            continue
        picks = [partial(_quantile, pick, quantile) for quantile in QUANTILES]
        table.add_row(name, *[seconds(each(run.summary)) for each in picks])
        intervals = [interval for each in picks if (interval := run.interval(each)) is not None]
        if intervals:
            table.add_row("", *[f"[dim]{seconds(*interval)}[/dim]" for interval in intervals])
    return table


def rate_table(runs: Sequence[Banded]) -> Table:
    table = _table("throughput, cache, memory", [run.name for run in runs])
    for name, pick, unit in RATES:
        if name != "padding tokens" or any(pick(run.summary) for run in runs):
            _add_rate(table, runs, name, pick, unit)
    return table


def _add_rate(table: Table, runs: Sequence[Banded], name: str, pick: Pick, unit: str) -> None:
    """A row; after the rates of hits, requests by the length of theirs: many short hits spare little prefill."""
    table.add_row(name, *[_with_band(run, pick, partial(quantity, unit)) for run in runs])
    if name != HITS_BY_REQUEST:
        return
    for length in dict.fromkeys(length for run in runs for length in run.summary.hit_lengths):
        count = partial(_num_hits, length)
        if any(count(run.summary) for run in runs):
            table.add_row(_of_length(length), *[_with_band(run, count, partial(quantity, "n")) for run in runs])


def _of_length(length: str) -> str:
    return f"  requests with {length} tokens hit"


def _num_hits(length: str, summary: Summary) -> float:
    return summary.hit_lengths.get(length, 0)


def class_table(run: Banded) -> Table:
    """Each class on its own: fairness does not show in a total."""
    columns = ("done", "queue p99", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p99", "met")
    table = _table("class", columns, padding=1)
    for name, c in run.summary.classes.items():
        waits = (c.queue_delay.p99, c.ttft.p50, c.ttft.p99, c.e2e.p99)
        queue, first, late, whole = (math.nan,) * 4 if run.summary.saturation.is_saturated else waits
        times = (queue, first, late, c.tpot.p50, c.tpot.p99, whole)
        done = f"{c.num_completed:,}/{c.num_requests:,}"
        table.add_row(escape(name), done, *map(seconds, times), quantity("%", c.attainment))
    return table


def prefill_table(run: Banded) -> Table:
    """Time from first scheduled to first token by how much of the prompt was found: what hits are worth."""
    table = _table("prefill by what the cache had", ("requests", *QUANTILES))
    for state, times in run.summary.prefill_by_cache.items():
        figures = [seconds(getattr(times, quantile)) for quantile in QUANTILES]
        table.add_row(CACHE_STATES[state], f"{times.num:,}", *figures)
    return table


def difference_table(a_name: str, b_name: str, a: dict[str, Any], b: dict[str, Any]) -> Table:
    """Figures of two stored results and how the second differs."""
    table = _table("", (a_name, b_name, "change"))
    for name, _ in LATENCIES:
        key = name.lower().replace(" ", "_")
        for quantile in ("p50", "p99"):
            x, y = (figures[key][quantile] for figures in (a, b))
            if x is not None and y is not None:
                table.add_row(f"{name} {quantile}", seconds(x), seconds(y), _change(x, y))
    rows = {key.replace("_", " "): (a[key], b[key]) for key in COMPARED}
    lengths = {_of_length(length): (num, b["hit_lengths"][length]) for length, num in a["hit_lengths"].items()}
    for name, (x, y) in {**rows, **lengths}.items():
        if name in rows or x or y:
            table.add_row(name, _digits(x), _digits(y), _change(x, y))
    return table


def _change(x: float, y: float) -> str:
    return "-" if not x else f"{100 * (y / x - 1):+.1f} %"


def comparison(runs: Sequence[Banded]) -> Table:
    """Latencies and rates of several runs of one workload, side by side."""
    table = _table("", [run.name for run in runs])
    for name, latency in LATENCIES:
        if name in GROWING and any(run.summary.saturation.is_saturated for run in runs):
            continue
        for quantile in ("p50", "p99"):
            pick = partial(_quantile, latency, quantile)
            table.add_row(f"{name} {quantile}", *[_with_band(run, pick, seconds) for run in runs])
    for name, rate, unit in RATES:
        if any(rate(run.summary) for run in runs):
            _add_rate(table, runs, name, rate, unit)
    return table


COMPARED = (
    *("request_throughput", "output_throughput", "mean_kv_held", "num_preemptions"),
    *("token_hit_rate", "request_hit_rate"),  # the lengths of hits follow
)
DRAWN_SHARE = 0.68  # of draws, that an interval covers: as the band does
WORTH_SAYING = 0.01
QUANTILES = ("mean", "p50", "p90", "p99")
GROWING = ("TTFT", "E2E", "queue delay")  # with the length of an overloaded run
CACHE_STATES = {"cold": "nothing (cold)", "partial": "a part", "full": "all it could (full)"}


def _quantile(latency: Callable[[Summary], Distribution], name: str, summary: Summary) -> float:
    value: float = getattr(latency(summary), name)
    return value


def _table(title: str, columns: Sequence[str], padding: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0), header_style="bold")
    table.add_column(escape(title), no_wrap=True)
    for column in columns:
        table.add_column(escape(column), justify="right", no_wrap=True)
    return table


def _with_band(run: Banded, pick: Pick, show: Callable[..., str]) -> str:
    """The value and, dimmed, its interval."""
    value, interval = pick(run.summary), run.interval(pick)
    band = show(*interval) if interval else ""
    return show(value) if band in ("", show(value)) else f"{show(value)} [dim]({band})[/dim]"


def provenance(profile: dict[str, Any], num_others: int) -> str:
    if profile["provenance"] == "live":
        return f"costs: live, {profile['model']} in {profile['dtype']} on {profile['gpu']}, by the wall clock"
    ranges = ""
    if num_others:
        drawn = f"the middle {100 * DRAWN_SHARE:.0f} % of {num_others} draws of the costs"
        ranges = f"; ranges: {drawn if num_others > 2 else 'all costs at either end of that band'}"
    if "server" in profile:
        return f"costs: {profile['provenance']} of {profile['server']}, ×/÷{profile['band']:.3f} (68 %){ranges}"
    if "body" in profile:
        return (
            f"costs: {profile['provenance']} on {profile['body']}, kernels {profile['kernels']}, "
            f"×/÷{profile['band']:.3f} (68 %){ranges}"
        )
    tp = f" x{profile['tensor_parallel']}" if profile["tensor_parallel"] > 1 else ""
    return (
        f"costs: {profile['provenance']} of {profile['model']} on {profile['gpu']}{tp}, ×/÷{profile['band']} (68 %)"
        f"{_beside(profile)}; host {profile['host_time_per_step'] * 1e6:.0f} us a step + "
        f"{profile['host_time_per_request'] * 1e6:.1f} us a running request, not measured here{ranges}"
    )


def _beside(profile: dict[str, Any]) -> str:
    """What the times of a profile do not rest on."""
    others = [part for part, source in profile.get("parts", {}).items() if source != profile["provenance"]]
    return f"; by datasheet: {', '.join(others)}" if others else ""


def extrapolation(run: Banded) -> list[str]:
    """Said before anything else where it is more than a trifle: a table knows nothing of what it has not seen."""
    total = sum(run.extrapolated.values())
    if total < WORTH_SAYING:
        return []
    worth = {name: share for name, share in run.extrapolated.items() if share >= WORTH_SAYING}
    parts = ", ".join(f"{name} {100 * share:.0f} %" for name, share in worth.items())
    return [f"extrapolated: {100 * total:.0f} % of the device's time lies beyond what was measured ({parts})"]


def print_run(console: Console, run: Banded, manifest: dict[str, Any]) -> None:
    for line in extrapolation(run):
        console.print(line, highlight=False, markup=False)
    console.print(answer(run), style="bold", highlight=False, markup=False)
    for line in verdicts(run):
        console.print(line, highlight=False, markup=False)
    console.print()
    console.print(latency_table(run), highlight=False)
    console.print()
    if run.summary.classes:
        console.print(class_table(run), highlight=False)
        console.print()
    if run.summary.prefix_caching:
        console.print(prefill_table(run), highlight=False)
        console.print()
    console.print(rate_table([run]), highlight=False)
    console.print()
    print_basis(console, manifest, len(run.others))


def print_basis(console: Console, manifest: dict[str, Any], num_others: int) -> None:
    """What the figures rest on."""
    console.print(provenance(manifest["profile"], num_others), highlight=False)
    engine, cluster = manifest["engine"], manifest["cluster"]
    replicas = "" if cluster["num_replicas"] == 1 else f"{cluster['num_replicas']} replicas, {cluster['routing']}; "
    console.print(
        f"engine: {replicas}{engine['num_blocks']:,} KV blocks of {engine['block_size']} tokens, "
        f"{engine['max_num_batched_tokens']:,} tokens a step, {engine['max_num_seqs']} running; "
        f"cache {cache_said(manifest['cache_state'])}; prefixes shared: {engine['isolation']}",
        highlight=False,
    )
    console.print(_policies(engine, manifest["slo"]), highlight=False)
    profile = manifest["profile"]
    is_of_a_gpu = not {"server", "body"} & profile.keys()  # a server's memory and flags are its own, and so a body's
    if is_of_a_gpu:
        console.print(_memory(manifest["memory"], engine["num_blocks"] * engine["block_size"]), highlight=False)
    told = "fitted with the steps" if "server" in profile else "measured" if "body" in profile else "not measured here"
    console.print(_front_end(manifest["front_end"], told), highlight=False)
    if is_of_a_gpu:
        console.print(f"as vLLM flags: {manifest['vllm_flags']}", highlight=False, markup=False)
    console.print(f"workload: {manifest['workload']['source']}", highlight=False, markup=False)
    for finding in manifest["workload"]["findings"]:
        console.print(f"  {finding}", highlight=False, markup=False)


def cache_said(protocol: str) -> str:
    return f"{protocol} at the start" if protocol == "cold" else protocol


def _policies(engine: dict[str, Any], slo: str | None) -> str:
    """What decides over memory, over latency and over who may share, whether chosen or left to the default."""
    caching = "on" if engine["enable_prefix_caching"] else "off"
    return (
        f"policies: memory by {engine['allocation']} allocation, {engine['eviction']} eviction, "
        f"{engine['preemption']} preemption; latency by {engine['admission']} admission, {engine['scheduling']} "
        f"scheduling, {engine['batching']} batching, objectives {slo or 'none'}; "
        f"security by {engine['isolation']} isolation, prefix caching {caching}{_threat(engine['threat_decision'])}"
    )


def _threat(decision: str) -> str:
    return f"; tenants may share, as decided: {escape(decision)}" if decision else ""


def _memory(wanted: dict[str, Any], num_tokens: int) -> str:
    """What running requests want of the KV cache, three ways, beside what there is of it and the weights."""
    token = wanted["kv_bytes_per_token"]
    return (
        f"memory of each GPU: weights {_gib(wanted['weight_bytes'])}, KV cache {_gib(num_tokens * token)}; "
        f"{wanted['num_requests']:,} running want {_gib(wanted['mean_tokens'] * token)} of KV on average, "
        f"{_gib(wanted['p99_tokens'] * token)} at p99, {_gib(wanted['worst_tokens'] * token)} "
        "if each is as long as the context limit"
    )


def _gib(num_bytes: float) -> str:
    return f"{_digits(num_bytes / GIB)} GiB"


def _front_end(times: Any, told: str) -> str:
    if times == "off":
        return "front end: off, latencies begin and end at the engine"
    if times == "live":
        return "front end: live, latencies begin and end at the clients in this process"
    return (
        f"front end: {times['num_api_servers']} API server(s), {times['api_time_per_request'] * 1e3:.3g} ms a request, "
        f"{times['tokenise_time_per_token'] * 1e6:.3g} us a prompt token, "
        f"{times['stream_time_per_token'] * 1e6:.3g} us a streamed token; {told}"
    )

"""Charts and the page: what is drawn is what happened, nothing is loaded, and no name is markup."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from policies.config import EngineConfig
from policies.prompt import LengthPrompt
from policies.types import Request
from sim.charts import charts, kv_over_time, latency_cdfs, queue_over_time, step_timeline
from sim.cost import AffineCost
from sim.frontend import FrontEndTimes
from sim.html_report import Reported, html, write_html
from sim.metrics import summarise
from sim.report import Banded
from sim.series import MAX_POINTS, steps, thin, throughput, timeline
from sim.setup import Setup, manifest
from sim.simulate import Run, simulate
from sim.slo import parse_objectives
from sim.spread import OTHERS, by_class, cdf, largest_classes
from sim.workload.workload import WorkItem, Workload

CONFIG = EngineConfig(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32)
SECOND = AffineCost(per_step=1.0)


def workload(rows: Sequence[tuple[float, int, int]], classes: Sequence[str] = ("chat",)) -> Workload:
    """(arrival, prompt tokens, output tokens) a request; classes take turns."""
    return Workload(
        "by hand",
        [
            WorkItem(Request(str(i), at, LengthPrompt(prompt), 32, class_name=classes[i % len(classes)]), num)
            for i, (at, prompt, num) in enumerate(rows)
        ],
    )


def many(num: int, classes: Sequence[str] = ("chat",), gap: float = 0.7) -> Workload:
    return workload([(i * gap, 1 + 5 * i % 17, 1 + 7 * i % 11) for i in range(num)], classes)


@pytest.fixture(scope="module")
def run() -> Run:
    """Two requests, a step a second: a (4 prompt, 3 out) at 0, b (12 prompt, 2 out) at 1; budget 8.

    step 0 [0, 1]: a's prompt -> token.  step 1 [1, 2]: a decodes, b's first 7.  step 2 [2, 3]: a decodes (done), b's
    last 5 -> token.  step 3 [3, 4]: b decodes (done).
    """
    return simulate(CONFIG, workload([(0.0, 4, 3), (1.0, 12, 2)]), SECOND)


@pytest.fixture(scope="module")
def empty() -> Run:
    """Everybody is refused."""
    return simulate(CONFIG, workload([(0.0, 99, 1), (1.0, 99, 1)]), SECOND)


# -- over time ----------------------------------------------------------------------------------------------------


def test_the_timeline_holds_each_step_and_the_end(run: Run) -> None:
    of = timeline(run)
    assert of.time.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert of.running.tolist() == [1, 2, 2, 1, 0]
    assert of.waiting.tolist() == [0, 0, 0, 0, 0]
    assert (16 * of.held).tolist() == [1, 4, 5, 4, 0]
    assert (of.held + of.cached + of.free).tolist() == [1.0] * 5


def test_an_idle_engine_runs_nobody_and_holds_nothing() -> None:
    of = timeline(simulate(CONFIG, workload([(0.0, 4, 1), (10.0, 4, 1)]), SECOND))
    assert of.time.tolist() == [0.0, 1.0, 10.0, 11.0]
    assert of.running.tolist() == [1, 0, 1, 0]
    assert of.held.tolist() == [1 / 16, 0, 1 / 16, 0]


def test_a_wedged_engine_is_not_called_idle(run: Run) -> None:
    of = timeline(replace(run, unfinished=("c",)))
    assert (of.time.tolist(), of.running.tolist()) == ([0.0, 1.0, 2.0, 3.0], [1, 2, 2, 1])


def test_steps_tell_prefill_from_decode(run: Run) -> None:
    of = steps(run)
    assert of.begin.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert of.duration.tolist() == [1.0] * 4
    assert of.prefill_tokens.tolist() == [4, 7, 5, 0]
    assert of.decode_tokens.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("async_depth", [1, 2])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_no_token_is_lost_and_no_step_overlaps_another_of_its_replica(async_depth: int, num_replicas: int) -> None:
    config = EngineConfig.from_dict({**CONFIG.to_dict(), "async_depth": async_depth})
    run = simulate(config, many(60), SECOND, num_replicas=num_replicas)
    of, whole = steps(run), timeline(run)
    assert len(of.begin) == len(run.step_ends)
    assert of.num_tokens.sum() == sum(sample.num_steps * sample.num_tokens for sample in run.samples)
    assert of.decode_tokens.sum() == sum(record.num_output_tokens - 1 for record in run.records)
    assert of.duration.min() >= 0 and of.duration.max() == pytest.approx(1.0)
    assert whole.held + whole.cached + whole.free == pytest.approx(1.0)
    assert whole.running.max() <= 2 * num_replicas and whole.running[-1] == 0


def test_replicas_add_up() -> None:
    """Two requests at once on two replicas, one step each: both run, then none."""
    of = timeline(simulate(CONFIG, workload([(0.0, 4, 1), (0.0, 4, 1)]), SECOND, num_replicas=2))
    assert (of.time.tolist(), of.running.tolist(), of.held.tolist()) == ([0.0, 1.0], [2, 0], [1 / 16, 0])


def test_throughput_counts_everything_once(run: Run) -> None:
    of = throughput(run)
    width = np.diff(of.edges)
    assert (of.edges[0], of.edges[-1]) == (0.0, 4.0)
    assert (of.output_tokens * width).sum() == pytest.approx(5)
    assert (of.prefill_tokens * width).sum() == pytest.approx(16)
    assert (of.arrived * width).sum() == pytest.approx(2)
    assert of.completed[[7, 9]] * width[0] == pytest.approx(1)  # a ends at 3, b at 4


# -- thinning -----------------------------------------------------------------------------------------------------


def test_thinning_keeps_every_extreme_in_order() -> None:
    x = np.arange(100_000.0)
    y = np.random.default_rng(1).normal(size=len(x))
    y[[123, 77_777]] = 50.0, -50.0
    keep = thin(x, y)
    assert len(keep) <= MAX_POINTS and (np.diff(keep) > 0).all() and keep[-1] == len(x) - 1
    assert {123, 77_777} <= set(keep.tolist())
    for kept, whole in zip(np.array_split(y[keep], 10), np.array_split(y, 10), strict=True):
        assert kept.max() > np.sort(whole)[-30] and kept.min() < np.sort(whole)[30]


def test_few_points_are_left_alone() -> None:
    assert thin(np.array([1.0, 1.0, 2.0]), np.array([3.0, 2.0, 1.0])).tolist() == [0, 1, 2]


def test_points_of_one_time_can_be_thinned() -> None:
    keep = thin(np.zeros(5000), np.arange(5000.0))
    assert keep.tolist() == [0, 4999]


# -- latencies ----------------------------------------------------------------------------------------------------


def test_a_cdf_leaves_out_what_was_not_measured() -> None:
    curve = cdf(np.array([3.0, math.nan, 1.0]), 100)
    assert curve.x.tolist() == [1.0, 1.0, 3.0]
    assert curve.y.tolist() == [0.0, 0.5, 1.0]
    assert len(cdf(np.array([math.nan]), 100).x) == 0


def test_a_thinned_cdf_keeps_both_ends_and_the_tail() -> None:
    values = np.random.default_rng(2).exponential(size=50_000)
    curve = cdf(values, 500)
    assert len(curve.x) <= 500
    assert (curve.x[0], curve.x[-1], curve.y[-1]) == (values.min(), values.max(), 1.0)
    assert np.isin(np.sort(values)[-100:], curve.x).all()
    assert (np.interp(1.0, curve.x, curve.y) - (1 - math.exp(-1))) == pytest.approx(0.0, abs=0.01)


def test_latencies_come_by_class_and_small_classes_together() -> None:
    run = simulate(CONFIG, workload([(9.0 * i, 4, 3) for i in range(6)], ("a", "b", "a", "c", "a", "a")), SECOND)
    assert largest_classes([run], 3) == ["a", "b", "c"]
    assert largest_classes([run], 2) == ["a"]
    found = by_class(run, ["a"])
    assert list(found) == ["a", OTHERS]
    assert found["a"].ttft.tolist() == [1.0] * 4
    assert found[OTHERS].tpot.tolist() == [1.0] * 2
    assert found[OTHERS].e2e.tolist() == [3.0] * 2
    assert by_class(run, ["a"], "guidellm")["a"].tpot.tolist() == [1.0] * 4


# -- figures ------------------------------------------------------------------------------------------------------


def test_figures_draw_the_data(run: Run) -> None:
    latency = latency_cdfs({"it": run})
    assert [trace.x.tolist() for trace in latency.data] == [[1.0, 1.0, 2.0], [1e3, 1e3, 1e3], [3.0, 3.0, 3.0]]
    running, waiting = queue_over_time({"it": run}).data
    assert (running.y.tolist(), waiting.y.tolist()) == ([1, 2, 2, 1, 0], [0] * 5)
    held, cached, free = kv_over_time({"it": run}).data
    assert held.y.tolist() == [1 / 16, 4 / 16, 5 / 16, 4 / 16, 0]
    assert {trace.stackgroup for trace in (held, cached, free)} == {"pool"}
    points = {trace.name: (trace.x.tolist(), trace.y.tolist()) for trace in step_timeline({"it": run}).data}
    assert points == {
        "steps with prefill": ([0.0, 1.0, 2.0], [1000.0] * 3),
        "steps of decodes only": ([3.0], [1000.0]),
        "prefill tokens": ([0.0, 1.0, 2.0], [4, 7, 5]),
        "decode tokens": ([1.0, 2.0, 3.0], [1, 1, 1]),
    }


def test_every_axis_that_is_titled_has_a_unit_and_every_figure_says_what_it_rests_on(run: Run) -> None:
    for figure in charts({"it": run, "again": run}, "costs:guessed"):
        titles = [axis.title.text for axis in [*figure.select_xaxes(), *figure.select_yaxes()] if axis.title.text]
        assert titles and all(
            ", " in title or title in ("chat", "share of KV blocks", "tokens a step") for title in titles
        )
        assert "costs:guessed" in figure.layout.title.text and figure.layout.meta["note"]


def test_a_wide_range_gets_a_logarithmic_axis() -> None:
    run = simulate(CONFIG, workload([(0.0, 4, 1), (0.0, 4, 1), (0.0, 4, 28), *[(0.0, 4, 28)] * 3]), SECOND)
    assert [axis.type for axis in latency_cdfs({"it": run}).select_xaxes()] == ["log", None, "log"]


def test_large_runs_are_thinned() -> None:
    run = simulate(CONFIG, many(400), SECOND, jumps=False)
    assert len(run.step_ends) > 1000
    for figure in charts({"it": run}, most=300):
        assert max(len(trace.x) for trace in figure.data) <= 300


def test_several_runs_share_panels_by_class() -> None:
    runs = {name: simulate(CONFIG, many(12, ("chat", "code")), SECOND) for name in ("a", "b")}
    figure = latency_cdfs(runs)
    assert [axis.title.text for axis in figure.select_yaxes(col=1)] == ["chat", "code"]
    assert [trace.name for trace in figure.data if trace.showlegend] == ["a", "b"]
    assert {trace.line.color for trace in figure.data if trace.name == "a"} == {"#0072B2"}


def test_latencies_are_the_clients_where_there_are_clients() -> None:
    times = FrontEndTimes.off(client_link_time=0.5)
    figure = latency_cdfs({"it": simulate(CONFIG, workload([(0.0, 4, 3)]), SECOND, front_end=times)})
    assert figure.data[0].x.tolist() == [2.0, 2.0]
    assert "as the client saw them" in figure.layout.meta["note"]


def test_an_empty_run_is_drawn_and_said(empty: Run) -> None:
    texts = [[note.text for note in figure.layout.annotations] for figure in charts({"it": empty})]
    assert texts[0] == ["no request was answered"]
    assert texts[2:] == [["no step ran"]] * 3
    assert len(timeline(empty).time) == len(steps(empty).begin) == 0
    assert charts({"nothing": simulate(CONFIG, workload([]), SECOND)})


def test_a_name_is_no_markup(run: Run) -> None:
    for figure in charts({"<b>x</b>": run, "y & z": run}):
        text = figure.to_json()
        assert "<b>x" not in text.replace("\\u003c", "<")


# -- the page -----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would find."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._open.append(tag)
            self.text.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text[self._open[-1]][-1] += data


def reported(name: str, run: Run, slo: str = "", **changed: object) -> Reported:
    summary = summarise(run, objectives=parse_objectives(slo) if slo else ())
    return Reported(Banded(name, summary), run, {**basis(), **changed} if changed else None)


@cache
def basis() -> dict[str, object]:
    setup = Setup(workload="fixed", num_requests=1)
    config = setup.config()
    return manifest(setup, config, setup.load(), setup.cost(config))


@pytest.fixture(scope="module")
def text(run: Run) -> str:
    return html([reported("it", run, "ttft_p99<5s,e2e<1s")], basis())


def test_the_page_loads_nothing(text: str) -> None:
    page = Page(text)
    loading = {"src", "href", "srcset", "data", "action", "poster", "background"}
    assert not [(tag, attrs) for tag, attrs in page.tags if loading & attrs.keys()]
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    assert "url(" not in page.text["style"][0] and "@import" not in page.text["style"][0]
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy


def test_the_page_opens_with_the_answer_then_verdicts_then_what_it_rests_on(text: str) -> None:
    page = Page(text)
    assert page.text["p"][0].startswith("it: 2 of 2 requests completed in 4 s")
    assert page.text["h2"] == ["Verdicts", "What this rests on", "Metrics", "Charts"]
    moods = [attrs.get("class") for tag, attrs in page.tags if tag == "li"]
    assert moods[:2] == ["good", "bad"]
    assert "costs" in page.text["dt"] and "cache state" in page.text["dt"] and "isolation" in page.text["dt"]
    assert json.loads(page.text["pre"][0]) == json.loads(json.dumps(basis(), default=str))
    assert len([text for text in page.text["script"] if text.startswith("{")]) == 5


def test_rejections_are_told_by_reason(empty: Run) -> None:
    page = html([reported("it", empty, "ttft_p99<5s")], basis())
    assert "2 of 2 requests rejected, as: request 0 has a prompt of 99 tokens" in page
    assert "class='bad'" in page


def test_what_users_name_is_escaped(run: Run) -> None:
    name = "</script><script>alert(1)</script>"
    workload_ = {"name": name, "source": "<img src=x>", "num_requests": 1, "findings": ["<b>hm</b>"]}
    page = Page(html([reported(name, run), reported("b", run, workload=workload_)], {**basis(), "workload": workload_}))
    assert not [text for text in page.text["script"] if text.startswith("alert")]
    assert "img" not in {tag for tag, _ in page.tags} and "b" not in {tag for tag, _ in page.tags}
    assert page.text["title"][0].startswith(name)


def test_several_runs_stand_side_by_side_with_what_differs(run: Run) -> None:
    runs = [reported("a", run), reported("b", run, seed=7)]
    page = Page(html(runs, basis()))
    assert [text for text in page.text["th"] if text in ("a", "b")] == ["a", "b"] * 2
    assert "seed" in page.text["td"] and "7" in page.text["td"]
    assert [text for text in page.text["h3"] if text == "b"] == ["b", "b"]  # verdicts, and its own manifest


def test_the_band_is_small_print(run: Run) -> None:
    slow = summarise(simulate(CONFIG, workload([(0.0, 4, 3), (1.0, 12, 2)]), AffineCost(per_step=2.0)))
    single = reported("it", run)
    page = Page(html([replace(single, banded=replace(single.banded, others=(single.summary, slow)))], basis()))
    assert "1.5 s" in page.text["td"] and "(0.625–1.25)" in page.text["small"]


def test_classes_have_a_table() -> None:
    run = simulate(CONFIG, many(12, ("chat", "[/red]")), SECOND)
    page = Page(html([reported("it", run)], basis()))
    assert "By class of request" in page.text["h2"] and {"chat", "[/red]"} <= set(page.text["td"])


def test_runs_must_be_told_apart_and_measured_alike(run: Run) -> None:
    with pytest.raises(ValueError, match="names, each its own"):
        html([reported("a", run), reported("a", run)], basis())
    other = Reported(Banded("b", summarise(run, "guidellm")), run)
    with pytest.raises(ValueError, match="vllm and guidellm"):
        html([reported("a", run), other], basis())


def test_four_large_runs_stay_below_six_megabytes(tmp_path: Path) -> None:
    run = simulate(CONFIG, many(700, [f"tenant {i}" for i in range(9)]), SECOND, jumps=False)
    write_html(tmp_path / "page.html", [reported(f"run {i}", run) for i in range(4)], basis())
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").stat().st_size < 6_000_000


def test_the_same_run_gives_the_same_page(run: Run, text: str) -> None:
    assert html([reported("it", run, "ttft_p99<5s,e2e<1s")], basis()) == text

"""A page in the browser: choose a workload and a server, run it, read what it came to.

Nothing is decided here: settings are sim.setup's, words sim.report's, charts sim.charts'. An empty field means the
default, or what the TOML file says.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from html import escape
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
import streamlit as st
from rich.console import Console
from rich.table import Table

from policies.catalogue import MENU, PRESETS
from policies.config import MENUS, EngineConfig
from sim.charts import kv_over_time, latency_cdfs, queue_over_time, throughput_over_time
from sim.commands import Prepared, run_banded
from sim.hardware import DEVICES
from sim.html_page import from_rich
from sim.models import MODELS
from sim.report import Banded, answer, class_table, latency_table, print_basis, rate_table, verdicts
from sim.setup import Setup
from sim.simulate import Run
from sim.workload.generate import RECIPES

LIMITS = {
    "max_num_seqs": "Requests running at once",
    "max_num_batched_tokens": "Tokens a step",
    "block_size": "Tokens a KV block",
    "num_blocks": "KV blocks",
    "max_model_len": "Longest prompt and answer",
}
FITTED = {"num_blocks": "what fits in memory", "max_model_len": "the model's"}
QUESTIONS = {
    "admission": "May it come in?",
    "scheduling": "Who is next?",
    "batching": "How many tokens each?",
    "allocation": "Which memory is promised?",
    "preemption": "Memory is full: who yields?",
    "eviction": "Which cached block goes?",
    "isolation": "Who may share a prefix?",
    "routing": "Which replica?",
}
CHOICES = (
    *("workload", "trace", "rate", "num_requests", "model", "gpu", "tensor_parallel", "num_replicas"),
    *("routing", "slo", "preset"),
)
ENGINE = (*MENUS, *LIMITS)
SIGNS = {"kept": "✓", "missed": "✗", "overloaded": "✗", "warning": "!"}
MOST = 2**53  # the largest number that a browser keeps whole

STYLE = """<style>
.answer { font-size: 1.35rem; line-height: 1.4; font-weight: 600; margin: 0 0 .4rem; overflow-wrap: anywhere; }
.verdict { margin: 0; padding: .1rem 0 .1rem 1.3em; text-indent: -1.3em; overflow-wrap: anywhere; }
.sign { font-weight: 700; display: inline-block; width: 1.3em; text-indent: 0; }
.kept { color: #009E73; } .missed, .overloaded, .warning { color: #D55E00; }
.basis { font-size: .82rem; line-height: 1.45; opacity: .72; margin: .7rem 0 0;
  padding-left: .7rem; border-left: 3px solid rgba(128, 128, 128, .35); overflow-wrap: anywhere; }
.tables { display: flex; flex-wrap: wrap; gap: 0 3.5rem; } .wide { overflow-x: auto; margin-bottom: 1rem; }
.wide table { border-collapse: collapse; font-size: .88rem; } .wide small { opacity: .65; font-size: .78rem; }
.wide th, .wide td { border: 0; border-bottom: 1px solid rgba(128, 128, 128, .3); padding: .22rem .9rem .22rem 0;
  text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.wide th:first-child, .wide td:first-child { text-align: left; }
.wide tr:has(+ tr > td:first-child:empty) td { border-bottom: 0; }
</style>"""


@dataclass(frozen=True, slots=True)
class Shown:
    """A finished run, as far as the page shows it."""

    setup: Setup
    banded: Banded
    basis: list[str]
    figures: list[go.Figure]


def page() -> None:
    st.set_page_config("servetwin", layout="wide")
    st.html(STYLE)
    if "base" not in st.session_state:
        show_choices(Setup())
    try:
        setup, trace, wants_run, band = sidebar()
        if wants_run:
            st.session_state.pop("shown", None)
            st.session_state.shown = play(prepare(setup, trace), band)
    except (ValueError, OSError) as error:
        complain(error)
        setup = None
    if told := st.session_state.pop("complaint", None):
        complain(told)
    if "shown" in st.session_state:
        results(st.session_state.shown, setup)
    elif setup is not None and not told:
        st.html("<p class='answer'>What will this server do under this load?</p>")
        st.info("Choose a workload and a server on the left, then press **Run**.")


def complain(error: object) -> None:
    """One line, as it was said: no Markdown in it."""
    line = " ".join(str(error).split())
    st.error(re.sub(r"([\\`*_~$\[\]<>:#|])", r"\\\1", line))


# -- choices ------------------------------------------------------------------------------------------------------


def sidebar() -> tuple[Setup, Any, bool, bool]:
    """The setup, the uploaded trace if there is one, whether to run it, and whether with its band."""
    with st.sidebar:
        wants_run = st.button("Run", type="primary", width="stretch")
        trace = workload_choices()
        server_choices()
        policy_choices()
        st.text_input("Objectives", key="slo", placeholder="ttft_p99<1s,tpot<50ms")
        band = st.checkbox("Also at both ends of the costs' band", value=True, help="Two more runs.")
        files = st.container()
        setup = chosen(trace)
        toml_files(files, setup)
        cost = setup.cost(setup.config())
        st.caption(f"Costs: {cost.provenance} of {cost.model.name} on {cost.device.name}, ×/÷{cost.band} (68 %)")
    return setup, trace, wants_run, band


def workload_choices() -> Any:
    st.subheader("Workload")
    choice("Built-in", "workload", RECIPES, "chat")
    trace = st.file_uploader("Or a trace", help="Its format is told by its content.")
    if st.session_state.get("trace"):
        st.text_input("Trace", key="trace", help="From the TOML file; empty it to use something else.")
    left, right = st.columns(2)
    with left:
        number("Requests/s", "rate", "its own", step=None, format="%g")
    with right:
        number("Requests", "num_requests", "1000" if trace is None else "all")
    return trace


def server_choices() -> None:
    st.subheader("Server")
    choice("Model", "model", [each.name for each in MODELS], "llama-3-8b")
    choice("GPU", "gpu", [each.name for each in DEVICES], "h100")
    left, right = st.columns(2)
    with left:
        number("GPUs a replica", "tensor_parallel", "1")
    with right:
        number("Replicas", "num_replicas", "1")


def policy_choices() -> None:
    with st.expander("Policies"):
        choice("Preset of a real engine", "preset", PRESETS, "none")
        defaults = defaults_under(st.session_state.preset)
        for menu, entries in MENU.items():
            choice(f"{menu.capitalize()}: {QUESTIONS[menu]}", menu, entries, defaults[menu])
    with st.expander("Engine limits"):
        for name, label in LIMITS.items():
            number(label, name, defaults[name])


def defaults_under(preset: str | None) -> dict[str, str]:
    """What an empty field stands for."""
    values = {name: each.default for name, each in EngineConfig.__dataclass_fields__.items()}
    values |= {"routing": Setup().routing} | PRESETS.get(preset or "", {}) | FITTED
    return {name: str(value) for name, value in values.items()}


def choice(label: str, name: str, options: Iterable[str], default: str) -> None:
    """Of the options, or whatever a user writes: a knob, a path. Empty: the default."""
    given = st.session_state.get(name)
    known = list(dict.fromkeys([*options, *([given] if given else [])]))
    st.selectbox(label, known, index=None, placeholder=default, key=name, accept_new_options=True)


def number(label: str, name: str, default: str, **look: Any) -> None:
    st.number_input(label, value=None, placeholder=default, key=name, **({"step": 1} | look))


def chosen(trace: Any) -> Setup:
    """What the page says, over what a TOML file said besides."""
    values = st.session_state.base.to_dict()
    engine = {**values.get("engine", {}), **{name: st.session_state.get(name) for name in ENGINE}}
    values |= {name: st.session_state.get(name) for name in CHOICES} | {"engine": told(engine)}
    if trace is not None:
        values["trace"] = trace.name
    return Setup.from_dict(told(values))


def told(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "")}


# -- TOML ---------------------------------------------------------------------------------------------------------


def toml_files(place: Any, setup: Setup) -> None:
    text = setup.to_toml()
    with place.expander("These choices as TOML"):
        st.code(text or "# all defaults", language="toml", wrap_lines=True)
        st.download_button("Download", text, "servetwin.toml", help="For servetwin simulate --config", width="stretch")
        st.file_uploader("Take them from a file", type="toml", key="toml", on_change=read_toml)


def read_toml() -> None:
    """The choices become the file's; they stay as they were if it cannot be used."""
    upload = st.session_state.toml
    if upload is None:
        return
    try:
        setup = Setup.from_dict(tomllib.loads(upload.getvalue().decode()))
        setup.cost(setup.config())
        show_choices(setup)
    except (ValueError, OSError, RecursionError) as error:
        st.session_state.complaint = f"{upload.name}: {error}"


def show_choices(setup: Setup) -> None:
    values = {name: getattr(setup, name) for name in CHOICES} | {name: setup.engine.get(name) for name in ENGINE}
    if values["rate"] is not None:
        values["rate"] = float(values["rate"])
    for name, value in values.items():
        if isinstance(value, (int, float)) and not abs(value) < MOST:
            raise ValueError(f"{name} ({value}) is too large for this page")
    st.session_state.update(values, base=setup)


# -- the run ------------------------------------------------------------------------------------------------------


def prepare(setup: Setup, trace: Any) -> Prepared:
    """An uploaded trace is read from a folder of its own, whose name nobody needs to see."""
    if trace is None:
        return Prepared.of(setup)
    with TemporaryDirectory() as folder:
        path = Path(folder) / Path(trace.name).name
        path.write_bytes(trace.getvalue())
        try:
            return Prepared.of(setup, workload=replace(setup, trace=str(path)).load())
        except ValueError as error:
            raise ValueError(str(error).replace(f"{folder}/", "")) from None


def play(prepared: Prepared, band: bool) -> Shown:
    others = prepared.other_costs(band)
    bar = st.progress(0.0)
    tick = ticker(bar, prepared.workload.num_requests * (1 + len(others)))
    run, banded = run_banded(prepared, others, tick=tick)
    bar.empty()
    return Shown(prepared.setup, banded, basis(prepared, band), figures(prepared, run))


def ticker(bar: Any, total: int) -> Callable[[object], None]:
    """Moves the bar a hundred times at most: each move is a message to the browser."""
    num, every = 0, max(1, total // 100)

    def tick(_: object) -> None:
        nonlocal num
        num += 1
        if num % every == 0:
            bar.progress(min(1.0, num / total), f"{min(num, total):,} of {total:,} requests")

    return tick


def basis(prepared: Prepared, band: bool) -> list[str]:
    """The terminal's words on what the figures rest on."""
    text = StringIO()
    print_basis(Console(file=text, width=10_000, color_system=None), prepared.manifest, 2 * band)
    return text.getvalue().splitlines()


def figures(prepared: Prepared, run: Run) -> list[go.Figure]:
    runs = {prepared.name: run}
    over_time = (queue_over_time, kv_over_time, throughput_over_time)
    return [latency_cdfs(runs, convention=prepared.setup.convention), *(draw(runs) for draw in over_time)]


# -- what it came to ----------------------------------------------------------------------------------------------


def results(shown: Shown, setup: Setup | None) -> None:
    if setup != shown.setup:
        st.warning("The choices have changed since this run: press Run to see what they do.")
    st.html(verdict(shown))
    for number_, figure in enumerate(shown.figures):
        chart(figure, f"chart-{number_}")
        if number_ == 0:
            tables(shown.banded)


def verdict(shown: Shown) -> str:
    lines = []
    for line in verdicts(shown.banded):
        word = line.replace(":", " ").split()[0]
        lines.append(
            f"<p class='verdict'><span class='sign {escape(word)}'>{SIGNS.get(word, '•')}</span>{escape(line)}</p>"
        )
    rests = "<br>".join(map(escape, shown.basis))
    return f"<p class='answer'>{escape(answer(shown.banded))}</p>{''.join(lines)}<p class='basis'>{rests}</p>"


def tables(banded: Banded) -> None:
    several = [class_table(banded)] if banded.summary.classes else []
    shown: list[Table] = [*several, latency_table(banded), rate_table([banded])]
    st.html(f"<div class='tables'>{''.join(map(from_rich, shown))}</div>")


def chart(figure: go.Figure, key: str) -> None:
    """Title and note as text of the page, which wraps and follows its theme."""
    meta, layout = figure.layout.meta, figure.layout
    room = meta["text_height"]
    bare = go.Figure(figure).update_layout(title=None, height=layout.height - room, margin_t=layout.margin.t - room)
    st.markdown(f"**{meta['title']}**")
    st.caption(meta["note"])
    st.plotly_chart(bare, key=key, config={"displaylogo": False})


if __name__ == "__main__":
    page()

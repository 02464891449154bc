"""What `servetwin fit-server` and `servetwin validate` do, once their options are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from calibration.figures import Figure
from calibration.fit_server import ServerFit, fit_server
from calibration.importers.read import read_results
from calibration.records import MeasuredRun
from calibration.validate import Validation, validate
from sim.cost import DatasheetCost, StepCost
from sim.cost.server import ServerCosts, read_server_costs
from sim.files import whole_file
from sim.frontend import FrontEndTimes


@dataclass(frozen=True, slots=True)
class Told:
    """What the caller knows: engine settings, the preset, and hardware whose datasheet is the prior."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    preset: str = "vllm-v1"
    model: str | None = None
    gpu: str | None = None


def told(given: Mapping[str, Any]) -> Told:
    """From options by name: a vLLM command's settings, over them the options."""
    from policies.config import EngineConfig
    from sim.vllm_args import VllmArgs, parse_command, parse_yaml

    text = given.get("from_")
    args = (
        VllmArgs()
        if text is None
        else parse_yaml(Path(text))
        if text.endswith((".yaml", ".yml"))
        else parse_command(text)
    )
    known = EngineConfig.__dataclass_fields__
    engine = {name: value for name, value in given.items() if name in known and value is not None}
    return Told({**args.engine, **engine}, given.get("preset") or "vllm-v1", given.get("model"), given.get("gpu"))


def read_runs(paths: Sequence[Path]) -> list[MeasuredRun]:
    """Raises ValueError for results that keep no requests."""
    runs = []
    for path in paths:
        for found in read_results(path):
            if not isinstance(found, MeasuredRun):
                raise ValueError(f"{str(path)!r} holds totals of {found.name!r}: records of its requests are needed")
            runs.append(found)
    return runs


# -- fit-server ---------------------------------------------------------------------------------------------------


def run_fit_server(paths: Sequence[Path], told: Told, out: Path, name: str | None) -> None:
    """Print what was found; write the costs once they stand."""
    runs = read_runs(paths)
    fit = fit_server(runs, told.engine, preset=told.preset, prior=_prior(told))
    console = Console()
    console.print(_prices(fit))
    for line in _said(fit, runs):
        console.print(line, highlight=False, markup=False)
    with whole_file(out) as file:
        file.write(server_costs(fit, runs, name or out.stem).to_json())
    console.print(f"{out}: servetwin simulate --costs {out} ...", highlight=False, markup=False)


def _prior(told: Told) -> StepCost | None:
    if told.model is None or told.gpu is None:
        return None
    from sim.hardware import device
    from sim.models import model

    return DatasheetCost(model(told.model), device(told.gpu))


def server_costs(fit: ServerFit, runs: Sequence[MeasuredRun], name: str) -> ServerCosts:
    config = fit.configs[0]
    about = {
        "method": fit.method,
        "unsure": dict(fit.unsure),
        "refused": dict(fit.refused),
        "from_prior": list(fit.from_prior),
        "speeds": {run.name: speed for run, speed in zip(runs, fit.speeds, strict=True)},
        "typical_error": None if np.isnan(fit.typical_error) else fit.typical_error,
        "findings": list(fit.findings),
        "sources": [run.source for run in runs],
    }
    front_end = None if fit.front_end is None else fit.front_end.to_dict()
    return ServerCosts(name, fit.cost, fit.draws, front_end, config.to_dict(), fit.hull, about)


def _prices(fit: ServerFit) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("price", "", "unsure by"):
        table.add_column(column, justify="left" if column == "price" else "right")
    for price, value in fit.cost.to_dict().items():
        if price.startswith("per_"):
            unsure = fit.unsure.get(price)
            table.add_row(price, f"{value * 1e6:,.4g} us", "" if unsure is None else f"{unsure:.0%}")
    table.add_row("free_tokens", f"{fit.cost.free_tokens:g}", "")
    for part in ("per_arrival", "per_completion"):
        if part in fit.unsure:
            table.add_row(f"  of per_prompt: {part}", "", f"{fit.unsure[part]:.0%}")
    return table


def _said(fit: ServerFit, runs: Sequence[MeasuredRun]) -> list[str]:
    lines = [f"method: {fit.method}; x/÷{fit.cost.band:.3f} between runs (68 %)"]
    if fit.front_end is not None:
        lines.append(f"front end: {fit.front_end.api_time_per_request * 1e3:.2f} ms a request before the engine has it")
    if not np.isnan(fit.typical_error):
        lines.append(f"typical error of a step: {fit.typical_error:.1%}")
    lines += [f"refused: {name}: {reason}" for name, reason in fit.refused.items()]
    lines += [f"from the prior, not from the records: {name}" for name in fit.from_prior]
    speeds = [f"{run.name} {speed:.3f}" for run, speed in zip(runs, fit.speeds, strict=True)]
    lines.append(f"time of each run's steps, of the fit's: {', '.join(speeds)}")
    return lines + list(fit.findings)


# -- validate -----------------------------------------------------------------------------------------------------


def run_validate(paths: Sequence[Path], costs: Path, told: Told, html: Path | None, draws: bool) -> None:
    """Print predicted against recorded for each run; a page with charts, if asked for."""
    server = read_server_costs(costs)
    front_end = None if server.front_end is None else FrontEndTimes(**server.front_end)
    found = validate(
        read_runs(paths), server.cost, front_end, told.engine, preset=told.preset, draws=server.draws if draws else ()
    )
    console = Console()
    for each in found:
        console.print(error_table(each))
    if html is not None:
        write_page(html, found, f"Costs: {server.name}, {server.cost.provenance}.")
        console.print(f"charts: {html}", highlight=False, markup=False)


def error_table(each: Validation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=_title(each), title_justify="left")
    for column in ("figure", "recorded", "predicted", "error", "68 % of draws", "repeats"):
        table.add_column(column, justify="left" if column == "figure" else "right", no_wrap=True)
    for figure in each.figures:
        table.add_row(figure.name, *_row(figure, each))
    return table


def _title(each: Validation) -> str:
    return f"{each.run.name}: {len(each.recorded.ids)} requests at {each.run.rate:.3g} a second"


def _row(figure: Figure, each: Validation) -> list[str]:
    values = [_shown(figure.name, figure.recorded), _shown(figure.name, figure.predicted), f"{figure.error:+.1%}"]
    drawn, repeats = each.draws.get(figure.name), each.repeats.get(figure.name)
    low, high = np.percentile(drawn, (16, 84)) if drawn else (0.0, 0.0)
    values.append(f"{_shown(figure.name, low)} to {_shown(figure.name, high)}" if drawn else "")
    return [*values, f"{_shown(figure.name, min(repeats))} to {_shown(figure.name, max(repeats))}" if repeats else ""]


def _shown(name: str, value: float) -> str:
    if name.split()[0] in ("ttft", "tpot", "e2e"):
        return f"{value * 1e3:,.4g} ms"
    return f"{value:.1%}" if name == "kv mean" else f"{value:,.4g}"


def write_page(path: Path, found: Sequence[Validation], basis: str) -> None:
    from calibration.validation_charts import validation_charts
    from sim.html_page import figure, from_rich, page, section

    tables = [section(_title(each), from_rich(error_table(each))) for each in found]
    charts = section("Charts", *(figure(chart) for chart in validation_charts(found, basis)))
    with whole_file(path) as file:
        file.write(page("Predicted and recorded", charts + "".join(tables)))

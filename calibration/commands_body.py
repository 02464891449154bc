"""What `servetwin calibrate body` and `servetwin twin` do: measure a live body, and hold it against its twin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import liverun
from backend.start import Body, start
from calibration.gpu_session import journals
from calibration.measure import grid_for, measure, num_measurements
from calibration.offered import at_rate, largest_rate
from calibration.own import body_costs
from calibration.points import GRIDS
from calibration.probe import Probing, probe_of
from calibration.quiet import MOST
from calibration.source import kernel_hash
from calibration.twin import Played, Twin, compare, from_journals
from policies.journal import Write
from sim.commands import progress
from sim.cost.body import BodyCost, BodyCosts, read_body_costs
from sim.experiment.statistics import Interval
from sim.files import whole_file, write_json
from sim.frontend import FrontEndTimes
from sim.report import seconds
from sim.workload.workload import Workload

SEATS = {"cpu": 32, "cuda": 256}
NUM_BLOCKS = {"cpu": 4096, "cuda": None}


def run_calibrate_body(model: str, device: str, out: Path, grid: str | None) -> BodyCosts:
    """Measure, fit, write; what was measured already is kept beside `out` and not measured again."""
    wanted = {"max_num_seqs": SEATS[device], "max_model_len": 2048, "num_blocks": NUM_BLOCKS[device]}
    body = start(model, device, {name: value for name, value in wanted.items() if value is not None})
    costs = calibrated(body, out, grid or grid_for(body))
    print_costs(Console(), costs, out)
    return costs


def calibrated(body: Body, out: Path, grid: str) -> BodyCosts:
    """The costs of this body, written to `out`; measurements go beside it as they are taken."""
    if grid not in GRIDS:
        raise ValueError(f"unknown grid {grid!r}; known: {', '.join(GRIDS)}")
    with progress("measuring", num_measurements(body, GRIDS[grid])) as tick:
        measured = measure(body, GRIDS[grid], out.with_suffix(".measured.jsonl"), tick)
    costs = body_costs(f"{body.model.name} on {measured.about['device']}", measured)
    with whole_file(out) as file:
        file.write(costs.to_json())
    return costs


def print_costs(console: Console, costs: BodyCosts, out: Path) -> None:
    console.print(f"{out}: {costs.name}, kernels {costs.about['kernels']}", style="bold", highlight=False)
    for line in cost_lines(costs):
        console.print(line, highlight=False)
    if costs.about["is_noisy"]:
        console.print(noisy(costs.about["others"]), style="bold red", highlight=False)


def cost_lines(costs: BodyCosts) -> list[str]:
    about = costs.about
    held, mixed = about["held_out_steps"], about["sum_of_parts"].get("mixed")
    lines = [
        f"{about['num_measurements']} measurements; repeats differ by {100 * about['spread_of_repeats']:.1f} %, "
        f"ceilings by {100 * about['drift']:.1f} %; {about['others']:.2f} cores worked for others",
        f"{held['num']:,} steps in service that were not fitted: off by {held['median']} % in the median, p95 "
        f"{held['p95']} %; 68 % of runs of 20 steps within x {costs.band:g}",
        "in service: " + ", ".join(f"{name} {value:.3g}" for name, value in asdict(costs.in_service).items() if value),
    ]
    if mixed:
        lines.append(
            f"whole mixed steps over the sum of their parts, alone: median {mixed['median']} %, bias {mixed['bias']} %"
        )
    return lines


# -- the twin ---------------------------------------------------------------------------------------------------------


def run_twin(
    body: Body,
    workload: Workload,
    costs_file: Path,
    utilisations: Sequence[float],
    num_repeats: int,
    out: Path | None,
) -> int:
    """0 if all replays were equal and nothing was found different, else 1. Calibrates if there are no costs yet."""
    found = twins(body, workload, costs_file, utilisations, num_repeats)
    if out is not None:
        write_json(out, {f"{share:g}": to_dict(twin) for share, twin in found.items()})
    return int(any(twin.divergences or twin.different for twin in found.values()))


def twins(
    body: Body, workload: Workload, costs_file: Path, utilisations: Sequence[float], num_repeats: int
) -> dict[float, Twin]:
    """By share of the largest rate, each printed when it is there."""
    console, costs = Console(), _costs(body, costs_file)
    cost = BodyCost(costs)
    most = largest_rate(body.config, workload, cost)
    console.print(
        f"{costs.name}; {workload.name} on {body.config.max_num_seqs} seats: {most:.3g} requests a second at most "
        "(simulated)",
        style="bold",
        highlight=False,
    )
    found = {}
    for share in utilisations:
        load = at_rate(workload, share * most)
        found[share] = twin = compare(
            lambda write, load=load: play_probed(body, load, write),  # type: ignore[misc]
            body.config,
            load,
            cost,
            num_repeats=num_repeats,
            front_end=FrontEndTimes.off(**costs.front_end),
        )
        print_twin(console, f"at {share:.3g} of it, {share * most:.3g} requests a second", twin)
    return found


def play_probed(body: Body, workload: Workload, write: Write) -> Played:
    """Live, the machine's speed looked at between steps."""
    probing = Probing(body.executor(), probe_of(body))
    run, _ = liverun.play(body, workload, write, executor=probing)
    return Played(run, probing.times)


def run_twin_of(folder: Path, out: Path | None) -> int:
    """0 if all replays were equal. Twins of the live runs that calibration.gpu_session wrote."""
    costs = read_body_costs(folder / "costs.json")
    console, cost, found = Console(), BodyCost(costs), {}
    print_costs(console, costs, folder / "costs.json")
    for (batching, share), lines in journals(folder).items():
        title = f"{batching}, {share:g} of the largest rate"
        if len(lines) < 2:
            console.print(f"{title}: one live run only, which tells nothing of chance", highlight=False)
            continue
        found[title] = twin = from_journals(lines, cost)
        print_twin(console, f"{title}, latencies at the engine", twin)
    if out is not None:
        write_json(out, {name: to_dict(twin) for name, twin in found.items()})
    return int(any(twin.divergences for twin in found.values()))


def _costs(body: Body, path: Path) -> BodyCosts:
    """Raises ValueError for costs of other kernels: they price another body."""
    if not path.is_file():
        return calibrated(body, path, grid_for(body))
    costs = read_body_costs(path)
    if costs.about["kernels"] != (here := kernel_hash()):
        raise ValueError(
            f"{path}: measured on kernels {costs.about['kernels']}, but these are {here}: remove it to calibrate again"
        )
    if (named := costs.about["model"]["name"]) != body.model.name:
        raise ValueError(f"{path}: costs of {named}, not of {body.model.name}: name another file by --costs")
    return costs


def print_twin(console: Console, title: str, twin: Twin) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("", "live", "simulated", "off by, 95 %", "as calibrated", "within"):
        table.add_column(name, justify="left" if name in ("", "within") else "right", no_wrap=True)
    for each in twin.differences:
        show = seconds if "." in each.measure else "{:.4g}".format
        table.add_row(
            each.measure.replace(".", " ").replace("_", " ").replace("throughput", "rate"),
            show(each.live),
            show(each.simulated),
            shown(each.error),
            shown(each.as_calibrated),
            "" if each.margin is None else f"{100 * each.margin:.0f} %: {each.verdict}",
        )
    console.print(f"\n{title}", style="bold", highlight=False)
    console.print(table, highlight=False)
    for line in summary_lines(twin):
        console.print(line, highlight=False)
    if twin.is_noisy:
        console.print(why_noisy(twin), style="bold red", highlight=False)


def shown(error: Interval) -> str:
    return f"{100 * error.mean:+.1f} ± {100 * error.half_width:.1f} %"


def why_noisy(twin: Twin) -> str:
    if twin.others > MOST:
        return noisy(twin.others)
    return "NOISY: the machine was never as fast as when it was calibrated: calibrate again, or wait"


def noisy(cores: float) -> str:
    return f"NOISY: other processes used {cores:.2f} cores meanwhile: repeat this on a quiet machine"


def summary_lines(twin: Twin) -> list[str]:
    alike = sum(match.num_alike for match in twin.matches) / max(1, sum(match.num_live for match in twin.matches))
    equal = f"all {twin.num_replayed:,} decisions equal" if not twin.divergences else f"DIVERGED: {twin.divergences[0]}"
    seen = "" if math.isnan(twin.others) else f", {twin.others:.2f} cores worked for others"
    return [
        f"replayed: {equal}; taken alike by the simulation on its own: {100 * alike:.1f} %",
        f"step costs: {100 * twin.cost_error:+.1f} % in sum, a single step off by {100 * twin.step_error:.1f} % in the "
        f"median; {_counted(twin)}, busy {100 * twin.busy:.0f} % of the time{seen}",
        f"by the probes between its steps the machine took {min(twin.slowness):.2f} to {max(twin.slowness):.2f} of its "
        "times at the calibration: simulated so, and as calibrated",
        "by kind of step: " + ", ".join(f"{kind} {100 * error:+.1f} %" for kind, error in twin.residuals.items()),
    ]


def _counted(twin: Twin) -> str:
    counted = f"{len(twin.repeats)} live runs"
    return counted if not twin.set_aside else f"{counted}, {len(twin.set_aside)} more at another speed set aside"


def to_dict(twin: Twin) -> Mapping[str, Any]:
    return {
        "differences": {
            each.measure: {
                "live": each.live,
                "simulated": each.simulated,
                "error": [each.error.low, each.error.mean, each.error.high],
                "as_calibrated": [each.as_calibrated.low, each.as_calibrated.mean, each.as_calibrated.high],
                "margin": each.margin,
                "verdict": each.verdict,
            }
            for each in twin.differences
        },
        "num_replayed": twin.num_replayed,
        "divergences": twin.divergences,
        "match": [match.rate for match in twin.matches],
        "cost_error": twin.cost_error,
        "step_error": twin.step_error,
        "slowness": twin.slowness,
        "num_set_aside": len(twin.set_aside),
        "residuals": dict(twin.residuals),
        "busy": twin.busy,
        "others": twin.others,
        "is_noisy": twin.is_noisy,
    }

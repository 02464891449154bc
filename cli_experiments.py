"""The commands that play many runs for one answer. Heavy imports wait until a command needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from options import Json

app = typer.Typer(rich_markup_mode=None)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="TOML of one arm, as simulate --toml writes it.")],
    b: Annotated[Path, typer.Argument(help="TOML of the other, alike but for the factor under test.")],
    num: Annotated[int, typer.Option(help="Seeds, each played in both arms.")] = 20,
    metric: Annotated[
        list[str] | None, typer.Option(help="ttft.p99, goodput, ...; the first one decides when to stop.")
    ] = None,
    precision: Annotated[
        float | None, typer.Option(help="Go on until B - A is known to this share of A: 0.01.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="A difference below this share of A does not matter: 0.02.")
    ] = None,
    factor: Annotated[str | None, typer.Option(help="All that may differ, by its name: engine.batching.")] = None,
    json_: Json = None,
    num_workers: Annotated[int, typer.Option(help="Processes; 0: one a core.")] = 0,
) -> None:
    """A/B: the same requests through two setups, what differs and how sure that is."""
    from sim.experiment.commands import run_compare
    from sim.experiment.runner import Simulated

    runner = Simulated(num_workers)
    run_compare(
        a, b, runner, num=num, metrics=metric or (), precision=precision, margin=margin, factor=factor, out=json_
    )

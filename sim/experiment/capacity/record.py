"""What predictions at a kind of costs came to against published or recorded runs: what an answer is to be trusted by.

Figures are those of docs/fidelity.md, each with the command that gives it again; tests hold the two to each other.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.cost import DatasheetCost, MeasuredCost
from sim.cost.best import Cost
from sim.cost.body import BodyCost
from sim.cost.server import ServedCost


class Entry(NamedTuple):
    """Of `gpus` at costs of a kind: what was compared, with what it came to, and how to get the figure again."""

    costs: str  # datasheet, or a profile's name
    gpus: tuple[str, ...]
    compared: str
    came_to: str
    command: str


PUBLISHED = "python -m pytest tests/sim/test_published.py"
LOOPS = "TPOT of 706 published closed loops of dense models on H100 and H200 (vLLM, SGLang, TensorRT-LLM)"
RECORD = (
    Entry(
        "public-tables",
        ("h100", "h200"),
        LOOPS,
        "68 % within ×/÷1.148, 95 % within ×/÷1.405; the median is 8.9 % long",
        PUBLISHED,
    ),
    Entry("datasheet", ("h100", "h200"), LOOPS, "68 % within ×/÷1.124; the median is 5.3 % long", PUBLISHED),
    Entry(
        "datasheet",
        ("h100",),
        "TPOT of vLLM 0.11 under load at 6 rates, Llama-3-8B (KubeCon 2025)",
        "predicted over measured 1.01, 0.94, 0.85, 0.80, 0.84, 0.95",
        PUBLISHED,
    ),
)


def record_of(cost: Cost) -> list[str]:
    """Lines; of a server's or a body's own costs what their file says; empty where nothing was compared."""
    if isinstance(cost, ServedCost):
        return _of_server(cost)
    if isinstance(cost, BodyCost):
        return [f"{name}: {text}" for name, text in cost.costs.about.items() if name.startswith("held_out")]
    costs = cost.profile.name if isinstance(cost, MeasuredCost) else "datasheet"
    assert isinstance(cost, (MeasuredCost, DatasheetCost))
    return [
        f"{each.compared}: {each.came_to} ({each.command})"
        for each in RECORD
        if each.costs == costs and cost.device.name in each.gpus
    ]


def _of_server(cost: ServedCost) -> list[str]:
    about, name = cost.server.about, cost.server.name
    lines = []
    if (error := about.get("typical_error")) is not None:
        lines.append(f"{name}: steps of the runs that it was fitted to, typically {100 * error:.0f} % off")
    if speeds := about.get("speeds"):
        low, high = min(speeds.values()), max(speeds.values())
        lines.append(f"{name}: the same steps took {low:.2f} to {high:.2f} of the mean in {len(speeds)} recorded runs")
    return lines

"""Costs of one running server, fitted to its records: a file with prices, front-end times and the engine they hold for.

It prices whole steps of one model on one machine, so no model or GPU is looked up; the flags that the server ran with
are the defaults of a simulation with it, and may be changed, which is what it is for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from sim.cost.datasheet import DatasheetCost
from sim.cost.draws import DATASHEET, Draw
from sim.cost.linear import LinearCost
from sim.cost.profile import content_hash, refuse_constant
from sim.cost.work import StepWork
from sim.hardware import Device
from sim.models.shape import Model

SCHEMA_VERSION = 1
KIND = "server costs"
PARTS = ("name", "cost", "draws", "front_end", "engine", "hull", "about")


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """`draws`: other prices that the records allow, each as likely. `front_end`: settings of FrontEndTimes; None where
    latencies were taken at the engine. `hull`: least and most of each count seen. `about`: method, errors, sources."""

    name: str
    cost: LinearCost
    draws: tuple[LinearCost, ...] = ()
    front_end: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    hull: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    content_hash: str = ""

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "name": self.name,
            "provenance": self.cost.provenance,
            "cost": self.cost.to_dict(),
            "draws": [draw.to_dict() for draw in self.draws],
            "front_end": None if self.front_end is None else dict(self.front_end),
            "engine": dict(self.engine),
            "hull": {name: list(ends) for name, ends in self.hull.items()},
            "about": dict(self.about),
        }
        return json.dumps({"content_hash": content_hash(content), **content}, indent=1, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True)
class ServedCost:
    """Steps at a server's prices. `rest` names the model and the GPU that the caller gave, and prices nothing."""

    server: ServerCosts
    rest: DatasheetCost
    scale: float = 1.0
    host_time_per_step: ClassVar[float] = 0.0  # within the prices of a step
    host_time_per_request: ClassVar[float] = 0.0

    @property
    def provenance(self) -> str:
        return self.server.cost.provenance

    @property
    def band(self) -> float:
        return self.server.cost.band

    @property
    def model(self) -> Model:
        return self.rest.model

    @property
    def device(self) -> Device:
        return self.rest.device

    @property
    def tensor_parallel(self) -> int:
        return self.rest.tensor_parallel

    @property
    def cuda_graphs(self) -> str:
        return self.rest.cuda_graphs

    def drawn(self, draw: Draw) -> ServedCost:
        """At other prices that the records allow; where they say of none, off by as much as the band says."""
        if not self.server.draws:
            return replace(self, scale=self.scale * math.exp(draw.score(DATASHEET) * math.log(self.band)))
        others = self.server.draws
        return replace(self, server=replace(self.server, cost=others[draw.number % len(others)]))

    def host_time(self, work: StepWork) -> float:
        return 0.0

    def device_time(self, work: StepWork) -> float:
        return self.scale * self.server.cost.device_time(work)


def server_behind(costs: str) -> ServerCosts | None:
    """The server whose costs are asked for; None where they are others'."""
    path = Path(costs)
    return read_server_costs(path) if path.suffix == ".json" and is_server_costs(path) else None


def is_server_costs(path: Path) -> bool:
    """Whether a JSON file says of itself that it is one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


def read_server_costs(path: Path) -> ServerCosts:
    """Raises ValueError, one line, for anything that is not a whole file of this version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: not a file of server costs ({error})") from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(f"{path.name}: not a file of server costs; servetwin fit-server writes them")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path.name}: schema version {content.get('schema_version')!r}, not {SCHEMA_VERSION}: fit again"
        )
    if content.get("content_hash") != content_hash(content):
        raise ValueError(f"{path.name}: its content does not match its hash: edited, or not whole. Fit it again")
    if missing := [part for part in PARTS if part not in content]:
        raise ValueError(f"{path.name}: lacks {', '.join(missing)}: fit it again")
    try:
        return _of(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def _of(content: Mapping[str, Any]) -> ServerCosts:
    return ServerCosts(
        name=content["name"],
        cost=LinearCost.from_dict(content["cost"]),
        draws=tuple(LinearCost.from_dict(each) for each in content["draws"]),
        front_end=content["front_end"],
        engine=content["engine"],
        hull={name: (low, high) for name, (low, high) in content["hull"].items()},
        about=content["about"],
        content_hash=content["content_hash"],
    )

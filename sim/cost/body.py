"""Costs of our own live body: tables of what each part of a step took, and prices of what lies between the parts.

A step is its layers, its LM head, attention of decodes and of prefills, each of the whole model and at what it takes in
service; an overhead that steps in service showed beside them; and one turn of the loop, on the host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sim.cost.datasheet import DatasheetCost
from sim.cost.draws import DATASHEET, Draw
from sim.cost.profile import content_hash, refuse_constant
from sim.cost.surface import Line, Surface
from sim.cost.work import StepWork
from sim.hardware import Device
from sim.models.shape import Model

SCHEMA_VERSION = 2
KIND = "body costs"


@dataclass(frozen=True, slots=True)
class Table:
    """Seconds by one count or two; between nodes by lines, beyond the last in proportion."""

    nodes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != math.prod(map(len, self.nodes)) or not self.values:
            raise ValueError(f"{len(self.values)} values for nodes of {list(map(len, self.nodes))}")
        if any(sorted(set(each)) != list(each) for each in self.nodes):
            raise ValueError("nodes must rise")
        if not all(0.0 < value < math.inf for value in self.values):
            raise ValueError("a table holds times above 0")

    def at(self, *counts: float) -> float:
        time = Surface(self.nodes, self.values).at(list(counts))
        for count, nodes in zip(counts, self.nodes, strict=True):
            if count > nodes[-1]:
                time *= count / nodes[-1]
        return time

    def line(self, first: float) -> Line:
        """With the first of two counts fixed."""
        fixed = Surface(self.nodes, self.values).fixed(0, first)
        beyond = max(1.0, first / self.nodes[0][-1])
        return Line(fixed.axes[0], tuple(beyond * value for value in fixed.values))


@dataclass(frozen=True, slots=True)
class InService:
    """What parts take in a running server over what each takes alone, and seconds of a step beside its parts."""

    layers: float = 1.0
    head: float = 1.0
    decode: float = 1.0
    prefill: float = 1.0
    per_step: float = 0.0
    per_prefill: float = 0.0  # a chunk
    per_request: float = 0.0
    per_token: float = 0.0
    per_context: float = 0.0  # a token that decodes attend to

    def __post_init__(self) -> None:
        if not all(0.0 <= value < math.inf for value in asdict(self).values()):
            raise ValueError(f"factors and prices must be finite and 0 or more: {asdict(self)}")

    def beside(self, work: StepWork) -> float:
        """Seconds of a step that are no part's."""
        time = self.per_step + self.per_prefill * work.num_prefills
        time += self.per_request * (work.num_decodes + work.num_prefills)
        return time + self.per_token * work.num_tokens + self.per_context * work.decode_context


@dataclass(frozen=True, slots=True)
class BodyCosts:
    """`layers` by tokens, `head` by rows, `decode` by batch and mean context, `prefill` by chunk and start, `loop` by
    running requests. `front_end`: settings of FrontEndTimes. `band`: runs of steps times and by it cover 68 %.
    `about`: device, model, versions, kernels, errors.
    """

    name: str
    layers: Table
    head: Table
    decode: Table
    prefill: Table
    loop: Table
    in_service: InService
    per_hashed_block: float
    band: float
    front_end: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    content_hash: str = ""

    def __post_init__(self) -> None:
        if not self.band >= 1.0 or not self.per_hashed_block >= 0.0:
            raise ValueError(
                f"band ({self.band}) must be 1 or more, per_hashed_block ({self.per_hashed_block}) 0 or more"
            )

    def to_json(self) -> str:
        content = {"schema_version": SCHEMA_VERSION, "kind": KIND, **asdict(self)}
        del content["content_hash"]
        content |= {"about": dict(self.about), "front_end": dict(self.front_end)}
        return json.dumps({"content_hash": content_hash(content), **content}, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True)
class BodyCost:
    """Steps as a body of ours takes them. `rest` names the model and GPU that a caller gave, and prices nothing."""

    costs: BodyCosts
    rest: DatasheetCost | None = None
    scale: float = 1.0
    _decodes: dict[int, Line] = field(init=False, repr=False, compare=False, default_factory=dict)  # by batch

    provenance = "measured"

    def with_time_per_step(self, seconds: float) -> BodyCost:
        """Where each step takes so much longer, whatever is in it."""
        service = self.costs.in_service
        slower = replace(self.costs, in_service=replace(service, per_step=service.per_step + seconds))
        return replace(self, costs=slower)

    @property
    def band(self) -> float:
        return self.costs.band

    @property
    def _named(self) -> DatasheetCost:
        assert self.rest is not None, "costs of a body alone name no model and no GPU"
        return self.rest

    @property
    def model(self) -> Model:
        return self._named.model

    @property
    def device(self) -> Device:
        return self._named.device

    @property
    def tensor_parallel(self) -> int:
        return self._named.tensor_parallel

    @property
    def cuda_graphs(self) -> str:
        return self._named.cuda_graphs

    @property
    def host_time_per_step(self) -> float:
        return self.costs.loop.at(1.0)

    @property
    def host_time_per_request(self) -> float:
        return (self.costs.loop.at(33.0) - self.costs.loop.at(1.0)) / 32.0

    def drawn(self, draw: Draw) -> BodyCost:
        """All times off by as much as whole steps were that were held out, or more, or less."""
        return replace(self, scale=self.scale * math.exp(draw.score(DATASHEET) * math.log(self.band)))

    def host_time(self, work: StepWork) -> float:
        time = self.costs.loop.at(max(1, work.num_requests))
        return self.scale * (time + self.costs.per_hashed_block * work.num_blocks_hashed)

    def device_time(self, work: StepWork) -> float:
        if not work.num_tokens:
            return 0.0
        by = self.costs.in_service
        layers, head, decode, prefill = self.parts(work)
        time = by.layers * layers + by.head * head + by.decode * decode + by.prefill * prefill
        return self.scale * (time + by.beside(work))

    def parts(self, work: StepWork) -> tuple[float, float, float, float]:
        """Seconds of layers, head, decodes' and prefills' attention, each alone."""
        return (
            self.costs.layers.at(work.num_tokens),
            self.costs.head.at(work.num_sampled) if work.num_sampled else 0.0,
            self._decode_line(work.num_decodes).at(work.decode_context / work.num_decodes) if work.num_decodes else 0.0,
            self._prefill_time(work) if work.num_prefills else 0.0,
        )

    def _decode_line(self, batch: int) -> Line:
        line = self._decodes.get(batch)
        if line is None:
            line = self._decodes[batch] = self.costs.decode.line(batch)
        return line

    def _prefill_time(self, work: StepWork) -> float:
        """One launch a chunk; all as long as their mean, and with as many query-key pairs."""
        num, num_tokens = work.num_prefills, work.num_tokens - work.num_decodes
        chunk = max(1.0, num_tokens / num)
        start = max(0.0, 0.5 * (work.prefill_pairs / (num * chunk) - chunk - 1.0))
        return num * self.costs.prefill.at(chunk, start)


def body_behind(costs: str) -> BodyCosts | None:
    """The body whose costs are asked for; None where they are others'."""
    path = Path(costs)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except (OSError, ValueError):
        return None
    return read_body_costs(path) if isinstance(content, dict) and content.get("kind") == KIND else None


def read_body_costs(path: Path) -> BodyCosts:
    """Raises ValueError, one line, for anything that is not a whole file of this version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: not a file of body costs ({error})") from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(f"{path.name}: not a file of body costs: servetwin calibrate body writes them")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path.name}: schema version {content.get('schema_version')!r}, not {SCHEMA_VERSION}: measure again"
        )
    if content.get("content_hash") != content_hash(content):
        raise ValueError(f"{path.name}: its content does not match its hash: edited, or not whole. Fit it again")
    try:
        return _of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from None


def _of(content: Mapping[str, Any]) -> BodyCosts:
    tables = {name: _table(content[name]) for name in ("layers", "head", "decode", "prefill", "loop")}
    return BodyCosts(
        name=content["name"],
        **tables,
        in_service=InService(**content["in_service"]),
        per_hashed_block=content["per_hashed_block"],
        band=content["band"],
        front_end=content["front_end"],
        about=content["about"],
        content_hash=content["content_hash"],
    )


def _table(content: Mapping[str, Sequence[Any]]) -> Table:
    return Table(tuple(map(tuple, content["nodes"])), tuple(content["values"]))

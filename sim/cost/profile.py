"""Measured costs of one GPU as a file: versioned JSON with a hash of its content, refused unless it is whole.

A profile holds fits, not measurements: of each operation the prices, the factors, how far held-out points missed, and
the recipe by which `servetwin calibrate check` gets the same again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from sim.cost.kinds import Decode, Gemm, Prefill
from sim.cost.mixed import Mixed
from sim.cost.op_model import Grid, OpModel

SCHEMA_VERSION = 1
SHIPPED = files("calibration").joinpath("profiles")
KINDS: dict[str, Any] = {kind.name: kind for kind in (Decode, Prefill, Mixed, Gemm)}
PROVENANCES = ("measured", "fitted from server records", "public tables", "datasheet")  # best first


@dataclass(frozen=True, slots=True)
class FittedOp:
    """One operation. `serves` says which launches it prices (dtype, head size, grouped queries or not); `evidence`:
    form, cross-validation, held-out errors, regimes, number of points.
    """

    model: OpModel
    serves: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.model.kind.name


@dataclass(frozen=True, slots=True)
class Profile:
    """`band`: step times multiplied and divided by it cover 68 %, as `band_source` found."""

    name: str
    device: str
    provenance: str
    ops: tuple[FittedOp, ...]
    band: float
    band_source: str
    about: Mapping[str, Any] = field(default_factory=dict)  # software, method, recipe, rejected rows
    content_hash: str = ""

    def __post_init__(self) -> None:
        if self.provenance not in PROVENANCES:
            raise ValueError(f"unknown provenance {self.provenance!r}; known: {', '.join(PROVENANCES)}")
        if not self.band >= 1.0:
            raise ValueError(f"band ({self.band}) must be 1 or more: times are multiplied and divided by it")

    def op(self, name: str, **serves: Any) -> FittedOp | None:
        """The operation that prices such launches."""
        return next((op for op in self.ops if op.name == name and serves.items() <= dict(op.serves).items()), None)

    def model(self, name: str, **serves: Any) -> OpModel | None:
        op = self.op(name, **serves)
        return op.model if op else None


# -- JSON -------------------------------------------------------------------------------------------------------------


def to_json(profile: Profile) -> str:
    """With the hash of the content; a line an operation's part, so that differences can be read."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "name": profile.name,
        "device": profile.device,
        "provenance": profile.provenance,
        "band": profile.band,
        "band_source": profile.band_source,
        "about": dict(profile.about),
        "ops": [_op_to_dict(op) for op in profile.ops],
    }
    return json.dumps({"content_hash": content_hash(content), **content}, indent=None, allow_nan=False) + "\n"


def content_hash(content: Mapping[str, Any]) -> str:
    """Of all but the hash itself, keys sorted."""
    told = {name: value for name, value in content.items() if name != "content_hash"}
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def from_json(text: str, source: str) -> Profile:
    """Raises ValueError, one line, for anything that is not a whole profile of this version."""
    try:
        content = json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        raise ValueError(f"{source}: not a profile ({error})") from None
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        found = content.get("schema_version") if isinstance(content, dict) else None
        raise ValueError(f"{source}: schema version {found!r}, this servetwin reads {SCHEMA_VERSION}: fit it again")
    if content.get("content_hash") != content_hash(content):
        raise ValueError(f"{source}: its content does not match its hash: edited, or not whole. Fit it again")
    try:
        return _from_dict(content)
    except (KeyError, TypeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{source}: {what}") from None


def refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}")


def _op_to_dict(op: FittedOp) -> dict[str, Any]:
    model = op.model
    return {
        "op": op.name,
        "serves": dict(op.serves),
        "constants": model.kind.constants,
        "norm": "inf" if math.isinf(model.norm) else model.norm,
        "prices": dict(zip(model.kind.names, model.prices, strict=True)),
        "grids": [
            {"axes": {name: list(nodes) for name, nodes in grid.axes.items()}, "factors": list(grid.factors)}
            for grid in model.grids
        ],
        "hull": {name: list(ends) for name, ends in model.hull.items()},
        "draws": [list(prices) for prices in model.draws],
        "spread": model.spread,
        "far_spread": model.far_spread,
        "evidence": dict(op.evidence),
    }


def _from_dict(content: Mapping[str, Any]) -> Profile:
    return Profile(
        name=content["name"],
        device=content["device"],
        provenance=content["provenance"],
        ops=tuple(_op_from_dict(op) for op in content["ops"]),
        band=content["band"],
        band_source=content["band_source"],
        about=content["about"],
        content_hash=content["content_hash"],
    )


def _op_from_dict(op: Mapping[str, Any]) -> FittedOp:
    if op["op"] not in KINDS:
        raise ValueError(f"unknown operation {op['op']!r}; known: {', '.join(KINDS)}")
    kind = KINDS[op["op"]](**op["constants"])
    if set(op["prices"]) != set(kind.names):
        raise ValueError(f"{kind.name}: prices of {', '.join(kind.names)} wanted, got {', '.join(op['prices'])}")
    model = OpModel(
        kind,
        tuple(op["prices"][name] for name in kind.names),
        float(op["norm"]),
        tuple(_grid_from_dict(grid) for grid in op["grids"]),
        {name: (low, high) for name, (low, high) in op["hull"].items()},
        tuple(tuple(prices) for prices in op["draws"]),
        op["spread"],
        op["far_spread"],
    )
    return FittedOp(model, op["serves"], op["evidence"])


def _grid_from_dict(grid: Mapping[str, Any]) -> Grid:
    return Grid({name: tuple(nodes) for name, nodes in grid["axes"].items()}, tuple(grid["factors"]))


# -- files ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Profile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read profile {str(path)!r}: {error}") from None
    return from_json(text, path.name)


def shipped(device: str | None = None) -> list[Profile]:
    """Those that come with the package, of one GPU or of all, best provenance first."""
    if not SHIPPED.is_dir():
        return []
    rooms = [room for room in SHIPPED.iterdir() if room.is_dir() and device in (None, room.name)]
    found = [
        from_json(each.read_text(encoding="utf-8"), f"{room.name}/{each.name}")
        for room in rooms
        for each in room.iterdir()
        if each.name.endswith(".json")
    ]
    return sorted(found, key=lambda profile: (profile.device, PROVENANCES.index(profile.provenance), profile.name))


def named(text: str, device: str) -> Profile:
    """A shipped profile of this GPU by its name, or any by the path of its file."""
    if text.endswith(".json"):
        return read(Path(text))
    known = {profile.name: profile for profile in shipped(device)}
    if text not in known:
        names = ", ".join(("auto", "datasheet", *known))
        raise ValueError(f"no costs {text!r} of {device}; known: {names}, or the path of a profile (.json)")
    return known[text]

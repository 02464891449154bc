"""What a sweep varies: knobs of a setup by their dotted names, and the points that a design makes of them.

`rate`, `engine.max_num_seqs`, `front_end_times.num_api_servers` are settings; `engine.batching.chunk_size` is a knob of
the batching policy that is chosen, `workload.prefix_tokens` one of the built-in workload, `host_times.per_lookup` what
the host needs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import product
from typing import Any

from policies.catalogue import find, parameters
from policies.config import MENUS, EngineConfig
from sim.frontend import FrontEndTimes
from sim.setup import HOST_TIMES, Setup
from sim.workload.generate import RECIPES

Value = str | int | float | bool
Point = Mapping[str, Value]  # by the knob's name
MAX_POINTS = 100_000
_KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True, slots=True)
class Choices:
    """A knob with these values, in this order."""

    name: str
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            raise ValueError(f"knob {self.name!r} needs values, each once; it has {list(self.values)}")

    @property
    def levels(self) -> tuple[Value, ...]:
        return self.values

    def at(self, share: float) -> Value:
        """Of equal parts of [0, 1), one a value."""
        return self.values[int(share * len(self.values))]


@dataclass(frozen=True, slots=True)
class Range:
    """A knob from `low` to `high`, both included; a grid takes so many levels of it, evenly spaced or by ratio."""

    name: str
    low: float
    high: float
    num_levels: int = 5
    is_log: bool = False
    is_whole: bool = False

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf or (self.is_log and self.low <= 0):
            rule = "0 < low < high" if self.is_log else "low < high"
            raise ValueError(f"knob {self.name!r}: {self.low:g}..{self.high:g} must be finite, with {rule}")
        if self.num_levels < 2:
            raise ValueError(f"knob {self.name!r}: {self.num_levels} levels are no range: 2 or more")

    @property
    def levels(self) -> tuple[Value, ...]:
        shares = (index / (self.num_levels - 1) for index in range(self.num_levels))
        return tuple(dict.fromkeys(map(self._between, shares)))

    def at(self, share: float) -> Value:
        if not self.is_whole or self.is_log:
            return self._between(share)
        return int(self.low) + int(share * (int(self.high) - int(self.low) + 1))  # each number as likely

    def _between(self, share: float) -> Value:
        if self.is_log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return round(value) if self.is_whole else float(f"{value:.9g}")  # such as a person would write


Knob = Choices | Range


# -- reading ----------------------------------------------------------------------------------------------------------


def parse_knob(text: str, setup: Setup) -> Knob:
    """`engine.max_num_seqs=64,128`, `rate=1..8`, `rate=1..8:4:log` (4 levels by ratio); `;` between values with commas.

    Raises ValueError of one line, for an unknown knob too.
    """
    name, equals, said = (part.strip() for part in text.partition("="))
    if not equals or not said:
        raise ValueError(f"knob {text!r} must read name=value,value or name=low..high")
    kind = kind_of(setup, name)
    if ".." in said and kind in (int, float):
        return _range(name, said, kind)
    parts = [each for part in said.split(";" if ";" in said else ",") if (each := part.strip())]
    return Choices(name, tuple(_typed(name, part, kind) for part in parts))


def read_knob(name: str, said: Any, setup: Setup) -> Knob:
    """From TOML: a list of values, or the text that `parse_knob` reads behind the name."""
    if isinstance(said, list):
        kind = kind_of(setup, name)
        return Choices(name, tuple(_typed(name, each, kind) for each in said))
    return parse_knob(f"{name}={said}", setup)


def _range(name: str, said: str, kind: type) -> Range:
    bounds, *more = said.split(":")
    low, _, high = bounds.partition("..")
    levels = [each for each in more if each != "log"]
    try:
        num_levels = int(levels[0]) if levels else 5
        return Range(name, float(low), float(high), num_levels, "log" in more, kind is int)
    except ValueError as error:
        if str(error).startswith("knob"):
            raise
        raise ValueError(f"knob {name!r}: {said!r} must read low..high, low..high:levels or low..high:log") from None


def _typed(name: str, said: Any, kind: type) -> Value:
    """A text, or a value of TOML, as the setting wants it."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(said).lower()]
        if kind is not str and isinstance(said, bool):
            raise ValueError
        if kind is int:
            return int(said) if isinstance(said, str) or said == int(said) else _no_whole(said)
        return float(said) if kind is float else str(said)
    except (KeyError, ValueError, TypeError):
        raise ValueError(f"knob {name!r}: {said!r} must be {kind.__name__}") from None


def _no_whole(said: Any) -> int:
    raise ValueError(f"{said!r} is not whole")


# -- settings by name -------------------------------------------------------------------------------------------------


def kind_of(setup: Setup, name: str) -> type:
    """str, int, float or bool. Raises ValueError for what is no setting, and for seeds: they are no knob."""
    if name == "seed":
        raise ValueError("seed is no knob: every point is played under the same seeds, as many as are asked for")
    room, _, rest = name.partition(".")
    known = _known(setup, room if rest else "", rest)
    leaf = rest.partition(".")[2] or rest or name
    if leaf not in known:
        hint = get_close_matches(leaf, known, n=1, cutoff=0.5)
        meant = f". Did you mean {hint[0]!r}?" if hint else ""
        raise ValueError(f"unknown knob {name!r}; known there: {', '.join(known) or 'none'}{meant}")
    return known[leaf]


def _known(setup: Setup, room: str, rest: str) -> dict[str, type]:
    """The settings of a room by name, with their kinds."""
    menu = rest.partition(".")
    if room == "engine" and menu[1] and menu[0] in MENUS:
        spec = str(setup.engine.get(menu[0], EngineConfig.__dataclass_fields__[menu[0]].default))
        knobs = parameters(find(menu[0], spec.split(",")[0]))
        return {each.name: type(each.default) for each in knobs.values()}
    if room == "engine":
        return {each.name: type(each.default) for each in fields(EngineConfig)}
    if room == "front_end_times":
        return {each.name: _kind(each.type) for each in fields(FrontEndTimes)}
    if room == "host_times":
        return dict.fromkeys(HOST_TIMES, float)
    if room == "workload":
        recipe = RECIPES.get((setup.workload or "chat").split(",")[0])
        drawn = inspect.signature(recipe).parameters.values() if recipe and not setup.trace else ()
        return {each.name: _kind(each.annotation) for each in drawn}
    return {} if room else {each.name: _kind(each.type) for each in fields(Setup) if _kind(each.type) is not object}


def _kind(annotation: Any) -> type:
    return _KINDS.get(str(annotation).split(" ")[0], object)


def with_values(setup: Setup, point: Point) -> Setup:
    """The setup with these knobs set, in their order."""
    for name, value in point.items():
        setup = _with(setup, name, value)
    return setup


def _with(setup: Setup, name: str, value: Value) -> Setup:
    room, _, rest = name.partition(".")
    if not rest:
        return Setup.from_dict({**setup.to_dict(), name: value})
    if room == "workload":
        return replace(setup, workload=_respecified(setup.workload or "chat", rest, value))
    inside = dict(getattr(setup, room))
    menu, _, knob = rest.partition(".")
    if knob:
        spec = str(inside.get(menu, EngineConfig.__dataclass_fields__[menu].default))
        inside[menu] = _respecified(spec, knob, value)
    else:
        inside[menu] = value
    changed: dict[str, Any] = {room: inside}
    return replace(setup, **changed)


def _respecified(spec: str, knob: str, value: Value) -> str:
    """`name,knob=value,...` with this knob so."""
    head, *parts = spec.split(",")
    others = [part for part in parts if part.partition("=")[0].strip() != knob]
    return ",".join((head, *others, f"{knob}={str(value).lower() if isinstance(value, bool) else value}"))


# -- designs ----------------------------------------------------------------------------------------------------------


def grid(knobs: Sequence[Knob]) -> list[Point]:
    """Every combination. Raises ValueError where there are more than anybody could play."""
    num = math.prod(len(knob.levels) for knob in knobs)
    if num > MAX_POINTS:
        raise ValueError(f"a grid of {num:,} points is more than {MAX_POINTS:,}: take fewer levels, or method lhs")
    names = [knob.name for knob in knobs]
    return [dict(zip(names, values, strict=True)) for values in product(*(knob.levels for knob in knobs))]


def one_at_a_time(knobs: Sequence[Knob]) -> list[Point]:
    """The setup as it is, and each level of each knob alone: an ablation, if levels are on and off."""
    return [{}, *({knob.name: value} for knob in knobs for value in knob.levels)]


def latin_hypercube(knobs: Sequence[Knob], num: int, seed: int) -> list[Point]:
    """Each knob's range in `num` equal parts, one point in each part of each knob (McKay et al., 1979)."""
    from scipy.stats import qmc

    shares = qmc.LatinHypercube(d=len(knobs), seed=seed).random(num)
    return list(_distinct({k.name: k.at(float(u)) for k, u in zip(knobs, row, strict=True)} for row in shares))


def _distinct(points: Iterator[Point]) -> Iterator[Point]:
    """Of few values, some points come twice."""
    seen = set()
    for point in points:
        key = tuple(point.items())
        if key not in seen:
            seen.add(key)
            yield point

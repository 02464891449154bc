"""What a short text asks for: `name,knob=value,...`, or `name=value,...` where the value is the first knob's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def parse(what: str, text: str, known: Mapping[str, Callable[..., T]], num_given: int = 1) -> Callable[..., T]:
    """The function named, its knobs filled in; its first `num_given` arguments are left to the caller.

    Raises ValueError of one line that says what is wrong and what is known. Ranges are checked by the function itself.
    """
    head, *parts = text.split(",")
    name, equals, value = (part.strip() for part in head.partition("="))
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}{hint(name, known)}")
    what = f"{what} {name!r}"
    knobs = list(inspect.signature(known[name]).parameters.values())[num_given:]
    if equals:
        parts.insert(0, f"{_first(what, knobs)}={value}")
    given = _given(what, parts)
    _check(what, given, knobs)
    kinds = {each.name: str(each.annotation) for each in knobs}
    return partial(known[name], **{knob: _value(what, knob, value, kinds) for knob, value in given.items()})


def hint(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f". Did you mean {close[0]!r}?" if close else ""


def _first(what: str, knobs: Sequence[inspect.Parameter]) -> str:
    if not knobs or _is_open(knobs[0]):
        raise ValueError(f"{what} has no value of its own: write knob=value after a comma")
    return knobs[0].name


def _is_open(knob: inspect.Parameter) -> bool:
    """Stands for knobs of any name."""
    return knob.kind is inspect.Parameter.VAR_KEYWORD


def _given(what: str, parts: Iterable[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in parts:
        knob, _, value = (each.strip() for each in part.partition("="))
        if not knob or not value:
            raise ValueError(f"{part.strip()!r} of {what} must read knob=value")
        if knob in given:
            raise ValueError(f"{knob!r} of {what} is given twice: leave one out")
        given[knob] = value
    return given


def _check(what: str, given: Iterable[str], knobs: Sequence[inspect.Parameter]) -> None:
    named = {each.name: each for each in knobs if not _is_open(each)}
    unknown = [] if any(map(_is_open, knobs)) else [knob for knob in given if knob not in named]
    for knob in unknown:
        raise ValueError(f"unknown knob {knob!r} of {what}; known: {', '.join(named) or 'none'}{hint(knob, named)}")
    missing = [name for name, each in named.items() if each.default is inspect.Parameter.empty and name not in given]
    if missing:
        raise ValueError(f"{what} needs {' and '.join(missing)}: add {','.join(f'{name}=...' for name in missing)}")


def _value(what: str, knob: str, text: str, kinds: Mapping[str, str]) -> str | int | float:
    """Read as the knob is annotated; one of any name is a number."""
    kind = kinds.get(knob, "float").split(" ")[0]  # of `int | None`, int
    if kind == "str":
        return text
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        raise ValueError(f"{knob}={text} of {what} must be a {'whole ' * (kind == 'int')}number") from None

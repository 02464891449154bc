"""Profiles as files: written, and held against a fit made anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sim.cost.op_model import OpModel
from sim.cost.profile import Profile, from_json, to_json

PROFILES = Path(__file__).parent / "profiles"
AGREES = 1e-6  # of a number, in relative terms


def path_of(profile: Profile, root: Path = PROFILES) -> Path:
    return root / profile.device / f"{profile.name}.json"


def write(profile: Profile, root: Path = PROFILES) -> Path:
    """Checked by reading it back first. Returns where it lies."""
    text, path = to_json(profile), path_of(profile, root)
    again = from_json(text, path.name)
    assert to_json(again) == text, f"profile {profile.name} of {profile.device} does not come back as it was written"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def differences(kept: Profile, again: Profile) -> list[str]:
    """What a refit has otherwise, by more than `AGREES`; a line each."""
    if len(kept.ops) != len(again.ops):
        return [f"{len(kept.ops)} operations, refitted {len(again.ops)}"]
    found = []
    for number, (old, new) in enumerate(zip(kept.ops, again.ops, strict=True)):
        where = f"{old.name} {dict(old.serves)}"
        if old.model.kind != new.model.kind or old.serves != new.serves:
            found.append(f"operation {number}: {where}, refitted {new.name} {dict(new.serves)}")
            continue
        found += [f"{where}: {line}" for line in _numbers(old.model, new.model)]
    return found


def _numbers(old: OpModel, new: OpModel) -> Iterator[str]:
    for name, a, b in zip(old.kind.names, old.prices, new.prices, strict=True):
        if not _agree(a, b):
            yield f"price of {name} {a:g}, refitted {b:g}"
    if [grid.axes for grid in old.grids] != [grid.axes for grid in new.grids]:
        yield "nodes differ"
        return
    for first, second in zip(old.grids, new.grids, strict=True):
        apart = sum(not _agree(a, b) for a, b in zip(first.factors, second.factors, strict=True))
        if apart:
            yield f"{apart} of {len(first.factors)} factors over {', '.join(first.axes)} differ"


def _agree(a: float, b: float) -> bool:
    return abs(a - b) <= AGREES * max(abs(a), abs(b))

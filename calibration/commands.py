"""What `servetwin calibrate` does: fit profiles to kernel tables, and check that the shipped ones come out again."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from calibration.profile import PROFILES, differences, path_of, write
from calibration.recipes import RECIPES, make, recipe_of, remake
from sim.cost.profile import Profile, read


def fit(devices: list[str], tables: Path | None, out: Path | None) -> None:
    """Profiles of these GPUs, of all if none is named."""
    for recipe in [recipe_of(name) for name in devices] or RECIPES:
        profile = make(recipe, tables)
        path = write(profile, out or PROFILES)
        console = Console()
        console.print(
            f"{path}: {len(profile.ops)} operations, {profile.about['num_rejected']} rows rejected", highlight=False
        )
        console.print(evidence_table(profile), highlight=False)


def check(devices: list[str], tables: Path | None, profiles: Path | None) -> int:
    """0 if every profile comes out again from its tables."""
    wrong = 0
    for recipe in [recipe_of(name) for name in devices] or RECIPES:
        root = profiles or PROFILES
        kept = read(root / recipe.device / f"{recipe.name}.json")
        found = differences(kept, remake(recipe, kept, tables))
        wrong += bool(found)
        print(f"{path_of(kept, root).name} of {kept.device}: {'; '.join(found) if found else 'fitted again, equal'}")
    return 1 if wrong else 0


def evidence_table(profile: Profile) -> Table:
    """How far each fit is off where it was not fitted, in percent."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("operation", "of", "form", "points", "held out, median / p95 %", "beyond 4 times the range"):
        table.add_column(column)
    for op in profile.ops:
        held, far = op.evidence["held_out"], op.evidence["frontier"]
        beyond = f"{far['count']} {far['median']} / {far['p95']}" if "median" in far else "not enough points"
        serves = ", ".join(f"{name} {value}" for name, value in op.serves.items())
        form, num = str(op.evidence["form"]), f"{op.evidence['num_points']:,}"
        table.add_row(op.name, serves, form, num, f"{held['median']} / {held['p95']}", beyond)
    return table
